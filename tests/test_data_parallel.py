import threading

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import engine
from mxnet import autograd, gluon, nd

# One device with the whole batch and several with shards add the same numbers in another order: rounding apart, the
# gradients are equal. float64 leaves 1e-12 of it, float32 2e-5 after a few layers.
TOLERANCE = {"float64": {"rtol": 1e-10, "atol": 1e-12}, "float32": {"rtol": 2e-4, "atol": 2e-5}}
# MXNet's update operators take the learning rate and 1 / (number of samples) as float32, NumPy's arithmetic does not.
AGAINST_NUMPY = {"float64": {"rtol": 1e-6, "atol": 1e-7}, "float32": {"rtol": 2e-4, "atol": 2e-5}}


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


def make_branches(dtype):
    def batch(num, random):
        x, z = random.standard_normal((num, 6)), random.standard_normal((num, 3))
        y, weight = random.standard_normal((num, 4)), random.uniform(0.5, 2, num)
        return tuple(nd.array(a, dtype=dtype) for a in (x, z)), tuple(nd.array(a, dtype=dtype) for a in (y, weight))

    return Branches(), two_headed_loss, batch


def make_lenet(dtype):
    net = gp.models.LeNet(num_classes=10)

    def batch(num, random):
        return nd.array(random.rand(num, 1, 28, 28), dtype=dtype), nd.array(random.randint(0, 10, num), dtype=dtype)

    return net, gluon.loss.SoftmaxCrossEntropyLoss(), batch


MODELS = {"branches": make_branches, "lenet": make_lenet}


def cpus(number):
    return gp.devices(f"cpu:{number}")  # GPUs with --devices gpu


class Run:
    """A net on `num_devices` devices that starts from weights drawn from `seed`."""

    def __init__(self, model, dtype, num_devices, optimizer=("sgd", {"learning_rate": 0.1}), hybridize=True, **options):
        self.net, self.loss, self.batch = MODELS[model](dtype)
        self.net.cast(dtype)
        self.net.initialize(ctx=cpus(num_devices))
        random = np.random.RandomState(0)
        for parameter in self.parameters():
            parameter.set_data(nd.array(random.standard_normal(parameter.shape) * 0.2, dtype=dtype))
        if hybridize:
            self.net.hybridize()
        self.trainer = gluon.Trainer(self.net.collect_params(), *optimizer)
        self.parallel = gp.DataParallel(self.net, self.loss, self.trainer, **options)

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


def reference_step(run, num, learning_rate=0.1, seed=5):
    """Gradients of the mean loss and the weights after plain SGD, by Gluon's own record and backward on one device."""
    x, y = (a if isinstance(a, tuple) else (a,) for a in run.batch(num, np.random.RandomState(seed)))
    x, y = ([array.as_in_context(cpus(1)[0]) for array in a] for a in (x, y))
    with autograd.record():
        outputs = run.net(*x)
        loss = run.loss(*(outputs if isinstance(outputs, (list, tuple)) else (outputs,)), *y).mean()
    loss.backward()
    gradients = run.gradients()
    return loss.asscalar(), gradients, [w - learning_rate * g for w, g in zip(run.weights(), gradients)]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("num_devices", "num"), [(1, 6), (2, 7), (3, 8), (5, 11), (5, 3)])
def test_one_step_over_devices_is_one_step_with_the_whole_batch(model, dtype, num_devices, num):
    loss, gradients, weights = reference_step(Run(model, dtype, 1), num)
    run = Run(model, dtype, num_devices)
    assert run.train([num])[0] == pytest.approx(loss, rel=TOLERANCE[dtype]["rtol"], abs=TOLERANCE[dtype]["atol"])
    assert_alike([gradient / num for gradient in run.gradients()], gradients, dtype)
    assert_alike(run.weights(), weights, dtype, AGAINST_NUMPY)


@pytest.mark.parametrize("hybridize", [False, True])
def test_twenty_steps_with_changing_batch_sizes_stay_together(hybridize):
    sizes = [8, 3, 1, 7, 2] * 4
    one = Run("branches", "float64", 1, hybridize=hybridize)
    three = Run("branches", "float64", 3, hybridize=hybridize)
    np.testing.assert_allclose(three.train(sizes), one.train(sizes), rtol=1e-9, atol=1e-11)
    assert_alike(three.weights(), one.weights(), "float64")


@pytest.mark.parametrize("num_devices", [1, 3])
def test_accumulating_three_batches_is_one_batch_three_times_as_large(num_devices):
    run = Run("branches", "float64", num_devices, accumulate=3)
    random = np.random.RandomState(5)
    batches = [run.batch(size, random) for size in (4, 7, 1)]
    big = Run("branches", "float64", 1)
    for _ in range(3):  # three updates: what was accumulated must be gone after each
        before = run.weights()
        for index, batch in enumerate(batches):
            if index:
                assert_alike(run.weights(), before, "float64")
            run.parallel.step(*batch)
        big.parallel.step(*concatenated(batches))
        assert_alike(run.weights(), big.weights(), "float64")


def test_a_parameter_that_is_trained_again_is_accumulated_like_the_others():
    runs = Run("branches", "float64", 3, accumulate=2), Run("branches", "float64", 1)
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
    run, clean = Run("branches", "float64", 3), Run("branches", "float64", 1)
    x, y = run.batch(4, np.random.RandomState(1))
    on = [array.as_in_context(cpus(3)[2]) for array in (*x, *y)]
    with autograd.record():
        loss = two_headed_loss(*run.net(*on[:2]), *on[2:])
    loss.backward()  # the caller's own, on a device that then has no sample
    run.train([2])
    clean.train([2])
    assert_alike(run.weights(), clean.weights(), "float64")


def test_a_step_that_breaks_off_leaves_nothing_behind():
    run, clean = Run("branches", "float64", 2, accumulate=2), Run("branches", "float64", 1, accumulate=2)
    run.train([5])
    loss, run.parallel.loss = run.parallel.loss, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.train([5])
    run.parallel.loss = loss
    run.train([3, 4])
    clean.train([3, 4])
    assert_alike(run.weights(), clean.weights(), "float64")


def test_an_incomplete_accumulation_is_updated_on_demand():
    run, whole = Run("branches", "float64", 2, accumulate=4), Run("branches", "float64", 1)
    run.parallel.update()  # nothing accumulated, nothing done
    run.train([5])
    run.parallel.update()
    whole.train([5])
    assert_alike(run.weights(), whole.weights(), "float64")


@pytest.mark.parametrize(("limit", "clipped"), [(0.05, True), (1e3, False)])
@pytest.mark.parametrize("num_devices", [1, 3])
def test_clipping_sees_the_norm_of_the_mean_gradient_of_the_whole_batch(num_devices, limit, clipped):
    start = Run("branches", "float64", 1).weights()
    _, gradients, _ = reference_step(Run("branches", "float64", 1), 7)
    norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
    assert (norm > limit) == clipped
    run = Run("branches", "float64", num_devices, clip_global_norm=limit)
    run.train([7])
    expected = [w - 0.1 * g * min(1, limit / norm) for w, g in zip(start, gradients)]
    assert_alike(run.weights(), expected, "float64", AGAINST_NUMPY)  # the factor is computed in float32


def test_clipping_and_accumulation_work_together():
    one = Run("branches", "float64", 1, clip_global_norm=0.05)
    three = Run("branches", "float64", 3, clip_global_norm=0.05, accumulate=2)
    random = np.random.RandomState(5)
    batches = [one.batch(size, random) for size in (4, 5)]
    one.parallel.step(*concatenated(batches))
    for batch in batches:
        three.parallel.step(*batch)
    assert_alike(three.weights(), one.weights(), "float64", AGAINST_NUMPY)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_a_loss_that_returns_its_shards_mean_is_weighted_by_the_shards_size(num_devices):
    reference = reference_step(Run("lenet", "float64", 1), 5)
    run = Run("lenet", "float64", num_devices, reduction="mean")
    per_sample = gluon.loss.SoftmaxCrossEntropyLoss()
    run.parallel.loss = lambda output, label: per_sample(output, label).mean()
    assert run.train([5])[0] == pytest.approx(reference[0], rel=1e-10, abs=1e-12)
    assert_alike(run.weights(), reference[2], "float64", AGAINST_NUMPY)


def test_a_loss_of_another_length_is_refused_and_nothing_is_updated():
    run = Run("lenet", "float64", 2)
    before = run.weights()
    run.parallel.loss = lambda output, label: nd.ones((3,), ctx=output.context)
    with pytest.raises(gp.errors.BatchMismatch, match=r"shape \(3,\) for 4 samples on .pu\(\d+\)"):
        run.train([8])
    assert_alike(run.weights(), before, "float64")


def test_the_loss_is_returned_without_waiting():
    released, gate = [], threading.Event()
    run = Run("branches", "float64", 2)
    run.train([4])
    x, y = run.batch(4, np.random.RandomState(0))
    engine.push(lambda: released.append(gate.wait(20)), write=[x[0]])  # the batch is not ready until the gate opens
    loss = run.parallel.step(x, y)
    assert not released
    gate.set()
    assert np.isfinite(loss.asscalar()) and released == [True]


def test_the_learning_rate_stays_the_trainers():
    run, other = Run("branches", "float64", 2), Run("branches", "float64", 1, ("sgd", {"learning_rate": 0.01}))
    run.trainer.set_learning_rate(0.01)
    run.train([6, 5])
    other.train([6, 5])
    assert_alike(run.weights(), other.weights(), "float64")


def test_frozen_parameters_stay_and_the_others_train():
    run = Run("branches", "float64", 2)
    before = run.weights()
    for parameter in run.net.short.collect_params().values():
        parameter.grad_req = "null"
    run.train([6])
    changed = [not np.array_equal(a, b) for a, b in zip(before, run.weights())]
    assert changed == [False, False, True, True, True, True]


def test_a_parameter_that_the_loss_does_not_reach_is_named_or_left_out():
    run = Run("branches", "float64", 2, hybridize=False)
    run.parallel.loss = loss = lambda sum_, short, y, weight: short.mean(axis=1)
    with pytest.raises(gp.errors.GradientUnavailable, match="dense"):
        run.train([6])
    run.parallel = gp.DataParallel(run.net, loss, run.trainer, ignore_stale_grad=True)
    before = run.weights()
    run.train([6])
    changed = [not np.array_equal(a, b) for a, b in zip(before, run.weights())]
    assert changed == [True, True, False, False, False, False]


def test_parameters_are_made_at_the_first_batch_where_their_shape_is_not_known():
    net = gluon.nn.Dense(2)
    assert np.isfinite(parallel_of(net, 3).step(nd.ones((2, 4)), nd.ones((2, 2))).asscalar())
    assert len({array.asnumpy().tobytes() for array in net.weight.list_data()}) == 1


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"clip_global_norm": 0.1}], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_sparse_gradients_train_like_dense_ones(options, optimizer):
    results = []
    for sparse, number in [(False, 1), (True, 3)]:
        net = gluon.nn.Embedding(10, 4, sparse_grad=sparse, dtype="float64")
        how = optimizer, {"learning_rate": 0.1, "lazy_update": False}
        parallel = parallel_of(net, number, lambda out: (out**2).sum(axis=1), mx.init.One(), how, **options)
        for words in ([1, 2, 2, 7, 1], [3, 1], [0, 1, 2, 3], [4]) * 2:  # some devices have none
            parallel.step(nd.array(words))
        parallel.update()
        results.append(net.weight.list_data()[-1].asnumpy())
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6, atol=1e-9)  # of clipping, norms are float32


def test_sparse_parameters_that_cannot_be_trained_are_refused_by_name():
    net = gluon.nn.Embedding(10, 4, sparse_grad=True, prefix="words_")
    net.initialize(ctx=cpus(2))

    class Other(mx.kv.KVStoreBase):
        type = "other"

    for store in ("horovod", Other(), "dist_sync"):
        trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=store)
        with pytest.raises(gp.errors.GradientUnavailable, match="words_weight: the store .* does not sum row_sparse"):
            gp.DataParallel(net, gluon.loss.L2Loss(), trainer)
    net = gluon.contrib.nn.SparseEmbedding(10, 4, prefix="words_")
    net.initialize(ctx=cpus(2))
    with pytest.raises(gp.errors.GradientUnavailable, match="words_weight: row_sparse weights"):
        gp.DataParallel(net, gluon.loss.L2Loss(), gluon.Trainer(net.collect_params(), "sgd"))


def test_one_hot_labels_are_told_from_numbers_of_classes():
    step = parallel_of(gluon.nn.Dense(3, in_units=2), 1, gluon.loss.SoftmaxCrossEntropyLoss())
    with pytest.raises(mx.base.MXNetError, match=r"1 label \(4, 3\).*labels are numbers of classes"):
        step(nd.ones((4, 2)), nd.ones((4, 3)))


@pytest.mark.parametrize("given", [iter, tuple, lambda devices: (device for device in devices)])
def test_devices_may_be_any_iterable(given):
    run = Run("branches", "float64", 3)
    assert gp.DataParallel(run.net, run.loss, run.trainer, devices=given(cpus(2))).devices == cpus(2)
    assert gp.DataParallel(run.net, run.loss, run.trainer, devices=cpus(1)[0]).devices == cpus(1)


WRONG = {
    r"expected a gluon.Trainer": {"trainer": "sgd"},
    r"loss: expected a function of \(output, label\).*got 'softmax'": {"loss": "softmax"},
    r"loss: got the class L2Loss; write L2Loss\(\)": {"loss": gluon.loss.L2Loss},
    "accumulate": {"accumulate": 0},
    "clip_global_norm": {"clip_global_norm": -1},
    r"not on \[cpu\(4\)\].*reset_ctx": {"devices": [mx.cpu(0), mx.cpu(4)]},
}


def test_wrong_arguments_are_refused_with_what_to_do():
    run = Run("branches", "float64", 2)
    for message, wrong in WRONG.items():
        with pytest.raises((ValueError, gp.errors.GradientUnavailable), match=message):
            gp.DataParallel(**{"net": run.net, "loss": run.loss, "trainer": run.trainer, **wrong})
    on_store = gluon.Trainer(run.net.collect_params(), "sgd", kvstore="device", update_on_kvstore=True)
    with pytest.raises(gp.errors.GradientUnavailable, match="update_on_kvstore=False"):
        gp.DataParallel(run.net, run.loss, on_store)


@pytest.mark.parametrize("store", ["dist_sync", "dist_device_sync", "horovod"])
def test_compression_is_refused_before_anything_starts_where_the_store_has_none(store):
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize(ctx=cpus(1))
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", kvstore=store, compression_params={"type": "2bit", "threshold": 0.5}
    )
    with pytest.raises(ValueError, match=f"'threshold': 0.5.*{store}.*take the store mpi"):
        gp.DataParallel(net, gluon.loss.L2Loss(), trainer)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((0, 4)), np.zeros((0, 2)), "no samples"),
        (np.zeros((3, 4)), np.zeros((2, 2)), r"data\['inputs'\]\[0\] has 3, data\['labels'\]\[0\] has 2"),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused(x, y, message):
    with pytest.raises(gp.errors.BatchMismatch, match=message):
        parallel_of(gluon.nn.Dense(2, in_units=4), 2).step(x, y)


def test_a_step_inside_record_is_refused_because_it_records_itself():
    net = gluon.nn.Dense(2, in_units=4)
    parallel = parallel_of(net, 2)
    before = net.weight.list_data()[0].asnumpy()
    with pytest.raises(gp.errors.GradientUnavailable, match="take it out of that block"), mx.autograd.record():
        parallel.step(np.zeros((3, 4)), np.zeros((3, 2)))
    assert (net.weight.list_data()[0].asnumpy() == before).all()


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


def test_rows_that_no_sample_reached_stay_where_a_device_has_no_samples():
    found = []
    for number in (1, 3):
        net = gluon.nn.Embedding(6, 2, sparse_grad=True)
        how = "sgd", {"learning_rate": 0.1, "momentum": 0.9}
        step = parallel_of(net, number, init=mx.init.One(), optimizer=how)
        for rows in ([0, 1, 2], [3]):  # with momentum, a lazy update moves the rows of the gradient alone
            step(nd.array(rows), nd.zeros((len(rows), 2)))
        found.append(net.weight.list_data()[0].asnumpy())
    np.testing.assert_allclose(found[1], found[0], **TOLERANCE["float32"])


@pytest.mark.parametrize("model", MODELS)
def test_what_the_net_returned_on_each_device_is_there_after_the_step(rng, model):
    net, loss, make_batch = MODELS[model]("float64")
    net.cast("float64")
    step = parallel_of(net, 3, loss)
    for num in (7, 2, 3):
        x, y = make_batch(num, np.random.RandomState(rng.integers(1000)))
        wanted = net(*x) if isinstance(x, tuple) else net(x)
        step(x, y)
        assert len(step.outputs) == min(num, 3)
        for output, whole in zip(zip(*map(_several, step.outputs)), _several(wanted)):
            rows = np.concatenate([one.asnumpy() for one in output])
            np.testing.assert_allclose(rows, whole.asnumpy(), **TOLERANCE["float64"])
    accuracy = mx.metric.Accuracy()
    if model == "lenet":
        accuracy.update(gp.split_and_load(y, cpus(3)), step.outputs)
        right = (wanted.asnumpy().argmax(axis=1) == y.asnumpy()).mean()
        assert accuracy.get() == ("accuracy", right)


def _several(outputs):
    return outputs if isinstance(outputs, (list, tuple)) else [outputs]
