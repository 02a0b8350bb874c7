"""Across processes: what there is works on MXNet's servers, and what there is not is refused with the reason."""

import os
import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import mxnet as mx
from gluon_parallel.asynchronous import Averaging, Served, check_store
from gluon_parallel.errors import AsynchronousUnsupported
from mxnet.gluon import nn


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_with_servers(program, num_workers=2, timeout=200):
    """Run `program` in so many processes with MXNet's scheduler and a server; returns what each printed."""
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NUM_WORKER": str(num_workers),
        "DMLC_NUM_SERVER": "1",
        "DMLC_NODE_HOST": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    roles = ["scheduler", "server"] + ["worker"] * num_workers
    processes = []
    try:
        for role in roles:
            code = program if role == "worker" else "import gluon_parallel"
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
                    env={**common, "DMLC_ROLE": role}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                )
            )  # fmt: skip
        outputs = [process.communicate(timeout=timeout)[0] for process in reversed(processes)][::-1]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for role, process, output in zip(roles, processes, outputs):
        assert process.returncode == 0, f"{role}: {output}"
    return outputs[2:]


ASYNC = """
    import numpy as np
    import gluon_parallel as gp
    import mxnet as mx
    store = mx.kv.create("dist_async")
    net = mx.gluon.nn.Dense(1, in_units=4)
    mx.random.seed(store.rank)
    net.initialize(mx.init.Normal(1), ctx=gp.devices("cpu:2"))
    served = gp.asynchronous.Served(
        net, mx.gluon.loss.L2Loss(), gp.devices("cpu:2"), store, "sgd", {"learning_rate": 0.4})
    rng = np.random.RandomState(store.rank)
    x = rng.normal(size=(400, 4)).astype("float32")
    y = x @ np.array([[1.0], [-2.0], [3.0], [0.5]], "float32") + 0.25
    batches = [(x[at:at + 5], y[at:at + 5]) for at in range(0, 400, 5)]
    done = served.train(batches)
    store._barrier()
    served.pull()
    weights = np.append(net.weight.data(mx.cpu(1)).asnumpy(), net.bias.data(mx.cpu(1)).asnumpy())
    print(done.updates, done.num_samples, *np.round(weights, 2))
"""


def test_async_learns_on_mxnets_server_and_all_processes_pull_the_same_weights():
    outputs = run_with_servers(ASYNC)
    for output in outputs:
        updates, samples, *weights = map(float, output.split())
        assert (updates, samples) == (80, 400)
        np.testing.assert_allclose(weights, [1.0, -2.0, 3.0, 0.5, 0.25], atol=0.05)
    assert outputs[0] == outputs[1]


LOCAL = """
    import numpy as np
    import gluon_parallel as gp
    import mxnet as mx
    store = mx.kv.create("dist_sync")
    devices = gp.devices("cpu:2")
    net = mx.gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Constant(10.0 * (store.rank + 1)), ctx=devices)
    averaging = gp.asynchronous.Averaging(net, store, every=2)
    seen = [net.weight.data(devices[1]).asnumpy().item()]
    for step in range(4):
        for data in net.weight.list_data():
            data += store.rank + 1
        averaging.step()
        seen.append(net.weight.data(devices[1]).asnumpy().item())
    print(*seen)
"""


@pytest.mark.slow
def test_local_takes_the_mean_over_processes_after_every_second_step():
    outputs = run_with_servers(LOCAL)
    # All begin with rank 0's 10; then rank 0 adds 1 per step and rank 1 adds 2, and every second step is a mean.
    assert sorted(outputs) == ["10.0 11.0 13.0 14.0 16.0\n", "10.0 12.0 13.0 15.0 16.0\n"]


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
    ],
)
def test_what_is_not_available_across_processes_is_refused_with_the_reason(mode, store, reason):
    with pytest.raises(AsynchronousUnsupported, match=reason):
        check_store(mode, Store(store))


@pytest.mark.parametrize(
    ("mode", "store"), [("async", "dist_async"), ("sync", "mpi"), ("local:3", "horovod"), ("local:1", "dist_sync")]
)
def test_what_is_available_across_processes_passes(mode, store):
    assert check_store(mode, Store(store)).name == mode.split(":")[0]


def test_averaging_and_serving_refuse_the_wrong_store_and_layers_that_meet():
    net = nn.Dense(1, in_units=1)
    net.initialize()
    with pytest.raises(AsynchronousUnsupported, match="needs a store that sums"):
        Averaging(net, Store("dist_async"))
    with pytest.raises(AsynchronousUnsupported, match="needs the store dist_async"):
        Served(net, lambda y: y, [mx.cpu()], mx.kv.create("local"))
    meeting = mx.gluon.contrib.nn.SyncBatchNorm(num_devices=2)
    with pytest.raises(AsynchronousUnsupported, match="SyncBatchNorm"):
        Served(meeting, lambda y: y, [mx.cpu()], Store("dist_async"))
