"""SyncBatchNorm on several devices against float64 NumPy on the whole batch: the contract, as a table."""

import itertools

import numpy as np
import pytest
from batch_norm_reference import by_operators, close, hybridized, joint, on, one_by_one, reference, shards, summed
from batch_norm_waiting import wait_for

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import native, nn
from gluon_parallel.nn.sync_batch_norm.operator import _states

pytestmark = pytest.mark.arithmetic

LOOPS = {"joint backward": joint, "backward per device": one_by_one}
HYBRIDIZE = {
    "imperative": None,
    "alone": {"alone": True},
    "hybridized": {},
    "static_alloc": {"static_alloc": True},
    "static_shape": {"static_alloc": True, "static_shape": True},
}
SIZES = [(5,), (4, 4), (6, 2), (1, 7), (5, 3, 1)]
# Relative to the largest value; the arithmetic around float64 sums is the input's own: 2**-24, and 2**-11 for float16.
TOLERANCE = {"float64": 1e-12, "float32": 3e-6, "float16": 3e-3}
ARITHMETIC = "memory", "operators"  # (float16 is computed with operators in any case)
PROCESSORS = "baseline", "avx2", "avx512"  # on memory, each has kernels of its own
EVERY_KERNEL = [*ARITHMETIC, *PROCESSORS[: native.function("gp_best_processor", 0)()]]


@pytest.fixture
def arithmetic(request, monkeypatch):
    """How the layers of a test compute, also by the kernels for another processor."""
    if request.param in PROCESSORS:
        monkeypatch.setenv("GLUON_PARALLEL_PROCESSOR", request.param)
    return request.param if request.param in ARITHMETIC else "memory"


def layer(devices, rng, channels, arithmetic="memory", dtype="float32", hybridize=None, **kwargs):
    """An initialised layer with random gamma and beta."""
    net = nn.SyncBatchNorm(in_channels=channels, **{"timeout": 60, **kwargs})
    if arithmetic == "operators":
        by_operators(net)
    net.initialize(ctx=devices)
    net.cast(dtype)
    net.gamma.set_data(mx.nd.array(rng.uniform(0.5, 1.5, channels)))
    net.beta.set_data(mx.nd.array(rng.normal(size=channels)))
    return net if hybridize is None else hybridized(net, **hybridize)


def check(net, loop, devices, rng, sizes, shape, dtype="float32", offset=0.0, axis=1, steps=2, slack=1, **scale):
    """Run `steps` steps and compare everything with the reference."""
    rtol = slack * TOLERANCE[dtype] + (2e-15 * offset if dtype == "float64" else 0)  # the mean has its own last digit
    statistics = np.float32 if dtype == "float16" else np.dtype(dtype).type
    running = [net.running_mean.data(devices[0]).asnumpy().astype(np.float64),
               net.running_var.data(devices[0]).asnumpy().astype(np.float64)]  # fmt: skip
    momentum = net._kwargs["momentum"]
    gamma, beta = (p.data(devices[0]).asnumpy() for p in (net.gamma, net.beta))
    gamma = np.ones_like(gamma) if net._kwargs["fix_gamma"] else gamma
    # The sums are of numbers of either sign. What is left may be near 0, while the partial sums, which MXNet's gradient
    # of BatchNorm rounds to float32 one after the other, are as large as the root of how many are added.
    num_added = sum(sizes) * np.prod(shape) / len(gamma)
    floor = np.sqrt(num_added) if net.sync_group.by_operators and dtype == "float32" else 1.0
    for _ in range(steps):
        x = shards(rng, sizes, shape, dtype, offset, **scale)
        heads = shards(rng, sizes, shape, dtype)
        xs, ys = on(devices, x), None
        ys = loop(net, xs, on(devices, heads, grad=False))
        y, dx, dgamma, dbeta, mean, variance = reference(x, heads, gamma, beta, axis, net._kwargs["eps"])
        close(np.concatenate([a.asnumpy() for a in ys]), np.concatenate(y), rtol, "output")
        close(np.concatenate([a.grad.asnumpy() for a in xs]), np.concatenate(dx), rtol, "input's gradient")
        if net.gamma.grad_req != "null":
            close(summed(net.gamma), dgamma, rtol, "gamma's gradient", floor=floor)
        if net.beta.grad_req != "null":
            close(summed(net.beta), dbeta, rtol, "beta's gradient", floor=floor)
        running = [momentum * old + (1 - momentum) * new for old, new in zip(running, (mean, variance))]
        for parameter, expected in zip((net.running_mean, net.running_var), running):
            copies = [parameter.data(device).asnumpy() for device in devices]
            assert copies[0].dtype == statistics
            close(copies[0], expected, 3e-6, parameter.name)
            assert all((copy == copies[0]).all() for copy in copies), f"{parameter.name} differs between devices"


@pytest.mark.parametrize(("loop", "hybridize"), list(itertools.product(LOOPS, HYBRIDIZE)))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_shards_of_any_size_are_normalised_as_one_batch(rng, sizes, loop, hybridize):
    devices = gp.devices(f"cpu:{len(sizes)}")
    net = layer(devices, rng, 3, hybridize=HYBRIDIZE[hybridize])
    check(net, LOOPS[loop], devices, rng, sizes, (3, 4, 5))


@pytest.mark.parametrize("arithmetic", EVERY_KERNEL, indirect=True)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((3,), 1), ((3,), -1), ((3, 7), 1), ((7, 3), 2), ((3, 4, 5), 1), ((4, 5, 3), 3), ((4, 3, 5), 2), ((3, 2, 4, 5), 1),
     ((2, 4, 5, 3), -1)],
    ids=str,
)  # fmt: skip
def test_any_layout_of_2_to_5_dimensions_in_every_precision(rng, shape, axis, dtype, arithmetic):
    devices = gp.devices("cpu:2")
    for hybridize in (None, {}):
        net = layer(devices, rng, 3, arithmetic, dtype, hybridize, axis=axis)
        check(net, joint, devices, rng, (6, 2), shape, dtype, axis=axis)


LONG = {"scale": 30.0, "slack": 40}  # many roundings: of 81,009 values in pieces, or by MXNet's gradient one by one


@pytest.mark.parametrize("arithmetic", EVERY_KERNEL, indirect=True)
@pytest.mark.parametrize(
    ("sizes", "shape", "options", "batch"),
    [
        *[
            ((6, 2), shape, {}, {"dtype": dtype, "offset": offset})  # a large mean costs no digit of the variance
            for shape in ((3, 4, 5), (3,))
            for dtype, offset in (("float32", 1e3), ("float32", 1e6), ("float64", 1e6), ("float16", 100))
        ],
        ((5, 3, 1), (2, 9001), {}, LONG),  # long rows are summed in pieces that combine
        ((1, 5, 3), (9001, 2), {"axis": 2}, {**LONG, "axis": 2}),
        ((3, 2), (3, 4), {"momentum": 0.5, "epsilon": 0.1, "scale": False, "center": False}, {}),
        *[((6, 2), (3, 4), {"kvstore": store}, {"offset": 1e3}) for store in ("local", "device")],  # of one process
    ],
    ids=str,
)
def test_values_of_every_kind_and_settings_of_every_kind_are_those_of_one_batch(
    rng, sizes, shape, options, batch, arithmetic
):
    devices = gp.devices(f"cpu:{len(sizes)}")
    channels = shape[options.get("axis", 1) - 1]
    for hybridize in (None, {"static_alloc": True}):
        net = layer(devices, rng, channels, arithmetic, batch.get("dtype", "float32"), hybridize, **options)
        check(net, joint, devices, rng, sizes, shape, **batch)
        assert (net.gamma.grad_req == net.beta.grad_req == "null") == ("scale" in options)


@pytest.mark.parametrize("arithmetic", EVERY_KERNEL, indirect=True)
def test_a_constant_channel_becomes_beta_and_only_its_scale_has_no_gradient(rng, arithmetic):
    devices = gp.devices("cpu:2")
    net = layer(devices, rng, 3, arithmetic)
    x, heads = [np.full((size, 3, 2), 1e6 + 0.1, np.float32) for size in (6, 2)], shards(rng, (6, 2), (3, 2))
    xs = on(devices, x)
    for y in joint(net, xs, on(devices, heads, grad=False)):
        assert (y.asnumpy() == net.beta.data(y.context).asnumpy()[:, None]).all()
    gamma, beta = (p.data(devices[0]).asnumpy() for p in (net.gamma, net.beta))
    _, dx, _, dbeta, _, _ = reference(x, heads, gamma, beta)
    close(np.concatenate([a.grad.asnumpy() for a in xs]), np.concatenate(dx), 3e-6, "input's gradient")
    close(summed(net.beta), dbeta, 3e-6, "beta's gradient")
    assert (summed(net.gamma) == 0).all()


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@pytest.mark.parametrize("arithmetic", EVERY_KERNEL, indirect=True)
@pytest.mark.parametrize("request_", ["add", "null"])
def test_gradients_add_up_or_are_left_out_where_asked_to(rng, request_, hybridize, arithmetic):
    devices = gp.devices("cpu:2")
    net = layer(devices, rng, 3, arithmetic, hybridize=HYBRIDIZE[hybridize])
    net.collect_params().setattr("grad_req", "add")
    x, heads = shards(rng, (3, 2)), shards(rng, (3, 2))
    xs = on(devices, x, grad=False)
    for array in xs if request_ == "add" else ():
        array.attach_grad(grad_req="add")
    net.gamma.grad_req = request_
    for _ in range(3):
        ys = joint(net, xs, on(devices, heads, grad=False))
    gamma, beta = (p.data(devices[0]).asnumpy() for p in (net.gamma, net.beta))
    y, dx, dgamma, dbeta, _, _ = reference(x, heads, gamma, beta)
    close(np.concatenate([a.asnumpy() for a in ys]), np.concatenate(y), 3e-6)
    close(summed(net.beta), 3 * dbeta, 3e-6)
    if request_ == "add":
        close(np.concatenate([a.grad.asnumpy() for a in xs]), 3 * np.concatenate(dx), 3e-6)
        close(summed(net.gamma), 3 * dgamma, 3e-6)


def constants(net, x, heads, device):
    """Output and gradients with the running statistics as constants, in float64."""
    gamma, beta, mean, variance = (
        parameter.data(device).asnumpy().astype(np.float64)[:, None, None]
        for parameter in (net.gamma, net.beta, net.running_mean, net.running_var)
    )
    rstd = 1 / np.sqrt(variance + net._kwargs["eps"])
    return (x - mean) * rstd * gamma + beta, heads * gamma * rstd, (heads * (x - mean) * rstd).sum(axis=(0, 2, 3))


STOPS = {
    "BlockGrad": mx.nd.BlockGrad, "ones_like": mx.nd.ones_like, "round": mx.nd.round, "comparison": lambda y: y > 0,
    "argmax": lambda y: y.argmax(axis=1).expand_dims(1),
    "BlockGrad, further on": lambda y: mx.nd.BlockGrad(2 * y.transpose()).transpose(),
}  # fmt: skip


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("hybridize", ["imperative", "alone", "hybridized"])
def test_zeros_come_back_where_a_gradient_is_stopped_on_one_device_or_on_all(rng, hybridize, stop):
    devices = gp.devices("cpu:2")
    net = layer(devices, rng, 3, hybridize=HYBRIDIZE[hybridize])
    net.beta.grad_req = "add"
    gamma, beta = (parameter.data(devices[0]).asnumpy() for parameter in (net.gamma, net.beta))
    for stopped, loop in itertools.product((devices, devices[:1]), LOOPS.values()):
        x, heads = shards(rng, (4, 3), (3,)), shards(rng, (4, 3), (3,))
        xs = on(devices, x)
        before = summed(net.beta)
        loop(lambda a: STOPS[stop](net(a)) if a.ctx in stopped else net(a), xs, on(devices, heads, grad=False))
        come = [0 * head if device in stopped else head for head, device in zip(heads, devices)]
        _, dx, dgamma, dbeta, _, _ = reference(x, come, gamma, beta)
        vanishes = len(stopped) == 2
        close(np.concatenate([a.grad.asnumpy() for a in xs]), np.concatenate(dx), 3e-6, vanishes=vanishes)
        close(summed(net.gamma), dgamma, 3e-6, vanishes=vanishes)
        close(summed(net.beta) - before, dbeta, 3e-6, vanishes=vanishes)


@pytest.mark.parametrize("arithmetic", ARITHMETIC, indirect=True)
@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@pytest.mark.parametrize(
    ("mode", "dtype", "request_", "frozen"),
    [
        ("evaluation", "float32", "write", False),
        *[("use_global_stats", dtype, request, frozen) for dtype in ("float32", "float16")
          for request in ("write", "add") for frozen in (False, True)],
    ],
)  # fmt: skip
def test_constant_statistics_need_one_device_only_and_have_a_gradient(
    rng, mode, dtype, request_, frozen, hybridize, arithmetic
):
    devices, training = gp.devices("cpu:2"), mode == "use_global_stats"
    net = layer(devices, rng, 3, arithmetic, dtype, HYBRIDIZE[hybridize], use_global_stats=training)
    net.running_mean.set_data(mx.nd.array(rng.normal(size=3)))
    net.running_var.set_data(mx.nd.array(rng.uniform(0.5, 2, 3)))
    if frozen:
        net.collect_params().setattr("grad_req", "null")
    (x,), (heads,) = shards(rng, (3,), dtype=dtype), shards(rng, (3,), dtype=dtype)
    y, dx, dgamma = constants(net, x, heads, devices[0])
    (array,) = on(devices, [x], grad=False)
    array.attach_grad(grad_req=request_)
    for _ in range(2):
        with mx.autograd.record(train_mode=training):
            output = net(array)
            loss = (output * mx.nd.array(heads, ctx=devices[0], dtype=dtype)).sum()
        loss.backward(train_mode=training)
    tolerance = TOLERANCE[dtype]
    close(output.asnumpy(), y, tolerance)
    close(array.grad.asnumpy(), dx * (2 if request_ == "add" else 1), tolerance)
    if not frozen:
        close(net.gamma.grad(devices[0]).asnumpy(), dgamma, tolerance)
    close(net(array).asnumpy(), y, tolerance)  # and outside of record


def test_running_statistics_change_in_the_forward_pass_of_training_only(rng):
    devices = gp.devices("cpu:2")
    net = layer(devices, rng, 3)
    before = net.running_mean.data(devices[0]).asnumpy()
    xs = on(devices, shards(rng, (3, 2)))
    for x in xs:
        net(x).wait_to_read()
    assert (net.running_mean.data(devices[0]).asnumpy() == before).all()
    with mx.autograd.record():
        losses = [net(x).sum() for x in xs]
    mx.nd.waitall()
    after = net.running_mean.data(devices[0]).asnumpy()
    assert (after != before).all()
    mx.autograd.backward(losses)
    mx.nd.waitall()
    assert (net.running_mean.data(devices[0]).asnumpy() == after).all()


@pytest.mark.parametrize("hybridize", [False, True])
def test_running_statistics_move_in_the_order_of_the_forward_passes_also_before_one_backward_pass(rng, hybridize):
    devices, batches = gp.devices("cpu:2"), [shards(rng, (4, 1)), [1 + 2 * x for x in shards(rng, (2, 3))]]
    net = layer(devices, rng, 3)
    net.hybridize(hybridize)
    mean, variance = (one.data(devices[0]).asnumpy().astype(float) for one in (net.running_mean, net.running_var))
    with mx.autograd.record():
        losses = [(net(x) ** 2).sum() for batch in batches for x in on(devices, batch)]
    mx.autograd.backward(losses)
    for batch in map(np.concatenate, batches):
        mean, variance = (
            0.9 * before + 0.1 * of_batch
            for before, of_batch in ((mean, batch.mean(axis=(0, 2, 3))), (variance, batch.var(axis=(0, 2, 3))))
        )
    for device in devices:
        close(net.running_mean.data(device).asnumpy(), mean, 1e-5)
        close(net.running_var.data(device).asnumpy(), variance, 1e-5)


def test_an_empty_array_is_refused_with_what_to_do_instead(rng):
    devices = gp.devices("cpu:2")
    net = layer(devices, rng, 3)
    with mx.util.np_shape(True):
        empty = mx.nd.zeros((0, 3, 4), ctx=devices[1])
        with pytest.raises(gp.errors.BatchMismatch, match=r"no samples.*participants"), mx.autograd.record():
            net(empty)


@pytest.mark.parametrize("arithmetic", EVERY_KERNEL, indirect=True)
@pytest.mark.parametrize("shape", [(3,), (3, 33)], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_channel(rng, shape, value, arithmetic):
    devices = gp.devices("cpu:2")
    x, heads, found = shards(rng, (5, 4), shape), shards(rng, (5, 4), shape), []
    for _ in range(2):
        net = layer(devices, np.random.default_rng(1), 3, arithmetic)
        xs = on(devices, x)
        ys = joint(net, xs, on(devices, heads, grad=False))
        found.append([np.concatenate([a.asnumpy() for a in arrays]) for arrays in (ys, [a.grad for a in xs])])
        x[0][3, 2] = value
    for before, after in zip(*found):
        np.testing.assert_array_equal(after[:, :2], before[:, :2])
        assert not np.isfinite(after[:, 2]).all()


def test_inputs_of_different_spatial_size_are_weighted_by_their_values(rng):
    devices = gp.devices("cpu:2")
    net = layer(devices, rng, 3)
    x = [shards(rng, (2,), (3, 4, 4))[0], shards(rng, (3,), (3, 2, 6))[0]]
    heads = [rng.normal(size=part.shape).astype("float32") for part in x]
    xs = on(devices, x)
    ys = joint(net, xs, on(devices, heads, grad=False))
    gamma, beta = (p.data(devices[0]).asnumpy() for p in (net.gamma, net.beta))
    # channels last, everything else in one long axis: there the shards can be put together
    flat = [[part.transpose(0, 2, 3, 1).reshape(-1, 3) for part in parts] for parts in (x, heads)]
    y, dx, dgamma, dbeta, _, _ = reference(*flat, gamma, beta)
    for i in range(2):
        close(ys[i].asnumpy().transpose(0, 2, 3, 1).reshape(-1, 3), y[i], 3e-6)
        close(xs[i].grad.asnumpy().transpose(0, 2, 3, 1).reshape(-1, 3), dx[i], 3e-6)
    close(summed(net.gamma), dgamma, 3e-6)
    close(summed(net.beta), dbeta, 3e-6)


@pytest.mark.parametrize("arithmetic", ARITHMETIC, indirect=True)
@pytest.mark.parametrize("hybridize", HYBRIDIZE)
def test_batches_of_any_size_and_shape_go_through_one_layer_and_its_states_are_used_again(rng, hybridize, arithmetic):
    devices = gp.devices("cpu:2")
    net = layer(devices, rng, 3, arithmetic, hybridize=HYBRIDIZE[hybridize])
    unused = net.sync_group.unused_states
    for size in (*range(1, 8), 4, 2):
        check(net, joint, devices, rng, (size, 2), (3, size), steps=1)
        if not hybridize.startswith("static"):  # MXNet may free an operator a little after its results are there
            wait_for(lambda: not any(state.group is net.sync_group for state in list(_states.values())))
    assert hybridize.startswith("static") or len(unused) == 2  # a kind for each device
    assert all(1 <= len(states) <= 4 for states in unused.values()), unused
