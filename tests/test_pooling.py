"""Pooling that is fast on CPUs computes what Gluon's does."""

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.nn.cpu_graph import rewrite
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


FILLED = "pooling of channels that fill no blocks"


def convolutions(*layers, inputs=1):
    """A net of the given layers and a dense one; numbers are the channels of 3 x 3 convolutions.

    Weights are multiples of 1/8, so that the first sums of whole numbers are exact in any order, and that ReLU and max
    pooling decide alike.
    """
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(*(nn.Conv2D(one, 3) if isinstance(one, int) else one() for one in layers), nn.Dense(4))
    mx.random.seed(3)
    net.initialize(mx.init.Xavier())
    net(nd.zeros((1, inputs, 16, 16)))
    for parameter in net.collect_params(".*weight").values():
        parameter.set_data((parameter.data() * 8).round() / 8)
    return net


def relu():
    return nn.Activation("relu")


def sigmoid():
    return nn.Activation("sigmoid")  # of 0 it is 0.5


def soft_batch_norm():
    return nn.BatchNorm(epsilon=1.0)  # divides no rounding by a small deviation


@pytest.mark.parametrize("hybridize", [{}, {"static_alloc": True, "static_shape": True}], ids=str)
@pytest.mark.parametrize(
    "layers",
    [
        (20, relu, nn.AvgPool2D, 50, relu, nn.MaxPool2D),  # 14 x 14 and 5 x 5 pixels, of which the last are left out
        (6, sigmoid, nn.MaxPool2D, 18, sigmoid, lambda: nn.AvgPool2D(3, 2, 1, count_include_pad=False)),
        (12, lambda: nn.MaxPool2D(3, 2, 1), sigmoid, lambda: nn.Conv2D(9, 3, use_bias=False), soft_batch_norm),
    ],
)
def test_convolutions_with_more_channels_train_to_the_same_numbers(rng, layers, hybridize):
    plain, fast = convolutions(*layers), gp.nn.convert_for_cpu(convolutions(*layers))
    x, head = nd.array(rng.integers(-9, 10, (3, 1, 16, 16))), nd.array(rng.normal(size=(3, 4)))
    seen = []
    for net in (plain, fast):
        net.hybridize(**hybridize)
        next(iter(net.collect_params().values())).grad_req = "add"
        x.attach_grad()
        seen.append([*step(net, x, head), *step(net, x, head), x.grad.asnumpy()])
    assert gp.nn.would_convert(plain) == {FILLED: sum("Pool" in type(layer).__name__ for layer in plain)}
    for wanted, got in zip(*seen):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)  # sums of up to some 100


@pytest.mark.parametrize(
    ("layers", "inputs", "found"),
    [
        ((20, relu, nn.AvgPool2D), 5, {FILLED: 1}),
        ((32, nn.AvgPool2D, 50, nn.MaxPool2D), 1, {FILLED: 1}),  # the other has blocks already
        ((20, nn.AvgPool2D), 10, {}),  # what the images have does not fill blocks either
        ((4, nn.AvgPool2D), 1, {}),  # twice the work
        ((20, relu), 1, {}),  # no pooling
        ((20, nn.BatchNorm, nn.AvgPool2D), 1, {}),  # it has parameters of its own for each channel
        ((20, lambda: nn.Dropout(0.5), nn.AvgPool2D), 1, {}),  # more channels would draw other numbers
        ((lambda: nn.Conv2D(20, 3, groups=2), nn.AvgPool2D), 2, {}),
        ((20, lambda: nn.AvgPool2D(3, 2, ceil_mode=True)), 1, {}),  # not oneDNN's
        ((20, nn.GlobalAvgPool2D), 1, {"global average pooling": 1}),
        ((32, nn.BatchNorm, 52, nn.AvgPool2D), 1, {FILLED: 1, "batch norm between two layouts": 1}),  # 16 and 8
    ],
)
def test_pooling_of_channels_that_fill_no_blocks_is_found(layers, inputs, found):
    net = convolutions(*layers, inputs=inputs)
    net.hybridize()
    net(nd.zeros((1, inputs, 16, 16)))
    assert gp.nn.would_convert(net) == found
    net.cast("float64")
    net(nd.zeros((1, inputs, 16, 16), dtype="float64"))
    assert FILLED not in gp.nn.would_convert(net)


def test_weights_and_outputs_that_are_read_elsewhere_keep_their_channels():
    x, weight, bias = (mx.sym.var(name) for name in ("x", "weight", "bias"))
    first = mx.sym.Convolution(x, weight, bias, kernel=(3, 3), num_filter=20)
    pooled = mx.sym.Pooling(first, kernel=(2, 2), stride=(2, 2), pool_type="avg")
    shapes = {"weight": (20, 1, 3, 3), "bias": (20,)}
    assert rewrite(pooled, shapes)[1] == {FILLED: 1}
    for other in (first, weight, bias, weight * 2, mx.sym.sum(first)):
        assert rewrite(mx.sym.Group([pooled, other]), shapes)[1] == {}
    means = mx.sym.Pooling(first, kernel=(1, 1), global_pool=True, pool_type="avg")
    assert rewrite(means, shapes)[1] == {"global average pooling": 1}
