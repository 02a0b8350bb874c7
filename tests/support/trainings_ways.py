"""The ways in which a random training is written with this package, on any devices and processes."""

import contextlib
import functools
import types
from pathlib import Path

import numpy as np
import trainings_nets as nets
from trainings_module import OfModule
from trainings_one_device import DECAY, batches, change, optimizer_of

import gluon_parallel as gp
import mxnet as mx
from mxnet import autograd, gluon, nd
from mxnet.contrib.amp.loss_scaler import LossScaler


def identity(bucket, store):
    """A communication hook that leaves nothing out."""
    return [store.allreduce(gradient) for gradient in bucket.gradients]


HOOKS = {"exact": identity, "float16": gp.communication_hooks.float16, "": None}


class Trained:
    """One process's part of a training: the net, its trainers and what makes the steps."""

    def __init__(self, case, folder, rank):
        self.case, self.folder, self.rank = case, Path(folder), rank
        self.devices = [mx.cpu(number) for number in range(1 if case.way == "Pipeline" else case.devices)]
        store = {"none": None}.get(case.store, case.store)
        self.store = gp.kvstore.create(store) if case.processes > 1 else store
        self.num_updates = self.num_waiting = self.num_steps = 0
        self.losses, self.scores = [], []
        self.build()

    def build(self):
        """A net with its first weights, and what trains it."""
        case = self.case
        convert = case.way == "prepare"
        self.net = nets.make(case, self.devices, gluon.nn.BatchNorm if convert else self.batch_norm)
        name = optimizer_of(case)[0]
        self.trainers = [
            gluon.Trainer(
                list(nets.trained(self.net).values()), name, optimizer_of(case)[1],
                kvstore=self.store, update_on_kvstore=case.update_on_kvstore,
            )
            for _ in range(1 + case.two_trainers)
        ]  # fmt: skip
        self.trainer = self.trainers[0]
        if case.scaled:
            self.trainer._amp_loss_scaler = LossScaler()  # as amp.init_trainer does
            self.trainer._amp_original_scale = self.trainer._scale
        self.average = gp.ExponentialMovingAverage(self.net, self.trainer, DECAY) if case.average else None
        if case.add:
            for parameter in nets.trained(self.net).values():
                parameter.grad_req = "null" if parameter.grad_req == "null" else "add"
        self.connect()

    def batch_norm(self, **options):
        """A layer over all devices and processes."""
        return gp.nn.SyncBatchNorm(kvstore=self.store if self.case.processes > 1 else None, **options)

    def connect(self):
        """Make what makes the steps."""
        if self.case.way == "DataParallel":
            self.parallel = gp.DataParallel(self.net, nets.loss_of(self.case), self.trainer, **self.options)

    @property
    def options(self):
        """The arguments of ``DataParallel``."""
        case = self.case
        return {
            "accumulate": case.accumulate, "clip_global_norm": case.clip_global_norm, "batch_axis": case.batch_axis,
            "ignore_stale_grad": case.branches, "reduction": case.reduction or None, "convert_for_cpu": case.convert,
            "shard_optimizer": case.shard_optimizer, "communication_hook": HOOKS[case.hook],
            "loss_over": "batch" if case.loss == "pairs" else "shard",
        }  # fmt: skip

    def before(self, step):
        """What happens before a step."""

        def set_rate(rate):
            for trainer in self.trainers:
                trainer.set_learning_rate(rate)

        change(step, self.case, self.net, set_rate, "add" if self.case.add else "write")
        if step.before in ("unused", "left_out"):
            self.backward(self.case.unused)
            if step.before == "left_out":
                self.trainer.allreduce_grads()
        elif step.before == "move":
            self.move()
        elif step.before == "checkpoint":
            path = self.folder / f"checkpoint-{self.num_steps}.npz"
            saved = {"average": self.average} if self.average else {}
            gp.checkpoint.save(path, self.net, self.trainer, **saved)
            self.build_again()
            gp.checkpoint.load(path, self.net, self.trainer, **({"average": self.average} if self.average else {}))
        elif step.before == "states":
            files = [str(self.folder / f"{kind}-{self.num_steps}-{self.rank}") for kind in ("net", "states")]
            self.net.save_parameters(files[0])
            self.trainer.save_states(files[1])
            self.build_again()
            self.net.load_parameters(files[0], ctx=self.devices)
            self.trainer.load_states(files[1])

    def move(self):
        """To other devices: as many, one more, or one less."""
        last = self.devices[-1].device_id
        more = [mx.cpu(last + 1)] if self.num_steps % 3 < 2 else []
        self.devices = [*self.devices[self.num_steps % 3 != 1 :], *more] or [mx.cpu(last + 1)]
        self.net.collect_params().reset_ctx(self.devices)
        self.connect()

    def build_again(self):
        """Build all anew; what is frozen for a time stays so."""
        requests = {name: one.grad_req for name, one in nets.trained(self.net).items()}
        used = getattr(self.net, "used", None)
        self.build()
        for name, one in nets.trained(self.net).items():
            if one.grad_req != requests[name]:
                one.grad_req = requests[name]
        if used is not None:
            self.net.used = used

    def arrays(self, numbers):
        """(inputs, labels) of these samples, in the form that the case has."""
        parts = nets.batch(self.case, numbers)
        if self.case.form == "numpy" and self.case.dtype == "float32":
            return parts
        make = mx.np.array if self.case.numpy_mode else nd.array
        return tuple([make(array, dtype=self.case.dtype) for array in part] for part in parts)

    def own(self, numbers, sizes):
        """This process's samples."""
        begin = sum(sizes[: self.rank])
        return numbers[begin : begin + sizes[self.rank]]

    def backward(self, numbers):
        """Forward and backward passes of a hand-written loop."""
        case = self.case
        shards = gp.split_and_load(self.arrays(numbers), self.devices, case.batch_axis)
        devices, loss = self.devices[: len(shards)], nets.loss_per_sample(case)
        if case.loss == "parts":
            parts = nets.Parts(case.batch_axis)
            loss = lambda *arguments: sum(total for total, _ in parts(*arguments))  # noqa: E731

        def record(inputs, labels):
            with autograd.record():
                return loss(self.net(*inputs), *labels)

        losses = []
        for place, device in enumerate(devices if case.backward == "again" else ()):
            [other] = gp.split_and_load(self.arrays([1000 + place]), [device], case.batch_axis)
            record(*other).backward()
            losses.append(record(*shards[place]))
            losses[-1].backward()
        meets = case.batch_norm and len(devices) < len(self.devices)
        with gp.nn.participants(self.net, devices) if meets else contextlib.nullcontext():
            losses = losses or [record(*shard) for shard in shards]
            if case.backward == "joint":
                autograd.backward(losses)
            for one, device in zip(losses, devices):
                if case.backward == "each":
                    one.backward()
                elif case.backward == "autograd.grad":
                    self.write_gradients(one, device)
        return sum(one.asnumpy().sum() for one in losses) / len(numbers)

    def write_gradients(self, loss, device):
        """Those of the parameters that the step uses."""
        unused = [("first.", "second.")[number] for number in (0, 1) if number not in getattr(self.net, "used", (0, 1))]
        named = nets.trained(self.net).items()
        parameters = [one for name, one in named if not name.startswith(tuple(unused)) and one.grad_req != "null"]
        arrays = [parameter.data(device) for parameter in parameters]
        for parameter, array, gradient in zip(parameters, arrays, autograd.grad(loss, arrays)):
            parameter.grad(device)[:] = gradient
            array._fresh_grad = True

    def step_of_loop(self, numbers, num_samples, is_last):
        """A step of a loop of ``gluon.Trainer``."""
        case = self.case
        if len(numbers):
            self.losses.append(self.backward(numbers))
        else:
            self.losses.append(None)
        self.num_waiting += num_samples
        if (self.num_steps + 1) % case.accumulate and not is_last:
            return
        trainer, num, ignore = self.trainers[self.num_updates % len(self.trainers)], self.num_waiting, case.branches
        if case.sums == "step":
            trainer.step(num, ignore_stale_grad=ignore)
        else:
            parameters = [one for one in nets.trained(self.net).values() if one.grad_req != "null"]
            if case.sums == "allreduce_grads":
                trainer.allreduce_grads()
            else:
                for parameter in parameters:
                    gp.allreduce(parameter.list_grad())
            if case.clip_global_norm is not None:
                gradients = [gradient for parameter in parameters for gradient in parameter.list_grad()]
                gluon.utils.clip_global_norm(gradients, case.clip_global_norm * num)
            trainer.update(num, ignore_stale_grad=ignore)
        if case.add:
            for parameter in nets.trained(self.net).values():
                parameter.zero_grad()
        self.num_updates, self.num_waiting = self.num_updates + 1, 0

    def step_of_parallel(self, numbers, _num_samples, is_last):
        """A step of ``DataParallel``."""
        if len(numbers):
            inputs, labels = self.arrays(numbers)
            loss = self.parallel.step(inputs if len(inputs) > 1 else inputs[0], labels)
            self.losses.append(loss.asnumpy().item())
        else:
            self.parallel.step(None)
            self.losses.append(None)
        if is_last:
            self.parallel.update()
        if self.average:
            self.average.update()

    def train(self):
        """Make all steps."""
        step = self.step_of_loop if self.case.way == "loop" else self.step_of_parallel
        for numbers, what, is_last in batches(self.case):
            self.before(what)
            step(self.own(numbers, what.sizes), len(numbers), is_last)
            self.num_steps += 1
        return self

    def weights(self):
        """{name: a copy on each device} of weights and running statistics."""
        named = self.net._collect_params_with_prefix().items()
        return {name: [copy.asnumpy() for copy in one.list_data()] for name, one in named}

    def averages(self):
        """The same of the moving average."""
        if self.average is None:
            return {}
        with self.average.applied():
            return self.weights()


class Piped(Trained):
    """A training of a pipeline, which moves its stages to devices of their own."""

    def connect(self):
        """Make the stages and the pipeline."""
        case, net, options = self.case, self.net, self.options
        stages = [net] if case.stages == 1 else [net.body, net.head]
        if case.stages == 3:  # then there is one input, and no layer is tied
            stages = [net.body.layers[:1], net.body.layers[1:], net.head]
        rows = [[mx.cpu(case.stages * row + place) for place in range(case.stages)] for row in range(case.devices)]
        names = "reduction", "batch_axis", "accumulate", "clip_global_norm"
        pipe = gp.Pipeline(
            stages, rows, case.micro_batches, case.order, case.recompute, **{name: options[name] for name in names}
        )
        step = functools.partial(pipe.step, nets.loss_of(case), self.trainer)
        self.parallel = types.SimpleNamespace(step=step, update=pipe.update)


class Prepared(Trained):
    """A training of ``gp.prepare`` with a loader."""

    def connect(self):
        """Make the training and its loader."""
        case = self.case
        data = gluon.data.SimpleDataset(range(case.samples))
        ones = mx.np.ones if case.numpy_mode else nd.ones
        kinds = {"": None, "stack": self.read, "extra": lambda numbers: [*self.read(numbers), ones((9, 2))]}
        if not case.batchify:
            data = gluon.data.SimpleDataset([tuple(_flat(nets.sample(case, number))) for number in range(case.samples)])
        loader = gluon.data.DataLoader(
            data, case.batch_size, shuffle=case.shuffle, last_batch=case.last_batch, batchify_fn=kinds[case.batchify]
        )
        numbers = gluon.data.SimpleDataset(range(case.samples))
        tests = gluon.data.DataLoader(numbers, case.batch_size, batchify_fn=self.arrays)
        self.training, self.loader, self.tests = gp.prepare(
            self.net, nets.loss_of(case), self.trainer, loader, tests, sync_batch_norm=case.batch_norm, seed=case.seed,
            store=self.store if case.store == "mpi" else None, **self.options,
        )  # fmt: skip

    def read(self, numbers):
        """A batchify function: the numbers of samples become arrays."""
        return _flat(self.arrays(numbers))

    def train(self):
        """All epochs; the events stand in the order of the steps."""
        case = self.case
        events = [step for _, step, _ in batches(case)]
        for _ in range(case.epochs):
            for batch in self.loader:
                batch = [part.astype(case.dtype) for part in batch]
                self.before(events[self.num_steps])
                inputs, labels = batch[: case.num_inputs], batch[case.num_inputs :][: case.num_labels]
                loss = self.training.step(tuple(inputs), tuple(labels))
                self.losses.append(loss.asnumpy().item() if case.processes == 1 else None)
                self.num_steps += 1
                if self.average:
                    self.average.update()
            if case.score:
                self.scores.append(self.score())
            self.training.end_epoch()
            if self.average:
                self.average.update()
        assert self.num_steps == len(events), f"{self.num_steps} steps, expected {len(events)}"
        return self

    def score(self):
        """What the case measures after an epoch, before which an update is made that waits."""
        case = self.case
        if case.score == "predict":
            return self.training.predict(self.tests)
        metric = nets.METRICS[case.score]() if case.score in nets.METRICS else nets.loss_per_sample(case)
        [(_, value)] = self.training.evaluate(self.tests, metric)
        return np.array(value)


def _flat(parts):
    return [*parts[0], *parts[1]]


def train(case, folder, rank):
    """What this process has after the training of `case`."""
    if case.way == "Module":
        return OfModule(case, rank).train()
    kinds = {"prepare": Prepared, "Pipeline": Piped}
    return kinds.get(case.way, Trained)(case, folder, rank).train()
