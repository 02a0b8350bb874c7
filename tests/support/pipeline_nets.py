"""Nets, batches and reference steps for the tests of pipelines."""

import numpy as np

import mxnet as mx
from mxnet import autograd, gluon, nd

# The unsplit net adds the same numbers in another order; float64 leaves 1e-12 of that.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}
SGD = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}


def cpus(*numbers):
    return [mx.cpu(number) for number in numbers]


def set_weights(net, seed=0):
    """float64 weights drawn with NumPy."""
    net.cast("float64")
    net.initialize()
    random = np.random.RandomState(seed)
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            parameter.set_data(nd.array(random.standard_normal(parameter.shape) * 0.5, dtype="float64"))
    return net


def layers(num=4, width=6, prefix="net_"):
    net = gluon.nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        for _ in range(num):
            net.add(gluon.nn.Dense(width, in_units=width, activation="tanh"))
    return set_weights(net)


def batch(num, width=6, seed=5):
    random = np.random.RandomState(seed)
    return tuple(nd.array(random.standard_normal((num, width)), dtype="float64") for _ in range(2))


def trainer_of(parameters, optimizer="sgd", **options):
    return gluon.Trainer(parameters, optimizer, dict(SGD if optimizer == "sgd" else {"learning_rate": 0.1}), **options)


def reference(net, loss, batches, trainer=None):
    """The mean losses of steps on one device with whole batches; gradients and weights stay in the net."""
    trainer = trainer or trainer_of(net.collect_params())
    found = []
    for x, y in batches:
        with autograd.record():
            losses = loss(net(x), y)
        losses.backward()
        trainer.step(len(x))
        found.append(losses.mean().asscalar())
    return found


def values(net, what="data"):
    """Name -> value of the first copy of each parameter's data, or gradient."""
    return {
        name: getattr(parameter, f"list_{what}")()[0].asnumpy()
        for name, parameter in net._collect_params_with_prefix().items()
        if what == "data" or parameter.grad_req != "null"
    }


def assert_equal(net, other, what="data", rtol=TOLERANCE["rtol"]):
    theirs = values(other, what)
    for name, value in values(net, what).items():
        np.testing.assert_allclose(value, theirs[name], rtol, TOLERANCE["atol"], err_msg=f"{what} of {name}")
