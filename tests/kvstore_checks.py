"""What a store must do, run by every process of a group: ``python kvstore_checks.py store check...``."""

import os
import sys
import threading
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
    assert store.type == sys.argv[1]
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
        # MXNet's stores overwrite a single value of one device with the result.
        assert store.type.startswith("dist") or (kept.asnumpy() == 2).all()
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
        assert np.allclose(array.asnumpy(), (1 + 2**-9) * store.num_workers, rtol=2**-10, atol=2**-10)
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    array, total = nd.zeros(50000), 0.0
    for _ in range(4):
        array[:] = 0.2
        store.pushpull("two bits", array)
        total += array.asnumpy()
    assert (total == 0.5 * store.num_workers).all()  # 0.8 in all: 0.5 was sent, the rest is kept
    store.set_gradient_compression({"type": "none"})


def compressed(store):
    """Where gradients are compressed, numbers of samples and of processes that go on are not."""
    num = [40000 + 32 * rank for rank in range(store.num_workers)]  # float16 knows these gradients, but not their sum
    x, y = nd.ones((num[store.rank], 1)), nd.zeros((num[store.rank], 1))
    for options, total in (({"type": "fp16"}, sum(num)), ({"type": "2bit", "threshold": 0.5}, 0.5 * len(num))):
        store.set_gradient_compression(options)
        net = gluon.nn.Dense(1, in_units=1, use_bias=False)
        net.initialize(mx.init.One(), ctx=DEVICES)
        made = gluon.Trainer(
            net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=store, update_on_kvstore=False
        )
        gp.DataParallel(net, gluon.loss.L2Loss(), made, DEVICES)(x, y)  # the gradient of each sample is 1
        weight = net.weight.data(DEVICES[0]).asscalar()
        assert np.isclose(weight, 1 - 0.5 * total / sum(num), rtol=1e-6, atol=1e-7), (options, weight)
        stream = list(range(store.rank + 1))
        joined = list(gp.sampler.join(stream, store))
        assert joined == stream + [None] * (store.num_workers - 1 - store.rank), (options, joined)
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


def again(store):
    """One array after another at one key, all under way at once, keep their order on every process."""
    for turn in range(5):
        late = nd.ones((700, 700))
        for _ in range(3):
            late = nd.dot(late, late) / 700  # what the last process pushes first becomes ready last
        arrays = [nd.full((7,), 10 * turn + number + store.rank) for number in range(6)]
        if store.rank == store.num_workers - 1:
            arrays[0] = arrays[0] + late[0, :7] - 1
        for array in arrays:
            store.pushpull("again", array)
        for number, array in enumerate(arrays):
            wanted = sum(10 * turn + number + rank for rank in range(store.num_workers))
            assert np.allclose(array.asnumpy(), wanted), (turn, number, array, wanted)


def bits(store):
    """Every process gets the same bits: the sum in rank order, whoever comes first."""
    for size in (5, 300, 100_000):
        rows = [np.random.default_rng(size + rank).standard_normal(size).astype("float32") for rank in range(9)]
        wanted = rows[0].copy()
        for row in rows[1 : store.num_workers]:
            wanted += row
        for turn in range(4):
            if store.rank == turn % store.num_workers:
                time.sleep(0.01)
            array = nd.array(rows[store.rank])
            store.pushpull(f"bits {size}", array)
            assert (array.asnumpy() == wanted).all(), size


def interrupted(store):
    """A step that broke off leaves neither its gradients nor its number of samples for the next update."""
    fails = []

    def loss(output, label):
        if fails:
            raise RuntimeError(fails.pop())
        return gluon.loss.L2Loss()(output, label)

    def build(kvstore):
        net = gluon.nn.Dense(1, in_units=2)
        net.initialize(mx.init.Constant(0.5), ctx=DEVICES)
        options = {"learning_rate": 0.5}
        made = gluon.Trainer(net.collect_params(), "sgd", options, kvstore=kvstore, update_on_kvstore=False)
        return net, gp.DataParallel(net, loss, made, DEVICES, accumulate=2)

    x = np.random.default_rng(2).standard_normal((40, 2)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    net, step = build(store)
    bounds = np.cumsum([0, *(2 + 3 * rank for rank in range(store.num_workers))])
    mine = slice(bounds[store.rank], bounds[store.rank + 1])
    step(nd.array(x[:9]), nd.array(y[:9]))
    fails.append("half a step")
    try:
        step(nd.array(x[:11]), nd.array(y[:11]))  # the last one before an update: its samples are told to all
    except RuntimeError as error:
        assert "half a step" in str(error)
    step(nd.array(x[mine]), nd.array(y[mine]))
    step.update()
    alone, reference = build(None)
    reference(nd.array(x[: bounds[-1]]), nd.array(y[: bounds[-1]]))
    reference.update()
    got, wanted = net.weight.data(DEVICES[0]).asnumpy(), alone.weight.data(DEVICES[0]).asnumpy()
    assert np.allclose(got, wanted, rtol=1e-5, atol=1e-6), (got, wanted)


def deferred(store):
    """A net whose shapes follow from its first input; oneDNN lays its weights out in its own way meanwhile."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(16, 3), gluon.nn.Conv2D(16, 3), gluon.nn.Dense(2))
    net.initialize(mx.init.Xavier(), ctx=DEVICES)
    net.hybridize(static_alloc=True)
    made = gluon.Trainer(net.collect_params(), "sgd", kvstore=store, update_on_kvstore=False)
    step = gp.DataParallel(net, gluon.loss.SoftmaxCrossEntropyLoss(), made, DEVICES)
    for _ in range(2):
        step(nd.ones((6, 8, 12, 12)) * (store.rank + 1), nd.zeros(6))
    for parameter in net.collect_params().values():
        rows = gp.metrics.gather(parameter.data(DEVICES[1]).asnumpy().reshape(1, -1), store)
        assert (rows == rows[0]).all(), parameter.name


class Held(mx.operator.CustomOp):
    """Hands on what it gets; going backward it waits until somebody lets it go on.

    MXNet keeps a script that has an operator of its own beyond the interpreter's end, and with it the script's store.
    """

    go_on = threading.Event()
    waited_in_vain = False

    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        if not Held.go_on.wait(10):
            Held.waited_in_vain = True
        self.assign(in_grad[0], req[0], out_grad[0])


@mx.operator.register("held")
class HeldProp(mx.operator.CustomOpProp):
    """Makes a :class:`Held`."""

    def create_operator(self, ctx, shapes, dtypes):
        return Held()


def overlap(store):
    """The last layer's gradient is exchanged while the first layer's backward operator is still to come."""
    net = gluon.nn.HybridSequential()
    first, last = gluon.nn.Dense(4, in_units=3), gluon.nn.Dense(2, in_units=4)
    net.add(first, gluon.nn.HybridLambda(lambda F, x: F.Custom(x, op_type="held")), last)
    net.initialize(ctx=DEVICES)
    made = gluon.Trainer(net.collect_params(), "sgd", kvstore=store, update_on_kvstore=False)
    step = gp.DataParallel(net, gluon.loss.L2Loss(), made, DEVICES)
    x, y = nd.ones((4, 3)) * (store.rank + 1), nd.ones((4, 2))
    for turn in range(4):  # the first time, keys are agreed upon; later ones take shorter ways
        Held.go_on.clear()
        step(x, y)
        for grad in last.weight.list_grad() + last.bias.list_grad():
            grad.wait_to_read()  # the sum over the processes, then
        assert not Held.waited_in_vain, f"step {turn}: nothing was exchanged before the end of the backward pass"
        Held.go_on.set()
        mx.nd.waitall()
    sums = gp.metrics.gather(first.weight.grad(DEVICES[1]).asnumpy().reshape(1, -1), store)
    assert sums.any() and (sums == sums[0]).all()


def envelopes(store):
    """Small messages that wait to be sent leave together: one envelope for each other process."""
    hub, arrays = store._hub, [nd.full((key + 1,), store.rank) for key in range(100)]
    for key, array in enumerate(arrays):
        store.pushpull(key, array)
    mx.nd.waitall()
    others, end = store.num_workers - 1, time.monotonic() + 20
    for turn in range(3):
        with hub._lock:  # as if a message were just being moved
            letters, sent = hub.wire.num_letters, hub.wire.num_envelopes
            for key, array in enumerate(arrays):
                array[:] = key + turn
                store.pushpull(key, array)
            while len(hub._submitted) < len(arrays):
                assert time.monotonic() < end
                time.sleep(0.001)
            assert (hub.wire.num_letters, hub.wire.num_envelopes) == (letters, sent)
        for key, array in enumerate(arrays):
            assert (array.asnumpy() == (key + turn) * store.num_workers).all()
        assert hub.wire.num_letters - letters == len(arrays) * others
        assert hub.wire.num_envelopes - sent == others, (hub.wire.num_envelopes - sent, len(arrays))


def models(store):
    """The last process trains another model; nobody takes a step."""
    last = store.rank == store.num_workers - 1
    net = gluon.nn.Dense(5 if last else 4, in_units=3)
    net.initialize(ctx=DEVICES)
    made = gluon.Trainer(net.collect_params(), "sgd", kvstore=store, update_on_kvstore=False)
    step = gp.DataParallel(net, gluon.loss.L2Loss(), made, DEVICES)
    began = time.monotonic()
    try:
        for _ in range(3):
            step(nd.ones((4, 3)), nd.ones((4, 5 if last else 4)))
            mx.nd.waitall()
    except (gp.errors.WorkersDiffer, gp.errors.WorkerLost) as error:
        assert "key" in str(error) and "(4," in str(error) and "(5," in str(error), error
        assert time.monotonic() - began < 5
        leave("refused another model")
    raise AssertionError("nobody noticed")


def opening(store):
    """The last process opens a key with another shape."""
    shape = (3, 4) if store.rank == store.num_workers - 1 else (4, 3)
    store.broadcast(0, nd.ones(3), per_device([np.zeros(3)] * 2))
    refused(store, lambda: store.broadcast(7, nd.ones(shape), per_device([np.ones(shape)] * 2)))


def layers(store):
    """The last process's model has a layer less."""
    net = gluon.nn.HybridSequential()
    for _ in range(2 if store.rank == store.num_workers - 1 else 3):
        net.add(gluon.nn.Dense(3, in_units=3))
    net.initialize(ctx=DEVICES)
    made = gluon.Trainer(net.collect_params(), "sgd", kvstore=store, update_on_kvstore=False)
    step = gp.DataParallel(net, gluon.loss.L2Loss(), made, DEVICES)
    refused(store, lambda: step(nd.ones((4, 3)), nd.ones((4, 3))))


def alone(store):
    """The last process trains another model with gluon.Trainer alone, for which the servers update the weights."""
    units = 5 if store.rank == store.num_workers - 1 else 3
    net = gluon.nn.Dense(2, in_units=units)
    net.initialize(ctx=DEVICES)
    made = gluon.Trainer(net.collect_params(), "sgd", kvstore=store.type)
    x = nd.ones((4, units), ctx=DEVICES[0])
    with mx.autograd.record():
        loss = net(x).sum()
    loss.backward()
    refused(store, lambda: made.step(4 * store.num_workers, ignore_stale_grad=True))


def refused(store, start):
    """What `start` does is refused at once, on every process with the key and all ranks."""
    began = time.monotonic()
    try:
        start()
    except gp.errors.WorkersDiffer as error:
        first = "process 0 sends" if store.num_workers == 2 else "processes 0, 1 send"
        for words in (f"{first} float32 (", f"process {store.num_workers - 1} sends ", "under key "):
            assert words in str(error), error
        assert time.monotonic() - began < 5
        raise  # a plain end of the program must not wait for anybody either


def missing(store):
    """The last process does not open a key that the others open, and lives on."""
    store.broadcast(0, nd.ones(3), nd.ones(3))
    if store.rank == store.num_workers - 1:
        time.sleep(8)
        leave("was missing")
    store.broadcast(1, nd.ones((3, 2)), nd.ones((3, 2)))


def once(store):
    """A process has one store over MXNet's servers, each key is opened once, and keeps its form."""
    assert mx.kv.create(store.type) is store
    mistakes = [
        (gp.errors.StoreUnavailable, "one store", lambda: mx.kv.create("dist_async")),
        (
            ValueError,
            "key 3: it is open already, with float32 (4,)",
            lambda: store.broadcast(3, nd.ones(4), nd.ones(4)),
        ),
        (gp.errors.ArrayMismatch, "key 3: it was opened with float32 (4,)", lambda: store.pushpull(3, nd.ones(5))),
        (gp.errors.ArrayMismatch, "now gets float64", lambda: store.pushpull(3, [nd.ones(4, dtype="float64")])),
    ]
    store.broadcast(3, nd.ones(4), nd.ones(4))
    for kind, words, mistake in mistakes:
        try:
            mistake()
        except kind as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
    array = nd.ones(4)
    store.pushpull(3, array)
    assert (array.asnumpy() == store.num_workers).all()
    store.broadcast([4, 5], [nd.ones(2), nd.ones(3)], [nd.ones(2), nd.ones(3)])
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    try:
        store.pushpull(3, array)
    except ValueError as error:
        assert "leave compression_params out" in str(error), error
        return
    raise AssertionError("compressed")


def later(store):
    """The last process sends another shape under a key that has worked before."""
    array, other = nd.ones((3, 4)), nd.ones((4, 3))
    for _ in range(3):
        store.pushpull("weight", array)
    array.wait_to_read()
    if store.rank == store.num_workers - 1:
        array = other
    try:
        for _ in range(3):
            store.pushpull("weight", array)
            array.wait_to_read()
    except (gp.errors.WorkersDiffer, gp.errors.WorkerLost) as error:
        assert "key weight" in str(error) and "(3, 4)" in str(error) and "(4, 3)" in str(error), error
        leave("refused")
    raise AssertionError("nobody noticed")


def raising(store):
    """The last process fails; the others are told why, within the limit."""
    survivor(store, lambda: (_ for _ in ()).throw(RuntimeError("no data")), "RuntimeError: no data")


def refusing(store):
    """The last process ends with a status, and has said what that stands for."""

    def refuse():
        gp.kvstore.leave_because("ConfigError: no such net")
        sys.exit(2)

    survivor(store, refuse, "ConfigError: no such net")


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


def integers(store):
    """The last process sends another shape: integers have no NaN, so reading them must raise, on both devices."""
    last = store.rank == store.num_workers - 1
    shape = (3, 4) if last else (4, 3)
    arrays = [nd.ones(shape, dtype="int32", ctx=mx.cpu(index)) for index in range(2)]
    store.pushpull("weight", arrays)
    for array in (arrays[0] + 1, arrays[1]):
        try:
            found = array.asnumpy()
        except (gp.errors.WorkersDiffer, gp.errors.WorkerLost) as error:
            assert "key weight" in str(error), error
        else:
            raise AssertionError(f"{found} was read")


def unread(store):
    """The same, and nobody reads it."""
    last = store.rank == store.num_workers - 1
    store.pushpull("weight", nd.ones((3, 4) if last else (4, 3), dtype="int32"))


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
        assert time.monotonic() - began < 30
        assert np.isnan(array.asnumpy()).all()
        leave(f"told: {error}")
    raise AssertionError("nobody noticed")


def leave(text):
    print(text, flush=True)
    time.sleep(1)  # until the others have said theirs: mpirun ends the group with the first that fails
    os._exit(3)


def prepare(name):
    """Something that happens before the store is made; whether the last process makes one at all."""
    [group] = [name for name in ("OMPI_COMM_WORLD_", "HOROVOD_", "WORKER_") if f"{name}RANK" in os.environ]
    last = int(os.environ[f"{group}RANK"]) == int(os.environ[f"{group}SIZE"]) - 1
    if name == "version" and last:
        gp.__version__ = "0.0.1"
    if name == "silent" and last:  # it starts MPI, and opens no store
        from mpi4py import MPI

        time.sleep(1000 + MPI.COMM_WORLD.rank)
    if name == "absent" and last:  # it does not even start MPI
        time.sleep(1000)


if __name__ == "__main__":
    if sys.argv[2] in ("version", "silent", "absent"):
        prepare(sys.argv.pop(2))
    made = gp.kvstore.create(sys.argv[1])
    for name in sys.argv[2:]:
        globals()[name](made)
        print(f"passed {name} on {made.rank}", flush=True)
