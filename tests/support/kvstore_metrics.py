"""Checks of samplers, joins and metrics over processes of unequal length."""

import sys

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

collective = sys.modules["gluon_parallel.kvstore.collective"]  # its name in the package is that of a function
DEVICES = gp.devices("cpu:2")


def check_samplers_joins_and_metrics(store):
    """Samplers, joins and metrics over processes of unequal length."""
    rank, num = store.rank, store.num_workers
    stream = [10 * rank + number for number in range(2 * rank + 1)]
    joined = list(gp.sampler.join(stream, store))
    assert joined == stream + [None] * (2 * (num - 1) - 2 * rank), joined
    assert list(gp.sampler.join([], store)) == []
    scores = np.arange(rank * 5000.0, (rank + 1) * 5000.0).reshape(-1, 2)[: 2500 if rank else 3]
    rows = gp.metrics.gather_rows(scores, store)
    assert rows.shape == (3 + 2500 * (num - 1), 2)
    assert np.array_equal(rows[3:5], [[5000, 5001], [5002, 5003]])
    labels, guesses = nd.array([0, 1, 1, 0][: rank + 2]), nd.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]])
    metric = mx.metric.create(["acc", mx.metric.F1(average="micro"), mx.metric.CrossEntropy()])
    whole = mx.metric.create(["acc", mx.metric.F1(average="micro"), mx.metric.CrossEntropy()])
    metric.update([labels], [guesses[: rank + 2]])
    for other in range(num):
        whole.update([nd.array([0, 1, 1, 0][: other + 2])], [guesses[: other + 2]])
    gp.metrics.merge(metric, store)
    for (name, got), (_, wanted) in zip(metric.get_name_value(), whole.get_name_value()):
        assert abs(got - wanted) < 1e-6, (name, got, wanted)
    identity = gluon.nn.HybridLambda(lambda F, x: x)
    samplers = [gp.sampler.BatchSampler(11, 2, each, num) for each in range(num)]
    data, truth = guesses[nd.arange(11) % 4], nd.array([0, 1, 1] * 4)[:11]
    loader = [(data[batch], truth[batch]) for batch in samplers[rank]]
    [(_, accuracy)] = gp.evaluate(identity, loader, "acc", DEVICES, store, samplers[rank].num_real)
    assert abs(accuracy - float((data.argmax(axis=1) == truth).mean().asscalar())) < 1e-6
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    for some, expected in ((loader, loss(data, truth)), (loader[:1] if rank == 0 else [], loss(*loader[0]))):
        values = gp.evaluate(identity, some, ["acc", loss], DEVICES, store, samplers[rank].num_real)
        wanted = gp.metrics.gather_rows(expected.asnumpy(), store)[: len(expected)].astype(np.float64).mean()
        assert values[1][0] == "loss" and abs(values[1][1] - wanted) < 1e-6, (values, wanted)


def check_objects_of_all_processes(store):
    """Objects of process 0 and arrays of all, whatever their sizes."""
    rank, num = store.rank, store.num_workers
    random = np.random.RandomState(0)
    bits = random.randint(0, 256, 200_000).astype(np.uint8)  # also those of NaN, and more than one message
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "_MOST_BYTES", 1 << 16)
        for value in ({"run": "runs/3", 5: None}, None, b"", bits, ["x" * 5000, mx.nd.arange(3)]):
            got = gp.broadcast_object(value if rank == 0 else lambda: "not looked at", store)
            assert type(got) is type(value)
            assert str(got) == str(value) and (value is not bits or np.array_equal(got, bits))
    large = np.array([[2**62 + rank]])  # which float64 does not hold
    assert gp.metrics.gather_rows(large, store).tolist() == [[2**62 + each] for each in range(num)]
    refused(
        store, lambda: gp.broadcast_object(lambda: 0, store), "gp.broadcast_object(): process 0 handed in a function"
    )
    assert gp.broadcast_object(rank, store) == 0  # and all can go on
    assert collective.object_of(num - 1, {"rank": rank}, store, "a check") == {"rank": num - 1}


def refused(store, function, words):
    try:
        function()
    except TypeError as error:
        assert words in str(error) and "cannot be pickled" in str(error), error
    else:
        raise AssertionError(f"nothing was refused on process {store.rank}")


class Weighted(mx.metric.EvalMetric):
    """A metric of its own whose value depends on which samples one update has."""

    def __init__(self):
        super().__init__("weighted")

    def update(self, labels, outputs):
        wrong = float((outputs[0].argmax(axis=1) - labels[0]).abs().asnumpy().max())
        self.sum_metric += wrong * len(labels[0])
        self.num_inst += 1


def every_metric():
    """Metrics of two classes' scores, all that MXNet has and others, new ones."""
    metric = mx.metric
    squared = metric.CustomMetric(lambda labels, scores: ((scores[:, 1] > labels).sum() ** 2, len(labels)), "squared")
    largest = metric.np(lambda labels, scores: float((scores[:, 1] * labels).max()), "largest")
    made = [metric.create(name) for name in ("acc", "f1", "mcc", "pcc", "ce", "loss", "torch", "caffe")]
    made += [metric.NegativeLogLikelihood(), metric.TopKAccuracy(2), metric.Perplexity(0)]
    made += [metric.F1(average="micro"), metric.MCC(average="micro")]
    return [*made, squared, largest, Weighted(), metric.CompositeEvalMetric(["acc", metric.F1("f1 of two")])]


def every_metric_of_numbers():
    metric = mx.metric
    micro = metric.PearsonCorrelation(average="micro")
    return [*map(metric.create, ("mae", "mse", "rmse", "pearsonr")), micro]


def check_every_metric_says_what_one_process_does(store):
    """Every metric, over unequal parts, some of them empty: the value of whole batches on one process and device."""
    rank, num = store.rank, store.num_workers
    random = np.random.RandomState(3)
    for length, size in ((3 * num + 4, 3), (num - 1 or 1, 2)):  # of the second, the only batch leaves processes without
        scores = random.dirichlet([1, 1], length).astype("float32")
        labels = random.randint(0, 2, length).astype("float32")
        numbers, truth = random.standard_normal((2, length, 3)).astype("float32")
        samplers = [gp.sampler.BatchSampler(length, size, each, num) for each in range(num)]
        for arrays, make in (((scores, labels), every_metric), ((numbers, truth), every_metric_of_numbers)):
            loader = [tuple(nd.array(array[batch]) for array in arrays) for batch in samplers[rank]]
            wanted = mx.metric.CompositeEvalMetric(make())
            for begin in range(0, length, size * num):
                outputs, answers = (nd.array(array[begin : begin + size * num]) for array in arrays)
                wanted.update([answers], [outputs])
            metric = mx.metric.CompositeEvalMetric(make())
            got = gp.evaluate(lambda x: x, loader, metric, DEVICES, store, samplers[rank].num_real)
            assert [name for name, _ in got] == [name for name, _ in wanted.get_name_value()]
            # MXNet adds float32 values, here in another order; they are of the size of 1
            plain, of_all = wanted.get_name_value(), wanted.get_global_name_value()
            for values, expected in ((got, plain), (metric.get_name_value(), plain),
                                     (metric.get_global_name_value(), of_all)):  # fmt: skip
                for (name, ours), (_, theirs) in zip(values, expected):
                    assert np.isclose(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True), (name, ours, theirs)


def check_outputs_without_samples_are_refused_on_all_processes(store):
    """Each process says what cannot be put together, also one that has no samples, and all can go on."""
    rank, num = store.rank, store.num_workers
    batch = nd.ones(2), nd.ones(2)
    for outputs in (lambda x: (x, x.sum()), lambda x: (x, None), lambda x: (x, x.asnumpy())):
        try:
            gp.evaluate(outputs, [batch] if rank == 0 else [], Weighted(), DEVICES[:1], store)
        except gp.errors.BatchMismatch as error:
            assert "evaluate: outputs[1] of a device or process is a" in str(error), error
        else:
            assert num == 1
    [(_, mse)] = gp.evaluate(lambda x: x, [batch], "mse", DEVICES[:1], store)
    assert mse == 0


def check_detection_metrics(store):
    """GluonCV's metrics and COCO's over processes: exactly those of one process that sees all images."""
    from detection_predictions import CLASSES, annotations, images, masks

    from gluoncv.utils import metrics

    rank, num, alone = store.rank, store.num_workers, mx.kv.create("local")
    # Every process its part; the first one everything; and each of them images of its own, as no sampler would have it.
    parts = (range(rank, 41, num), range(41) if rank == 0 else (), range(rank * 41 // num, (rank + 1) * 37 // num))
    for repeated, mine in zip((True, True, False), map(list, parts)):
        everything = images(41, repeated)
        seen = sorted(int(number) for number in gp.metrics.gather_rows(np.array(mine, int).reshape(-1), store))
        for made in (metrics.VOC07MApMetric, metrics.VOCMApMetric):
            metric, whole = made(class_names=CLASSES), made(class_names=CLASSES)
            for number in mine:
                metric.update(*everything[number])
            for number in seen:
                whole.update(*everything[number])
            gp.metrics.merge(metric, store)
            plain = whole.get()
            gp.metrics.merge(whole, alone)
            assert same(metric.get()[1], whole.get()[1]), (metric.get(), whole.get())
            assert repeated or same(metric.get()[1], plain[1])  # as GluonCV alone says where no scores are equal
        metric, whole = (metrics.SegmentationMetric(len(CLASSES)) for _ in range(2))
        for number in mine:
            metric.update(*masks(number))
        for number in seen:
            whole.update(*masks(number))
        gp.metrics.merge(metric, store)
        assert same(metric.get(), whole.get()), (metric.get(), whole.get())
        metric, whole = (gp.metrics.COCOMeanAP(annotations(everything), [10, 20, 30]) for _ in range(2))
        for some, to in ((mine, metric), (seen, whole)):
            for number in some:
                boxes, labels, scores, *_ = everything[number]
                to.update([number], boxes, labels, scores)
        gp.metrics.merge(metric, store)
        assert len(metric.seen) == len(set(seen))
        assert same(metric.get()[1], whole.get()[1]), (metric.get(), whole.get())
    both = mx.metric.CompositeEvalMetric([mx.metric.Accuracy(), metrics.SegmentationMetric(2)])
    both.metrics[0].update([nd.array([1, 0])], [nd.array([[0, 1], [0, 1]])])
    both.metrics[1].update(nd.ones((1, 2, 2)), nd.array(np.arange(8).reshape(1, 2, 2, 2)))
    gp.metrics.merge(both, store)
    assert both.metrics[0].get()[1] == 0.5 and both.metrics[1].total_label == 4 * num


def same(first, second):
    return np.array_equal(np.array(first, float), np.array(second, float), equal_nan=True)
