"""A random training as a loop of MXNet's Module, whose batches all have one size."""

import trainings_nets as nets
from trainings_one_device import batches, optimizer_of

import gluon_parallel as gp
import mxnet as mx
from mxnet import nd


class OfModule:
    """One process's part of the training."""

    def __init__(self, case, rank):
        self.case, self.rank, self.losses, self.scores = case, rank, [], []
        devices = [mx.cpu(number) for number in range(case.devices)]
        self.store = gp.kvstore.create(case.store) if case.store == "mpi" else case.store
        self.net = nets.make(case, devices, lambda **options: gp.nn.SyncBatchNorm(kvstore=self.of_layers, **options))
        self.parameters = self.net.collect_params()
        self.module = self.make(devices)

    @property
    def of_layers(self):
        """The store of layers that exchange."""
        return self.store if self.case.processes > 1 else None

    def make(self, devices):
        """The Module of the net's graph, with its weights."""
        case = self.case
        inputs, labels = self.arrays(range(case.steps[0].sizes[self.rank]))
        names = [
            [f"{kind}{number}" for number in range(len(arrays))] for kind, arrays in (("x", inputs), ("y", labels))
        ]
        x, y = (list(map(mx.sym.var, part)) for part in names)
        loss = mx.sym.MakeLoss(nets.loss_per_sample(case)(self.net(*x), *y))
        fixed = [nets.chosen(case, self.net).name] if case.fixed == "null" else None
        module = mx.mod.Module(loss, *names, context=devices, fixed_param_names=fixed)
        layout = "TNC" if case.time_major else "NTCHW"
        shapes = [
            [mx.io.DataDesc(*one, case.dtype, layout[: len(one[1])]) for one in zip(part, [a.shape for a in arrays])]
            for part, arrays in zip(names, (inputs, labels))
        ]
        module.bind(*shapes)
        values = {name: parameter.data(devices[0]) for name, parameter in self.parameters.items()}
        weights = {name: value for name, value in values.items() if name in module._param_names}
        module.init_params(None, weights, {name: value for name, value in values.items() if name not in weights})
        name, options = optimizer_of(case)
        module.init_optimizer(self.store, name, options)
        return module

    def arrays(self, numbers):
        """(inputs, labels) of these samples."""
        return [[nd.array(array, dtype=self.case.dtype) for array in part] for part in nets.batch(self.case, numbers)]

    def own(self, numbers, sizes):
        """This process's samples."""
        begin = sum(sizes[: self.rank])
        return numbers[begin : begin + sizes[self.rank]]

    def train(self):
        """Make all steps."""
        for numbers, step, _ in batches(self.case):
            if step.before == "set_data":
                weights, statistics = self.module.get_params()
                self.module.set_params({name: value * 0.5 for name, value in weights.items()}, statistics)
            elif step.before == "learning_rate":
                self.module._optimizer.set_learning_rate(0.03)
            self.module.forward_backward(mx.io.DataBatch(*self.arrays(self.own(numbers, step.sizes))))
            self.losses.append(self.module.get_outputs()[0].asnumpy().mean())
            self.module.update()
        return self

    def weights(self):
        """{name: a copy} of weights and running statistics."""
        values = {name: value for part in self.module.get_params() for name, value in part.items()}
        named = self.net._collect_params_with_prefix().items()
        return {name: [values[parameter.name].asnumpy()] for name, parameter in named}

    def averages(self):
        """There is no moving average."""
        return {}
