"""Checks of steps in which processes have no samples: they follow the SyncBatchNorm layers of the others."""

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

C = 4


class Mixed(gluon.Block):
    """Layers used twice, frozen, detached, only evaluated, and sometimes, made in another order than they run."""

    def __init__(self, norm, reads):
        super().__init__()
        self.reads = reads
        with self.name_scope():
            self.head = gluon.nn.Dense(1, in_units=C)
            for name in ("sometimes", "twice", "frozen", "detached", "evaluated"):
                part = gluon.nn.HybridSequential()
                part.add(gluon.nn.Dense(C, in_units=C, activation="tanh"), norm())
                setattr(self, name, part)
        self.frozen.collect_params().setattr("grad_req", "null")

    def forward(self, x, uses):
        with mx.autograd.predict_mode():
            kept = self.evaluated(x)
        y = self.frozen(x)
        y = self.twice(y) * self.twice(y * y)
        if self.reads:  # so the exchanges before this end while the net is launched
            assert np.isfinite(y.asnumpy()).all()
        if uses.asnumpy()[0]:
            y = self.sometimes(y)
        return self.head(y + kept - self.detached(x).detach())


class NormalisedLoss(gluon.loss.L2Loss):
    """A loss with a layer of its own."""

    def __init__(self, store):
        super().__init__()
        self.norm = gp.nn.SyncBatchNorm(in_channels=1, kvstore=store, epsilon=1e-2)

    def hybrid_forward(self, F, output, label):
        return super().hybrid_forward(F, self.norm(output), label)


def build(store, devices, norm, reads=False, dtype="float32", hybridize=False, accumulate=1):
    net = Mixed(norm, reads)
    net.initialize(ctx=devices)
    rng = np.random.RandomState(0)
    for name, parameter in net.collect_params().items():
        if name.endswith(("weight", "bias")):
            parameter.set_data(nd.array(rng.standard_normal(parameter.shape)))
    loss = NormalisedLoss(store)
    loss.initialize(ctx=devices)
    for block in (net, loss):
        block.cast(dtype)
        if hybridize:
            block.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)

    def steps_on(devices):
        for block in (net, loss):
            block.collect_params().reset_ctx(devices)
        return gp.DataParallel(net, loss, trainer, devices, accumulate=accumulate, ignore_stale_grad=True)

    return net, steps_on


def follows(store, num_devices, dtype="float32", tolerance=1e-4, **options):
    """Train a net with batches of which some processes have no samples, as one device does with the whole batches.

    Before the third batch it leaves its first device for another one.
    """
    devices, num = [mx.cpu(number) for number in range(num_devices)], store.num_workers
    norm = lambda: gp.nn.SyncBatchNorm(in_channels=C, kvstore=store, epsilon=1e-2)  # noqa: E731
    net, steps_on = build(store, devices, norm, dtype=dtype, **options)
    options["reads"] = False
    plain = lambda: gp.nn.SyncBatchNorm(in_channels=C, epsilon=1e-2)  # noqa: E731
    alone, reference_on = build(None, devices[:1], plain, dtype=dtype, **options)
    step, reference = steps_on(devices), reference_on(devices[:1])
    taking_part = [0], range(1, num), [num - 1], range(num), range(num), [0, num - 1]
    for turn in range(6):
        if turn == 2:
            step = steps_on([*devices[1:], mx.cpu(num_devices)])
        sizes = [(1, 5, 3)[turn % 3] if rank in taking_part[turn] else 0 for rank in range(num)]
        ends = np.cumsum(sizes)
        mine = slice(ends[store.rank] - sizes[store.rank], ends[store.rank])
        rng = np.random.RandomState(turn)
        x, y, uses = rng.standard_normal((ends[-1], C)), rng.standard_normal((ends[-1], 1)), np.full(ends[-1], turn % 2)
        x, y, uses = (nd.array(array, dtype=dtype) for array in (x, y, uses))
        reference((x, uses), y)
        step(*(((x[mine], uses[mine]), y[mine]) if sizes[store.rank] else (None,)))
    for got, wanted in zip(net.collect_params().values(), alone.collect_params().values()):
        for copy in got.list_data():
            problem = got.name, options, copy.asnumpy(), wanted.data().asnumpy()
            assert np.allclose(copy.asnumpy(), wanted.data().asnumpy(), rtol=tolerance, atol=tolerance), problem


def check_processes_without_samples_follow_the_others(store):
    """A net that reads values while it is launched."""
    follows(store, 1, reads=True)


def check_processes_without_samples_follow_with_several_devices(store):
    """Hybridized parts, accumulation, and processes that have samples for one device of two."""
    follows(store, 2, "float64", 1e-9, hybridize=True, accumulate=2)
