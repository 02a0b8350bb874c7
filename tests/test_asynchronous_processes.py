"""Across processes: what there is works on MXNet's servers, and what there is not is refused with the reason."""

import json
import textwrap

import numpy as np
import pytest
from processes import run_servers

import mxnet as mx
from gluon_parallel.asynchronous import Averaging, Served, check_store, processes
from gluon_parallel.errors import AsynchronousUnsupported, BatchMismatch, GradientUnavailable
from mxnet.gluon import nn

ASYNC = """
    import json, time
    from pathlib import Path
    import numpy as np
    import gluon_parallel as gp
    import mxnet as mx

    if NUMPY_MODE:
        mx.npx.set_np()

    files = [Path(__file__).with_name(f"steps of process {rank}") for rank in range(2)]
    counted = 0

    def reached(rank, num_steps):
        while not files[rank].exists() or files[rank].stat().st_size < num_steps:
            time.sleep(0.001)

    class Net(mx.gluon.nn.Dense):
        def forward(self, x):
            # In each step of process 1, between its pull and its push, process 0 has pulled what it had pushed itself.
            global counted
            if x.ctx == devices[0]:
                counted += 1
                mx.nd.waitall()  # for what was pulled
                if store.rank == 0:
                    reached(1, (counted + 1) // 2)
                with files[store.rank].open("a") as file:
                    file.write(".")
                if store.rank == 1:
                    reached(0, 2 * counted)
            return super().forward(x)

    store = mx.kv.create("dist_async")
    devices = gp.devices("cpu:2")
    net, loss = Net(1, in_units=4), mx.gluon.loss.L2Loss()
    mx.random.seed(store.rank)
    net.initialize(mx.init.Normal(1), ctx=devices)
    served = gp.asynchronous.Served(net, loss, devices, store, "sgd", {"learning_rate": 0.4})
    rng = np.random.RandomState(store.rank)
    x = rng.normal(size=(400, 4)).astype("float32")
    y = x @ np.array([[1.0], [-2.0], [3.0], [0.5]], "float32") + 0.25
    batches = [(x[at:at + 5], y[at:at + 5]) for at in range(0, 400, 5)]
    num = 80 if store.rank == 0 else 40
    done = served.train([*batches[:num], (x[:0], y[:0])])  # a last batch in which this process has no share
    store._barrier()
    served.pull()
    weights = np.append(net.weight.data(mx.cpu(1)).asnumpy(), net.bias.data(mx.cpu(1)).asnumpy())
    print(json.dumps({"rank": store.rank, "done": done[1:3] + done[4:5], "weights": weights.tolist(),
                      "staleness": [sorted(h.items()) for h in served.staleness.histograms],
                      "mine": sum(done.staleness.histograms[store.rank].values())}))
"""


@pytest.fixture(
    scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["legacy arrays", "NumPy mode"]
)
def trained(request, tmp_path_factory):
    script = tmp_path_factory.mktemp("served") / "program.py"
    script.write_text(textwrap.dedent(ASYNC.replace("NUMPY_MODE", str(request.param))))
    status, said = run_servers(2, script)
    assert status == 0, said
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]  # one of each process
    return sorted(found, key=lambda process: process["rank"])


def test_async_learns_on_mxnets_server_which_counts_how_stale_every_update_of_every_process_was(trained):
    for process, steps in zip(trained, (80, 40)):
        assert process["done"] == [5 * steps, steps, [steps]]
        np.testing.assert_allclose(process["weights"], [1.0, -2.0, 3.0, 0.5, 0.25], atol=0.05)
    assert trained[0]["weights"] == trained[1]["weights"]  # all pull the same
    assert trained[0]["staleness"] == trained[1]["staleness"]
    quick, slow = (dict(histogram) for histogram in trained[0]["staleness"])
    assert (sum(quick.values()), sum(slow.values())) == (80, 40)
    assert [process["mine"] for process in trained] == [80, 40]
    # An update that is stale by one was overtaken by one of the other process, and process 0 overtakes each of process
    # 1's. Neither can be overtaken more often than the other one has steps.
    overtaken = [sum(at * times for at, times in histogram.items()) for histogram in (quick, slow)]
    assert overtaken[0] <= 40 <= overtaken[1] <= 80 and min(slow) >= 1


def test_the_clock_counts_the_steps_between_a_pull_and_a_push_of_each_worker():
    state, wanted, rng = np.zeros(1 + 3 * 256), [{}, {}, {}], np.random.RandomState(3)
    for step in range(400):
        worker, age = rng.randint(3), min(step, rng.randint(300))
        message = np.zeros_like(state)
        message[:2] = worker, step - age
        state = processes.tick(state, message)
        age = min(age, processes.MOST)
        wanted[worker][age] = wanted[worker].get(age, 0) + 1
    assert state[0] == 400
    for worker, histogram in enumerate(wanted):
        counts = state[1 + 256 * worker :][:256]
        assert {at: counts[at] for at in np.flatnonzero(counts)} == histogram


def test_counting_leaves_the_weights_to_the_optimizer_that_it_carries(rng):
    def train(optimizer):
        update, weight = mx.optimizer.get_updater(optimizer), mx.nd.ones(4)
        ticks = mx.nd.zeros(1 + 256)
        for _ in range(5):
            update(0, mx.nd.array([0.5, -1.0, 2.0, 0.25]), weight)
            if isinstance(optimizer, processes.Counting):
                update(processes.CLOCK, mx.nd.zeros(257), ticks)
        return weight.asnumpy(), ticks.asnumpy()

    def adam():
        return mx.optimizer.Adam(learning_rate=0.1)

    plain, (counted, ticks) = train(adam())[0], train(processes.Counting(adam()))
    np.testing.assert_array_equal(counted, plain)
    assert ticks[:6].tolist() == [5, 1, 1, 1, 1, 1]  # five steps from the weights before all of them


class Server:
    """MXNet's server and its only process, as a dictionary."""

    type, num_workers, rank = "dist_async", 1, 0

    def __init__(self):
        self.weights = {}

    def init(self, key, value):
        self.weights[key] = value.as_nd_ndarray().copy()

    def set_optimizer(self, optimizer):
        self.update = mx.optimizer.get_updater(optimizer)

    def push(self, key, value, priority=0):
        self.update(key, value.as_nd_ndarray(), self.weights[key])

    def pull(self, key, out, priority=0):
        for array in out if isinstance(out, list) else [out]:
            self.weights[key].copyto(array.as_nd_ndarray())


@pytest.mark.parametrize("reduction", [None, "mean", "sum"])
@pytest.mark.parametrize("numpy", [False, True], ids=["legacy arrays", "NumPy mode"])
def test_served_takes_the_gradient_of_the_mean_over_shards_of_different_sizes(request, rng, numpy, reduction):
    if numpy:
        request.getfixturevalue("numpy_mode")

    def loss(output, label):
        squares = ((output - label) ** 2).sum(axis=1)
        return squares if reduction is None else getattr(squares, reduction)()

    net = nn.Dense(2, in_units=3, use_bias=False)
    devices = [mx.cpu(0), mx.cpu(1)]
    net.initialize(mx.init.Constant(0.25), ctx=devices)
    served = Served(
        net, loss, devices, Server(), optimizer_params={"learning_rate": 0.1}, clip_global_norm=2, reduction=reduction
    )
    weight, total = np.full((2, 3), 0.25), 0.0
    batches = [(rng.normal(size=(num, 3)), rng.normal(size=(num, 2))) for num in (7, 1, 5, 4)]
    for x, y in batches:
        error = x @ weight.T - y
        total += (error**2).sum()
        gradient = 2 * error.T @ x / len(x)
        weight -= 0.1 * gradient * min(1, 2 / np.linalg.norm(gradient))
    done = served.train([(x.astype("float32"), y.astype("float32")) for x, y in batches])
    np.testing.assert_allclose(net.weight.data(devices[1]).asnumpy(), weight, rtol=1e-5, atol=1e-6)  # float32
    assert done.loss == pytest.approx(total / 17, rel=1e-5)


def test_served_sends_no_gradients_of_an_earlier_batch():
    class Net(mx.gluon.Block):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Dense(1, in_units=1), nn.Dense(1, in_units=1)

        def forward(self, x):
            return (self.first(x) + self.second(x)) if x[0, 0].asscalar() > 0 else self.first(x)

    net = Net()
    net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
    served = Served(net, mx.gluon.loss.L2Loss(), [mx.cpu(0), mx.cpu(1)], Server())
    ones, label = np.ones((2, 1), "float32"), np.zeros((2, 1), "float32")
    served.train([(ones, label)])
    with pytest.raises(GradientUnavailable, match="dense.*got no gradient"):
        served.train([(-ones, label)])


class Store:
    num_workers, rank = 2, 0

    def __init__(self, type):
        self.type = type


@pytest.mark.parametrize(
    ("mode", "store", "reason"),
    [
        ("ssp:2", "dist_async", "keep no count of anybody's steps"),
        ("backup:1", "dist_sync", "waits for all processes at every step"),
        ("elastic", "dist_async", "half of the attraction is missing"),
        ("dc", "dist_async", "one backup for all of them"),
        ("async", "dist_sync", "needs the store dist_async"),
        ("local:4", "dist_async", "applies an optimizer to whatever it is sent"),
        ("sync", "dist_async", "needs a store that sums"),
        *((mode, store, None) for mode, store in [("async", "dist_async"), ("sync", "mpi"), ("local:3", "horovod")]),
    ],
)
def test_what_is_not_available_across_processes_is_refused_with_the_reason(mode, store, reason):
    if reason is None:
        assert check_store(mode, Store(store)).name == mode.split(":")[0]
        return
    with pytest.raises(AsynchronousUnsupported, match=reason):
        check_store(mode, Store(store))


def test_averaging_and_serving_refuse_the_wrong_store_layers_that_meet_and_losses_of_one_value():
    net, layer = nn.Dense(2, in_units=3), mx.gluon.contrib.nn.SyncBatchNorm(num_devices=2)
    net.initialize()
    for make, message in (
        (lambda: Averaging(net, Store("dist_async")), "needs a store that sums"),
        (lambda: Served(net, abs, [mx.cpu()], mx.kv.create("local")), "needs the store dist_async"),
        (lambda: Served(layer, abs, [mx.cpu()], Store("dist_async")), "SyncBatchNorm"),
    ):
        with pytest.raises(AsynchronousUnsupported, match=message):
            make()
    served = Served(net, lambda output, label: (output - label).sum(), [mx.cpu()], Server())
    with pytest.raises(BatchMismatch, match='reduction="mean" or reduction="sum"'):
        served.train([(np.ones((4, 3), "float32"), np.ones((4, 2), "float32"))])
