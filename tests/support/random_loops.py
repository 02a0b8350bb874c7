"""Random training loops of ``gluon.Trainer`` alone, run on any devices; as a program, on two processes over a store.

``python random_loops.py STORE UPDATE_ON_KVSTORE NUM_DEVICES SEED...`` compares each process with one device.
"""

import dataclasses
import itertools
import sys
import warnings

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from mxnet import autograd, gluon, nd

BRANCHES = 2


@dataclasses.dataclass(frozen=True)
class Loop:
    """How a loop is written. The same loop trains on one device and on several."""

    way: str  # how gradients are summed: "step", "allreduce_grads" or "gp.allreduce", and then trainer.update
    ignore_stale_grad: bool
    accumulate: int  # batches per update, with grad_req="add"; 1: "write"
    frozen: bool  # a layer without gradients
    losses: str  # "one", "two heads" or "sum of two"
    backward: str  # "joint", "each" or "autograd.grad", whose gradients are written and marked
    optimizer: str
    hybridize: bool
    # (size, branches of the net that it uses, whether the update is made); the size of a pass before it, 0: none
    batches: tuple

    @classmethod
    def draw(cls, rng, ways=("step", "allreduce_grads", "gp.allreduce"), num=7, in_parts=True, with_unused=True):
        """A random one. Only with ``ignore_stale_grad`` and `in_parts` a batch may use a part of the net.

        With `with_unused`, passes whose gradients the next pass overwrites come before some batches.
        """
        way, ignore = str(rng.choice(ways)), bool(rng.integers(2))
        in_parts = in_parts and ignore and bool(rng.integers(2))
        leaves_out = way == "allreduce_grads" or (way == "gp.allreduce" and not in_parts)  # which sums what it is given
        accumulate = int(rng.choice([1, 1, 1, 2]))
        backward = str(rng.choice(["joint", "each", "autograd.grad"] if accumulate == 1 else ["joint", "each"]))
        with_unused = with_unused and backward != "autograd.grad"  # marks that the loop sets tell nothing of passes

        def batch():
            size = int(rng.choice([1, 2, 3, 4, 5, 7]))
            used = tuple(branch for branch in range(BRANCHES) if not in_parts or rng.integers(3))
            unused = int(rng.choice([0, 0, 1, 2, 6])) if with_unused else 0
            return size, used, not leaves_out or bool(rng.integers(5)), unused

        return cls(
            way, ignore, accumulate, bool(rng.integers(2)), str(rng.choice(["one", "two heads", "sum of two"])),
            backward, str(rng.choice(["sgd", "momentum", "adam", "schedule"])), bool(rng.integers(2)),
            tuple(batch() for _ in range(num * accumulate)),
        )  # fmt: skip

    def trainer(self, net, store, update_on_kvstore):
        """The trainer of `net`."""
        options = {"learning_rate": 0.1, "wd": 0.01}
        if self.optimizer == "momentum":
            options["momentum"] = 0.9
        if self.optimizer == "schedule":
            options["lr_scheduler"] = mx.lr_scheduler.FactorScheduler(1, 0.8, base_lr=0.1)
        name = "adam" if self.optimizer == "adam" else "sgd"
        return gluon.Trainer(net.collect_params(), name, options, kvstore=store, update_on_kvstore=update_on_kvstore)


class Net(gluon.HybridBlock):
    """A layer, then the sum of the branches that `used` names."""

    def __init__(self):
        super().__init__(prefix="")
        with self.name_scope():
            self.first = gluon.nn.Dense(4, activation="tanh", in_units=3, prefix="first_")
            self.branches = [gluon.nn.Dense(2, in_units=4, prefix=f"branch{number}_") for number in range(BRANCHES)]
            for branch in self.branches:
                self.register_child(branch)

    def forward(self, x, used):
        """(N, 2)"""
        hidden = self.first(x)
        return sum(self.branches[number](hidden) for number in used)


def train(loop, seed, devices, store="device", update_on_kvstore=None, rank=0, num_workers=1):
    """The weights, {name: one array per device}, after `loop` on this process's part of its batches."""
    net, rng = Net(), np.random.default_rng(seed)
    net.cast("float64")
    net.initialize(ctx=devices)
    for parameter in net.collect_params().values():
        parameter.set_data(nd.array(rng.normal(size=parameter.shape), dtype="float64"))
        parameter.grad_req = "add" if loop.accumulate > 1 else "write"
    if loop.frozen:
        net.first.weight.grad_req = "null"
    if loop.hybridize:
        net.hybridize()
    trainer = loop.trainer(net, store, update_on_kvstore)
    for number, (size, used, updates, unused) in enumerate(loop.batches):
        if unused:
            before = [rng.normal(size=(unused, width)) for width in (3, 2)]
            if loop.accumulate > 1:  # these gradients stay in the sum, so each process has a part of them
                before = [part[rank::num_workers] for part in before]
            if len(before[0]):
                before = [nd.array(part, dtype="float64") for part in before]
                backward(loop, net, before, devices, range(BRANCHES), unused)
        x, y = (rng.normal(size=(size, width))[rank::num_workers] for width in (3, 2))
        if len(x) and used:
            backward(loop, net, [nd.array(part, dtype="float64") for part in (x, y)], devices, used, size)
        if (number + 1) % loop.accumulate == 0:
            finish_step(loop, net, trainer, updates)
    return {name: [array.asnumpy() for array in p.list_data()] for name, p in net.collect_params().items()}


def backward(loop, net, batch, devices, used, size):
    """Gradients of the mean loss of a batch of `size` samples, of which this process may have a part."""
    shards = gp.split_and_load(batch, devices)
    with autograd.record():
        outputs = [net(x, used) for x, _ in shards]
        losses = [((output - y) ** 2).sum() / size for output, (_, y) in zip(outputs, shards)]
        more = [(output * y).sum() / size for output, (_, y) in zip(outputs, shards)]
        if loop.losses == "sum of two":
            losses = [one + other for one, other in zip(losses, more)]
        heads = [[loss] if loop.losses != "two heads" else [loss, other] for loss, other in zip(losses, more)]
    if loop.backward == "joint":
        autograd.backward(list(itertools.chain(*heads)))
    elif loop.backward == "each":
        for row in heads:
            autograd.backward(row)
    else:
        layers = [net.first, *(net.branches[number] for number in used)]
        parameters = [p for layer in layers for p in layer.collect_params().values() if p.grad_req != "null"]
        for row, (x, _) in zip(heads, shards):
            arrays = [parameter.data(x.ctx) for parameter in parameters]
            for parameter, array, gradient in zip(parameters, arrays, autograd.grad(row, arrays)):
                parameter.grad(x.ctx)[:] = gradient
                array._fresh_grad = True


def finish_step(loop, net, trainer, updates):
    """Sum the gradients and update, unless the loop leaves the update out."""
    parameters = [parameter for parameter in net.collect_params().values() if parameter.grad_req != "null"]
    if loop.way == "step":
        trainer.step(1, ignore_stale_grad=loop.ignore_stale_grad)
    else:
        if loop.way == "allreduce_grads":
            trainer.allreduce_grads()
        else:
            for parameter in parameters:
                gp.allreduce(parameter.list_grad())
        if updates:
            trainer.update(1, ignore_stale_grad=loop.ignore_stale_grad)
    if loop.accumulate > 1:
        for parameter in parameters:
            parameter.zero_grad()


def differences(weights, wanted, tolerance=1e-9):
    """The names of parameters of which a copy is not that of one device."""
    # float64: sums in another order differ by 1e-16 of a gradient, which seven updates of Adam enlarge.
    return [
        name
        for name, copies in weights.items()
        if any(not np.allclose(copy, wanted[name][0], rtol=tolerance, atol=tolerance) for copy in copies)
    ]


def main(store, update_on_kvstore, num_devices, *seeds):
    """Compare this process's weights with one device's, for the loop of each seed."""
    warnings.filterwarnings("ignore", category=gp.errors.SeparateTraining)  # of the reference
    update_on_kvstore = {"None": None, "True": True, "False": False}[update_on_kvstore]
    on_servers = store.startswith("dist") and update_on_kvstore is not False
    ways = ("step",) if on_servers else ("step", "allreduce_grads")
    for seed in map(int, seeds):
        # The servers update every parameter. A process without samples that has made an earlier pass is refused.
        loop = Loop.draw(np.random.default_rng(seed), ways, in_parts=not on_servers, with_unused=False)
        opened = gp.kvstore.create(store)
        devices = [mx.cpu(number) for number in range(int(num_devices))]
        wanted = train(loop, seed, devices[:1])
        weights = train(loop, seed, devices, opened, update_on_kvstore, opened.rank, opened.num_workers)
        # MXNet's servers keep float64 as float32 in some runs, and Adam divides by the size of small gradients.
        wrong = differences(weights, wanted, 1e-4 if store.startswith("dist") else 1e-9)
        assert not wrong, (wrong, seed, loop)
        print(f"seed {seed} passed on {opened.rank}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
