import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

pytestmark = pytest.mark.arithmetic


def _net(devices):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(8, in_units=4, activation="relu"), gluon.nn.Dropout(0.5), gluon.nn.Dense(3, in_units=8))
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize()
    return net


def test_several_metrics_and_a_used_one_start_from_nothing_and_a_function_of_mxnets_keeps_its_arguments(rng):
    devices = [mx.cpu(0), mx.cpu(1)]
    net = _net(devices)
    own = mx.metric.CustomMetric(lambda labels, outputs: float((outputs.argmax(1) == labels).mean()))
    metric = mx.metric.create(["acc", mx.metric.TopKAccuracy(2), own])
    loader = [(rng.standard_normal((6, 4)).astype("float32"), rng.integers(0, 3, 6))]
    first = gp.evaluate(net, loader, metric, devices)
    assert [name for name, _ in first[:2]] == ["accuracy", "top_k_accuracy_2"]
    assert first[2][1] == pytest.approx(first[0][1])
    assert gp.evaluate(net, loader, metric, devices) == first


@pytest.mark.parametrize("name", ["rmse", "f1", "mcc"])
def test_metrics_that_are_no_mean_of_shards_do_not_depend_on_the_number_of_devices(name, rng):
    x, y = rng.standard_normal((23, 2)).astype("float32"), rng.integers(0, 2, 23)
    x[:, 1] += y
    loader = [(abs(x[begin : begin + 9]), y[begin : begin + 9]) for begin in range(0, 23, 9)]
    if name == "rmse":
        loader = [(images[:, :1], labels) for images, labels in loader]
    values = [gp.evaluate(lambda x: x, loader, name, [mx.cpu(i) for i in range(number)])[0][1] for number in (1, 3)]
    assert values[1] == pytest.approx(values[0])


SHARD = (np.zeros((2, 4)), np.zeros(2))


@pytest.mark.parametrize(
    ("loader", "metric", "devices", "message"),
    [
        ([], "acc", None, "no batch"),
        ([np.zeros((2, 4))], "acc", None, "batch 0 is a ndarray"),
        ([(np.zeros((2, 4)), np.zeros(3))], "acc", None, "differ in their number of samples"),
        ([SHARD], "acc", "cpu:2", r"expected a list of mx.Context: write gp.devices\('cpu:2'\)"),
        ([SHARD], "accuracyy", None, "none called 'accuracyy'; did you mean 'accuracy'.*top_k_acc"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(loader, metric, devices, message):
    two = [mx.cpu(0), mx.cpu(1)]
    with pytest.raises((ValueError, gp.errors.DeviceUnavailable), match=message):
        gp.evaluate(_net(two), loader, metric, devices or two)


class Own(mx.metric.EvalMetric):
    """A metric that leaves NaN out."""

    def __init__(self):
        super().__init__("own")

    def update(self, labels, outputs):
        self.sum_metric, self.num_inst = float(np.nanmax(outputs[0].asnumpy()[:1])), 1


def test_outputs_that_are_nan_are_refused_and_infinite_ones_are_not():
    devices, x, y = [mx.cpu(0), mx.cpu(1)], mx.nd.ones((3, 2)), mx.nd.zeros(3)
    x[2] = mx.nd.array([np.inf, -np.inf])  # whose sum is NaN
    assert gp.evaluate(lambda x: x, [(x, y)], "acc", devices) == [("accuracy", 1.0)]
    x[2, 1] = np.nan
    for metric in ("acc", gluon.loss.SoftmaxCELoss()):
        with pytest.raises(gp.errors.NotFinite, match=r"of shape \(1, 2\) on cpu\(1\).*np\.isfinite\(images\)\.all"):
            gp.evaluate(lambda x: x, [(x, y)], metric, devices)
    assert gp.evaluate(lambda x: x, [(x, y)], Own(), devices) == [("own", 1.0)]


def test_a_metric_that_nobody_can_add_up_is_refused_before_anything_is_exchanged():
    class Silent:
        def __getattr__(self, name):
            raise AssertionError("it was asked")

    both = mx.metric.CompositeEvalMetric([mx.metric.Accuracy(), mx.metric.PearsonCorrelation()])
    with pytest.raises(ValueError, match="what PearsonCorrelation knows cannot be added up"):
        gp.metrics.merge(both, Silent())


def test_an_empty_share_of_the_last_batch_counts_nothing_where_there_is_a_store():
    net = gluon.nn.Dense(2, in_units=1)
    net.initialize(mx.init.Zero())
    batches = [(mx.nd.ones((3, 1)), mx.nd.array([0, 0, 1])), (np.zeros((0, 1), "float32"), np.zeros(0))]
    [(_, accuracy)] = gp.evaluate(net, batches, "acc", [mx.cpu()], mx.kv.create("local"))
    assert accuracy == pytest.approx(2 / 3)
    with pytest.raises(gp.errors.BatchMismatch):
        gp.evaluate(net, batches, "acc", [mx.cpu()])


def test_the_loss_of_an_evaluation_is_the_one_that_a_step_returns(rng):
    devices = [mx.cpu(0), mx.cpu(1)]
    net, loss = gluon.nn.Dense(3, in_units=4), gluon.loss.SoftmaxCrossEntropyLoss()
    net.initialize(mx.init.Xavier(), ctx=devices)
    x, y = mx.nd.array(rng.standard_normal((7, 4))), mx.nd.array(rng.integers(0, 3, 7))
    [(_, accuracy), (name, value)] = gp.evaluate(net, [(x, y)], ["acc", loss], devices)
    assert (name, accuracy) == ("loss", gp.evaluate(net, [(x, y)], "acc", devices)[0][1])
    assert gp.evaluate(net, [(x, y)], gluon.loss.SoftmaxCELoss, devices) == [("loss", value)]  # a class is as good
    step = gp.DataParallel(net, loss, gluon.Trainer(net.collect_params(), "sgd"))
    assert value == pytest.approx(step(x, y).asscalar(), rel=1e-6)  # float32


@pytest.mark.parametrize("num_devices", [1, 3])
def test_time_major_batches_are_cut_along_their_axis(num_devices, rng):
    x, y = (rng.standard_normal((5, 4, 2)).astype("float32"), rng.integers(0, 2, (5, 4)))  # (time, sample, class)
    net, devices = gluon.nn.HybridLambda(lambda F, x: F.cumsum(x, axis=0)), [mx.cpu(i) for i in range(num_devices)]
    loader, wanted = [(x, y), (x[:, :1], y[:, :1])], np.cumsum(x, axis=0).argmax(2) == y
    loss = gluon.loss.SoftmaxCELoss(batch_axis=1)
    whole = mx.metric.np(lambda labels, scores: (scores.argmax(2) == labels).all(axis=0).mean())
    values = gp.evaluate(net, loader, [mx.metric.Accuracy(axis=2), loss, whole], devices, batch_axis=1)
    assert values[0][1] == pytest.approx(np.append(wanted, wanted[:, :1]).mean())
    right = wanted.all(axis=0)
    assert values[2][1] == pytest.approx((right.mean() + right[0]) / 2)
    losses = loss(net(mx.nd.array(x)), mx.nd.array(y)).asnumpy()
    assert values[1][1] == pytest.approx(np.append(losses, losses[0]).mean(), rel=1e-5)  # float32


def test_what_split_and_load_makes_arrays_of_is_evaluated_too():
    sparse = pytest.importorskip("scipy.sparse")
    x = np.array([[1, 0], [0, 2], [3, 4], [0, 5]], "float32")
    batches = [(sparse.csr_matrix(x), [0, 1, 1, 0]), ([[2.0, 1.0]], [0])]
    for devices in ([mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]):
        for num_real, wanted in ((None, 4 / 5), ([3, 1].__getitem__, 1.0)):
            got = gp.evaluate(lambda x: x.tostype("default"), batches, ["acc", "f1"], devices, num_real=num_real)
            assert got[0][1] == pytest.approx(wanted)


OUTPUTS_WITHOUT_SAMPLES = {
    "None": lambda x: None, "a number": lambda x: 3.0, "an array of NumPy": lambda x: x.asnumpy(),
    "a sum": lambda x: x.sum(), "a state": lambda x: mx.nd.ones((3, *x.shape), ctx=x.ctx),
}  # fmt: skip


@pytest.mark.parametrize("kind", OUTPUTS_WITHOUT_SAMPLES)
def test_outputs_without_samples_are_seen_on_one_device_and_not_put_together_on_several(kind):
    metric = mx.metric.np(lambda labels, scores: float((scores == labels).mean()), allow_extra_outputs=True)
    net, data = (lambda x: (x, OUTPUTS_WITHOUT_SAMPLES[kind](x))), [(mx.nd.ones(5), mx.nd.ones(5))]
    if kind.endswith((" sum", " state")):  # MXNet's metric converts its own arrays alone
        assert gp.evaluate(net, data, metric, [mx.cpu()])[0][1] == 1
    with pytest.raises(gp.errors.BatchMismatch, match=r"evaluate: outputs\[1\] of a device or process is a.*axis 0"):
        gp.evaluate(net, data, metric, [mx.cpu(0), mx.cpu(1)])
