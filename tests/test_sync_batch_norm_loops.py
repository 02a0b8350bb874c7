"""SyncBatchNorm inside nets: shared heads, branches, convolutions around it, threads, smaller steps, long runs."""

import copy
import json

import numpy as np
import pytest
from batch_norm_reference import close, in_parallel, joint, normalised, on, random_step, shards, summed, threads

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import nn
from mxnet import gluon

pytestmark = pytest.mark.arithmetic

HYBRIDIZE = [None, {}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}]


class SharedHead(gluon.HybridBlock):
    """One layer called on two branches of unequal length, and on the result of one of them again."""

    def __init__(self, norm, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.long = gluon.nn.HybridSequential()
            self.long.add(
                gluon.nn.Conv2D(4, 3, padding=1, in_channels=3, use_bias=False),
                norm(in_channels=4),
                gluon.nn.Activation("softrelu"),  # without it, the head's norm would take beta away again
                gluon.nn.Conv2D(4, 1, in_channels=4, use_bias=False),
            )
            self.short = gluon.nn.Conv2D(4, 1, in_channels=3, use_bias=False)
            self.head = norm(in_channels=4)

    def hybrid_forward(self, F, x):
        long, short = self.head(self.long(x)), self.head(self.short(x))
        return F.concat(long * 2, short, self.head(F.tanh(short)), dim=1)


def convolutions(norm, like=None):
    """Convolutions with a norm behind each, which hand over oneDNN's blocked layout; with the parameters of `like`.

    (A smooth activation: at relu's corner one rounding error would decide over a whole gradient.)
    """
    net, conv = gluon.nn.HybridSequential(), gluon.nn.Conv2D
    for inputs in (3, 16):
        net.add(conv(16, 3, padding=1, in_channels=inputs, use_bias=False, params=like and like[len(net)].params))
        net.add(norm(in_channels=16, params=like and like[len(net)].params), gluon.nn.Activation("softrelu"))
    net.add(conv(3, 3, padding=1, in_channels=16, params=like and like[len(net)].params))
    return net


def twins(make, devices, hybridize=None):
    """The net with plain BatchNorm on one device, and with SyncBatchNorm on all, from the same parameters."""
    plain, synced = make(gluon.nn.BatchNorm), make(lambda **kwargs: nn.SyncBatchNorm(timeout=60, **kwargs))
    plain.initialize(mx.init.Xavier(), ctx=devices[0])
    synced.initialize(ctx=devices)
    load(synced, plain)
    if hybridize is not None:
        synced.hybridize(**hybridize)
    return plain, synced


def load(target, source):
    for new, old in zip(target.collect_params().values(), source.collect_params().values()):
        new.set_data(old.list_data()[0])


def together(arrays):
    return np.concatenate([array.asnumpy() for array in arrays])


def of_one_device(plain, device, x, heads, dtype="float32"):
    """Outputs and the input's gradient of a step of the plain net on the whole batch."""
    wholes = on([device], [np.concatenate(x).astype(dtype)])
    ys = joint(plain, wholes, on([device], [np.concatenate(heads).astype(dtype)], grad=False))
    return ys[0].asnumpy(), wholes[0].grad.asnumpy()


def parameters_agree(synced, plain, gradients=True, statistics=True):
    for ours, theirs in zip(synced.collect_params().values(), plain.collect_params().values()):
        if ours.grad_req != "null" and gradients:
            close(summed(ours), theirs.grad().asnumpy(), 1e-4, ours.name)
        elif ours.grad_req == "null" and statistics:
            for copied in ours.list_data():
                close(copied.asnumpy(), theirs.data().asnumpy(), 1e-4, ours.name)


# float32 through several convolutions; a gradient that vanishes is a sum of rounding errors.
def compare(plain, synced, devices, rng, sizes, channels, shape=(3, 8, 8), dtype="float32", **compared):
    """One step of both nets on the same batch gives the same outputs, gradients and running statistics."""
    x, heads = shards(rng, sizes, shape), shards(rng, sizes, (channels, *shape[1:]))
    y, dx = of_one_device(plain, devices[0], x, heads, dtype)
    xs = on(devices, x)
    ys = joint(synced, xs, on(devices, heads, grad=False))
    close(together(ys), y, 1e-4, "output")
    close(together(part.grad for part in xs), dx, 1e-4, "input's gradient")
    parameters_agree(synced, plain, **compared)


@pytest.mark.parametrize("hybridize", HYBRIDIZE, ids=str)
def test_a_layer_called_several_times_on_branches_of_unequal_length(rng, hybridize):
    devices = gp.devices("cpu:2")
    plain, synced = twins(SharedHead, devices, hybridize)
    for _ in range(3):  # plain BatchNorm updates running statistics in the backward pass, last call first
        compare(plain, synced, devices, rng, (3, 1), 12, statistics=False)


@pytest.mark.parametrize("hybridize", HYBRIDIZE, ids=str)
@pytest.mark.parametrize("sizes", [(4, 4), (6, 2)], ids=str)
def test_between_convolutions_whose_memory_layout_is_not_the_plain_one(rng, sizes, hybridize):
    devices = gp.devices("cpu:2")
    plain, synced = twins(convolutions, devices, hybridize)
    for _ in range(6):  # a graph of its own each time: what is freed too early is seen only now and then
        if hybridize is not None:
            synced.hybridize(**hybridize)
        load(synced, plain)
        for _ in range(2):
            compare(plain, synced, devices, rng, sizes, 3)


def volumes(norm):
    """Two norms on five axes; if the parts are hybridized on their own, one's graph has no convolution."""
    net, middle = gluon.nn.HybridSequential(), gluon.nn.HybridSequential()
    middle.add(gluon.nn.Activation("softrelu"), norm(in_channels=16))
    net.add(gluon.nn.Conv3D(16, 3, padding=1, in_channels=16, use_bias=False), middle)
    net.add(gluon.nn.Conv3D(16, 3, padding=1, in_channels=16, use_bias=False), norm(in_channels=16))
    net.add(gluon.nn.Activation("softrelu"), gluon.nn.Conv3D(3, 3, padding=1, in_channels=16))
    return net


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("hybridize", HYBRIDIZE, ids=str)
def test_between_convolutions_of_volumes(rng, hybridize, in_parts):
    devices = gp.devices("cpu:2")
    plain, synced = twins(volumes, devices)
    plain.cast("float64")  # MXNet's batch norm of what a float32 convolution of volumes returns fails
    for _ in range(4):  # as above
        for block in synced if in_parts else [synced]:
            block.hybridize(hybridize is not None, **(hybridize or {}))
        compare(plain, synced, devices, rng, (3, 1), 3, shape=(16, 4, 6, 6), dtype="float64")


@pytest.mark.parametrize("hybridize", [False, True])
def test_max_pooling_of_the_output_has_the_right_gradient(rng, hybridize):
    """It has not for arrays that MXNet takes for views of others."""
    device = mx.cpu()
    layer, gradients = nn.SyncBatchNorm(in_channels=16), []
    layer.initialize()
    layer.hybridize(hybridize)
    for copied in (False, True):
        (x,) = on([device], shards(np.random.default_rng(1), (4,), (16, 8, 8)))
        with mx.autograd.record():
            y = layer(x)
            y = mx.nd.Pooling(y.copy() if copied else y, kernel=(2, 2), stride=(2, 2))
        y.backward(y)
        gradients.append(x.grad.asnumpy())
    assert gradients[0].any()
    np.testing.assert_array_equal(*gradients)


def test_a_hybridized_net_per_thread_with_shared_parameters(rng):
    devices = gp.devices("cpu:2")
    plain, synced = twins(convolutions, devices)
    nets = [synced, convolutions(nn.SyncBatchNorm, like=synced)]
    for net in nets:
        net.hybridize()
    x, heads = shards(rng, (3, 2), (3, 8, 8)), shards(rng, (3, 2), (3, 8, 8))
    _, dx = of_one_device(plain, devices[0], x, heads)
    xs, rs = on(devices, x), on(devices, heads, grad=False)
    for net, array in zip(nets, xs):
        net(array).wait_to_read()  # graphs are built by one thread

    def run(i):
        with mx.autograd.record():
            loss = (nets[i](xs[i]) * rs[i]).sum()
        loss.backward()
        loss.wait_to_read()

    in_parallel([lambda i=i: run(i) for i in range(2)])
    close(together(x.grad for x in xs), dx, 1e-4)


def without_sizes(norm):
    """Convolutions whose parameters are made at the first call."""
    net = gluon.nn.HybridSequential()
    for _ in range(4):
        net.add(gluon.nn.Conv2D(4, 3, padding=1, use_bias=False), norm(), gluon.nn.Activation("softrelu"))
    return net


@pytest.mark.parametrize("hybridize", HYBRIDIZE[:2], ids=str)
def test_threads_that_call_a_net_for_the_first_time_at_once_make_its_parameters_once(rng, hybridize):
    devices = gp.devices("cpu:2")
    for _ in range(4):
        plain, synced = without_sizes(gluon.nn.BatchNorm), without_sizes(lambda: nn.SyncBatchNorm(timeout=60))
        plain.initialize(ctx=devices[0])
        synced.initialize(mx.init.Xavier(), ctx=devices)
        if hybridize is not None:
            synced.hybridize()
        x, heads = shards(rng, (3, 2), (3, 8, 8)), shards(rng, (3, 2), (4, 8, 8))
        xs = on(devices, x)
        threads(synced, xs, on(devices, heads, grad=False))
        plain(mx.nd.array(x[0]))
        load(plain, synced)
        close(together(x.grad for x in xs), of_one_device(plain, devices[0], x, heads)[1], 1e-4)
        parameters_agree(synced, plain, statistics=False)


@pytest.mark.parametrize("hybridize", HYBRIDIZE[:3], ids=str)
def test_two_forward_passes_before_two_backward_passes_over_one_graph(rng, hybridize):
    devices = gp.devices("cpu:2")
    plain, synced = twins(convolutions, devices, hybridize)
    batches = [(shards(rng, sizes, (3, 8, 8)), shards(rng, sizes, (3, 8, 8))) for sizes in ((3, 2), (1, 2))]

    def run(net, devices, batches):
        arrays = [(on(devices, x), on(devices, heads, grad=False)) for x, heads in batches]
        with mx.autograd.record():
            losses = [(net(a) * r).sum() for xs, heads in arrays for a, r in zip(xs, heads)]
        for retain in (True, False):
            mx.autograd.backward(losses, retain_graph=retain)
            yield together(a.grad for xs, _ in arrays for a in xs)
            for array in (a for xs, _ in arrays for a in xs):
                array.grad[:] = 0

    whole = [([np.concatenate(x)], [np.concatenate(heads)]) for x, heads in batches]
    for found, wanted in zip(run(synced, devices, batches), run(plain, devices[:1], whole)):
        close(found, wanted, 1e-4)


def test_more_devices_than_worker_threads(rng):
    devices = gp.devices("cpu:40")  # MXNet has one to four workers per CPU device, and far fewer cores
    net = nn.SyncBatchNorm(in_channels=2, timeout=60)
    net.initialize(ctx=devices)
    normalised(random_step(net, devices, rng, [1] * 40, (2, 3)), 1e-6)


def test_files_of_parameters_go_both_ways_and_an_exported_net_has_plain_batch_norm(rng, tmp_path):
    devices = gp.devices("cpu:2")
    plain, synced = twins(convolutions, devices, {})
    compare(plain, synced, devices, rng, (3, 2), 3)
    for source, target in ((plain, synced), (synced, plain)):
        source.save_parameters(str(tmp_path / "net.params"))
        target.load_parameters(str(tmp_path / "net.params"), ctx=devices if target is synced else devices[0])
    names = [list(kind(prefix="bn_").collect_params()) for kind in (nn.SyncBatchNorm, gluon.nn.BatchNorm)]
    assert names[0] == names[1]
    (x,) = on(devices, shards(rng, (3,), (3, 8, 8)))
    expected = synced(x).asnumpy()
    synced.export(str(tmp_path / "net"))
    graph = mx.sym.load(str(tmp_path / "net-symbol.json"))
    operators = {node["op"] for node in json.loads(graph.tojson())["nodes"]}
    assert operators == {"null", "Convolution", "BatchNorm", "Activation"}
    executor = graph.simple_bind(devices[0], grad_req="null", data=x.shape)
    saved = mx.nd.load(str(tmp_path / "net-0000.params"))
    arguments, states = ({key[4:]: saved[key] for key in saved if key.startswith(kind)} for kind in ("arg:", "aux:"))
    executor.copy_params_from(arguments, states)
    close(executor.forward(is_train=False, data=x)[0].asnumpy(), expected, 1e-5)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(synced[1].sync_group)


@pytest.mark.filterwarnings("ignore:Cannot decide type")  # of the imported net's input, which MXNet does not need
def test_an_imported_net_has_nothing_to_do_with_the_one_it_was_exported_from(rng, tmp_path):
    devices = gp.devices("cpu:2")
    plain, synced = twins(convolutions, devices[:1], {})
    x, heads = shards(rng, (3, 2), (3, 8, 8)), shards(rng, (3, 2), (3, 8, 8))
    synced(mx.nd.array(x[0]))
    synced.export(str(tmp_path / "net"))
    imported = gluon.SymbolBlock.imports(
        str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params"), ctx=devices
    )
    ys = joint(imported, on(devices, x), on(devices, heads, grad=False))
    compare(plain, synced, devices[:1], rng, (4,), 3)
    for number, y in enumerate(ys):  # by the statistics of each device, while the other net lives
        wanted = joint(plain, on(devices[:1], x[number : number + 1]), on(devices[:1], heads[number : number + 1]))
        close(y.asnumpy(), wanted[0].asnumpy(), 1e-4)
