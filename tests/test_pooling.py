"""Global pooling that is fast on CPUs computes what Gluon's does."""

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

pytestmark = pytest.mark.arithmetic

nn = gluon.nn


def make():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(16, 3, padding=1, in_channels=3), nn.BatchNorm(in_channels=16), nn.GlobalAvgPool2D())
        net.add(nn.Dense(4, in_units=16))
    mx.random.seed(3)
    net.initialize(mx.init.Xavier())
    return net


def step(net, x, head):
    """Outputs and gradients of the loss (y * head).sum(), for (N, 4) random numbers `head`."""
    with mx.autograd.record():
        y = net(x)
        loss = (y * head).sum()
    loss.backward()
    gradients = [p.grad().asnumpy() for p in net.collect_params().values() if p.grad_req != "null"]
    return [y.asnumpy(), *gradients]


@pytest.mark.parametrize("hybridize", [None, {}, {"static_alloc": True, "static_shape": True}], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 3, 5, 9), (3, 3, 1, 1)], ids=str)
def test_outputs_and_gradients_are_those_of_gluons_layer(rng, shape, hybridize):
    plain, fast = make(), gp.nn.convert_global_pooling(make())
    assert type(fast[2]) is gp.nn.GlobalAvgPool2D
    for net in (plain, fast):
        if hybridize is not None:
            net.hybridize(**hybridize)
    x, head = nd.array(rng.normal(size=shape)), nd.array(rng.normal(size=(shape[0], 4)))
    for wanted, got in zip(step(plain, x, head), step(fast, x, head)):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_half_precision_does_not_overflow_where_gluons_layer_does_not(rng):
    x = nd.array(rng.uniform(0, 50, (2, 3, 56, 56)), dtype="float16")
    got, wanted = gp.nn.GlobalAvgPool2D()(x).asnumpy(), nn.GlobalAvgPool2D()(x).asnumpy()
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3)  # means near 25, of which float16 keeps 3 digits


@pytest.mark.filterwarnings("ignore:(?s).*Cannot decide type for the following arguments")  # any SymbolBlock
def test_a_net_that_was_traced_already_is_traced_again_and_a_converted_one_is_exported(rng, tmp_path):
    net = make()
    net.hybridize()
    x = nd.array(rng.normal(size=(2, 3, 8, 8)))
    before = net(x).asnumpy()
    gp.nn.convert_global_pooling(net)
    np.testing.assert_allclose(net(x).asnumpy(), before, rtol=1e-5, atol=1e-6)
    net.export(str(tmp_path / "net"))
    graph = (tmp_path / "net-symbol.json").read_text()
    assert '"op": "mean"' in graph and '"op": "Pooling"' not in graph
    again = gluon.SymbolBlock.imports(str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params"))
    np.testing.assert_allclose(again(x).asnumpy(), before, rtol=1e-5, atol=1e-6)


def test_other_layers_stay_what_they_are():
    class Own(nn.GlobalAvgPool2D):
        pass

    net = nn.HybridSequential()
    net.add(Own(), nn.AvgPool2D(2), nn.GlobalMaxPool2D(), nn.GlobalAvgPool3D(), nn.GlobalAvgPool2D("NHWC"))
    kinds = [type(layer) for layer in net]
    assert [type(layer) for layer in gp.nn.convert_global_pooling(net)] == kinds
    layer = nn.GlobalAvgPool2D()
    assert gp.nn.convert_global_pooling(layer) is layer and type(layer) is gp.nn.GlobalAvgPool2D
