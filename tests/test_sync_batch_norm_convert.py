"""Converters, and nets of GluonCV with SyncBatchNorm as their norm layer."""

import contextlib

import numpy as np
import pytest
from batch_norm_reference import close, normalised, on, random_step, shards

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import nn
from gluon_parallel.nn.convert import ContribSyncBatchNorm
from gluon_parallel.nn.sync_batch_norm.sync_group import GROUPS
from mxnet import gluon

gluoncv = pytest.importorskip("gluoncv", reason="GluonCV is an optional dependency")

pytestmark = [
    pytest.mark.arithmetic,
    pytest.mark.filterwarnings("ignore:Parameter .* is already initialized"),  # GluonCV initialises its heads itself
    pytest.mark.filterwarnings("ignore:(?s).*Cannot decide type for the following arguments"),  # any SymbolBlock
]


def small():
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Conv2D(4, 3, in_channels=3), gluon.nn.BatchNorm(in_channels=4, momentum=0.8, epsilon=1e-3))
        net.add(gluon.contrib.nn.Identity(), gluon.nn.BatchNorm(in_channels=4, scale=False, center=False))
    return net


@pytest.mark.parametrize("hybridize", [False, True])
def test_a_converted_net_keeps_its_parameters_and_what_they_learned(rng, hybridize):
    devices = gp.devices("cpu:2")
    net = small()
    net.initialize(ctx=devices)
    net.hybridize(hybridize)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    before = dict(net.collect_params().items())
    xs = on(devices, shards(rng, (3, 2), (3, 6, 6)))
    expected = [net(x).asnumpy() for x in xs]
    assert nn.convert_sync_batchnorm(net, timeout=60) is net
    assert [type(child) for child in net if "batchnorm" in child.name] == [nn.SyncBatchNorm] * 2
    assert net[1]._kwargs["momentum"] == 0.8
    assert all(parameter is before[name] for name, parameter in net.collect_params().items())
    for x, y in zip(xs, expected):
        close(net(x).asnumpy(), y, 1e-5)
    normalised(random_step(net, devices, rng, (3, 2), (3, 6, 6), (4, 4, 4)), 1e-5)  # one batch
    trainer.step(5)
    learned = [net(x).asnumpy() for x in xs]
    assert nn.revert_sync_batchnorm(net) is net
    assert [type(child) for child in net if "batchnorm" in child.name] == [gluon.nn.BatchNorm] * 2
    for x, y in zip(xs, learned):
        close(net(x).asnumpy(), y, 1e-5)
    with mx.autograd.record():
        net(xs[0]).wait_to_read()  # and waits for no other device
    assert all(parameter is before[name] for name, parameter in net.collect_params().items())


def test_a_layer_alone_and_mxnets_own_sync_batch_norm_are_converted_and_ours_in_its_place_stays(rng):
    devices = gp.devices("cpu:2")
    layer = nn.convert_sync_batchnorm(gluon.nn.BatchNorm(in_channels=3))
    assert type(layer) is nn.SyncBatchNorm
    net = gluon.nn.HybridSequential()
    net.add(gluon.contrib.nn.SyncBatchNorm(in_channels=3, num_devices=2), ContribSyncBatchNorm(3))
    nn.convert_sync_batchnorm(net, timeout=60)
    net.initialize(ctx=devices)
    normalised(random_step(net, devices, rng), 1e-5)
    assert all(type(layer) is gluon.nn.BatchNorm for layer in nn.revert_sync_batchnorm(net))


def test_what_cannot_be_converted_is_refused_by_name_before_anything_changes():
    class Own(gluon.nn.BatchNorm):
        pass

    net = small()
    net.add(Own(in_channels=4, prefix="own_"))
    with pytest.raises(TypeError, match="own: Own is a BatchNorm of another kind"):
        nn.convert_sync_batchnorm(net)
    assert type(net[1]) is gluon.nn.BatchNorm
    x = mx.sym.var("x")
    block = gluon.SymbolBlock(mx.sym.BatchNorm(x, name="bn"), x)
    with pytest.raises(TypeError, match="a SymbolBlock's graph is fixed"):
        nn.convert_sync_batchnorm(block)


DATA = mx.sym.var("data")


def symbol(**options):
    return nn.sync_batch_norm_symbol(DATA, name="bn", fix_gamma=False, timeout=60, **options)


def with_zeros(block, devices):
    """The block of that symbol, initialised so that its outputs have mean 0 and variance 1."""
    block.initialize(mx.init.Zero(), ctx=devices)
    block.params["bn_gamma"].initialize(mx.init.One(), ctx=devices, force_reinit=True)
    return block


@pytest.mark.parametrize("form", ["num_devices", "ndev", "within a hybridized block", "a layer's graph"])
def test_the_symbol_twin_is_synchronised_where_gluon_runs_it(rng, form):
    devices, count = gp.devices("cpu:2"), {"ndev" if form == "ndev" else "num_devices": 2}
    if form == "a layer's graph":
        net = nn.SyncBatchNorm(in_channels=3, timeout=60)
        net.initialize(ctx=devices)
        block = gluon.SymbolBlock(net(DATA), DATA, params=net.collect_params())
    else:
        block = with_zeros(gluon.SymbolBlock(symbol(**count), DATA), devices)
    if form == "within a hybridized block":
        inner, block = block, gluon.nn.HybridSequential(prefix="outer_")
        block.add(inner)
        block.hybridize()
    for _ in range(3):
        normalised(random_step(block, devices, rng), 1e-6)
    with nn.participants(block, devices[:1]):
        random_step(block, devices[:1], rng, (3,))
    normalised(random_step(block, devices, rng), 1e-6)


def test_the_symbol_twin_exchanges_on_the_devices_of_its_parameters(rng):
    devices = gp.devices("cpu:2")
    y = symbol(num_devices=2)
    for some in (devices, devices[::-1]):  # the second block takes the place of the first
        block = with_zeros(gluon.SymbolBlock(y, DATA), some)
        block(mx.nd.ones((2, 3, 4), some[0])).wait_to_read()  # builds the graph
        normalised(random_step(block, some, rng), 1e-6)
    block.collect_params().reset_ctx(gp.devices("cpu:3"))
    with pytest.raises(gp.errors.DevicesMismatch, match="bn: num_devices=2, but its parameters live on 3"):
        random_step(block, devices, rng)


@pytest.mark.parametrize("hybridize", [False, True])
def test_the_symbol_twin_is_synchronised_in_an_imported_graph(rng, tmp_path, hybridize):
    devices, net = gp.devices("cpu:2"), gluon.SymbolBlock(symbol(num_devices=2), DATA)
    net.initialize(mx.init.One(), ctx=devices)
    net(mx.nd.ones((1, 3, 4), devices[0]))
    net.export(str(tmp_path / "net"))
    files = str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
    block = gluon.SymbolBlock.imports(*files, ctx=devices)
    block.params["bn_beta"].set_data(mx.nd.zeros(3))
    if hybridize:
        block.hybridize(static_alloc=True)
    normalised(random_step(block, devices, rng), 1e-6)
    assert {one.shape for one in block.collect_params().values()} == {(3,)}
    average = gp.ExponentialMovingAverage(block, gluon.Trainer(block.collect_params(), "sgd"))
    average.update()
    average.restore(average.state())


def test_blocks_of_one_graph_do_not_meet(rng):
    devices, saved = gp.devices("cpu:4"), symbol(num_devices=2).tojson()
    blocks = [gluon.SymbolBlock(mx.sym.load_json(saved), DATA) for _ in range(2)]
    for block, some in zip(blocks, (devices[:2], devices[1:3])):
        block.initialize(mx.init.One(), ctx=some)
    for block, some in zip(blocks * 2, (devices[:2], devices[1:3]) * 2):
        y = np.concatenate([y.asnumpy() for y in random_step(block, some, rng)])
        np.testing.assert_allclose(y.mean(axis=(0, 2)), 1, rtol=1e-5, atol=1e-5)  # beta


def test_a_graph_that_no_block_runs_is_not_trained_and_the_number_of_devices_is_to_be_said():
    run = mx.nd.CachedOp(symbol(num_devices=1))
    arrays = [mx.nd.ones(shape) for shape in ((2, 3), *[(3,)] * 4)]
    assert run(*arrays).shape == (2, 3)
    with pytest.raises(gp.errors.BarrierBroken, match="bn: to train this graph, run it in a gluon block"):
        with mx.autograd.train_mode():
            run(*arrays)
    with pytest.raises(ValueError, match="expected the number of devices"):
        symbol()


def test_a_graph_that_met_processes_through_a_store_at_hand_is_not_trained_elsewhere(rng, monkeypatch):
    devices, named = gp.devices("cpu:2"), symbol(num_devices=2, kvstore="local")
    y = symbol(num_devices=2, kvstore=mx.kv.create("local"))
    monkeypatch.setattr(nn.sync_batch_norm.sync_group, "stores", {})  # as in another program
    refused = pytest.raises(
        gp.errors.BarrierBroken, match="bn: this graph exchanges through a kvstore object of the prog"
    )
    for graph in (named, y):
        block = gluon.SymbolBlock(mx.sym.load_json(graph.tojson()), DATA)
        block.initialize(mx.init.One(), ctx=devices)
        assert np.isfinite(block(mx.nd.ones((3, 3, 4), devices[0])).asnumpy()).all()
        with contextlib.nullcontext() if graph is named else refused:
            random_step(block, devices, rng)


def test_feature_pyramids_take_the_symbol_twin(rng):
    devices = gp.devices("cpu:2")
    norm = {"norm_layer": nn.SyncBatchNorm, "norm_kwargs": {"num_devices": 2, "timeout": 60}}
    backbone = gluoncv.model_zoo.get_model("resnet18_v1b", **norm)
    block = gluoncv.nn.feature.FPNFeatureExpander(
        network=backbone, outputs=["layers1_relu3_fwd", "layers2_relu3_fwd", "layers3_relu3_fwd", "layers4_relu3_fwd"],
        num_filters=[8, 8, 8, 8], use_1x1=True, use_upsample=True, use_elewadd=True, use_p6=True, no_bias=True,
        norm_layer=nn.sync_batch_norm_symbol, norm_kwargs={"ndev": 2, "timeout": 60},
    )  # fmt: skip
    block.initialize(ctx=devices)
    with mx.autograd.record():
        outputs = [block(x) for x in on(devices, shards(rng, (1, 1), (3, 64, 64)), grad=False)]
    mx.autograd.backward([part for output in outputs for part in output])
    synced = [one.list_data() for one in block.collect_params().values() if GROUPS.of(one) is not None]
    assert len(block._cached_op.groups) == len(synced) == 20 + 9  # the pyramid's own: 4 laterals, 4 outputs, P6
    assert all((one.asnumpy() == other.asnumpy()).all() for one, other in synced)
