"""Layers of which one parameter is frozen: the others have the gradients that they have beside trained ones."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd
from mxnet.gluon import nn, rnn

# The bias's gradient is summed by another operator, in another order: single precision, sums of up to 10 values.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Unrolled(gluon.HybridBlock):
    """A recurrent cell over three time steps: one weight, used three times."""

    def __init__(self, cell):
        super().__init__()
        with self.name_scope():
            self.cell = cell(4)

    def hybrid_forward(self, F, x):
        return self.cell.unroll(3, x, merge_outputs=True)[0]


def chain(*layers):
    net = nn.HybridSequential()
    net.add(*layers)
    return net


# Name -> (what makes the layers, the shape of their input)
LAYERS = {
    "dense": (lambda: nn.Dense(3), (4, 5)),
    "dense on the last axis": (lambda: nn.Dense(3, flatten=False, activation="relu"), (4, 2, 5)),
    "dense without bias": (lambda: chain(nn.Dense(3, use_bias=False), nn.Dense(2)), (4, 5)),
    "dense after sync": (
        lambda: chain(nn.Conv2D(4, 3), gp.nn.SyncBatchNorm(), nn.GlobalAvgPool2D(), nn.Dense(3)), (4, 3, 6, 6)
    ),
    "convolution": (lambda: nn.Conv2D(4, 3), (2, 3, 6, 6)),
    "convolution in groups": (lambda: nn.Conv1D(6, 3, groups=3), (2, 3, 6)),
    "transposed": (lambda: nn.Conv2DTranspose(4, 3), (2, 3, 6, 6)),
    "batch norm": (lambda: nn.BatchNorm(), (4, 3, 5, 5)),
    "sync batch norm": (lambda: gp.nn.SyncBatchNorm(), (4, 3, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(), (4, 6)),
    "group norm": (lambda: nn.GroupNorm(3), (4, 6, 3)),
    "instance norm": (lambda: nn.InstanceNorm(), (4, 6, 3)),
    "recurrent": (lambda: rnn.LSTM(4), (3, 2, 5)),
    "recurrent cell": (lambda: Unrolled(rnn.LSTMCell), (2, 3, 5)),
    "gated cell": (lambda: Unrolled(rnn.GRUCell), (2, 3, 5)),
}  # fmt: skip


def made(make, shape, hybridize):
    net = make()
    net.initialize()
    if hybridize:
        net.hybridize()
    net(nd.zeros(shape))
    for number, parameter in enumerate(net.collect_params().values()):
        values = np.random.default_rng(number).normal(size=parameter.shape) + ("var" in parameter.name)
        parameter.set_data(nd.array(np.abs(values) + 0.1))
    return net


def gradients(net, shape, request="write"):
    """{name: gradient} of a random function of the outputs; MXNet's operators leave memory of others behind.

    With the request "add", that of the input is of two passes.
    """
    nd.full((1000,), 1e3).wait_to_read()
    rng = np.random.default_rng(0)
    x = nd.array(rng.normal(size=shape))
    x.attach_grad(request)
    factors = None
    for _ in range(1 + (request == "add")):
        with mx.autograd.record():
            y = net(x)
            factors = nd.array(rng.normal(size=y.shape)) if factors is None else factors
            loss = (y * factors).sum()
        loss.backward()
    named = net._collect_params_with_prefix().items()
    return {"x": x.grad.asnumpy()} | {name: one.grad().asnumpy() for name, one in named if one.grad_req != "null"}


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_frozen_parameter_changes_no_gradient_of_another_one(name, hybridize):
    make, shape = LAYERS[name]
    wanted = gradients(made(make, shape, hybridize), shape)
    for frozen in wanted.keys() - {"x"}:
        net = made(make, shape, hybridize)
        parameter = net._collect_params_with_prefix()[frozen]
        for request in ("null", "write", "null"):  # before the first pass, and between passes
            parameter.grad_req = request
            found = gradients(net, shape)
            assert found.keys() == wanted.keys() - ({frozen} if request == "null" else set())
            for other, gradient in found.items():
                np.testing.assert_allclose(gradient, wanted[other], **CLOSE, err_msg=f"{other}, {frozen} {request}")


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_passes_add_to_the_gradients_beside_a_frozen_parameter(name, hybridize):
    make, shape = LAYERS[name]
    wanted = gradients(made(make, shape, hybridize), shape)
    for frozen in wanted.keys() - {"x"}:
        net = made(make, shape, hybridize)
        for other, parameter in net._collect_params_with_prefix().items():
            parameter.grad_req = "add" if other in wanted.keys() - {frozen} else "null"
        found = gradients(net, shape, "add")
        for other, gradient in found.items():
            np.testing.assert_allclose(gradient, 2 * wanted[other], **CLOSE, err_msg=f"{other}, {frozen} is frozen")


def test_a_net_is_freed_with_its_executors():
    net = made(*LAYERS["dense"], True)
    net.weight.grad_req = "null"
    gradients(net, (4, 5))
    executor = weakref.ref(net._cached_op)
    del net
    gc.collect()
    assert executor() is None


def test_threads_that_call_a_net_at_once_after_its_weights_were_frozen_all_run_the_right_graph():
    devices = gp.devices("cpu:4")
    net = chain(*(nn.Dense(2, in_units=2) for _ in range(30)))
    net.initialize(mx.init.Constant(0.5), ctx=devices)
    net.hybridize()
    barrier = threading.Barrier(len(devices))

    def train(device):
        barrier.wait()
        with mx.autograd.record():
            y = net(nd.ones((3, 2), ctx=device))
        y.backward()
        return [layer.bias.grad(device).asnumpy().tolist() for layer in net]

    with ThreadPoolExecutor(len(devices)) as pool:
        for request in ("write", "null"):
            for layer in net:
                layer.weight.grad_req = request
                layer.bias.zero_grad()
            assert list(pool.map(train, devices)) == [[[3.0, 3.0]] * 30] * len(devices)
