"""A net that is converted for CPUs trains to the same numbers as the original one, and its files are the original's."""

import itertools
import warnings

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.nn.cpu_graph import rewrite
from gluon_parallel.nn.for_cpu import is_faster_on
from mxnet import gluon, nd

nn = gluon.nn
MODES = [None, {}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}]
RELU6, LAYOUTS, POOLING = "ReLU6 behind a batch norm", "batch norm between two layouts", "global average pooling"
FILLED = "pooling of channels that fill no blocks"


class ReLU6(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.clip(x, 0, 6, name="fwd")


def make(devices=None, dtype="float32", deferred=False, **batch_norm):
    """A net with each pattern: 12 channels fill no blocks, 24 are stored in blocks of 8, 48 in blocks of 16."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(12, 3, padding=1), nn.AvgPool2D(3, 1, 1))
        net.add(nn.Conv2D(24, 3, padding=1, use_bias=False), nn.BatchNorm(**batch_norm), ReLU6())
        net.add(nn.Conv2D(48, 1, use_bias=False), nn.BatchNorm(**batch_norm), nn.Activation("relu"))
        net.add(nn.Conv2D(48, 3, padding=1, groups=48, use_bias=False), nn.BatchNorm(**batch_norm), ReLU6())
        net.add(nn.GlobalAvgPool2D(), nn.Dense(5))
    devices = devices or [mx.cpu()]
    mx.random.seed(3)
    net.initialize(mx.init.Xavier(), ctx=devices)
    if dtype != "float32":
        net.cast(dtype)
    if not deferred:
        net(nd.zeros((1, 3, 8, 8), devices[0], dtype))  # with the seed of above
    return net


def train(net, shards, steps=3, train_mode=True):
    """Outputs and input gradients of each step, then all gradients and parameters, as NumPy."""
    devices = [x.context for x, _ in shards]
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    seen = []
    for _ in range(steps):
        for x, _head in shards:
            x.attach_grad()
        with mx.autograd.record(train_mode):
            outputs = [net(x) for x, _ in shards]
        mx.autograd.backward(outputs, [head for _, head in shards], train_mode=train_mode)
        seen += [y.asnumpy() for y in outputs] + [x.grad.asnumpy() for x, _ in shards]
        trainer.step(sum(len(x) for x, _ in shards))
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            seen += [parameter.grad(device).asnumpy() for device in devices]
        seen += [parameter.data(device).asnumpy() for device in devices]
    return seen


def shards_for(rng, sizes=(4,), shape=(3, 8, 8), outputs=5, dtype="float32"):
    def array(shape, device):
        return nd.array(rng.normal(size=shape), device, dtype)

    return [
        (array((size, *shape), mx.cpu(number)), array((size, outputs), mx.cpu(number)))
        for number, size in enumerate(sizes)
    ]


def assert_same(got, wanted, dtype="float32"):
    assert len(got) == len(wanted)
    # Sums in another order: rounding, which the batch norms divide by small deviations.
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if dtype == "float64" else {"rtol": 2e-3, "atol": 2e-4}
    for ours, theirs in zip(got, wanted):
        np.testing.assert_allclose(ours, theirs, **tolerance)


def operators(net, x, hybridize=True):
    """Names of the nodes that MXNet runs for one call."""
    names = []
    if hybridize:  # anew: hooks do not work with static_alloc
        net.hybridize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "register_op_hook is experimental")
        net.register_op_hook(lambda name, *_: names.append(name if isinstance(name, str) else name.decode()))
        net(x).wait_to_read()
    return names


SETTINGS = [{"use_global_stats": True}, {"scale": False}, {"center": False}, {"epsilon": 1e-2, "momentum": 0.5}, None]


@pytest.mark.parametrize(
    ("sizes", "mode", "dtype", "settings"),
    [*itertools.product([(4,), (3, 1)], MODES, ["float32", "float64"], [{}]),
     *itertools.product([(4,)], [{}], ["float32"], SETTINGS)],  # None: not in training mode
    ids=str,
)  # fmt: skip
def test_training_and_prediction_are_those_of_the_original_net(rng, sizes, mode, dtype, settings):
    shards = shards_for(rng, sizes, dtype=dtype)
    devices = [x.context for x, _ in shards]
    plain, fast = (make(devices, dtype, **(settings or {})) for _ in range(2))
    gp.nn.convert_for_cpu(fast)
    if mode is not None:
        plain.hybridize(**mode)
        fast.hybridize(**mode)
    assert_same(*(train(net, shards, train_mode=settings is not None) for net in (fast, plain)), dtype)
    np.testing.assert_allclose(fast(shards[0][0]).asnumpy(), plain(shards[0][0]).asnumpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beta", [0.0, 6.0, -0.0])
def test_the_gradient_at_the_bounds_of_relu6_is_that_of_clip(beta):
    gradients = []
    for convert in (lambda net: net, gp.nn.convert_for_cpu):
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(nn.BatchNorm(in_channels=2, gamma_initializer="zeros", beta_initializer=mx.init.Constant(beta)))
            net.add(ReLU6())
        convert(net).initialize()
        net.hybridize()
        with mx.autograd.record():
            y = net(nd.arange(16).reshape((2, 2, 2, 2)))
        y.backward()
        gradients.append(net[0].beta.grad().asnumpy())
    assert gradients[0].tolist() == gradients[1].tolist() == [8.0, 8.0]


def test_every_pattern_is_found_and_runs_only_in_the_converted_net(rng):
    (x, _head), plain, fast = shards_for(rng)[0], make(), gp.nn.convert_for_cpu(make())
    assert gp.nn.would_convert(plain) == {}  # it has not run yet
    for net in (plain, fast):
        net.hybridize()
        net(x)
    assert gp.nn.would_convert(plain) == {RELU6: 2, LAYOUTS: 1, POOLING: 1, FILLED: 1}
    assert gp.nn.would_convert(fast) == {}
    names = operators(fast, x)
    for name in ("relu60_fwd_low", "batchnorm1_fwd_plain", "pool1_fwd_rows", "conv0_weight_filled"):
        assert any(name in other for other in names), names
        assert not any(name in other for other in operators(plain, x))


def test_a_graph_without_such_patterns_stays_the_same_object():
    x = mx.sym.Convolution(mx.sym.var("x"), mx.sym.var("w"), kernel=(3, 3), num_filter=24, no_bias=True)
    graph = mx.sym.Activation(mx.sym.BatchNorm(mx.sym.clip(x, 0, 6)), act_type="relu")
    graph = mx.sym.Pooling(graph, global_pool=True, kernel=(1, 1), pool_type="max")
    found, replaced = rewrite(graph, {"w": (24, 3, 3, 3)})
    assert found is graph and replaced == {}


@pytest.mark.parametrize(
    ("first", "second", "groups", "found"),
    [
        ((24, 16, 1, 1), (16, 24, 1, 1), 1, False),  # blocks of 8 on both sides
        ((32, 16, 1, 1), (24, 32, 1, 1), 1, True),  # 16 and 8
        ((32, 16, 1, 1), (48, 32, 3, 3), 1, False),  # 16 and 16
        ((48, 24, 1, 1), (48, 1, 3, 3), 48, True),  # 8, and 16 for all 48 channels
        ((24, 3, 3, 3), (40, 24, 1, 1), 1, False),  # 8 and 8: the images are not in blocks
        ((32, 16, 1, 1), (32, 4, 3, 3), 8, True),  # 16, and 4 for each group
        ((12, 16, 1, 1), (12, 12, 1, 1), 1, False),  # not in blocks
    ],
)
def test_a_batch_norm_is_found_where_its_convolutions_take_other_blocks(first, second, groups, found):
    x = mx.sym.Convolution(mx.sym.var("x"), mx.sym.var("first"), kernel=first[2:], num_filter=first[0], no_bias=True)
    x = mx.sym.Activation(mx.sym.BatchNorm(x), act_type="relu")
    x = mx.sym.Convolution(
        x, mx.sym.var("second"), kernel=second[2:], num_filter=second[0], num_group=groups, no_bias=True
    )
    assert rewrite(x, {"first": first, "second": second})[1] == ({LAYOUTS: 1} if found else {})


@pytest.mark.filterwarnings("ignore:(?s).*Cannot decide type for the following arguments")  # any SymbolBlock
def test_files_are_those_of_the_original_net_and_nets_that_have_run_or_are_imported_are_converted(rng, tmp_path):
    x, nets = shards_for(rng)[0][0], {"plain": make(), "fast": gp.nn.convert_for_cpu(make())}
    for name, net in nets.items():
        net.hybridize()
        net(x)
        net.export(str(tmp_path / name))
    graphs = [(tmp_path / f"{name}-symbol.json").read_text() for name in nets]
    assert graphs[0] == graphs[1]
    saved = [nd.load(str(tmp_path / f"{name}-0000.params")) for name in nets]
    assert saved[0].keys() == saved[1].keys()
    for source, target in (("plain", "fast"), ("fast", "plain")):  # parameters go from one to the other
        train(nets[source], shards_for(rng))
        nets[source].save_parameters(str(tmp_path / "net.params"))
        nets[target].load_parameters(str(tmp_path / "net.params"))
        np.testing.assert_allclose(nets[target](x).asnumpy(), nets[source](x).asnumpy(), rtol=1e-4, atol=1e-5)
    nets["plain"].export(str(tmp_path / "net"))
    files = str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
    wanted = nets["plain"](x).asnumpy()
    for block in (nets["plain"], gluon.SymbolBlock.imports(*files)):
        block(x)
        gp.nn.convert_for_cpu(block)
        np.testing.assert_allclose(block(x).asnumpy(), wanted, rtol=1e-4, atol=1e-5)
        assert any("relu60_fwd_low" in name for name in operators(block, x, hybridize=False))


def test_a_hybridized_block_around_a_converted_net_runs_it_converted_with_shapes_of_its_first_input(rng):
    x, outer = shards_for(rng)[0][0], nn.HybridSequential()
    outer.add(gp.nn.convert_for_cpu(make(deferred=True)), nn.Dense(2))
    outer[1].initialize()
    outer.hybridize()
    outer(x)
    names = operators(outer, x, hybridize=False)
    assert all(any(part in name for name in names) for part in ("relu60_fwd_low", "batchnorm1_fwd_plain"))


@pytest.mark.parametrize("first", ["sync", "cpu"])
def test_synchronised_batch_norms_stay_synchronised(rng, first):
    shards = shards_for(rng, (3, 1))
    devices = [x.context for x, _ in shards]

    def synchronised(net):
        return gp.nn.convert_sync_batchnorm(net, timeout=60)

    wanted = synchronised(make(devices))
    converted = make(devices)
    for convert in (synchronised, gp.nn.convert_for_cpu) if first == "sync" else (gp.nn.convert_for_cpu, synchronised):
        convert(converted)
    for net in (wanted, converted):
        net.hybridize(static_alloc=True)
    assert_same(train(converted, shards), train(wanted, shards))
    names = operators(converted, shards[0][0])
    assert any("relu60_fwd_low" in name for name in names) and any(name.endswith("sync_output") for name in names)


def test_half_precision_and_gpus_run_the_original_graph(rng):
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(in_channels=3), ReLU6())
    net.initialize()
    net.cast("float16")
    gp.nn.convert_for_cpu(net).hybridize()
    x = nd.array(rng.normal(size=(2, 3, 4, 4)), dtype="float16")
    assert not any("low" in name for name in operators(net, x))

    class OnGPU:
        context, dtype = mx.gpu(0), np.float32

    assert not is_faster_on(OnGPU()) and is_faster_on(nd.zeros(1)) and not is_faster_on(x)


GLUONCV = "mobilenetv3_small", "cifar_resnet20_v1", "se_resnet18_v1"
NETS = "mobilenetv2_0.25", "mobilenet0.25", "resnet18_v1", "resnet18_v2", *GLUONCV
LARGE = "resnet18_v2", "se_resnet18_v1"


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in NETS])
def test_nets_of_the_model_zoos_train_the_same(rng, tmp_path, name):
    """One step in double precision: rounding in single precision would grow through so many batch norms."""
    zoo = pytest.importorskip("gluoncv").model_zoo if name in GLUONCV else gluon.model_zoo.vision
    shards, seen = shards_for(rng, shape=(3, 32, 32), outputs=10, dtype="float64"), []
    plain, fast = (zoo.get_model(name, classes=10) for _ in range(2))
    plain.initialize(mx.init.Xavier())
    plain(nd.zeros((1, 3, 32, 32)))
    plain.save_parameters(str(tmp_path / "net.params"))
    gp.nn.convert_for_cpu(fast).load_parameters(str(tmp_path / "net.params"))
    for net in (plain, fast):
        net.cast("float64")
        net.hybridize()
        mx.random.seed(4)  # for Dropout
        seen.append(train(net, shards, steps=1))
    assert_same(seen[1], seen[0], "float64")


def trained(rng, net, steps=3, **options):
    """The net after steps of DataParallel."""
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    step = gp.DataParallel(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, **options)
    for _ in range(steps):
        step(nd.array(rng.normal(size=(4, 3, 8, 8))), nd.array([0, 1, 2, 3]))
    return net


def runs_faster_graph(rng, net):
    return any("relu60_fwd_low" in name for name in operators(net, shards_for(rng)[0][0]))


@pytest.mark.filterwarnings("ignore::gluon_parallel.errors.StatisticsPerDevice")
@pytest.mark.parametrize("num_devices", [1, 2])
def test_data_parallel_converts_hybridized_nets_from_the_first_step_on_and_says_so_once(seed, num_devices, caplog):
    nets = [make(gp.devices(f"cpu:{num_devices}")) for _ in range(2)]
    for net, converts in zip(nets, (True, False)):
        net.hybridize()
        trained(np.random.default_rng(seed), net, convert_for_cpu=converts)
        assert caplog.text.count("faster on CPUs") == converts
        caplog.clear()
        assert runs_faster_graph(np.random.default_rng(seed), net) == converts
    assert_same(*([p.data(mx.cpu()).asnumpy() for p in net.collect_params().values()] for net in nets))


@pytest.mark.parametrize("why", ["variable", "not hybridized", "nothing to replace", "converted before"])
def test_nothing_is_said_where_data_parallel_converts_nothing(rng, caplog, monkeypatch, why):
    net = make()
    if why == "variable":
        monkeypatch.setenv("GLUON_PARALLEL_CONVERT_FOR_CPU", "0")
    if why == "nothing to replace":
        net = nn.HybridSequential()
        net.add(nn.Conv2D(4, 3), nn.Activation("relu"), nn.Dense(5))
        net.initialize()
    if why == "converted before":
        gp.nn.convert_for_cpu(net)
    if why != "not hybridized":
        net.hybridize()
    trained(rng, net)
    assert "CPU" not in caplog.text
    if why in ("variable", "not hybridized"):
        assert not runs_faster_graph(rng, net)
