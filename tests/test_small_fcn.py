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


def test_its_norm_layers_are_those_it_is_told_to_have():
    store = mx.kv.create("local")
    net = build(norm_layer=gp.nn.SyncBatchNorm, norm_kwargs={"kvstore": store, "momentum": 0.7})
    found, plain = [], []
    for made, blocks in ((net, found), (build(), plain)):
        made.apply(lambda block: blocks.append(block) if isinstance(block, gluon.nn.BatchNorm) else None)
    assert len(found) == len(plain) and {type(block) for block in found} == {gp.nn.SyncBatchNorm}
    assert {block._kwargs["momentum"] for block in found} == {0.7}
    assert not any(block.sync_group.spans_processes for block in found)  # with a store of one process
