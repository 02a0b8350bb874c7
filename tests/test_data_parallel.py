import pickle
from copy import deepcopy

import numpy as np
import pytest
from step_checks import Loss

import gluon_parallel as gp
import mxnet as mx
from mxnet import autograd, gluon, nd

# One device with the whole batch and several with shards add the same numbers in another order: rounding apart, the
# gradients are equal. float64 leaves 1e-12 of it, float32 2e-5 after a few layers.
TOLERANCE = {"float64": {"rtol": 1e-10, "atol": 1e-12}, "float32": {"rtol": 2e-4, "atol": 2e-5}}
# MXNet's update operators take the learning rate and 1 / (number of samples) as float32, NumPy's arithmetic does not.
AGAINST_NUMPY = {"float64": {"rtol": 1e-6, "atol": 1e-6}, "float32": {"rtol": 2e-4, "atol": 2e-5}}


class Branches(gluon.HybridBlock):
    """Two inputs, two branches of unequal length, two outputs."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.short = gluon.nn.Dense(4, in_units=6)
            self.long = gluon.nn.HybridSequential()
            self.long.add(gluon.nn.Dense(5, in_units=3, activation="tanh"), gluon.nn.Dense(4, in_units=5))

    def hybrid_forward(self, F, x, z):
        short, long = self.short(x), self.long(z)
        return short + long, short


def two_headed_loss(sum_, short, y, weight):
    return ((sum_ - y) ** 2).mean(axis=1) * weight + short.abs().mean(axis=1)


def reduced(loss, reduction):
    """The mean or the sum of a loss over the samples."""
    return lambda *arrays: getattr(loss(*arrays), reduction)()


def make_branches(dtype):
    def batch(num, random):
        x, z = random.standard_normal((num, 6)), random.standard_normal((num, 3))
        y, weight = random.standard_normal((num, 4)), random.uniform(0.5, 2, num)
        return tuple(nd.array(a, dtype=dtype) for a in (x, z)), tuple(nd.array(a, dtype=dtype) for a in (y, weight))

    return Branches(), two_headed_loss, batch


def cpus(number):
    return gp.devices(f"cpu:{number}")  # GPUs with --devices gpu


class Run:
    """A net on `num_devices` devices that starts from weights drawn from seed 0."""

    def __init__(self, dtype, num_devices, hybridize=True, **options):
        self.net, self.loss, self.batch = make_branches(dtype)
        self.net.cast(dtype)
        self.net.initialize(ctx=cpus(num_devices))
        random = np.random.RandomState(0)
        for parameter in self.parameters():
            parameter.set_data(nd.array(random.standard_normal(parameter.shape) * 0.2, dtype=dtype))
        self.net.hybridize(active=hybridize)
        self.trainer = gluon.Trainer(self.net.collect_params(), "sgd", {"learning_rate": 0.1})
        loss = reduced(self.loss, options["reduction"]) if "reduction" in options else self.loss
        self.parallel = gp.DataParallel(self.net, loss, self.trainer, **options)

    def parameters(self):
        return list(self.net.collect_params().values())

    def train(self, sizes, seed=5):
        random = np.random.RandomState(seed)
        return [self.parallel.step(*self.batch(size, random)).asscalar() for size in sizes]

    def weights(self):
        for parameter in self.parameters():
            copies = [array.asnumpy() for array in parameter.list_data()]
            for copy in copies[1:]:
                np.testing.assert_array_equal(copy, copies[0], err_msg=f"devices disagree about {parameter.name}")
        return [parameter.list_data()[0].asnumpy() for parameter in self.parameters()]

    def gradients(self):
        return [parameter.list_grad()[0].asnumpy() for parameter in self.parameters()]

    def mean_loss(self, x, y):
        """By Gluon's own calls, on the first device."""
        x, y = ([one.as_in_context(cpus(1)[0]) for one in side] for side in (x, y))
        return self.loss(*self.net(*x), *y).mean()

    def step_in_numpy(self, batches, limit):
        """A step of SGD with all samples of the batches; returns the gradient."""
        with autograd.record():
            loss = self.mean_loss(*concatenated(batches))
        loss.backward()
        gradients = self.gradients()
        scale = min(1, limit / np.sqrt(sum((gradient**2).sum() for gradient in gradients)))
        for parameter, weight, gradient in zip(self.parameters(), self.weights(), gradients):
            parameter.set_data(nd.array(weight - 0.1 * scale * gradient, dtype=weight.dtype))
        return gradients


def parallel_of(net, num_devices, loss=None, init=None, optimizer=("sgd", {"learning_rate": 0.1}), **options):
    """A step of this net on so many devices."""
    net.initialize(init or mx.init.Xavier(), ctx=cpus(num_devices))
    trainer = gluon.Trainer(net.collect_params(), *optimizer)
    return gp.DataParallel(net, loss or gluon.loss.L2Loss(), trainer, **options)


def concatenated(batches):
    """The batches as one."""
    return [tuple(nd.concat(*parts, dim=0) for parts in zip(*side)) for side in zip(*batches)]


def assert_alike(ours, theirs, dtype, tolerance=TOLERANCE):
    for our, their in zip(ours, theirs):
        np.testing.assert_allclose(our, their, **tolerance[dtype])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 3},
        {"clip_global_norm": 0.05},
        {"clip_global_norm": 1e3},
        {"clip_global_norm": 0.05, "accumulate": 2},
        {"reduction": "mean"},
        {"reduction": "sum", "clip_global_norm": 0.05, "accumulate": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "num_devices"), [("float64", 1), ("float64", 3), ("float32", 5)])
def test_steps_over_devices_are_sgd_with_the_whole_batch(dtype, num_devices, options):
    run, one = Run(dtype, num_devices, hybridize=num_devices != 3, **options), Run(dtype, 1)
    random, num, limit = np.random.RandomState(5), options.get("accumulate", 1), options.get("clip_global_norm", np.inf)
    run.parallel.update()  # nothing accumulated, nothing done
    batches = [run.batch(size, random) for size in (7, 4, 1, 3, 8, 2, 5)]
    for begin in range(0, len(batches), num):
        before = run.weights()
        for batch in batches[begin : begin + num]:
            assert_alike(run.weights(), before, dtype)
            mean = run.parallel.step(*batch).asscalar()
            wanted = one.mean_loss(*batch).asscalar()
            assert mean == pytest.approx(wanted, rel=AGAINST_NUMPY[dtype]["rtol"], abs=AGAINST_NUMPY[dtype]["atol"])
        run.parallel.update()  # of the last ones, which are too few
        gradients = one.step_in_numpy(batches[begin : begin + num], limit)
        if not options and not begin:  # later, weights differ by the roundings of the updates
            assert_alike([gradient / 7 for gradient in run.gradients()], gradients, dtype)
        assert_alike(run.weights(), one.weights(), dtype, AGAINST_NUMPY)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("size", [3, 4])
def test_a_loss_of_one_value_without_a_word_is_refused_and_nothing_is_updated(reduction, size):
    run = Run("float64", 3)
    before = run.weights()
    run.parallel.loss = reduced(run.loss, reduction)
    with pytest.raises(gp.errors.BatchMismatch, match=r'\w+ samples .*.pu\(0\)|two samples.*reduction="sum"'):
        run.train([size])
    assert_alike(run.weights(), before, "float64")


def test_a_parameter_that_is_trained_again_is_accumulated_like_the_others():
    runs = Run("float64", 3, accumulate=2), Run("float64", 1)
    random = np.random.RandomState(5)
    first, *batches = [runs[0].batch(size, random) for size in (6, 5, 3)]
    for run, steps in zip(runs, (batches, [concatenated(batches)])):
        parameter = run.parameters()[-1]
        parameter.grad_req = "null"
        run.parallel.step(*first)
        run.parallel.update()
        parameter.grad_req = "write"
        for batch in steps:
            run.parallel.step(*batch)
    assert_alike(runs[0].weights(), runs[1].weights(), "float64")


def test_gradients_from_outside_a_step_do_not_count():
    run, clean = Run("float64", 3), Run("float64", 1)
    x, y = run.batch(4, np.random.RandomState(1))
    on = [array.as_in_context(cpus(3)[2]) for array in (*x, *y)]
    with autograd.record():
        loss = two_headed_loss(*run.net(*on[:2]), *on[2:])
    loss.backward()  # the caller's own, on a device that then has no sample
    run.train([2])
    clean.train([2])
    assert_alike(run.weights(), clean.weights(), "float64")


def test_a_step_that_breaks_off_leaves_nothing_behind():
    run, clean = Run("float64", 2, accumulate=2), Run("float64", 1, accumulate=2)
    run.train([5])
    loss, run.parallel.loss = run.parallel.loss, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.train([5])
    run.parallel.loss = loss
    run.train([3, 4])
    clean.train([3, 4])
    assert_alike(run.weights(), clean.weights(), "float64")


def test_a_parameter_that_the_loss_does_not_reach_is_named_or_left_out_and_a_frozen_one_stays():
    run = Run("float64", 2, hybridize=False)
    run.parallel.loss = loss = lambda sum_, short, y, weight: short.mean(axis=1)
    with pytest.raises(gp.errors.GradientUnavailable, match="dense"):
        run.train([6])
    run.parallel = gp.DataParallel(run.net, loss, run.trainer, ignore_stale_grad=True)
    run.net.short.bias.grad_req = "null"
    before = run.weights()
    run.train([6])
    assert [not np.array_equal(a, b) for a, b in zip(before, run.weights())] == [True] + [False] * 5


# With momentum, a lazy update moves the rows of the gradient alone: what no sample reached stays.
LAZY = "sgd", {"learning_rate": 0.1, "momentum": 0.9}
OPTIMIZERS = [(name, {"learning_rate": 0.1, "lazy_update": False}) for name in ("sgd", "adam")]


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"clip_global_norm": 0.1}], ids=str)
@pytest.mark.parametrize("how", [*OPTIMIZERS, LAZY], ids=["sgd", "adam", "lazy"])
def test_sparse_gradients_train_like_dense_ones(options, how):
    results = []
    for sparse, number in [(how is LAZY, 1), (True, 3)]:
        net = gluon.nn.Embedding(10, 4, sparse_grad=sparse, dtype="float64")
        parallel = parallel_of(net, number, lambda out: (out**2).sum(axis=1), mx.init.One(), how, **options)
        for words in ([1, 2, 2, 7, 1], [3, 1], [0, 1, 2, 3], [4], [5, 6, 8]) * 2:  # some devices have none
            parallel.step(nd.array(words))
        parallel.update()
        results.append(net.weight.list_data()[-1].asnumpy())
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6, atol=1e-9)  # of clipping, norms are float32


def test_nothing_to_train_is_refused_with_its_cause():
    net = gluon.nn.Dense(1, in_units=1)
    parallel = parallel_of(net, 2)
    data = nd.ones((2, 1))
    loss = parallel.step(data, data)
    with pytest.raises(mx.base.MXNetError, match="parallel.step have made the backward pass already"):
        loss.backward()
    net.collect_params().setattr("grad_req", "null")
    with pytest.raises(gp.errors.GradientUnavailable, match="all parameters of the net are frozen .*grad_req of some"):
        parallel.step(data, data)
    net.collect_params().setattr("grad_req", "write")
    parallel.step(data, data)
    parallel = gp.DataParallel(net, lambda out, y: (y * 2).mean(axis=1), parallel.trainer)
    with pytest.raises(gp.errors.GradientUnavailable, match="the loss depends on no parameter that is trained"):
        parallel.step(data, data)


def test_sparse_parameters_that_cannot_be_trained_are_refused_by_name():
    net = gluon.nn.Embedding(10, 4, sparse_grad=True, prefix="words_")
    net.initialize(ctx=cpus(2))

    class Other(mx.kv.KVStoreBase):
        type, rank, num_workers = "other", 0, 1

    for store in ("horovod", Other(), "dist_sync"):
        trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=store)
        with pytest.raises(gp.errors.GradientUnavailable, match="words_weight: the store .* does not sum row_sparse"):
            gp.DataParallel(net, gluon.loss.L2Loss(), trainer)
    net = gluon.contrib.nn.SparseEmbedding(10, 4, prefix="words_")
    net.initialize(ctx=cpus(2))
    with pytest.raises(gp.errors.GradientUnavailable, match="words_weight: row_sparse weights"):
        gp.DataParallel(net, gluon.loss.L2Loss(), gluon.Trainer(net.collect_params(), "sgd"))


def made(net=None, num_devices=2, store="device", **options):
    """A step of a net that needs float32 inputs (n, 4)."""
    net = net or gluon.nn.Dense(2, in_units=4)
    net.initialize(ctx=cpus(num_devices))
    compression = {"compression_params": options.pop("compression")} if "compression" in options else {}
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", kvstore=store, update_on_kvstore=options.pop("on_store", None), **compression
    )
    return gp.DataParallel(**{"net": net, "loss": gluon.loss.L2Loss(), "trainer": trainer, **options})


X, Y, TWO_BITS = np.ones((4, 4), "float32"), np.zeros((4, 2), "float32"), {"type": "2bit", "threshold": 0.5}
SOFTMAX = {"loss": gluon.loss.SoftmaxCrossEntropyLoss()}
REFUSED = [
    (r"expected a gluon.Trainer", {"trainer": "sgd"}),
    (r"loss: expected a function of \(output, label\).*got 'softmax'", {"loss": "softmax"}),
    (r"loss: got the class L2Loss; write L2Loss\(\)", {"loss": gluon.loss.L2Loss}),
    ("accumulate", {"accumulate": 0}),
    ("clip_global_norm", {"clip_global_norm": -1}),
    (r"not on \[cpu\(4\)\].*reset_ctx", {"devices": 1, "to": [mx.cpu(0), mx.cpu(4)]}),
    ("update_on_kvstore=False", {"on_store": True}),
    *(
        (f"'threshold': 0.5.*{store}.*take the store mpi", {"store": store, "compression": TWO_BITS})
        for store in ("dist_sync", "dist_device_sync", "horovod")
    ),
    ("no samples", {"batch": (X[:0], Y[:0])}),
    (r"data\['inputs'\]\[0\] has 3, data\['labels'\]\[0\] has 2", {"batch": (X[:3], Y[:2])}),
    (r"shape \(3,\) for 2 samples on .pu\(\d+\)", {"loss": lambda output, _: nd.ones((3,), ctx=output.context)}),
    (r"shape \(2,\) for 2 samples.*reduction='mean'.*leave it out", {"reduction": "mean"}),
    ("reduction: expected 'mean' or 'sum'.*got 'average'", {"reduction": "average"}),
    (r"reduction='sum': the loss has parts \(square, above\)", {"reduction": "sum", "loss": Loss()}),
    ("accumulate=2: .*square, above.*take a larger batch", {"accumulate": 2, "loss": Loss()}),
    (r"1 label \(4, 2\).*labels are numbers of classes", {**SOFTMAX, "devices": 1}),
    (r"is 2, .* the net has 2 outputs", {**SOFTMAX, "batch": (X, np.array([0, 1, 2, 0]))}),
]


@pytest.mark.parametrize(("message", "wrong"), REFUSED)
def test_what_cannot_be_trained_is_refused_and_nothing_is_updated(message, wrong):
    wrong, net = dict(wrong), gluon.nn.Dense(2, in_units=4)
    batch, to, num = wrong.pop("batch", (X, Y)), wrong.pop("to", None), wrong.pop("devices", 2)
    kinds = ValueError, gp.errors.GradientUnavailable, mx.base.MXNetError
    with pytest.raises(kinds, match=message):
        made(net, num, **wrong, **({"devices": to} if to else {})).step(*batch)
    np.testing.assert_array_equal(net.bias.list_data()[0].asnumpy(), 0)


@pytest.mark.parametrize("copied", [deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"])
def test_a_copy_of_a_net_trains_on_the_same_devices_and_its_original_stays(copied):
    net = gluon.nn.Dense(2, in_units=4)
    net.initialize(mx.init.One(), ctx=cpus(2))
    gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0})._init_kvstore()  # as its first step does
    other = copied(net)
    trainer = gluon.Trainer(other.collect_params(), "sgd", {"learning_rate": 1.0})
    step = gp.DataParallel(other, gluon.loss.L2Loss(), trainer)
    assert step.devices == cpus(2)
    step(X, Y)  # outputs of 4, halved by the mean over two of them
    assert [array.asnumpy().tolist() for array in other.weight.list_data()] == [[[-1.0] * 4] * 2] * 2
    assert [array.ctx for array in other.weight.list_data()] == cpus(2)
    assert (net.weight.data().asnumpy() == 1).all()


def test_weights_of_grouped_convolutions_are_trained_and_compared_whatever_their_memory_layout():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(32, 3), gluon.nn.Conv2D(32, 3, groups=32), gluon.nn.Flatten(), gluon.nn.Dense(2))
    step = parallel_of(net, 2)
    x, y = np.ones((4, 3, 12, 12), "float32"), np.zeros((4, 2), "float32")
    first = step(x, y).asscalar()  # makes the parameters by an inference, for which oneDNN lays weights out anew
    net(nd.array(x, ctx=cpus(1)[0])).wait_to_read()
    gp.check_replicas(net)
    assert step(x, y).asscalar() < first


def test_running_statistics_of_each_device_are_no_difference_between_replicas():
    net = gluon.nn.BatchNorm(in_channels=2)
    net.initialize(ctx=cpus(2))
    net.running_mean.data(mx.cpu(1))[:] = 7
    gp.check_replicas(net)
    net.gamma.data(mx.cpu(1))[:] = 7
    with pytest.raises(gp.errors.ReplicasDiffer, match="gamma differs"):
        gp.check_replicas(net)


def test_what_the_net_returned_on_each_device_is_there_after_the_step():
    run, random = Run("float64", 3), np.random.RandomState(2)
    for num in (7, 2, 3):
        x, y = run.batch(num, random)
        wanted = run.net(*x)
        run.parallel.step(x, y)
        assert len(run.parallel.outputs) == min(num, 3)
        for output, whole in zip(zip(*run.parallel.outputs), wanted):
            rows = np.concatenate([one.asnumpy() for one in output])
            np.testing.assert_allclose(rows, whole.asnumpy(), **TOLERANCE["float64"])
