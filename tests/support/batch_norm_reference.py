"""Batch norm in float64 NumPy over the whole batch, and the loops in which a layer on several devices must equal it."""

import threading

import numpy as np

import mxnet as mx
from gluon_parallel.kvstore.exchange import combine


def reference(xs, heads, gamma, beta, axis=1, epsilon=1e-5):
    """(outputs, input gradients, gamma's gradient, beta's gradient, mean, variance) of the loss sum(y * head).

    `xs` and `heads` are lists of shards; what belongs to samples comes back as the same shards.
    """
    sizes = np.cumsum([len(x) for x in xs])[:-1]
    x, head = (np.concatenate([np.asarray(part, np.float64) for part in parts]) for parts in (xs, heads))
    axis %= x.ndim
    others = tuple(i for i in range(x.ndim) if i != axis)
    column = [-1 if i == axis else 1 for i in range(x.ndim)]
    gamma, beta = np.reshape(gamma, column).astype(np.float64), np.reshape(beta, column).astype(np.float64)
    mean, variance = x.mean(others, keepdims=True), x.var(others, keepdims=True)
    normal = (x - mean) / np.sqrt(variance + epsilon)
    dbeta, dgamma = head.sum(others, keepdims=True), (head * normal).sum(others, keepdims=True)
    count = x.size // x.shape[axis]
    dx = gamma / np.sqrt(variance + epsilon) * (head - dbeta / count - normal * dgamma / count)
    return (
        np.split(normal * gamma + beta, sizes), np.split(dx, sizes),
        dgamma.ravel(), dbeta.ravel(), mean.ravel(), variance.ravel(),
    )  # fmt: skip


def measured(x, axis=1):
    """(1 + 2C,) count, mean and squared deviations from it: what devices and processes send each other."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, 0).reshape(x.shape[axis], -1)
    mean = x.mean(axis=1) if x.size else np.zeros(len(x))
    return np.concatenate([[x.shape[1]], mean, np.square(x - mean[:, None]).sum(axis=1)])


def combined(vectors, direction=0):
    """The message of all, by the C library: moments as of :func:`measured`, or with direction 1 sums."""
    return combine(np.stack(vectors), direction)


def combined_messages(messages, direction):
    """The message of all with its header, the count and the call's number, by the C library."""
    return combine(np.stack(messages), direction, messages=True)


def shards(rng, sizes, shape=(3, 4, 5), dtype="float32", offset=0.0, scale=1.0):
    """Random shards of these sizes, in the precision that the layer will see."""
    return [(rng.normal(size=(size, *shape)) * scale + offset).astype(dtype) for size in sizes]


def on(devices, arrays, dtype=None, grad=True):
    """The arrays on the devices, one each, with room for a gradient."""
    placed = [mx.nd.array(array, ctx=device, dtype=dtype or array.dtype) for array, device in zip(arrays, devices)]
    for array in placed if grad else ():
        array.attach_grad()
    return placed


def joint(net, xs, heads):
    """One thread, one backward pass for all devices."""
    with mx.autograd.record():
        ys = [net(x) for x in xs]
        losses = [(y * head).sum() for y, head in zip(ys, heads)]
    mx.autograd.backward(losses)
    return ys


def random_step(net, devices, rng, sizes=(3, 2), shape=(3, 4), outputs=None):
    """The outputs of a step on random shards; those of a layer, unless the shape of `outputs` is another."""
    xs = on(devices, shards(rng, sizes, shape))
    return joint(net, xs, on(devices, shards(rng, sizes, outputs or shape), grad=False))


def one_by_one(net, xs, heads):
    """One thread, which calls backward for device after device."""
    with mx.autograd.record():
        ys = [net(x) for x in xs]
        losses = [(y * head).sum() for y, head in zip(ys, heads)]
    for loss in losses:
        loss.backward()
    return ys


def threads(net, xs, heads):
    """One thread per device."""
    ys = [None] * len(xs)

    def run(i):
        with mx.autograd.record():
            ys[i] = net(xs[i])
            loss = (ys[i] * heads[i]).sum()
        loss.backward()
        ys[i].wait_to_read()

    in_parallel([lambda i=i: run(i) for i in range(len(xs))])
    return ys


def in_parallel(functions):
    """Run each function on a thread of its own; raise the first error of any."""
    errors = []

    def guarded(function):
        try:
            function()
        except Exception as error:
            errors.append(error)

    running = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]


def summed(parameter):
    """A parameter's gradient, summed over its devices as a trainer does."""
    return sum(gradient.asnumpy().astype(np.float64) for gradient in parameter.list_grad())


def close(actual, expected, rtol, what="", vanishes=False, floor=1.0):
    """Whether two arrays agree, relative to the largest expected value, and to `floor` where that is smaller.

    Zeros must not pass for a result: what is expected is larger than the tolerance, unless it is said to vanish.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what}: {actual.shape} instead of {expected.shape}"
    if expected.size:
        largest = np.abs(expected).max()
        assert vanishes or largest > 10 * rtol * floor, (
            f"{what}: with {largest:.1e} expected, zeros would pass at {rtol:.0e}"
        )
        error = np.abs(actual - expected).max() / max(floor, largest)
        assert error <= rtol, f"{what}: error {error:.2e} > {rtol:.0e}"


def normalised(ys, tolerance):
    """Whether the shards are one batch with mean 0 and variance 1 in every channel, where gamma is 1 and beta 0."""
    parts = [np.asarray(y.asnumpy(), np.float64) for y in ys]
    y = np.concatenate(parts)
    others = tuple(axis for axis in range(y.ndim) if axis != 1)
    close(y.mean(others), np.zeros(y.shape[1]), tolerance, "mean", vanishes=True)
    close(y.var(others), np.ones(y.shape[1]), 1e-2, "variance")  # epsilon takes 1e-5 / (the input's variance) of it
    alone = [
        np.abs(part.mean(others)).max() for part in parts if part.size
    ]  # of random shards, whose own mean is not 0
    assert len(alone) < 2 or max(alone) > 1e-3, f"each shard is normalised alone: means of {alone}"


class InNet(mx.gluon.HybridBlock):
    """A net of one layer, which lends it its attributes."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def __getattr__(self, name):
        return getattr(vars(self).get("layer"), name)

    def hybrid_forward(self, F, x):
        return self.layer(x)


def hybridized(net, alone=False, **options):
    """The layer, ready to run as a graph; alone, outside of a hybridized net, it runs none."""
    net = net if alone else InNet(net)
    net.hybridize(**options)
    return net


def by_operators(layer):
    """The layer, which computes with MXNet's operators on CPUs too, as on GPUs and in float16."""
    layer.sync_group.by_operators = True
    return layer
