"""Random programs: what is trained, how and on which samples; and its weights on one device."""

import dataclasses

import numpy as np

import mxnet as mx
from mxnet import autograd, gluon, nd

EPSILON = 1e-2  # of batch norm: a group with two alike samples would enlarge rounding errors by 1 / sqrt(EPSILON)
IN, OUT = 3, 2


@dataclasses.dataclass(frozen=True)
class Program:
    """What is trained, how, and on which samples."""

    dtype: str
    layers: tuple  # (units, sync group of its batch norm or "no batch norm", whether it is frozen)
    num_devices: int  # of each process
    accumulate: int
    hybridize: bool
    optimizer: dict
    sizes: tuple  # samples of each process, for each batch
    members: tuple  # of a group of processes that sums other arrays meanwhile
    shard_optimizer: bool

    @classmethod
    def draw(cls, rng, num):
        """A random one for `num` processes."""
        kinds = ["no batch norm", None, "host", *(k for k in range(1, num) if num % k == 0)]

        def layer():
            # The weights between two wide layers travel by themselves, all others in buckets.
            units = int(rng.choice([2, 5, 40, 600], p=[0.3, 0.4, 0.2, 0.1]))
            return units, kinds[rng.integers(len(kinds))], bool(rng.random() < 0.25)

        def batch():
            sizes = rng.integers(0, 5, num) * (rng.random(num) < 0.8)
            sizes[rng.integers(num)] += 1  # a step without any samples is refused
            return tuple(sizes.tolist())

        accumulate = int(rng.choice([1, 1, 2]))
        return cls(
            str(rng.choice(["float32", "float64"])), tuple(layer() for _ in range(rng.integers(1, 5))),
            int(rng.integers(1, 3)), accumulate, bool(rng.integers(2)),
            {"learning_rate": 0.1, "momentum": float(rng.choice([0.0, 0.9])), "wd": float(rng.choice([0.0, 0.01]))},
            tuple(batch() for _ in range(int(rng.integers(1, 5)) * accumulate)),
            tuple(rng.permutation(num)[: rng.integers(1, num + 1)].tolist()), bool(rng.integers(2)),
        )  # fmt: skip

    def net(self, seed, normalise, devices, dtype):
        """The net with weights that float32 has; ``normalise(channels, kind)`` makes a layer of batch norm."""
        net, in_units, rng = gluon.nn.HybridSequential(), IN, np.random.default_rng(seed)
        for units, kind, frozen in (*self.layers, (OUT, "no batch norm", False)):
            parts = [gluon.nn.Dense(units, in_units=in_units)]
            parts += [] if kind == "no batch norm" else [normalise(units, kind)]
            for parameter in (p for part in parts for p in part.collect_params().values() if frozen):
                parameter.grad_req = "null"
            net.add(*parts, gluon.nn.Activation("tanh"))
            in_units = units
        net.cast(dtype)
        net.initialize(ctx=devices)
        for name, parameter in net._collect_params_with_prefix().items():
            if "running" not in name:
                scale = 1 / np.sqrt(parameter.shape[-1]) if len(parameter.shape) > 1 else 0.5
                values = rng.normal(size=parameter.shape) * scale + name.endswith("gamma")
                parameter.set_data(nd.array(values.astype("float32"), dtype=dtype))
        return net

    def batches(self, seed):
        """(x, y) of all processes for each batch, in their order; numbers that float32 has."""
        rng = np.random.default_rng([seed, 1])
        return [tuple(rng.normal(size=(sum(sizes), width)).astype("float32") for width in (IN, OUT))
                for sizes in self.sizes]  # fmt: skip


class NormOfGroups(gluon.nn.BatchNorm):
    """Batch norm on one device, of the samples of each group of processes by themselves."""

    def __init__(self, channels, groups):
        super().__init__(in_channels=channels, epsilon=EPSILON)
        self.groups, self.sizes = groups, ()
        self.running = {group: [np.zeros(channels), np.ones(channels)] for group in groups}

    def forward(self, x):
        """(N, C), as many samples of each process as `sizes` says."""
        owners, outputs, places = np.repeat(np.arange(len(self.sizes)), self.sizes), [], []
        for group in self.groups:
            mine = np.flatnonzero(np.isin(owners, group))
            if len(mine):
                part = nd.take(x, nd.array(mine))
                mean = part.mean(axis=0)
                variance = nd.square(part - mean).mean(axis=0)
                normal = (part - mean) / nd.sqrt(variance + EPSILON)
                outputs.append(normal * self.gamma.data() + self.beta.data())
                places.append(mine)
                for running, value in zip(self.running[group], (mean, variance)):
                    running *= 0.9
                    running += 0.1 * value.asnumpy()
        return nd.take(nd.concat(*outputs, dim=0), nd.array(np.argsort(np.concatenate(places))))


def wanted(program, seed, groups):
    """The weights of one device in float64, and {name of a running statistic: {group: value}}."""
    net = program.net(seed, lambda channels, kind: NormOfGroups(channels, groups[kind]), [mx.cpu()], "float64")
    trainer = gluon.Trainer(net.collect_params(), "sgd", program.optimizer, kvstore=None)
    trained = [parameter for parameter in net.collect_params().values() if parameter.grad_req != "null"]
    for parameter in trained:
        parameter.grad_req = "add"
    num_samples = 0
    for number, (sizes, batch) in enumerate(zip(program.sizes, program.batches(seed)), 1):
        for layer in net:
            layer.sizes = sizes
        x, y = (nd.array(part, dtype="float64") for part in batch)
        with autograd.record():
            loss = nd.square(net(x) - y).sum() / 2 / OUT
        loss.backward()
        num_samples += len(x)
        if number % program.accumulate == 0:
            trainer.step(num_samples)
            num_samples = 0
            for parameter in trained:
                parameter.zero_grad()
    running = {
        f"{place}.{name}": {group: values[which] for group, values in layer.running.items()}
        for place, layer in enumerate(net) if isinstance(layer, NormOfGroups)
        for which, name in enumerate(("running_mean", "running_var"))
    }  # fmt: skip
    return {name: value.data().asnumpy() for name, value in net._collect_params_with_prefix().items()}, running
