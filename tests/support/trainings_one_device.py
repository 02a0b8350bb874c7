"""The reference of random trainings: a plain loop on one device with the whole batch, and MXNet's updater."""

import itertools

import numpy as np
import trainings_nets as nets

import gluon_parallel as gp
import mxnet as mx
from mxnet import autograd, gluon, nd

EPSILON = 1e-3  # of optimizers that divide by the size of a gradient: a small one would enlarge rounding errors
DECAY = 0.5  # of the moving average


def optimizer_of(case):
    """(name, its arguments), for MXNet and for a trainer; a schedule is a new one."""
    kinds = {
        "momentum": ("sgd", {"momentum": 0.9}),
        "nag": ("nag", {"momentum": 0.9}),
        "adam": ("adam", {"epsilon": EPSILON}),
        "adagrad": ("adagrad", {"eps": EPSILON}),
        "rmsprop": ("rmsprop", {"epsilon": EPSILON}),
        "adamw": ("adamw", {"epsilon": EPSILON}),
    }
    name, options = kinds.get(case.optimizer, (case.optimizer, {}))
    rate = 0.1 if name in ("sgd", "nag") else 0.02
    schedules = {
        "factor": lambda: mx.lr_scheduler.FactorScheduler(2, 0.6, base_lr=rate),
        "poly": lambda: mx.lr_scheduler.PolyScheduler(12, base_lr=rate, warmup_steps=2),
    }
    schedule = {"lr_scheduler": schedules[case.schedule]()} if case.schedule else {}
    clip = {} if case.clip_gradient is None else {"clip_gradient": case.clip_gradient}
    return name, {"learning_rate": rate, "wd": case.wd, **options, **schedule, **clip}


def batches(case):
    """(numbers of the samples of all processes, `Step`, whether it is the last one of an epoch) of each batch."""
    if not case.samples:
        first = 0
        for place, step in enumerate(case.steps):
            yield np.arange(first, first + sum(step.sizes)), step, place + 1 == len(case.steps)
            first += sum(step.sizes)
        return
    left, steps = [], itertools.cycle(case.steps)
    for epoch in range(case.epochs):
        order = [*left, *order_of(case, epoch)]
        parts = [order[begin : begin + case.batch_size] for begin in range(0, len(order), case.batch_size)]
        rest = parts.pop() if len(parts[-1]) < case.batch_size and case.last_batch != "keep" else []
        left = rest if case.last_batch == "rollover" else []
        for place, numbers in enumerate(parts):
            yield np.array(numbers), next(steps), place + 1 == len(parts)


def order_of(case, epoch):
    """The numbers of all samples in the order of an epoch."""
    if not case.shuffle:
        return list(range(case.samples))
    sampler = gp.sampler.BatchSampler(case.samples, case.samples, shuffle=True, seed=case.seed)
    sampler.set_epoch(epoch)
    [order] = sampler
    assert sorted(order) == list(range(case.samples))
    return order


class OneDevice:
    """The net, an optimizer for each trainer, and what has been accumulated."""

    def __init__(self, case):
        self.case, self.dtype = case, case.plain.dtype
        self.net = nets.make(case.plain, [mx.cpu(0)], gluon.nn.BatchNorm)
        self.parameters = list(nets.trained(self.net).values())
        self.optimizers, self.updaters = [], []
        for _ in range(1 + case.two_trainers):
            name, options = optimizer_of(case)
            self.optimizers.append(mx.optimizer.create(name, param_dict=dict(enumerate(self.parameters)), **options))
            self.updaters.append(mx.optimizer.get_updater(self.optimizers[-1]))
        self.totals, self.num_samples, self.num_steps, self.num_updates = {}, 0, 0, 0
        self.average = {}

    def add(self, numbers):
        """Forward and backward pass; adds to the gradients. The losses of the samples, or the mean of the parts."""
        inputs, labels = ([nd.array(array, dtype=self.dtype) for array in p] for p in nets.batch(self.case, numbers))
        with autograd.record():
            if self.case.loss == "parts":
                pairs = nets.Parts(self.case.batch_axis)(self.net(*inputs), *labels)
                losses = sum(total / nd.maximum(count, 1) for total, count in pairs)
            elif self.case.loss == "pairs":
                losses = nets.Pairs(self.case.batch_axis)(self.net(*inputs), *labels)
            else:
                losses = nets.loss_per_sample(self.case)(self.net(*inputs), *labels)
        losses.backward()
        for number, parameter in enumerate(self.parameters):
            if parameter.grad_req != "null" and parameter.data()._fresh_grad:
                gradient, before = parameter.grad(), self.totals.get(number)
                self.totals[number] = gradient.copy() if before is None else nd.sparse.add(before, gradient)
                parameter.data()._fresh_grad = False
        self.num_samples += len(numbers)
        self.num_steps += 1
        return losses.asnumpy()

    def update(self):
        """Update what the losses have reached by the mean gradient of the samples; whether there was any."""
        if not self.num_steps:
            return False
        which = self.num_updates % len(self.updaters)
        divisor = 1 if self.case.is_of_batch else self.num_samples
        if self.case.clip_global_norm is not None:
            norm = np.sqrt(sum((one.asnumpy().astype("float64") ** 2).sum() for one in self.totals.values())) / divisor
            factor = min(1.0, self.case.clip_global_norm / (norm + 1e-12))
            self.totals = {number: one * factor for number, one in self.totals.items()}
        self.optimizers[which].rescale_grad = 1 / divisor
        if self.totals:
            numbers = list(self.totals)
            weights = [self.parameters[number].data() for number in numbers]
            self.updaters[which](numbers, list(self.totals.values()), weights)
        self.num_updates += 1
        self.forget()
        return True

    def score(self):
        """What the case measures after an epoch; None: nothing."""
        case, found = self.case, []
        if not case.score:
            return None
        metric = nets.METRICS[case.score]() if case.score in nets.METRICS else None
        for begin in range(0, case.samples, case.batch_size):
            numbers = range(begin, min(begin + case.batch_size, case.samples))
            inputs, labels = ([nd.array(array, dtype=self.dtype) for array in p] for p in nets.batch(case, numbers))
            outputs = self.net(*inputs)
            if metric is not None:
                metric.update(labels, [outputs])
                continue
            values = outputs if case.score == "predict" else nets.loss_per_sample(case)(outputs, *labels)
            found.append(values.asnumpy())
        if metric is not None:
            return np.array(metric.get()[1])
        return np.concatenate(found, case.batch_axis) if case.score == "predict" else np.concatenate(found).mean()

    def forget(self):
        """Forget what was accumulated."""
        self.totals, self.num_samples, self.num_steps = {}, 0, 0

    def add_to_average(self):
        """After an update."""
        for name, parameter in self.net._collect_params_with_prefix().items():
            value = parameter.data().asnumpy().astype("float64")
            before = self.average.get(name, value)
            self.average[name] = DECAY * before + (1 - DECAY) * value

    def weights(self):
        """{name: array} of weights and running statistics."""
        return {name: one.data().asnumpy() for name, one in self.net._collect_params_with_prefix().items()}


def change(step, case, net, set_rate, grad_req="write"):
    """What happens before a step: to the net, on whatever devices, and by ``set_rate(rate)`` to the optimizers."""
    if case.branches:
        net.used = step.used
    parameter = nets.chosen(case, net)
    if step.before == "freeze":
        parameter.grad_req = "null"
    elif step.before == "thaw" and case.fixed != "null":
        parameter.grad_req = grad_req
    elif step.before == "set_data":
        for one in nets.trained(net).values():
            one.set_data(one.data(one.list_ctx()[0]) * 0.5)
    elif step.before == "in_place":
        for one in nets.trained(net).values():
            for copy in one.list_data():
                copy[:] = copy.clip(-0.4, 0.4)
    elif step.before == "learning_rate":
        set_rate(0.03)


def train(case):
    """{name: weights}, {name: moving average}, for each step the losses of the samples or the mean of parts, scores."""
    one, losses, scores = OneDevice(case), [], []

    def set_rate(rate):
        for optimizer in one.optimizers:
            optimizer.set_learning_rate(rate)

    def update():
        if one.update() and case.average:
            one.add_to_average()

    for numbers, step, ends_epoch in batches(case):
        change(step, case, one.net, set_rate)
        if step.before in ("unused", "left_out"):
            one.add(case.unused)
            one.forget()
        losses.append(one.add(numbers))
        if one.num_steps == case.accumulate or ends_epoch:
            update()
        if ends_epoch:
            scores.append(one.score())
    return one.weights(), one.average, losses, scores
