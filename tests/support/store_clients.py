"""Programs that use a store as MXNet shows it; each process runs ``python store_clients.py STORE CLIENT ...``."""

import sys

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

SAMPLES, BATCH, CLASSES = 32, 4, 3
OPTIMIZERS = {"sgd": {"learning_rate": 0.5, "momentum": 0.9, "wd": 0.1}, "nadam": {"learning_rate": 0.01}}


def names(store):
    """Keys are names, and lists of them."""
    total = store.num_workers * (store.num_workers + 1) / 2
    store.init("weight", nd.ones((2, 3)) * (store.rank + 5))
    store.init(["bias", "gamma"], [nd.ones(4), nd.zeros(2)])
    out = nd.zeros((2, 3))
    store.pull("weight", out=out)
    assert (out.asnumpy() == 5).all(), out  # rank 0's
    store.push("weight", [nd.ones((2, 3)) * (store.rank + 1)])
    store.push(["bias", "gamma"], [nd.ones(4) * (store.rank + 1), nd.ones(2)])
    outs = [nd.zeros(4), nd.zeros(2)]
    store.pull("weight", out=out)
    store.pull(["bias", "gamma"], out=outs)
    assert [values.asnumpy().tolist() for values in (*outs, out[0])] == [
        [total] * 4, [float(store.num_workers)] * 2, [total] * 3
    ]  # fmt: skip
    array = nd.ones(3)
    store.broadcast("beta", nd.ones(3) * (store.rank + 7), out=array)
    assert (array.asnumpy() == 7).all()
    store.pushpull("beta", array, out=array)
    assert (array.asnumpy() == 7 * store.num_workers).all()
    for attempt in (lambda: store.push("unknown", nd.ones(1)), lambda: store.pull("unknown", out=nd.ones(1))):
        try:
            attempt()
        except (ValueError, mx.base.MXNetError) as error:
            assert "'unknown'" in str(error) or "key unknown" in str(error), error
        else:
            raise AssertionError("took an unknown name")


def mixed(store):
    """Names and whole numbers in one store are refused over MXNet's servers, as by MXNet."""
    store.init("another", nd.ones(2))
    try:
        store.init(3, nd.ones(2))
    except mx.base.MXNetError as error:
        assert "mixed key types" in str(error)
    else:
        raise AssertionError("took both")


def statistics(store):
    """A layer's statistics travel through a store whose keys are names."""
    store.init("weight", nd.ones(2))
    layer = gp.nn.SyncBatchNorm(in_channels=2, kvstore=store)
    layer.initialize()
    with mx.autograd.record():
        layer(nd.ones((2, 2)) * store.rank).wait_to_read()
    store.pull("weight", out=nd.zeros(2))
    mean = 0.1 * np.arange(store.num_workers).mean()  # momentum 0.9
    np.testing.assert_allclose(layer.running_mean.data().asnumpy(), [mean, mean], rtol=1e-5, atol=1e-7)


def copies(store):
    """One value per device: the first counts for init and broadcast, all are added by push."""
    devices = [mx.cpu(0), mx.cpu(1)]
    store.init("a", [nd.ones(3, ctx=device) * (store.rank + 1) for device in devices])
    outs = [nd.zeros(3, ctx=device) for device in devices]
    store.pull("a", out=outs)
    assert [out.asnumpy().tolist() for out in outs] == [[1.0] * 3] * 2
    store.push("a", [nd.ones(3, ctx=device) for device in devices])
    store.pull("a", out=outs)
    assert [out.asnumpy().tolist() for out in outs] == [[2.0 * store.num_workers] * 3] * 2
    store.broadcast("b", [nd.ones(3) * (store.rank + 1)] * 2, out=outs)
    assert [out.asnumpy().tolist() for out in outs] == [[1.0] * 3] * 2


def numpy_mode(store):
    """Arrays of mx.np, with and without dimensions."""
    mx.npx.set_np()
    for key, shape in (("matrix", (2, 3)), ("scalar", ()), ("vector", (1,))):
        array = mx.np.ones(shape) * (store.rank + 1)
        store.init(key, array)
        out = mx.np.zeros(shape)
        store.pull(key, out=out)
        assert type(out) is mx.np.ndarray and (out.asnumpy() == 1).all()
        store.push(key, array)
        store.pull(key, out=out)
        total = store.num_workers * (store.num_workers + 1) / 2
        assert out.shape == shape and (out.asnumpy() == total).all()
        store.pushpull(f"{key}, summed", array)
        assert array.shape == shape and (array.asnumpy() == total).all()
    mx.npx.reset_np()


def sparse(store):
    """Sparse arrays are refused with the reason."""
    store.init("sparse", nd.ones((2, 2)))
    rows = nd.ones((2, 2)).tostype("row_sparse")
    for attempt in (
        lambda: store.push("sparse", rows),
        lambda: store.row_sparse_pull("sparse", out=rows, row_ids=nd.array([0])),
        lambda: store.pull("sparse", out=rows, ignore_sparse=False),
    ):
        try:
            attempt()
        except gp.errors.SparseUnsupported as error:
            assert "dense" in str(error)
        else:
            raise AssertionError("took a sparse array")


def net():
    data = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=8, name="first")
    data = mx.sym.FullyConnected(mx.sym.Activation(data, act_type="tanh"), num_hidden=CLASSES, name="second")
    return mx.sym.SoftmaxOutput(data, mx.sym.var("softmax_label"), name="softmax")


def fit(rows, labels, batch_size, seed, devices, kvstore, optimizer="sgd"):
    """The weights after two epochs of ``Module.fit``."""
    mx.random.seed(seed)
    module = mx.mod.Module(net(), context=devices)
    module.fit(
        mx.io.NDArrayIter(rows, labels, batch_size), num_epoch=2, kvstore=kvstore, initializer=mx.init.Normal(0.3),
        optimizer=optimizer, optimizer_params=OPTIMIZERS[optimizer],
    )  # fmt: skip
    return {name: values.asnumpy() for name, values in module.get_params()[0].items()}


def module(store):
    """``Module.fit`` over the processes is that of one process on the joint batches, from rank 0's weights."""
    random = np.random.RandomState(7)
    rows, labels = random.normal(size=(SAMPLES, 5)).astype("float32"), random.randint(CLASSES, size=SAMPLES)
    num, rank = store.num_workers, store.rank
    for devices, optimizer in (([mx.cpu()], "sgd"), ([mx.cpu(0), mx.cpu(1)], "sgd"), ([mx.cpu(2), mx.cpu(0)], "nadam")):
        kvstore = store.type if len(devices) == 1 or store.type == "mpi" else None
        if kvstore is None:
            continue  # MXNet's servers keep a name for good: one Module per process
        found = fit(rows[rank::num], labels[rank::num], BATCH, 11 + rank, devices, kvstore, optimizer)
        expected = fit(rows, labels, BATCH * num, 11, [mx.cpu()], None, optimizer)
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-5, err_msg=name)


def moved(store):
    """A Trainer's parameters are moved and set between steps, on other devices in each process."""
    x = np.random.RandomState(1).normal(size=(5, 8, 3)).astype("float32")
    moves = [[[0, 1], [2], [2, 0, 1]], [[1], [1, 2], [0]]][store.rank]  # at the beginning, before and after two steps

    def train(x, moves, kvstore, in_parallel):
        layer = gluon.nn.Dense(1, in_units=3)
        layer.initialize(mx.init.One(), ctx=[mx.cpu(number) for number in moves[0]])
        trainer = gluon.Trainer(layer.collect_params(), "nadam", {"learning_rate": 0.1}, kvstore=kvstore)
        loss = lambda output: (output - 1) ** 2  # noqa: E731
        for number, batch in enumerate(x):
            if number in (0, 2):
                layer.collect_params().reset_ctx([mx.cpu(place) for place in moves[1 + number // 2]])
                parallel = gp.DataParallel(layer, loss, trainer) if in_parallel else None
            if number == 3:
                layer.weight.set_data(layer.weight.list_data()[0] * 0.5)
            if in_parallel:
                parallel.step(nd.array(batch))
                continue
            with mx.autograd.record():
                losses = [loss(layer(part)) for part in gp.split_and_load(nd.array(batch), layer.weight.list_ctx())]
            mx.autograd.backward(losses)
            trainer.step(x.shape[1] * (1 if kvstore is None else store.num_workers))
        return [copy.asnumpy() for copy in layer.weight.list_data()]

    [wanted] = train(x, [[0]] * 3, None, False)
    own = x[:, store.rank :: store.num_workers]
    for in_parallel in (False, True):
        for copy in train(own, moves, gp.kvstore.create("mpi"), in_parallel):
            np.testing.assert_allclose(copy, wanted, rtol=1e-5, atol=1e-6)  # float32, sums in another order


def optimizer(store):
    """An optimizer made without the number of processes would take steps that are too long."""
    data = mx.io.NDArrayIter(np.ones((BATCH, 5), "float32"), np.zeros(BATCH), BATCH)
    trained = mx.mod.Module(net())
    trained.bind(data.provide_data, data.provide_label)
    trained.init_params()
    try:
        trained.init_optimizer(store, mx.optimizer.SGD(rescale_grad=1 / BATCH))
    except ValueError as error:
        assert "rescale_grad=0.25" in str(error) and "takes 0.125" in str(error), error
    else:
        raise AssertionError("took it")
    trained.init_optimizer(store, mx.optimizer.SGD(rescale_grad=1 / BATCH / store.num_workers))


if __name__ == "__main__":
    made = gp.kvstore.create(sys.argv[1])
    for client in sys.argv[2:]:
        globals()[client](made)
        print(f"passed {client} on {made.rank}", flush=True)
