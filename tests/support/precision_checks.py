"""Mixed precision in processes of its own, as it cannot be undone: ``python ... check...`` or ``... store check``."""

import itertools
import os
import sys
import traceback

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.step.precision import has_bfloat16_on_cpus
from mxnet import gluon
from mxnet.contrib import amp
from mxnet.contrib.amp.loss_scaler import LossScaler

DEVICES = gp.devices("cpu:2")
# Loss scales are the same in every type.
PRECISION = "bfloat16" if has_bfloat16_on_cpus() else "float32"
# A number has 8 bits in bfloat16, so each rounding is off by 2**-8 at most. A step rounds what four layers take
# and give; measured for 24 nets, the error of all gradients together is 0.6 to 0.8 % of their norm.
BOUND = 0.02


def build(devices, norm=None, hybridize=True, optimizer="sgd", kvstore="device", seed=0, lr=0.1, **options):
    """A small net of convolutions with batch norm on `devices`, from weights of that seed."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(6, 3, in_channels=2))
    if norm is not None:
        net.add(norm(in_channels=6))
    net.add(gluon.nn.Activation("tanh"), gluon.nn.Conv2D(4, 3, in_channels=6), gluon.nn.Activation("tanh"))
    net.add(gluon.nn.Dense(8, in_units=4 * 16, activation="tanh"), gluon.nn.Dense(3, in_units=8))
    net.initialize(ctx=devices)
    random = np.random.RandomState(seed)
    for name, parameter in net._collect_params_with_prefix().items():
        if name.endswith("weight"):
            scale = np.sqrt(2 / np.prod(parameter.shape[1:]))
            parameter.set_data(mx.nd.array(random.standard_normal(parameter.shape) * scale))
    net.hybridize(hybridize)
    trainer = gluon.Trainer(net.collect_params(), optimizer, {"learning_rate": lr}, kvstore=kvstore)
    return net, trainer, options


def weighted_cross_entropy(y, label, factor):
    return gluon.loss.SoftmaxCrossEntropyLoss()(y, label) * factor


def parallel(net, trainer, options):
    return gp.DataParallel(net, weighted_cross_entropy, trainer, **options)


def batch(num, seed=1, overflow=None, factor=1e38):
    """Images, and (labels, factors); `factor`, of the sample `overflow`, makes its gradients infinite, not its loss."""
    random = np.random.RandomState(seed)
    images, labels = mx.nd.array(random.standard_normal((num, 2, 8, 8))), mx.nd.array(random.randint(0, 3, num))
    factors = np.ones(num)
    if overflow is not None:
        factors[overflow] = factor  # 1e38 times a loss scale of 2**15 is more than float32 holds
    return images, (labels, mx.nd.array(factors))


def weights(net):
    found = {}
    for name, parameter in net._collect_params_with_prefix().items():
        copies = [array.asnumpy() for array in parameter.list_data()]
        if not name.endswith(("running_mean", "running_var")) or len(copies) == 1:
            for copy in copies[1:]:
                np.testing.assert_array_equal(copy, copies[0], err_msg=name)
        found[name] = copies[0]
    return found


def gradients(net):
    return {
        name: parameter.list_grad()[0].asnumpy()
        for name, parameter in net._collect_params_with_prefix().items()
        if parameter.grad_req != "null"
    }


def assert_within_bound(found, expected):
    errors, wanted = (
        np.concatenate([np.ravel(value, "K").astype("float64") for value in arrays])
        for arrays in ([found[name] - array for name, array in expected.items()], expected.values())
    )
    assert np.linalg.norm(errors) < BOUND * np.linalg.norm(wanted), np.linalg.norm(errors) / np.linalg.norm(wanted)


NORMS = {"plain": None, "sync": gp.nn.SyncBatchNorm}


def bfloat16():
    """Steps in bfloat16 are those in float32, up to the bound; two devices, hybridized or not, with SyncBatchNorm."""
    reference = {}
    for name, norm in NORMS.items():
        made = build(DEVICES[:1], norm)
        parallel(*made)(*batch(12))
        reference[name] = gradients(made[0]), weights(made[0])
    gp.set_precision("bfloat16", DEVICES)
    gp.set_precision("bfloat16", DEVICES)  # said twice is said once
    for name, norm in NORMS.items():
        for hybridize in (True, False):
            net, trainer, options = build(DEVICES, norm, hybridize)
            step = parallel(net, trainer, options)
            loss = step(*batch(12))
            assert loss.dtype == np.float32
            assert {np.dtype(parameter.dtype).name for parameter in net.collect_params().values()} == {"float32"}
            assert_within_bound(gradients(net), reference[name][0])
            if norm is not None:  # statistics in float32: those of the bfloat16 outputs, to float32's accuracy
                assert_within_bound(weights(net), reference[name][1])
            different = {key for key, value in reference[name][0].items() if (gradients(net)[key] != value).any()}
            assert different == set(reference[name][0]), "nothing was computed in bfloat16"
    images, labels = batch(12)
    for hybridize in (True, False):
        net, trainer, _ = build(DEVICES, None, hybridize)
        step = parallel(net, trainer, {"accumulate": 2})
        for part in (slice(0, 5), slice(5, 12)):
            step(images[part], tuple(label[part] for label in labels))
        assert_within_bound(gradients(net), reference["plain"][0])
        for name, norm in NORMS.items():
            for recompute in (False, True):
                net, _, _ = build(DEVICES[:1], norm, hybridize)
                pipe = gp.Pipeline(net, DEVICES, 3, recompute=recompute)
                trainer = gluon.Trainer(pipe.collect_params(), "sgd", {"learning_rate": 0.1})
                pipe.step(weighted_cross_entropy, trainer, images, labels)
                assert_within_bound(gradients(net), reference[name][0])
                assert pipe(images).dtype == np.float32


def layers():
    """Layers that MXNet's own amp.init breaks in hybridized nets: transposed convolutions, recurrent ones, arrays."""
    gp.set_precision("bfloat16", DEVICES)
    images, texts = mx.nd.random.uniform(shape=(5, 3, 8, 8)), mx.nd.random.uniform(shape=(4, 5, 3))
    for layers, x in (
        ((gluon.nn.Conv2D(4, 3), gp.nn.SyncBatchNorm(), gluon.nn.Conv2DTranspose(2, 4, strides=2)), images),
        ((gluon.rnn.LSTM(4, layout="TNC"), gluon.nn.HybridLambda("transpose"), gluon.nn.Dense(2)), texts),
        ((gluon.nn.Conv2D(4, 3), gluon.nn.HybridLambda(lambda F, x: F.concat(x, F.relu(x), dim=1))), images),
        ((gluon.nn.HybridLambda(lambda F, x: F.broadcast_add(x, F.arange(0, 8))), gluon.nn.Dense(2)), images),
    ):
        net, found = gluon.nn.HybridSequential(), []
        net.add(*layers)
        net.initialize()
        for hybridize in (False, True):
            net.hybridize(hybridize)
            with mx.autograd.record():
                y = net(x).astype("float32")
                total = y.square().sum()
            total.backward()
            found.append(y.asnumpy())
        assert np.linalg.norm(found[1] - found[0]) < BOUND * np.linalg.norm(found[0])


def recomputation():
    """Recomputed blocks take and return bfloat16, and training has the bits that it has without recomputation."""
    gp.set_precision("bfloat16", DEVICES)
    for accumulate, frozen in itertools.product((1, 2), (False, True)):
        found = []
        for recomputes in (False, True):
            net, trainer, options = build(DEVICES, gp.nn.SyncBatchNorm, False, accumulate=accumulate)
            for layer in net:  # recomputed ones run as graphs
                layer.hybridize()
            for number in (0, 3, 4, 5) if recomputes else ():  # behind images, layers in float32 and in bfloat16
                gp.nn.recompute(net[number])
            net[5].weight.grad_req = "null" if frozen else "write"
            step = parallel(net, trainer, options)
            for number in range(4):
                step(*batch(5, seed=number))
            found.append(weights(net))
        for name in found[0]:
            np.testing.assert_array_equal(*(one[name] for one in found), err_msg=f"{name}, {accumulate}, {frozen}")


def init_trainer(trainer):
    """``amp.init_trainer``, also where this CPU has no type that ``amp.init`` takes."""
    if PRECISION == "float32":
        trainer._amp_loss_scaler, trainer._amp_original_scale = LossScaler(), trainer._scale
    else:
        amp.init_trainer(trainer)


def scaled(net, trainer, options):
    init_trainer(trainer)
    scaler = trainer._amp_loss_scaler  # MXNet has one for all trainers; of earlier checks too
    scaler._loss_scale, scaler._unskipped = 2.0**16, 0
    return parallel(net, trainer, options)


def skipping():
    """An overflow on one device leaves every weight and state as it is, halves the scale, and is forgotten after it."""
    gp.set_precision(PRECISION, DEVICES)
    net, trainer, _ = build(DEVICES, optimizer="adam")
    step = scaled(net, trainer, {"clip_global_norm": 1.0})
    scaler = trainer._amp_loss_scaler
    step(*batch(6))
    before = weights(net)
    assert (step.loss_scaling.scale, step.loss_scaling.num_skipped) == (2.0**16, 0)
    bad = batch(6, overflow=5)  # on the second device alone
    assert np.isfinite(step(*bad).asnumpy())
    assert (step.loss_scaling.scale, step.loss_scaling.num_skipped) == (2.0**15, 1)
    for name, array in weights(net).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    assert set(trainer.optimizer._index_update_count.values()) == {1}  # Adam's bias correction counts updates
    scaler._unskipped = 1999
    step(*batch(6))
    assert (step.loss_scaling.scale, scaler._unskipped) == (2.0**16, 0)  # after 2000 updates in a row
    assert any((array != before[name]).any() for name, array in weights(net).items())
    assert trainer._scale == 1 and trainer._amp_loss_scaler is scaler
    net, _, _ = build(DEVICES[:1])
    pipe = gp.Pipeline(net, DEVICES, 3)
    trainer = gluon.Trainer(pipe.collect_params(), "sgd")
    init_trainer(trainer)
    scaler._loss_scale, before = 2.0**16, weights(net)
    assert np.isfinite(pipe.step(weighted_cross_entropy, trainer, *bad).asnumpy())  # one micro-batch overflows
    assert (pipe.loss_scaling.scale, pipe.loss_scaling.num_skipped) == (2.0**15, 1)
    for name, array in weights(net).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    pipe.step(weighted_cross_entropy, trainer, *batch(6))
    assert any((array != before[name]).any() for name, array in weights(net).items())
    # A gradient that is not finite at any scale ends the training, rather than leaving out steps for ever.
    with pytest.raises(gp.errors.NotFinite, match="42 updates were left out"):
        for _ in range(100):
            step(*batch(6, overflow=1, factor=np.inf))


def checkpoint():
    """The scale and its count are in the checkpoint; a run that goes on with it takes the same steps."""
    gp.set_precision(PRECISION, DEVICES)
    net, trainer, _ = build(DEVICES, optimizer="adam")
    step = scaled(net, trainer, {})
    for overflow in (None, 0, None, None):
        step(*batch(6, overflow=overflow))
    state = gp.checkpoint.state(net, trainer)
    again, fresh, _ = build(DEVICES, optimizer="adam", seed=9)
    other = scaled(again, fresh, {})
    gp.checkpoint.restore(state, again, fresh)
    scaler = fresh._amp_loss_scaler
    assert (scaler.loss_scale, scaler._unskipped) == (2.0**15, 2)
    for one in (step, other):
        one(*batch(5, seed=3))
    for name, array in weights(net).items():
        np.testing.assert_array_equal(array, weights(again)[name], err_msg=name)


class Scale(gluon.HybridBlock):
    """y = sum_i x_i w_i + b, with operators that MXNet has in float16 on CPUs, and batch norm if asked for."""

    def __init__(self, norm):
        super().__init__()
        with self.name_scope():
            self.w = self.params.get("w", shape=(4,))
            self.b = self.params.get("b", shape=(1,))
            self.norm = norm(in_channels=4) if norm is not None else None

    def hybrid_forward(self, F, x, w, b):
        if self.norm is not None:
            x = self.norm(x)
        return F.broadcast_add(F.broadcast_mul(x, w).sum(axis=1), b)


def cast():
    """net.cast("float16") with a multi-precision optimizer follows float32, to float16's accuracy, step by step."""

    def trained(dtype, norm, hybridize, optimizer, clip):
        net = Scale(norm)
        net.cast(dtype)
        net.initialize(mx.init.One(), ctx=DEVICES)
        net.hybridize(hybridize)
        options = {"learning_rate": 0.05, "multi_precision": True}
        trainer = gluon.Trainer(net.collect_params(), optimizer, options)
        step = gp.DataParallel(net, lambda y, t: (y - t) ** 2, trainer, clip_global_norm=clip)
        random, losses = np.random.RandomState(4), []
        for num in (7, 5, 1, 6, 6):
            x, t = random.standard_normal((num, 4)), random.standard_normal(num)
            losses.append(step(mx.nd.array(x, dtype=dtype), mx.nd.array(t, dtype=dtype)).asnumpy())
            assert losses[-1].dtype == np.float32
        return np.array(losses), weights(net)

    for case in itertools.product((None, gp.nn.SyncBatchNorm), (True, False), ("sgd", "adam"), (None, 0.5)):
        (losses, found), (wanted, expected) = (trained(dtype, *case) for dtype in ("float16", "float32"))
        # float16 has 11 bits: 2**-11 per rounding, of some ten per step and five steps
        np.testing.assert_allclose(losses, wanted, rtol=0.03, atol=0.01)
        for name, array in expected.items():
            assert found[name].dtype == ("float32" if "norm" in name else "float16")
            np.testing.assert_allclose(found[name].astype("float32"), array, rtol=0.02, atol=0.02, err_msg=name)


def cast_pipeline():
    """Float16 weights in a pipeline have the gradients of float32, to the accuracy of up to 48 additions in float16."""
    rows = np.random.RandomState(4).standard_normal((48, 4)).astype("float16")

    def make(dtype, hybridize):
        stages = [gluon.nn.LayerNorm(in_channels=4, prefix=f"{number}_") for number in range(2)]
        for stage in stages:
            stage.cast(dtype)
            stage.initialize()
            stage.hybridize(hybridize)
        return stages, [one for stage in stages for one in stage.collect_params().values()]

    def loss(y):
        return (y.astype("float32") * mx.nd.arange(4, ctx=y.ctx)).sum(axis=1)

    whole, parameters = make("float32", False)
    with mx.autograd.record():
        losses = loss(whole[1](whole[0](mx.nd.array(rows, dtype="float32"))))
    losses.backward()
    for hybridize, num in itertools.product((True, False), (1, 3, 48)):
        stages, own = make("float16", hybridize)
        pipe = gp.Pipeline(stages, DEVICES, num)
        trainer = gluon.Trainer(pipe.collect_params(), "sgd", {"learning_rate": 0.1, "multi_precision": True})
        mean = pipe.step(loss, trainer, mx.nd.array(rows, dtype="float16"))
        np.testing.assert_allclose(mean.asscalar(), losses.mean().asscalar(), rtol=2e-3, atol=2e-3)
        found, wanted = ({one.name: one.grad().asnumpy() for one in arrays} for arrays in (own, parameters))
        assert_within_bound(found, wanted)


def refused(function, *words):
    with pytest.raises(gp.errors.PrecisionUnsupported) as caught:
        function()
    assert all(word in str(caught.value) for word in words), caught.value


def refusals():
    """What MXNet cannot do is refused before the first step, with the reason."""
    refused(lambda: gp.set_precision("float16", DEVICES), "float16", "cpu(0)", "no float16 matrix product", "bfloat16")
    gp.set_precision("float32", DEVICES)
    refused(lambda: gp.set_precision("half", DEVICES), "'half'", "bfloat16")
    for layer in (gluon.nn.Dense(2, in_units=2), gluon.nn.Conv2D(2, 3, in_channels=2), gluon.rnn.LSTM(2, input_size=2)):
        net = gluon.nn.HybridSequential()
        net.add(layer)
        net.cast("float16")
        net.initialize(ctx=DEVICES)
        refused(lambda: parallel(net, gluon.Trainer(net.collect_params(), "sgd"), {}), layer.name, "matrix product")
        refused(lambda: gp.Pipeline(net, DEVICES[:1], 2), layer.name, "matrix product")
    net = gluon.nn.Dense(2, in_units=2)
    net.initialize(ctx=DEVICES)
    net.cast(gp.mxnet.compat.array_types.BFLOAT16)
    refused(lambda: parallel(net, gluon.Trainer(net.collect_params(), "sgd"), {}), "optimizers", "set_precision")


def refusals_in_bfloat16():
    """The same once bfloat16 has been set."""
    gp.set_precision("bfloat16", DEVICES)
    refused(lambda: gp.set_precision("float32", DEVICES), "cannot be undone")
    net, trainer, _ = build(DEVICES)
    trainer._compression_params = {"type": "2bit", "threshold": 0.5}
    refused(lambda: scaled(net, trainer, {}), "2 bits", "fp16")
    with mx.util.np_shape(True), mx.util.np_array(True):
        net = gluon.nn.Dense(2, in_units=2)
        net.initialize(ctx=DEVICES)
        refused(lambda: parallel(net, gluon.Trainer(net.collect_params(), "sgd"), {}), "NumPy mode")


def bfloat16_by_amp():
    """amp.init("bfloat16") works, but not for gradients that are added up."""
    amp.init("bfloat16")
    parallel(*build(DEVICES))(*batch(12))
    net, trainer, _ = build(DEVICES)
    refused(lambda: parallel(net, trainer, {"accumulate": 2}), "would leave them zero", "gp.set_precision")


def no_bfloat16():
    """A CPU without AVX-512 is named before anything is computed, whoever calls amp.init."""
    refused(lambda: gp.set_precision("bfloat16", DEVICES), "'bfloat16'", "cpu(0), cpu(1)", "AVX-512", "float32")
    assert gp.step.active_precision() is None
    net = build(DEVICES[:1])[0]
    amp.init("bfloat16")
    refused(lambda: parallel(*build(DEVICES)), "amp.init('bfloat16')", "AVX-512")
    refused(lambda: gp.Pipeline(net, DEVICES, 2), "amp.init('bfloat16')", "AVX-512")


def float16_by_amp():
    """amp.init("float16") on CPUs is refused as well, whoever calls it."""
    amp.init("float16")
    assert gp.step.active_precision() == "float16"
    refused(lambda: parallel(*build(DEVICES)), "amp.init('float16')", "cpu(0)", "bfloat16")
    net = build(DEVICES[:1])[0]
    refused(lambda: gp.Pipeline(net, DEVICES, 2), "amp.init('float16')", "cpu(0), cpu(1)", "bfloat16")
    refused(lambda: gp.pipeline.partition(net, 2, batch(2)[0]), "amp.init('float16')", "cpu(0)", "bfloat16")
    assert len(gp.pipeline.partition(net, 2)) == 2  # nothing is computed
    net, trainer, _ = build(DEVICES[:1])
    amp.init_trainer(trainer)
    trainer._amp_loss_scaler._loss_scale = 2.0**9
    state = gp.checkpoint.state(net, trainer)
    trainer._amp_loss_scaler._loss_scale = 2.0**16  # MXNet has one for all trainers
    net, fresh, _ = build(DEVICES[:1])
    gp.checkpoint.restore(state, net, fresh)  # before a pipeline's first step
    assert fresh._amp_loss_scaler.loss_scale == 2.0**9


def processes(store):
    """An overflow on one device of one process is agreed on by all; without one, the steps are those of one process."""
    gp.set_precision(PRECISION, DEVICES)
    sizes = [5, 8, 6]
    net, trainer, _ = build(DEVICES[:1], gp.nn.SyncBatchNorm)
    alone = scaled(net, trainer, {"clip_global_norm": 0.5})
    shared = lambda **kwargs: gp.nn.SyncBatchNorm(kvstore=store, **kwargs)  # noqa: E731
    ours, across, _ = build(DEVICES, shared, kvstore=store)
    together = scaled(ours, across, {"clip_global_norm": 0.5})
    share = slice(store.rank, None, store.num_workers)
    for seed, num in enumerate(sizes):
        x, labels = batch(num, seed)
        alone(x, labels)
        together(mx.nd.array(x.asnumpy()[share]), tuple(mx.nd.array(label.asnumpy()[share]) for label in labels))
        before = weights(ours)
        together(*batch(4, overflow=3 if store.rank == store.num_workers - 1 else None))  # on its last device
        assert together.loss_scaling.num_skipped == seed + 1
        assert together.loss_scaling.scale == 2.0 ** (15 - seed)
        for name, array in weights(ours).items():
            if not name.endswith(("running_mean", "running_var")):
                np.testing.assert_array_equal(array, before[name], err_msg=name)
    trained = {name for name in weights(net) if not name.endswith(("running_mean", "running_var"))}
    assert_within_bound(weights(ours), {name: weights(net)[name] for name in trained})


def halves(store):
    """Gradients that cross processes in 16 bits are off by no more than the docs say."""
    for kind, unit, limit in (("fp16", 2.0**-11, 2.0**-25), ("bf16", 2.0**-8, 2.0**-134)):
        store.set_gradient_compression({"type": kind})
        for size in (100, 60000):
            rows = [np.random.RandomState(rank).standard_normal(size).astype("f") for rank in range(store.num_workers)]
            for exponent in (0, -12, 12):
                array = mx.nd.array(rows[store.rank] * 2.0**exponent)
                store.pushpull(f"{kind} {size} {exponent}", array)
                exact = np.sum(rows, axis=0, dtype=np.float64) * 2.0**exponent
                bound = unit * (2 + unit) * np.sum(np.abs(rows), axis=0, dtype=np.float64) * 2.0**exponent
                error = np.abs(array.asnumpy() - exact)
                assert (error <= bound + (store.num_workers + 1) * limit).all(), (kind, size, exponent)
                assert error.any()
        array = mx.nd.array([1e5 if store.rank == 0 else 1.0])
        store.pushpull(f"{kind} overflow", array)
        assert np.isinf(array.asnumpy()[0]) == (kind == "fp16")
    store.set_gradient_compression({"type": "none"})
    array = mx.nd.full((70000,), 1 + 2.0**-7).astype(gp.mxnet.compat.array_types.BFLOAT16)
    store.pushpull("in bfloat16", array)
    np.testing.assert_array_equal(array.astype("float32").asnumpy(), (1 + 2.0**-7) * store.num_workers)


def run(checks):
    """Run functions of this file by name; say which were right. Returns whether all were."""
    wrong = []
    for check in checks:
        try:
            globals()[check]()
            mx.nd.waitall()
        except Exception:
            traceback.print_exc()
            wrong.append(check)
        os.write(1, f"{check}: {'wrong' if check in wrong else 'right'}\n".encode())
    return not wrong


if __name__ == "__main__":
    if sys.argv[1] in globals():
        sys.exit(not run(sys.argv[1:]))
    store = gp.kvstore.create(sys.argv[1])
    for check in sys.argv[2:]:  # of several processes
        globals()[check](store)
        mx.nd.waitall()
        os.write(1, f"{check}: right\n".encode())
