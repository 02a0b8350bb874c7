"""NumPy mode (``mx.npx.set_np()``): the same functions take and return ``mx.np`` arrays, and compute the same."""

import functools

import numpy as np
import pytest
from batch_norm_reference import in_parallel

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.allreduce import copy_sums

DEVICES = [mx.cpu(0), mx.cpu(1)]


def in_numpy_mode(function, *arguments, **options):
    """What the function returns after ``mx.npx.set_np()``, which is taken back."""
    mx.npx.set_np()
    try:
        return function(*arguments, **options)
    finally:
        mx.npx.reset_np()


def copies(values, dtype="float32"):
    return [mx.np.array(value, dtype=dtype, ctx=device) for value, device in zip(values, DEVICES)]


def assert_all(arrays, wanted):
    for array in arrays:
        assert type(array) is mx.np.ndarray and array.shape == np.shape(wanted)
        np.testing.assert_array_equal(array.asnumpy(), wanted)


@pytest.mark.parametrize("by_mxnet", [False, True])
@pytest.mark.parametrize("shape", [(3, 2), (5,), (), (0,), (0, 3), (2, 0)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_arrays_of_any_shape_are_copied_summed_and_averaged_in_place(monkeypatch, numpy_mode, shape, dtype, by_mxnet):
    if by_mxnet:
        monkeypatch.setattr(copy_sums, "_is_memory", lambda arrays: False)
    arrays = copies([np.full(shape, 2), np.full(shape, 5)], dtype)
    gp.broadcast(arrays)
    assert_all(arrays, np.full(shape, 2))
    gp.allreduce(arrays)
    assert_all(arrays, np.full(shape, 4))
    if dtype != "int32":
        towers = [[array] for array in copies([np.full(shape, 1), np.full(shape, 4)], dtype)]
        assert gp.average_gradients(towers)[0][0] is towers[0][0]
        assert_all([grads[0] for grads in towers], np.full(shape, 2.5))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("source", [mx.np.array, np.asarray])
def test_a_batch_is_split_into_arrays_of_the_mode(numpy_mode, source, axis):
    whole = np.arange(14, dtype=np.float32).reshape((7, 2))
    whole = whole if axis == 0 else whole.T.copy()
    batch = {"x": source(whole), "nothing": source(np.zeros((7, 0) if axis == 0 else (0, 7), np.float32))}
    shards = gp.split_and_load(batch, DEVICES, batch_axis=axis)
    for shard, device in zip(shards, DEVICES):
        assert type(shard["x"]) is type(shard["nothing"]) is mx.np.ndarray
        assert shard["x"].ctx == device
    together = np.concatenate([shard["x"].asnumpy() for shard in shards], axis)
    np.testing.assert_array_equal(together, whole)
    assert [shard["nothing"].shape[axis] for shard in shards] == [4, 3]


class Net(mx.gluon.HybridBlock):
    """Convolution, batch norm, pooling, dense, and a factor of no dimension; in either mode."""

    def __init__(self, norm=gp.nn.SyncBatchNorm):
        super().__init__()
        with self.name_scope():
            self.body = mx.gluon.nn.HybridSequential()
            self.body.add(
                mx.gluon.nn.Conv2D(4, 3, in_channels=2),
                norm(in_channels=4),
                mx.gluon.nn.Activation("relu"),
                gp.nn.GlobalAvgPool2D(),
                mx.gluon.nn.Dense(3, in_units=4),
            )
            shape = () if mx.util.is_np_array() else (1,)
            self.factor = self.params.get("factor", shape=shape, init=mx.init.Uniform())

    def hybrid_forward(self, F, x, factor):
        y = self.body(x)
        return y * factor if mx.util.is_np_array() else F.broadcast_mul(y, factor.reshape((1, 1)))


def make(num_devices, hybridize, norm=gp.nn.SyncBatchNorm, optimizer="adam", **options):
    net = Net(norm)
    net.initialize(ctx=DEVICES[:num_devices])
    random = np.random.RandomState(3)
    for name, parameter in net._collect_params_with_prefix().items():
        value = random.standard_normal(parameter.shape) * 0.5
        value = np.abs(value) + 0.5 if name.endswith("running_var") else value
        for array in parameter.list_data():
            gp.mxnet.compat.array_types.as_legacy(array)[:] = mx.nd.array(value)
    if hybridize:
        net.hybridize()
    trainer = mx.gluon.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.05})
    return net, trainer, gp.DataParallel(net, mx.gluon.loss.SoftmaxCrossEntropyLoss(), trainer, **options)


def batches(sizes):
    random = np.random.RandomState(8)
    return [(random.standard_normal((n, 2, 6, 6)).astype(np.float32), random.randint(0, 3, n)) for n in sizes]


def in_mode(array):
    return gp.mxnet.compat.array_types.as_current(mx.nd.array(array, dtype="float32"))


class Parts:
    """The mean distance of the labels that are far from the outputs, and that of the others."""

    parts = ("far", "near")

    def __call__(self, y, label):
        distance = mx.np.abs(y - label)
        far = distance > 2
        return [((distance * one).sum(), one.astype("float32").sum()) for one in (far, mx.np.logical_not(far))]


LOSSES = [
    (lambda y, label: ((y - label) ** 2).mean().reshape(()), "mean", (1 + 4 + 36 + 81) / 4, 2 * (1 + 4 + 36 + 81) / 4),
    (lambda y, label: ((y - label) ** 2).mean().reshape((1,)), "mean", 122 / 4, 2 * 122 / 4),
    (Parts(), None, 7.5 + 1.5, 7.5 + 1.5),
]


@pytest.mark.parametrize(("loss", "reduction", "wanted", "gradient"), LOSSES)
def test_losses_of_one_value_and_of_parts_count_all_samples_of_all_devices(
    numpy_mode, loss, reduction, wanted, gradient
):
    net = mx.gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.One(), ctx=DEVICES)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
    step = gp.DataParallel(net, loss, trainer, reduction=reduction)
    found = step(in_mode(np.array([[1.0], [2.0], [6.0], [9.0]])), in_mode(np.zeros((4, 1))))
    assert type(found) is mx.np.ndarray and found.asnumpy() == pytest.approx(wanted)
    assert net.weight.data(DEVICES[1]).asnumpy() == pytest.approx(1 - 0.5 * gradient)


def test_evaluate_hands_mx_np_arrays_to_metrics_of_ones_own(numpy_mode):
    class Own(mx.metric.EvalMetric):
        seen: set = set()

        def update(self, labels, preds):
            self.seen.update(map(type, (*labels, *preds)))
            self.sum_metric += int((preds[0].argmax(axis=1).astype("int32") == labels[0].astype("int32")).sum())
            self.num_inst += labels[0].shape[0]

    net, _, _ = make(2, True)
    data = [(in_mode(x), in_mode(y)) for x, y in batches((7, 1, 4))]
    own = Own("own")
    [(_, ours)] = gp.evaluate(net, data, own, DEVICES)
    named = dict(gp.evaluate(net, data, ["acc", mx.metric.TopKAccuracy(2)], DEVICES[:1]))
    predictions = np.concatenate([net(x).asnumpy().argmax(axis=1) for x, _ in data])
    labels = np.concatenate([y.asnumpy() for _, y in data])
    assert ours == pytest.approx((predictions == labels).mean())
    assert named["accuracy"] == pytest.approx(ours)
    assert Own.seen == {mx.np.ndarray}


@pytest.mark.parametrize("saved_in_numpy_mode", [True, False])
def test_a_checkpoint_goes_from_one_mode_to_the_other(saved_in_numpy_mode):
    def saved():
        net, trainer, step = make(2, True)
        for x, y in batches((5, 4)):
            step(in_mode(x), in_mode(y))
        return gp.checkpoint.state(net, trainer)

    def restored(archive):
        net, trainer, _ = make(1, True)
        gp.checkpoint.restore(archive, net, trainer)
        return gp.checkpoint.state(net, trainer).arrays

    this, the_other = (in_numpy_mode, lambda function, *args: function(*args))[:: 1 if saved_in_numpy_mode else -1]
    archive = this(saved)
    # The factor of one value has no dimension in NumPy mode and one in the other.
    shape = (1,) if saved_in_numpy_mode else ()
    arrays = {name: array.reshape(shape) if "factor" in name else array for name, array in archive.arrays.items()}
    for found in (this(restored, archive), the_other(restored, gp.archive.Archive(arrays, archive.facts))):
        for name, array in archive.arrays.items():
            np.testing.assert_array_equal(found[name].reshape(-1), array.reshape(-1), err_msg=name)


def test_replicas_are_compared_in_numpy_mode(numpy_mode):
    net, trainer, _ = make(2, True)
    gp.check_replicas(net, None)
    gp.mxnet.compat.array_types.as_legacy(net.factor.data(DEVICES[1]))[:] = 7
    with pytest.raises(gp.errors.ReplicasDiffer, match="factor"):
        gp.check_replicas(net, None)


def test_join_and_a_loader_with_our_sampler_yield_mx_np_batches(numpy_mode):
    assert list(gp.sampler.join([1, 2], mx.kv.create("local"))) == [1, 2]
    dataset = mx.gluon.data.ArrayDataset(mx.np.arange(10).reshape((5, 2)), mx.np.arange(5))
    batches_of = gp.sampler.BatchSampler(5, 2, rank=1, num_workers=2)
    loader = mx.gluon.data.DataLoader(dataset, batch_sampler=batches_of)
    found = [(type(x), type(y), x.shape, y.asnumpy().astype(int).tolist()) for x, y in loader]
    assert found == [(mx.np.ndarray, mx.np.ndarray, (len(numbers), 2), numbers) for numbers in batches_of]


@pytest.mark.parametrize("hybridize", [True, False])
def test_sync_batch_norm_works_on_threads_that_set_numpy_mode_themselves(hybridize):
    [(x, _)] = batches((6,))
    expected = None
    with mx.util.np_shape(True), mx.util.np_array(True):
        net, _, _ = make(1, hybridize)
        with mx.autograd.train_mode():
            expected = net(in_mode(x)).asnumpy()
        net, _, _ = make(2, hybridize)
    outputs = {}

    def work(number, shard, device):
        with mx.util.np_shape(True), mx.util.np_array(True), mx.autograd.train_mode():
            outputs[number] = net(mx.np.array(shard, dtype="float32", ctx=device))

    if hybridize:  # a graph is traced once, by one thread
        with mx.util.np_shape(True), mx.util.np_array(True):
            net(mx.np.array(x[:2], ctx=DEVICES[0]))
    shards = zip(range(2), (x[:4], x[4:]), DEVICES)
    in_parallel([functools.partial(work, *arguments) for arguments in shards])
    assert all(type(output) is mx.np.ndarray for output in outputs.values())
    found = np.concatenate([outputs[number].asnumpy() for number in range(2)])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_pipeline_takes_a_hybridized_stage_that_has_nothing_to_learn(numpy_mode):
    stages = [mx.gluon.nn.Flatten(), mx.gluon.nn.Dense(1, in_units=4, use_bias=False)]
    for stage in stages:
        stage.initialize(mx.init.One())
        stage.hybridize()
    pipe = gp.Pipeline(stages, DEVICES, 2)
    trainer = mx.gluon.Trainer(pipe.collect_params(), "sgd", {"learning_rate": 0.5})
    x, y = mx.np.arange(8.0).reshape(2, 2, 2), mx.np.array([5.0, 22.0])
    loss = pipe.step(mx.gluon.loss.L2Loss(), trainer, x, y)
    wanted = np.full((1, 4), 1.0) - 0.5 * np.arange(4.0) / 2  # errors of 1 and 0
    np.testing.assert_allclose(stages[1].weight.data(DEVICES[1]).asnumpy(), wanted, rtol=1e-6, atol=1e-6)
    assert loss.asnumpy() == pytest.approx(0.25)
