"""Training loops, written in several ways, whose gradients are exact sums, and MXNet's updater on one device."""

import copy

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from mxnet import autograd, gluon, nd

NUM = 6  # parameters: SGD and LARS update four at once
ALL, LATER = tuple(range(NUM)), (4, 5)
STEPS = [(5, ALL), (1, ALL), (4, LATER), (6, ALL), (2, ALL), (3, (1, 5))]  # (samples, parameters that the loss reaches)


class PerCall(mx.lr_scheduler.LRScheduler):
    """A rate that falls at every call, so that it shows how often it is asked."""

    def __init__(self):
        super().__init__(base_lr=0.1)
        self.calls = 0

    def __call__(self, num_update):
        self.calls += 1
        return 0.1 / (self.calls + num_update)


@mx.optimizer.register
class OnesOwn(mx.optimizer.Optimizer):
    """An optimizer of a user's, with a number and an array that are one for all devices."""

    def __init__(self, **options):
        super().__init__(**options)
        self.numbers, self.norm = [0], None

    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        self._update_count(index)
        self.numbers[0] += 1
        self.norm = grad.norm() if self.norm is None else self.norm.as_in_context(grad.context) / 2 + grad.norm()
        weight[:] -= self._get_lr(index) * self.rescale_grad * self.numbers[0] * grad / self.norm


FACTOR = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.1)
OPTIMIZERS = {
    "sgd": {"momentum": 0.9, "wd": 0.1},
    "ccsgd": {},
    "nag": {"momentum": 0.9},
    "signum": {"wd_lh": 0.1},
    "sgld": {"wd": 0.1},
    "dcasgd": {},
    "lars": {"momentum": 0.9, "wd": 0.1},
    "lbsgd": {"momentum": 0.9, "batch_scale": 2, "updates_per_epoch": 3},
    "lamb": {"wd": 0.1},
    "ftml": {},
    "ftrl": {},
    "adam": {"wd": 0.1},
    "adam per call": {"lr_scheduler": PerCall()},
    "adamax": {},
    "nadam": {"wd": 0.1},
    "adagrad": {},
    "groupadagrad": {},
    "adadelta": {},
    "rmsprop": {},
    "rmsprop centered": {"centered": True},
    "adamw": {},
    "onesown": {},
}


def options_of(case):
    """(name of the optimizer, its arguments); schedules keep what they were asked, so they are copies."""
    options = copy.deepcopy({"lr_scheduler": FACTOR, **OPTIMIZERS[case]})
    return case.split()[0], {"learning_rate": options["lr_scheduler"].base_lr, **options}


def batch(number, size):
    return np.random.RandomState(number).randint(-8, 9, size=(size, 3)).astype("float32")


class Net(gluon.Block):
    """The sum of the layers that `used` names, each times its number."""

    def __init__(self):
        super().__init__(prefix="")
        self.used = ALL
        for number in ALL:
            self.register_child(gluon.nn.Dense(1, use_bias=False, in_units=3, prefix=f"layer{number}_"))

    def forward(self, x):
        return sum((number + 1) * self._children[str(number)](x) for number in self.used)


def first_weights():
    return [np.arange(1, 4, dtype="float32").reshape(1, 3) / (number + 2) for number in ALL]


class OneDevice:
    """MXNet's updater, without a trainer, on one device."""

    def __init__(self, case):
        name, options = options_of(case)
        self.optimizer = mx.optimizer.create(name, **options)
        self.updater = mx.optimizer.get_updater(self.optimizer)
        self.arrays = [nd.array(value) for value in first_weights()]
        self.gradients = [array.copy() for array in self.arrays]  # LBSGD keeps the arrays themselves

    def step(self, number, size, used):
        total = batch(number, size).sum(axis=0, keepdims=True)
        self.optimizer.rescale_grad = 1 / size
        for index in used:
            self.gradients[index][:] = (index + 1) * total
        self.updater(list(used), *([arrays[index] for index in used] for arrays in (self.gradients, self.arrays)))

    def weights(self):
        return [[array.asnumpy()] for array in self.arrays]


class Loop:
    """A training loop on these devices, written in this `way`."""

    def __init__(self, case, way, numbers, weights=None, kvstore="device"):
        name, options = options_of(case)
        self.way, self.net, self.devices = way, Net(), [mx.cpu(number) for number in numbers]
        self.net.initialize(mx.init.Zero(), ctx=self.devices)
        self.parameters = list(self.net.collect_params().values())
        for parameter, value in zip(self.parameters, weights or first_weights()):
            parameter.set_data(nd.array(value))
        on_store = {"store": True, "gp.DataParallel": None}.get(way, False)
        if kvstore == "device" and len(numbers) == 1:  # then MXNet makes no store
            on_store = None
        self.trainer = gluon.Trainer(self.net.collect_params(), name, options, kvstore, update_on_kvstore=on_store)
        self.rows = slice(None) if kvstore == "device" else slice(kvstore.rank, None, kvstore.num_workers)
        if way == "gp.DataParallel":
            self.parallel = gp.DataParallel(self.net, lambda y: y, self.trainer, ignore_stale_grad=True)

    def step(self, number, size, used):
        x, self.net.used = nd.array(batch(number, size)[self.rows]), used
        if self.way == "gp.DataParallel":
            self.parallel.step(x)
            return
        if len(x):
            with autograd.record():
                losses = [self.net(part) for part in gp.split_and_load(x, self.devices)]
            autograd.backward(losses)
        if self.way == "update":
            self.trainer.allreduce_grads()
            self.trainer.update(size, ignore_stale_grad=True)
        else:
            self.trainer.step(size, ignore_stale_grad=True)

    def weights(self):
        return [[array.asnumpy() for array in parameter.list_data()] for parameter in self.parameters]


def assert_same_bits(loop, one):
    for copies, [wanted] in zip(loop.weights(), one.weights()):
        for found in copies:
            np.testing.assert_array_equal(found, wanted, f"{loop.way} on {loop.devices}")
