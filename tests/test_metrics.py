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


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_every_sample_counts_once_whatever_the_devices(num_devices, rng):
    devices = [mx.cpu(index) for index in range(num_devices)]
    net = _net(devices)
    x, y = rng.standard_normal((25, 4)).astype("float32"), rng.integers(0, 3, 25)
    loader = [(x[begin : begin + 8], y[begin : begin + 8]) for begin in range(0, 25, 8)]  # the last holds one sample
    expected = (net(mx.nd.array(x)).asnumpy().argmax(1) == y).mean()
    assert gp.evaluate(net, loader, "acc", devices) == [("accuracy", pytest.approx(expected))]


def test_several_metrics_and_a_used_one_start_from_nothing(rng):
    devices = [mx.cpu(0), mx.cpu(1)]
    net = _net(devices)
    metric = mx.metric.create(["acc", mx.metric.TopKAccuracy(2)])
    loader = [(rng.standard_normal((6, 4)).astype("float32"), rng.integers(0, 3, 6))]
    first = gp.evaluate(net, loader, metric, devices)
    assert [name for name, _ in first] == ["accuracy", "top_k_accuracy_2"]
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


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "no batch"),
        ([np.zeros((2, 4))], "batch 0 is a ndarray"),
        ([(np.zeros((2, 4)), np.zeros(3))], "differ in their number of samples"),
    ],
)
def test_a_loader_that_cannot_be_evaluated_is_refused(loader, message):
    devices = [mx.cpu(0), mx.cpu(1)]
    with pytest.raises(ValueError, match=message):
        gp.evaluate(_net(devices), loader, "acc", devices)


def test_a_metric_that_nobody_can_add_up_is_refused_before_anything_is_exchanged():
    class Silent:
        def __getattr__(self, name):
            raise AssertionError("it was asked")

    both = mx.metric.CompositeEvalMetric([mx.metric.Accuracy(), mx.metric.PearsonCorrelation()])
    with pytest.raises(ValueError, match="what PearsonCorrelation knows cannot be added up"):
        gp.metrics.merge(both, Silent())


def test_a_misspelt_metric_is_refused_with_the_right_names():
    with pytest.raises(ValueError, match="none called 'accuracyy'; did you mean 'accuracy'.*top_k_acc"):
        gp.evaluate(_net([mx.cpu(0)]), [], "accuracyy", [mx.cpu(0)])


def test_an_empty_share_of_the_last_batch_counts_nothing_where_there_is_a_store():
    net = gluon.nn.Dense(2, in_units=1)
    net.initialize(mx.init.Zero())
    batches = [(mx.nd.ones((3, 1)), mx.nd.array([0, 0, 1])), (np.zeros((0, 1), "float32"), np.zeros(0))]
    [(_, accuracy)] = gp.evaluate(net, batches, "acc", [mx.cpu()], mx.kv.create("local"))
    assert accuracy == pytest.approx(2 / 3)
    with pytest.raises(gp.errors.BatchMismatch):
        gp.evaluate(net, batches, "acc", [mx.cpu()])
