"""The small FCN is fully convolutional, is built like GluonCV's nets, and has its weights before its first image."""

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

pytestmark = pytest.mark.arithmetic


def build(**options):
    net = gp.models.SmallFCN(5, channels=(4, 6, 8, 10), **options)
    net.initialize(mx.init.Xavier(magnitude=2))
    return net


@pytest.mark.parametrize("aux", [False, True])
def test_every_output_has_the_classes_of_every_pixel_hybridized_or_not(rng, aux):
    net, images = build(aux=aux), mx.nd.array(rng.normal(size=(2, 3, 32, 48)))
    parameters = net.collect_params()  # which it has before its first image, under names of their own
    assert all(np.prod(parameter.shape) > 0 and parameter.data().size for parameter in parameters.values())
    assert len(set(parameters)) == len(list(parameters.values()))
    wanted = [output.asnumpy() for output in net(images)]
    assert [output.shape for output in wanted] == [(2, 5, 32, 48)] * (1 + aux)
    net.hybridize()
    for one, other in zip(net(images), wanted):
        np.testing.assert_allclose(one.asnumpy(), other, rtol=1e-4, atol=1e-5)  # other sums of float32


def test_what_moves_by_sixteen_pixels_moves_in_the_output_too(rng):
    net = build()
    images = np.zeros((1, 3, 192, 192), "float32")
    images[:, :, 88:104, 80:96] = rng.normal(size=(1, 3, 16, 16))
    moved = np.roll(images, 16, axis=3)
    one, other = (net(mx.nd.array(array))[0].asnumpy() for array in (images, moved))
    inner = slice(64, 128)  # far from the borders, which do not move
    np.testing.assert_allclose(other[:, :, inner, 80:128], one[:, :, inner, 64:112], rtol=1e-4, atol=1e-5)
    assert np.ptp(one[:, 0, inner, inner]) > 1e-3  # and there is something to be seen


def follow(devices, batches):
    """Train in float64, with batch norm over the devices; the losses and the weights."""
    gp.reseed(3)
    net = build(aux=True, norm_layer=gp.nn.SyncBatchNorm)
    net.initialize(mx.init.Xavier(magnitude=2), ctx=devices, force_reinit=True)
    net.cast("float64")
    net.hybridize()
    criterion = gp.models.PixelLoss(aux_weight=0.4)

    def loss(*arrays):  # counts are float32, and a sum has to be of its count's type; its gradient is float64 again
        return [(total.astype("float32"), count) for total, count in criterion(*arrays)]

    loss.parts = criterion.parts
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    step = gp.DataParallel(net, loss, trainer)
    losses = [step(mx.nd.array(x, dtype="float64"), mx.nd.array(y, dtype="int32")).asscalar() for x, y in batches]
    named = net._collect_params_with_prefix()
    return losses, {name: parameter.data(devices[-1]).asnumpy() for name, parameter in named.items()}


@pytest.mark.parametrize("num_devices", [2, 3])
def test_on_several_devices_it_follows_one_step_by_step(rng, num_devices):
    # Ragged shards, a batch smaller than the number of devices, and an image in which nothing counts.
    batches = [(rng.normal(size=(n, 3, 32, 32)), rng.integers(-1, 5, size=(n, 32, 32))) for n in (5, 3, 1, 4)]
    batches[1][1][0] = -1
    losses, weights = follow([mx.cpu(0)], batches)
    others, copies = follow([mx.cpu(i) for i in range(num_devices)], batches)
    np.testing.assert_allclose(others, losses, rtol=1e-6, atol=1e-7)
    for name, weight in weights.items():
        np.testing.assert_allclose(copies[name], weight, rtol=1e-9, atol=1e-11, err_msg=name)


def test_its_norm_layers_are_those_it_is_told_to_have():
    store = mx.kv.create("local")
    net = build(norm_layer=gp.nn.SyncBatchNorm, norm_kwargs={"kvstore": store, "momentum": 0.7})
    found, plain = [], []
    for made, blocks in ((net, found), (build(), plain)):
        made.apply(lambda block: blocks.append(block) if isinstance(block, gluon.nn.BatchNorm) else None)
    assert len(found) == len(plain) and {type(block) for block in found} == {gp.nn.SyncBatchNorm}
    assert {block._kwargs["momentum"] for block in found} == {0.7}
    assert not any(block.sync_group.spans_processes for block in found)  # with a store of one process
