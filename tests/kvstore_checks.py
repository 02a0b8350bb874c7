"""What a store must do, run by every process of a group: ``python kvstore_checks.py store check...``."""

import os
import sys
import time

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

DEVICES = gp.devices("cpu:2")


def per_device(values, dtype="float32"):
    return [nd.array(value, ctx=device, dtype=dtype) for device, value in zip(DEVICES, values)]


def contract(store):
    """The same for every store that meets processes: names, broadcast, sums over devices and processes."""
    rank, num = store.rank, store.num_workers
    assert rank in range(num)
    assert store.type in ("mpi", "dist_sync", "horovod")
    everyone = num * (num - 1) / 2  # the sum of all ranks
    for key, shape in enumerate([(3,), (2, 3), (5, 1, 4), (70001,), (1,)]):
        value = nd.full(shape, rank + 7)
        outs = per_device([np.zeros(shape)] * 2)
        store.broadcast(key, value, outs)
        assert all((out.asnumpy() == 7).all() for out in outs), key
        grads = per_device([np.full(shape, rank), np.full(shape, 10.0 + key)])
        for turn in range(3):
            expected = everyone * 2**turn * num**turn + num * (10.0 + key) * (2 * num) ** turn
            store.pushpull(key, grads)
            for grad in grads:
                assert np.allclose(grad.asnumpy(), expected), (key, turn, grad.asnumpy().ravel()[0], expected)
        kept = nd.full(shape, 2)
        store.pushpull(key, kept, out=outs)
        # MXNet's dist_sync overwrites a single value of one device with the result.
        assert store.type == "dist_sync" or (kept.asnumpy() == 2).all()
        assert all((out.asnumpy() == 2 * num).all() for out in outs)


def order(store):
    """Keys of all sizes, in another order on every process, meet by key."""
    random = np.random.default_rng(store.rank)
    sizes = [1, 7, 300, 20000, 70001]
    for turn in range(8):
        keys = random.permutation(30)
        arrays = {key: nd.full((sizes[key % 5],), 1000 * turn + key + store.rank) for key in keys.tolist()}
        for key, array in arrays.items():
            store.pushpull(f"k{key}", array, priority=int(random.integers(9)))
        for key, array in arrays.items():
            wanted = sum(1000 * turn + key + rank for rank in range(store.num_workers))
            assert (array.asnumpy() == wanted).all(), (turn, key)


def pieces(store):
    """160 large pieces under way at once."""
    arrays = [nd.full((40000 + key,), store.rank + key) for key in range(160)]
    for turn in range(3):
        for key, array in enumerate(arrays):
            array[:] = store.rank + key + turn
            store.pushpull(f"piece {key}", array, priority=-key)
        for key, array in enumerate(arrays):
            wanted = sum(rank + key + turn for rank in range(store.num_workers))
            assert (array.asnumpy() == wanted).all(), (turn, key)


def many(store):
    """10,000 small exchanges, half of them through the engine."""
    for number in range(5000):
        rows = store.gather("vector", np.array([number, store.rank], np.float64))
        assert rows[:, 0].tolist() == [number] * store.num_workers
        assert rows[:, 1].tolist() == list(range(store.num_workers))
    arrays = [nd.zeros(4) for _ in range(8)]
    for number in range(625):
        for key, array in enumerate(arrays):
            array[:] = number
            store.pushpull(key, array)
    assert all((array.asnumpy() == 624 * store.num_workers).all() for array in arrays)


def dtypes(store):
    """float16 is added in float32; whole numbers and float64 are exact."""
    for dtype, value in (("float64", 1 + 2**-40), ("int32", 2**30 // 4), ("uint8", 3), ("float16", 1.0)):
        array = nd.full((5,), value, dtype=dtype)
        store.pushpull(f"type {dtype}", array)
        assert (array.asnumpy() == np.asarray(value, dtype) * store.num_workers).all(), dtype
    store.set_gradient_compression({"type": "fp16"})
    for size in (10, 50000):
        array = nd.full((size,), 1 + 2**-9)
        store.pushpull(f"half {size}", array)
        assert np.allclose(array.asnumpy(), (1 + 2**-9) * store.num_workers, rtol=2**-10)
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    array, total = nd.zeros(50000), 0.0
    for _ in range(4):
        array[:] = 0.2
        store.pushpull("two bits", array)
        total += array.asnumpy()
    assert (total == 0.5 * store.num_workers).all()  # 0.8 in all: 0.5 was sent, the rest is kept
    store.set_gradient_compression({"type": "none"})


def bookkeeping(store):
    """Samplers, joins and metrics over processes of unequal length."""
    rank, num = store.rank, store.num_workers
    stream = [10 * rank + number for number in range(2 * rank + 1)]
    joined = list(gp.sampler.join(stream, store))
    assert joined == stream + [None] * (2 * (num - 1) - 2 * rank), joined
    assert list(gp.sampler.join([], store)) == []
    scores = np.arange(rank * 5000.0, (rank + 1) * 5000.0).reshape(-1, 2)[: 2500 if rank else 3]
    rows = gp.metrics.gather(scores, store)
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


def detection(store):
    """GluonCV's metrics and COCO's over processes: exactly those of one process that sees all images."""
    from detection_predictions import CLASSES, annotations, images, masks

    from gluoncv.utils import metrics

    rank, num, alone = store.rank, store.num_workers, mx.kv.create("local")
    # Every process its part; the first one everything; and each of them images of its own, as no sampler would have it.
    parts = (range(rank, 41, num), range(41) if rank == 0 else (), range(rank * 41 // num, (rank + 1) * 37 // num))
    for repeated, mine in zip((True, True, False), map(list, parts)):
        everything = images(41, repeated)
        seen = sorted(int(number) for number in gp.metrics.gather(np.array(mine, int).reshape(-1), store))
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


def trainer(store):
    """gluon.Trainer takes the store by name, also for one device, and rank 0's weights."""
    net = gluon.nn.Dense(2, in_units=3)
    mx.random.seed(store.rank)
    net.initialize(mx.init.Normal(1), ctx=DEVICES[:1])
    by_name = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=store.type)
    x = nd.full((4, 3), store.rank + 1)
    with mx.autograd.record():
        loss = net(x).sum()
    loss.backward()
    by_name.step(4 * store.num_workers)
    assert by_name._kvstore.num_workers == store.num_workers
    weights = gp.metrics.gather(net.weight.data().asnumpy().reshape(1, -1), store)
    assert (weights == weights[0]).all()


def raising(store):
    """The last process fails; the others are told why, within the limit."""
    survivor(store, lambda: (_ for _ in ()).throw(RuntimeError("no data")), "RuntimeError: no data")


def stopping(store):
    """The last process stops without a word."""
    survivor(store, lambda: os.kill(os.getpid(), 19), f"process {store.num_workers - 1}")


def leaving(store):
    """The last process takes fewer steps."""
    survivor(store, lambda: sys.exit(0), "has ended its program")


def shapes(store):
    """The last process sends another shape."""
    last = store.rank == store.num_workers - 1
    array = nd.zeros((3, 4) if last else (4, 3))
    store.pushpull("weight", array)
    began = time.monotonic()
    try:
        array.wait_to_read()
        mx.nd.waitall()
        store.pushpull("weight", array)
        mx.nd.waitall()
        store.pushpull("weight", array)
    except (gp.errors.WorkersDiffer, gp.errors.WorkerLost) as error:
        message = str(error)
        assert "key weight" in message and "(3, 4)" in message and "(4, 3)" in message, message
        assert time.monotonic() - began < 5
        assert np.isnan(array.asnumpy()).all()  # nobody may train on with half a sum
        leave("refused")
    raise AssertionError("nobody noticed")


def survivor(store, fail, words):
    array = nd.ones(4)
    store.pushpull("common", array)
    array.wait_to_read()
    if store.rank == store.num_workers - 1:
        fail()
    began = time.monotonic()
    store.pushpull("alone", array)
    try:
        array.wait_to_read()
        store.pushpull("after", array)
    except gp.errors.WorkerLost as error:
        assert words in str(error), error
        assert time.monotonic() - began < 15
        assert np.isnan(array.asnumpy()).all()
        leave(f"told: {error}")
    raise AssertionError("nobody noticed")


def leave(text):
    print(text, flush=True)
    time.sleep(1)  # until the others have said theirs: mpirun ends the group with the first that fails
    os._exit(3)


if __name__ == "__main__":
    made = gp.kvstore.create(sys.argv[1])
    for name in sys.argv[2:]:
        globals()[name](made)
        print(f"passed {name} on {made.rank}", flush=True)
