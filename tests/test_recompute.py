"""Recomputed blocks: outputs, gradients and running statistics are those of the same net that keeps its activations."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import run_command

import gluon_parallel as gp
import mxnet as mx
from mxnet import autograd, gluon, nd

pytestmark = pytest.mark.filterwarnings("ignore::gluon_parallel.errors.StatisticsPerDevice")
MODULE = sys.modules["gluon_parallel.nn.recompute"]
WAYS = "as it is", "MXNet's mirroring", "`gp.nn.recompute`", "the least, by the formula"
BENCHMARK = Path(__file__).resolve().parents[1] / "scripts" / "benchmarks" / "recompute.py"


class Residual(gluon.HybridBlock):
    def __init__(self, channels, dropout=0.0):
        super().__init__()
        with self.name_scope():
            self.body = gluon.nn.HybridSequential()
            for _number in range(2):
                self.body.add(gluon.nn.Conv2D(channels, 3, padding=1, in_channels=channels))
                self.body.add(gluon.nn.BatchNorm(in_channels=channels), gluon.nn.Dropout(dropout))

    def hybrid_forward(self, F, x):
        return F.Activation(x + self.body(x), act_type="relu")


class Pair(gluon.HybridBlock):
    """Nested inputs and outputs, of which one output needs no gradient and one is an input."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense = gluon.nn.Dense(3, in_units=3, flatten=False)

    def hybrid_forward(self, F, x, pair):
        first, second = pair
        return self.dense(x) * first, [F.BlockGrad(second), first]


def residual_net(rng, marks, devices, hybridize=True, dtype="float64"):
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Conv2D(4, 3, padding=1, in_channels=2), *(Residual(4) for _number in range(3)))
        net.add(gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(2, in_units=4))
    net.cast(dtype)
    net.initialize(ctx=devices)
    for name, parameter in net._collect_params_with_prefix().items():
        if "running" not in name:
            parameter.set_data(nd.array(rng.normal(size=parameter.shape) * 0.5, dtype=dtype))
    for number in marks:
        assert gp.nn.recompute(net[number]) is net[number]
    if hybridize:
        net.hybridize()
    return net


def values(net):
    return {
        name: [copy.asnumpy() for copy in one.list_data()] for name, one in net._collect_params_with_prefix().items()
    }


@pytest.fixture
def calls(monkeypatch):
    """The recomputed forward passes that were made, each by its block's number of arguments."""
    made, forward = [], MODULE._Graph.forward
    monkeypatch.setattr(MODULE._Graph, "forward", lambda graph, *rest: (made.append(graph), forward(graph, *rest))[1])
    return made


def test_random_steps_train_like_those_that_keep_their_activations(rng, calls):
    for _number in range(6):
        seed, devices = int(rng.integers(1 << 20)), gp.devices(f"cpu:{rng.integers(1, 3)}")
        marks, frozen = np.flatnonzero(rng.random(6) < 0.6).tolist() or [2], int(rng.integers(1, 4))
        options = {"accumulate": int(rng.integers(1, 3)), "clip_global_norm": rng.choice([None, 0.1])}
        dtype, sizes = str(rng.choice(["float32", "float64"])), rng.integers(1, 6, 4)
        hybridize, results = bool(rng.integers(2)), []
        for chosen in ([], marks):
            net = residual_net(np.random.default_rng(seed), chosen, devices, hybridize, dtype)
            for parameter in net[frozen].body[0].collect_params().values():
                parameter.grad_req = "null"
            trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
            step = gp.DataParallel(net, gluon.loss.L2Loss(), trainer, devices, **options)
            random = np.random.default_rng(seed)
            for size in sizes:
                x, y = random.normal(size=(size, 2, 6, 6)), random.normal(size=(size, 2))
                step(nd.array(x, dtype=dtype), nd.array(y, dtype=dtype))
            results.append(values(net))
        assert calls
        calls.clear()
        # The graphs of a net that is cut differ, and with them the order of sums in oneDNN.
        close = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {"rtol": 1e-9, "atol": 1e-11}
        for name, copies in results[0].items():
            for one, other in zip(copies, results[1][name]):
                np.testing.assert_allclose(other, one, **close, err_msg=f"{name} {marks}")


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_nested_inputs_and_outputs_have_the_same_gradients(rng, grad_req, hybridize, calls):
    results = []
    arrays = [rng.normal(size=(2, 2, 3)) for _number in range(3)]
    weight, head = rng.normal(size=(3, 3)), rng.normal(size=(2, 2, 3))
    for marked in (False, True):
        block = Pair()
        block.initialize()
        block.cast("float64")
        block.dense.weight.set_data(nd.array(weight, dtype="float64"))
        block.collect_params().setattr("grad_req", grad_req)
        if marked:
            gp.nn.recompute(block)
        if hybridize:
            block.hybridize(static_alloc=True, static_shape=True)
        x, first, second = (nd.array(array, dtype="float64") for array in arrays)
        x.attach_grad(grad_req)
        first.attach_grad(grad_req)
        for _number in range(2):
            with autograd.record():
                out, [constant, passed] = block(x, [first, second])
                loss = (out * nd.array(head, dtype="float64")).sum() + (passed * passed).sum() + constant.sum()
            loss.backward()
        results.append([loss, constant, x.grad, first.grad, block.dense.weight.grad(), block.dense.bias.grad()])
    for one, other in zip(*results):
        np.testing.assert_allclose(other.asnumpy(), one.asnumpy(), rtol=1e-12, atol=1e-13)  # float64
    assert len(calls) == 2


def test_dropout_has_the_same_mask_in_both_passes_and_another_one_each_time(rng):
    block = gp.nn.recompute(gluon.nn.Dropout(0.5))
    x = nd.array(rng.normal(size=(200,)) + 5)
    x.attach_grad()
    masks = []
    for seed in (1, 1, None):
        if seed is not None:
            mx.random.seed(seed)
        with autograd.record():
            y = block(x)
        y.backward()
        np.testing.assert_allclose(x.grad.asnumpy(), (y / x).asnumpy(), rtol=1e-6)  # float32
        masks.append(y.asnumpy() != 0)
    assert (masks[0] == masks[1]).all() and 60 < masks[0].sum() < 140 and (masks[1] != masks[2]).any()


def test_predictions_files_and_exports_know_nothing_of_it(rng, calls, tmp_path):
    nets = [residual_net(np.random.default_rng(3), marks, [mx.cpu()]) for marks in ([], [1, 2, 3])]
    x = nd.array(rng.normal(size=(2, 2, 6, 6)), dtype="float64")
    for number, net in enumerate(nets):
        with autograd.record(train_mode=False):
            net(x)
        net(x).wait_to_read()
        net.save_parameters(str(tmp_path / f"{number}.params"))
        net.export(str(tmp_path / f"net{number}"))
    assert len(calls) == 3
    assert (nets[0](x).asnumpy() == nets[1](x).asnumpy()).all() and len(calls) == 3
    assert list(nd.load(str(tmp_path / "0.params"))) == list(nd.load(str(tmp_path / "1.params")))
    graphs = [json.loads((tmp_path / f"net{number}-symbol.json").read_text("utf-8")) for number in range(2)]
    operators = [[node["op"] for node in graph["nodes"]] for graph in graphs]
    assert operators[0] == operators[1] and "Custom" not in operators[0]


def test_a_block_that_is_cast_not_yet_initialised_or_extended_is_recomputed(calls):
    block = gp.nn.recompute(gluon.nn.HybridSequential())
    block.add(gluon.nn.Dense(2))
    for dtype, wanted in (("float32", 1), ("float64", 2)):
        block[-1].initialize(mx.init.One())
        block.cast(dtype)
        with autograd.record():
            loss = block(nd.ones((1, 3), dtype=dtype)).sum()
        loss.backward()
        gradient = block[0].weight.grad().asnumpy()
        assert gradient.dtype == np.dtype(dtype) and (gradient == wanted).all()
        block.add(gluon.nn.Dense(2))
    assert len(calls) == 2


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("stopped", [False, True])
def test_small_blocks_have_the_gradients_of_what_they_pass_on_or_stop(rng, calls, dense, stopped):
    layer = gluon.nn.Dense(3, in_units=3)

    def forward(F, x, z):
        y = layer(x) if dense else x
        return F.BlockGrad(y) if stopped else y, z

    block = gluon.nn.HybridLambda(forward)
    block.dense = layer
    block.initialize(mx.init.Normal(1))
    x, z = nd.array(rng.normal(size=(4, 3))), nd.ones((4, 3))
    for array in (x, z):
        array.attach_grad()
    gradients, found = [x.grad, z.grad, layer.weight.grad()][: 2 + dense], []
    for marked in (False, True):
        for gradient in gradients:
            gradient[:] = 7
        if marked:
            gp.nn.recompute(block)
        with autograd.record():
            y, passed = block(x, z)
            loss = (x * y).sum() + (2 * passed).sum()
        loss.backward()
        found.append([gradient.asnumpy() for gradient in gradients])
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)  # float32
    assert len(calls) == 1


def test_zeros_come_back_where_the_gradient_of_the_output_is_stopped(rng, calls):
    block = gp.nn.recompute(gluon.nn.Dense(3, in_units=3))
    block.initialize(mx.init.Normal(1))
    block.weight.grad()[:] = 7
    x = nd.array(rng.normal(size=(4, 3)))
    x.attach_grad()
    with autograd.record():
        loss = (x * nd.BlockGrad(2 * block(x))).sum()
    loss.backward()
    np.testing.assert_allclose(x.grad.asnumpy(), 2 * block(x).asnumpy(), rtol=1e-5, atol=1e-6)  # float32
    assert (block.weight.grad().asnumpy() == 0).all() and calls


def test_running_statistics_that_a_forward_pass_changes_move_once(monkeypatch):
    def call(graph, arguments, states, call=MODULE._Graph.call):  # as batch norm on GPUs
        for state in states:
            state += 1
        return call(graph, arguments, states)

    monkeypatch.setattr(MODULE._Graph, "call", call)
    block, x = gp.nn.recompute(gluon.nn.BatchNorm(in_channels=3, use_global_stats=True)), nd.ones((2, 3))
    block.initialize()
    for number in (1, 2):
        with autograd.record():
            y = block(x)
        y.backward()
        mx.nd.waitall()
        assert (block.running_mean.data().asnumpy() == number).all()


def test_what_cannot_be_recomputed_is_refused():
    with pytest.raises(TypeError, match="expected a HybridBlock, got Sequential"):
        gp.nn.recompute(gluon.nn.Sequential())
    for layer, message in (
        (gp.nn.SyncBatchNorm(in_channels=2), "SyncBatchNorm layer, which would exchange statistics a second time"),
        (gluon.nn.Embedding(4, 2, sparse_grad=True), "its gradient must be dense|gradients must be dense"),
    ):
        block = gluon.nn.HybridSequential()
        block.add(layer)
        block.initialize()
        gp.nn.recompute(block)
        with autograd.record(), pytest.raises(ValueError, match=message):
            block(nd.ones((3, 2)))


def megabytes(folder, *words):
    """What the benchmark says of the memory of each way."""
    file = folder / "rows.json"
    status, output = run_command([sys.executable, str(BENCHMARK), *words, "--json", str(file)])
    assert status == 0, output
    found = {}
    for row in json.loads(file.read_text()):
        if row["unit"] == "MB":
            found |= {row["measured"]: row["values"], row["against"]: row["others"]}
    return [found.get(way, [None])[0] for way in WAYS]


@pytest.mark.slow
def test_a_recomputed_net_takes_the_memory_of_its_inputs_and_one_part(tmp_path):
    words = "--net lstm --layers 8 --hidden-size 128 --length 100 --steps 1 --batch-size 32".split()
    plain, mirror, recompute, formula = megabytes(tmp_path, *words)
    assert recompute < 0.6 * min(plain, mirror), (plain, mirror, recompute)
    assert recompute < 1.2 * formula, (recompute, formula)  # resident memory has pages of its own
