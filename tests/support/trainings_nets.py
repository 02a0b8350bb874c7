"""Nets, losses and samples of random trainings: the same numbers on one device and on several."""

import zlib

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

EPSILON = 1e-2  # of batch norm: it divides rounding errors by the root of it at most
WORDS, LENGTH, OUT = 7, 6, 3


class ByName(mx.init.Initializer):
    """Weights that follow from a parameter's name and shape alone, also where the shape is known late."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def _init_weight(self, name, array):
        rng = np.random.default_rng([self.seed, zlib.crc32(str(name).encode())])
        array[:] = (rng.normal(size=array.shape) / np.sqrt(np.prod(array.shape[1:]))).astype("float32")


class Body(gluon.HybridBlock):
    """Layers on the sum of the inputs, then a tied layer twice, if there is one."""

    def __init__(self, layers, tied):
        super().__init__(prefix="body_")
        self.layers, self.tied, self.tanh = layers, tied, gluon.nn.Activation("tanh")

    def hybrid_forward(self, F, x, *others):
        """(N, width), or with words (N, LENGTH, width) or (LENGTH, N, width)."""
        x = self.layers(sum(others, x))
        return x if self.tied is None else self.tanh(self.tied(self.tanh(self.tied(x))))


class Single(gluon.HybridBlock):
    """A body, then a layer."""

    def __init__(self, body, head):
        super().__init__(prefix="single_")
        self.body, self.head = body, head

    def hybrid_forward(self, F, *x):
        """(N, OUT), or with words (N, LENGTH, OUT) or (LENGTH, N, OUT)."""
        return self.head(self.body(*x))


class Branches(gluon.Block):
    """A body, then the sum of those of two layers that `used` names."""

    def __init__(self, body, heads):
        super().__init__(prefix="branches_")
        self.used = (0, 1)
        self.body, self.first, self.second = body, *heads

    def forward(self, *x):
        """The sum of the outputs of the layers."""
        hidden = self.body(*x)
        return sum((self.first, self.second)[number](hidden) for number in self.used)


def make(case, devices, batch_norm):
    """The net of `case` on `devices`; ``batch_norm(**options)`` makes a layer."""
    body = Body(_layers(case, batch_norm), _dense(case, case.width, "tied_") if case.tied else None)
    heads = [_dense(case, OUT, f"head{number}_") for number in range(1 + case.branches)]
    net = Branches(body, heads) if case.branches else Single(body, *heads)
    net.cast(case.dtype)
    net.initialize(ByName(case.seed), ctx=devices)
    if case.fixed == "null":
        chosen(case, net).grad_req = "null"
    elif case.fixed:
        setattr(chosen(case, net), case.fixed, 0.0)
    if case.recompute and case.way != "Pipeline":
        gp.nn.recompute(body)
    if case.hybridize:
        is_static = case.hybridize.startswith("static")
        net.hybridize(static_alloc=is_static, static_shape=case.hybridize == "static_shape")
    return net


def _layers(case, batch_norm):
    nn, width, known = gluon.nn, case.width, case.width * (not case.deferred)
    bias = not case.batch_norm  # before batch norm its gradient is 0, or rounding errors, which Adam would enlarge
    layers = nn.HybridSequential(prefix="layers_")
    with layers.name_scope():
        if case.net == "dense":
            layers.add(nn.Dense(width, in_units=4 * (not case.deferred), use_bias=bias))
        elif case.net == "conv":
            layers.add(nn.Conv2D(width, 3, in_channels=2 * (not case.deferred), use_bias=bias))
        else:
            layers.add(nn.Embedding(WORDS, width, sparse_grad=case.sparse))
        if case.net == "lstm":
            layers.add(gluon.rnn.LSTM(width, layout="TNC" if case.time_major else "NTC", input_size=known))
        if case.batch_norm:
            layers.add(batch_norm(axis=1 if case.is_flat else -1, epsilon=EPSILON, in_channels=known))
        layers.add(nn.Activation(case.activation))
        if case.net == "conv":
            layers.add(nn.Conv2D(width, 1, in_channels=known), nn.GlobalAvgPool2D(), nn.Flatten())
    return layers


def _dense(case, units, prefix):
    return gluon.nn.Dense(units, in_units=case.width * (not case.deferred), flatten=case.is_flat, prefix=prefix)


def trained(net):
    """{name: parameter} without running statistics; each parameter once."""
    found = {}
    for name, parameter in net._collect_params_with_prefix().items():
        if "running" not in name and not any(parameter is one for one in found.values()):
            found[name] = parameter
    return found


def chosen(case, net):
    """The parameter that `case` leaves as it is, at times or always."""
    parameters = list(trained(net).values())
    return parameters[case.which % len(parameters)]


class Parts:
    """A cross entropy over the words that count, and a penalty over all samples: sums and counts."""

    parts = ("words", "size")

    def __init__(self, axis):
        self.axis = axis

    def __call__(self, y, labels):
        counts = (labels > 0).astype(y.dtype)
        entropy = -nd.pick(nd.log_softmax(y, axis=-1), labels, axis=-1) * counts
        num_samples = nd.full(1, y.shape[self.axis], y.context, y.dtype)
        return (entropy.sum(), counts.sum()), (0.1 * nd.square(y).sum(), num_samples)


class Pairs:
    """A mean over the samples, and one over all pairs of them, of what the net returns for a sample."""

    def __init__(self, axis):
        self.axis = axis

    def __call__(self, y, labels):
        of_samples = (y.swapaxes(0, self.axis) if self.axis else y).reshape((y.shape[self.axis], -1))
        entropy = -nd.pick(nd.log_softmax(y, axis=-1), labels, axis=-1).mean()
        return entropy + nd.tanh(nd.dot(of_samples, of_samples, transpose_b=True) / of_samples.shape[1]).mean()


def loss_per_sample(case):
    """Gluon's loss, one value per sample."""
    kind = gluon.loss.L2Loss if case.loss == "l2" else gluon.loss.SoftmaxCrossEntropyLoss
    return kind(batch_axis=case.batch_axis)


def loss_of(case):
    """The loss as `case` hands it over."""
    if case.is_of_batch:
        return (Parts if case.loss == "parts" else Pairs)(case.batch_axis)
    loss = loss_per_sample(case)
    return loss if not case.reduction else lambda *arguments: getattr(loss(*arguments), case.reduction)()


class Largest(mx.metric.EvalMetric):
    """The mean over the batches of the largest error, which is no sum over samples."""

    def update(self, labels, outputs):
        """One batch."""
        self.sum_metric += np.abs(labels[0].asnumpy() - outputs[0].asnumpy()).max()
        self.num_inst += 1


METRICS = {
    "mse": mx.metric.MSE, "rmse": mx.metric.RMSE, "mae": mx.metric.MAE, "largest": lambda: Largest("largest"),
    "acc": lambda: mx.metric.Accuracy(axis=-1),
}  # fmt: skip


def sample(case, number):
    """(inputs, labels) of one sample: two lists of arrays of float32, without a batch axis."""
    rng = np.random.default_rng([case.seed, 1, number])
    place = () if case.is_flat else (LENGTH,)
    shape = {"dense": (4,), "conv": (2, 5, 5)}.get(case.net)
    inputs = [rng.normal(size=shape) if shape else rng.integers(0, WORDS, place) for _ in range(case.num_inputs)]
    labels = [rng.normal(size=(*place, OUT)) if case.loss == "l2" else rng.integers(0, OUT, place)]
    if case.loss == "weighted":
        labels.append(rng.uniform(0.2, 2, size=(1,) * (len(place) + 1)))
    return [array.astype("float32") for array in inputs], [array.astype("float32") for array in labels]


def batch(case, numbers):
    """(inputs, labels) of the samples of these numbers: two tuples of NumPy arrays, along the batch axis."""
    inputs, labels = zip(*(sample(case, int(number)) for number in numbers))
    return tuple(stack(case, parts) for parts in zip(*inputs)), tuple(stack(case, parts) for parts in zip(*labels))


def stack(case, arrays):
    """The arrays of several samples as one."""
    return np.stack(arrays, case.batch_axis)
