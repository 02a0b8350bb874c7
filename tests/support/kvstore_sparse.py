"""Checks of row_sparse gradients: nets with an embedding train as with dense ones, and as on one device."""

import dataclasses
import warnings

import numpy as np
import pytest
from kvstore_random import seeds

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.kvstore.mpi import python_sums
from mxnet import gluon, nd
from mxnet.contrib.amp.loss_scaler import LossScaler

WORDS, LENGTH, OUT = 30, 3, 2
DEVICES = gp.devices("cpu:2")
TOLERANCE = {"float32": 2e-5, "float64": 1e-11}  # relative to what is larger: a value, or 1; Adam enlarges rounding


class Net(gluon.HybridBlock):
    """The mean of a text's word vectors, dense layers and perhaps batch norm."""

    def __init__(self, width, sparse, norm=None):
        super().__init__()
        with self.name_scope():
            self.embedding = gluon.nn.Embedding(WORDS, width, sparse_grad=sparse)
            self.body = gluon.nn.HybridSequential()
            self.body.add(gluon.nn.Dense(4, in_units=width))
            self.body.add(*([] if norm is None else [norm]), gluon.nn.Dense(OUT, in_units=4))

    def hybrid_forward(self, F, tokens):
        return self.body(self.embedding(tokens).mean(axis=1))


@dataclasses.dataclass(frozen=True)
class Program:
    """What is trained, how, and on which samples."""

    dtype: str
    width: int
    num_devices: int
    accumulate: int
    clip: float
    hybridize: bool
    frozen: str
    normalises: bool
    optimizer: tuple
    sizes: tuple  # samples of each process, for each batch
    recomputes: bool = False  # the layers behind the embedding, over the processes

    @classmethod
    def draw(cls, rng, num):
        """A random one for `num` processes."""
        accumulate, norms = int(rng.choice([1, 2])), bool(rng.integers(2))

        def batch():
            sizes = rng.integers(0, 5, num) * (rng.random(num) < 0.7)
            sizes[rng.integers(num)] += 2
            return tuple(sizes.tolist())

        optimizers = [("sgd", {"learning_rate": 0.2}), ("sgd", {"learning_rate": 0.2, "momentum": 0.9, "wd": 0.01}),
                      ("adam", {"learning_rate": 0.05, "epsilon": 1e-2})]  # fmt: skip
        return cls(
            str(rng.choice(["float32", "float64"])), int(rng.choice([2, 7])), int(rng.integers(1, 4)), accumulate,
            rng.choice([None, 0.05]), bool(rng.integers(2)), str(rng.choice(["", "", "body", "embedding"])), norms,
            optimizers[rng.integers(3)], tuple(batch() for _ in range(3 * accumulate)), not norms,
        )  # fmt: skip


def build(program, seed, store=None, sparse=True, lazy=True):
    """(net, trainer, parallel step) on this process's devices; without a store on one device."""
    devices = gp.devices(f"cpu:{1 if store is None else program.num_devices}")
    norm = gp.nn.SyncBatchNorm(in_channels=4, epsilon=1e-2, kvstore=store) if program.normalises else None
    net, rng = Net(program.width, sparse, norm), np.random.default_rng(seed)
    net.cast(program.dtype)
    net.initialize(ctx=devices)
    for name, parameter in net._collect_params_with_prefix().items():
        if "running" not in name and not name.endswith("gamma"):
            values = rng.normal(size=parameter.shape).astype("float32")
            parameter.set_data(nd.array(values, dtype=program.dtype))
        if program.frozen and name.startswith(program.frozen):
            parameter.grad_req = "null"
    if program.recomputes and store is not None:
        gp.nn.recompute(net.body)
    if program.hybridize:
        net.hybridize()
    optimizer, options = program.optimizer
    trainer = gluon.Trainer(net.collect_params(), optimizer, {**options, "lazy_update": lazy}, kvstore=store)
    step = gp.DataParallel(
        net, gluon.loss.L2Loss(), trainer, devices, accumulate=program.accumulate, clip_global_norm=program.clip
    )
    return net, trainer, step


def take_steps(program, seed, step, store=None, numbers=None):
    """This process's part of the batches of these numbers; without a store all of each."""
    for number in range(len(program.sizes)) if numbers is None else numbers:
        sizes, rng = program.sizes[number], np.random.default_rng([seed, number])
        x, y = rng.integers(0, WORDS, (sum(sizes), LENGTH)), rng.normal(size=(sum(sizes), OUT)).astype("float32")
        if store is not None:
            first = sum(sizes[: store.rank])
            x, y = (part[first : first + sizes[store.rank]] for part in (x, y))
        step(*((nd.array(x, dtype="int32"), nd.array(y, dtype=program.dtype)) if len(x) else (None,)))


def train(program, seed, store=None, **options):
    """{name: the values of each device} after the program."""
    net, _, step = build(program, seed, store, **options)
    take_steps(program, seed, step, store)
    return values_of(net)


def values_of(net):
    return {name: [copy.asnumpy() for copy in one.list_data()]
            for name, one in net._collect_params_with_prefix().items()}  # fmt: skip


def assert_close(copies, wanted, dtype, about):
    """Every device of this process holds the wanted values."""
    for name, [value, *_] in wanted.items():
        for copy in copies[name]:
            error = np.abs(copy - value) / np.maximum(np.abs(value), 1)
            assert error.max() <= TOLERANCE[dtype], (name, error.max(), about)


def check_random_programs_train_as_with_dense_gradients_and_as_one_device(store):
    """With lazy updates as one device with them, and otherwise as with dense gradients; equal on all processes."""
    for seed in seeds():
        program = Program.draw(np.random.default_rng([seed, store.num_workers]), store.num_workers)
        lazy = train(program, seed, gp.kvstore.create(store.type))
        assert_close(lazy, train(program, seed, lazy=True), program.dtype, program)
        eager = train(program, seed, gp.kvstore.create(store.type), lazy=False)
        dense = train(program, seed, gp.kvstore.create(store.type), sparse=False, lazy=False)
        assert_close(eager, dense, program.dtype, program)
        for copies in (lazy, eager):
            own = copies["embedding.weight"]
            rows = gp.metrics.gather_rows(own[0].reshape(1, -1), store)
            assert (rows == rows[0]).all() and all((copy == own[0]).all() for copy in own), program


def check_sums_of_rows_have_the_bits_of_dense_sums(store):
    """Row by row the devices of a process are added up first, then the processes in their order."""
    rng = np.random.default_rng(3)
    full = rng.normal(size=(store.num_workers, 2, 20, 3)).astype("float32")
    full *= rng.random((store.num_workers, 2, 20, 1)) < 0.4
    full[0] = 0  # this process has no rows
    mine = [nd.array(values, ctx=mx.cpu(number)) for number, values in enumerate(full[store.rank])]
    rows = [array.tostype("row_sparse") for array in mine]
    for _ in range(2):
        outs = [array.copy() for array in rows]
        store.pushpull("rows", outs)
        for out in outs:
            reached = np.flatnonzero(full.any(axis=(0, 1, 3)))
            assert out.indices.asnumpy().tolist() == reached.tolist()
            wanted = np.add.reduce([devices[0] + devices[1] for devices in full])
            assert out.asnumpy().tobytes() == (wanted + 0).tobytes()
    nothing = nd.zeros((20, 3)).tostype("row_sparse")
    store.pushpull("rows", nothing)
    assert nothing.indices.shape == (0,)


def check_a_loop_of_the_trainer_alone_sums_rows(store):
    """gluon.Trainer by itself, by the store's name, where one process has no samples in some steps."""
    warnings.filterwarnings("ignore", category=gp.errors.SeparateTraining)  # of the reference

    def words(number, rank):
        return [] if rank == number % store.num_workers else (number * 5 + np.arange(3 * rank + 1)) % WORDS

    def loop(kvstore, ranks):
        net = gluon.nn.Embedding(WORDS, 2, sparse_grad=True)
        net.initialize(mx.init.One(), ctx=DEVICES)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.5}, kvstore=kvstore)
        for number in range(4):
            parts = np.array_split(np.concatenate([words(number, rank) for rank in ranks]), 2)
            with mx.autograd.record():
                outputs = [net(nd.array(part, ctx=device)) for part, device in zip(parts, DEVICES) if len(part)]
                losses = [(output**2).sum() for output in outputs]
            if losses:
                mx.autograd.backward(losses)
            trainer.step(10, ignore_stale_grad=True)
        return net.weight.list_data()

    for copy, wanted in zip(loop(store.type, [store.rank]), loop("device", range(store.num_workers))):
        np.testing.assert_allclose(copy.asnumpy(), wanted.asnumpy(), rtol=1e-5, atol=1e-6)  # float32


def check_an_overflow_of_rows_on_one_process_skips_the_update_on_all(store):
    """Mixed precision's loss scaling looks at rows as well."""
    net = gluon.nn.Embedding(WORDS, 2, sparse_grad=True)
    net.initialize(mx.init.One(), ctx=gp.devices("cpu:1"))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    trainer._amp_loss_scaler, trainer._amp_original_scale = LossScaler(), trainer._scale  # as amp.init_trainer does
    step = gp.DataParallel(net, lambda out, factor: (out * factor).sum(axis=(1,)), trainer)
    scale = step.loss_scaling.scale
    for factor, skipped in ((1.0, 0), (np.inf if store.rank == 0 else 1.0, 1), (1.0, 1)):
        step(nd.array([store.rank, 5]), nd.full((2, 1), factor))
        assert step.loss_scaling.num_skipped == skipped, (factor, step.loss_scaling.num_skipped)
    assert step.loss_scaling.scale == scale / 2
    wanted = np.ones((WORDS, 2), "float32")
    wanted[: store.num_workers] -= 2 * 0.1 / (2 * store.num_workers)
    wanted[5] -= 2 * 0.1 / 2
    np.testing.assert_allclose(net.weight.data().asnumpy(), wanted, rtol=1e-6)


def check_a_run_continues_with_the_same_bits_from_a_checkpoint(store):
    """Optimizer states of rows that were reached, and of others."""
    sizes, adam = (2,) * store.num_workers, ("adam", {"learning_rate": 0.05})
    program = Program("float32", 4, 2, 1, None, False, "", False, adam, (sizes,) * 4)
    mine = gp.kvstore.create(store.type)
    net, trainer, step = build(program, 1, mine)
    take_steps(program, 1, step, mine, range(2))
    state = gp.checkpoint.state(net, trainer)
    take_steps(program, 1, step, mine, range(2, 4))
    mine = gp.kvstore.create(store.type)
    resumed, trainer, step = build(program, 2, mine)
    gp.checkpoint.restore(state, resumed, trainer)
    take_steps(program, 1, step, mine, range(2, 4))
    for one, other in zip(values_of(net).values(), values_of(resumed).values()):
        assert np.array_equal(one, other)


def check_few_words_of_many_travel_in_a_tenth_of_the_dense_bytes(store):
    """An embedding of 50,000 x 256, and 2,000 words per process."""
    num, width, sent = 50_000, 256, []

    class Operation(python_sums.Operation):
        def __init__(self, group, name, signature, stages, size, once=False):
            sent.append(size)
            super().__init__(group, name, signature, stages, size, once)

    net = gluon.nn.Embedding(num, width, sparse_grad=True)
    net.initialize(mx.init.Zero(), ctx=gp.devices("cpu:1"))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore=store)
    step = gp.DataParallel(net, lambda out: out.sum(axis=(1,)), trainer)
    words = np.arange(2000) * 7 + store.rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(python_sums, "Operation", Operation)
        step(nd.array(words))
    assert len(sent) == 1 and 0 < sent[0] <= num * width * 4 / 10  # each process sends them to each other one
    reached = {word * 7 + rank for word in range(2000) for rank in range(store.num_workers)}
    assert np.flatnonzero(net.weight.data().asnumpy().any(axis=1)).tolist() == sorted(reached)
