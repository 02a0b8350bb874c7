"""AdamW is Adam with decoupled weight decay: ten lines of float64 NumPy say what each update is."""

import numpy as np
import pytest
from pipeline_nets import layers

import gluon_parallel as gp
import mxnet as mx
from mxnet import autograd, gluon, nd

# MXNet's operator takes the learning rate, betas and epsilon as float32: 6e-8 of each update of 0.01, 30 times.
TOLERANCE = {"rtol": 1e-6, "atol": 1e-7}
# float32 weights are also rounded after each update, by 6e-8 of weights of up to 3.
IN_FLOAT32 = {"rtol": 2e-5, "atol": 2e-5}
SETTINGS = {"learning_rate": 0.01, "wd": 0.1}


def by_hand(weight, gradients, rates, wd, beta1=0.9, beta2=0.999, epsilon=1e-8):
    mean, square = np.zeros_like(weight), np.zeros_like(weight)
    for number, (gradient, rate) in enumerate(zip(gradients, rates), start=1):
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        direction = mean / (1 - beta1**number) / (np.sqrt(square / (1 - beta2**number)) + epsilon)
        weight = weight * (1 - rate * wd) - rate * direction
    return weight


def draw(rng, num=30, shape=(4, 5)):
    """A weight, and gradients of very different sizes: epsilon counts for the smallest."""
    return rng.normal(size=shape), [rng.normal(size=shape) * 10.0 ** rng.integers(-9, 2, shape) for _ in range(num)]


def updated(weight, gradients, dtype="float64", cast=lambda gradient: gradient, **settings):
    """The weight after updates through MXNet's registry and updater."""
    array = nd.array(weight, dtype=dtype)
    updater = mx.optimizer.get_updater(mx.optimizer.create("adamw", **settings))
    for gradient in gradients:
        updater(0, nd.array(cast(gradient), dtype=dtype), array)
    return array.asnumpy()


@pytest.mark.parametrize(
    ("dtype", "settings", "tolerance"),
    [
        ("float64", {"beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3}, TOLERANCE),
        ("float64", {"wd": 0.0}, TOLERANCE),
        ("float32", {}, IN_FLOAT32),
    ],
)
def test_updates_are_those_computed_by_hand(rng, dtype, settings, tolerance):
    weight, gradients = draw(rng)
    settings = {"wd": 0.1, **settings}
    wanted = by_hand(weight, gradients, [0.01] * 30, **settings)
    np.testing.assert_allclose(updated(weight, gradients, dtype, learning_rate=0.01, **settings), wanted, **tolerance)
    wanted = by_hand(weight, gradients, [0.001] * 30, wd=0.01)
    np.testing.assert_allclose(updated(weight, gradients), wanted, **TOLERANCE)  # by the defaults


def test_a_schedule_scales_the_decay_too_and_its_rate_is_not_overwritten(rng, capfd):
    weight, gradients = draw(rng)
    schedule = mx.lr_scheduler.CosineScheduler(max_update=30, base_lr=0.05)
    rates = [0.05 * (1 + np.cos(np.pi * number / 30)) / 2 for number in range(1, 31)]
    wanted = by_hand(weight, gradients, rates, wd=0.1)
    np.testing.assert_allclose(updated(weight, gradients, wd=0.1, lr_scheduler=schedule), wanted, **TOLERANCE)
    assert "overwritten" not in capfd.readouterr().out


def test_gradients_are_rescaled_and_clipped_and_the_decay_is_not(rng):
    weight, gradients = draw(rng)
    wanted = by_hand(weight, [np.clip(gradient / 8, -0.01, 0.01) for gradient in gradients], [0.01] * 30, wd=0.1)
    found = updated(weight, gradients, rescale_grad=1 / 8, clip_gradient=0.01, **SETTINGS)
    np.testing.assert_allclose(found, wanted, **TOLERANCE)


def test_float16_weights_are_updated_in_float32_or_refused(rng):
    weight, gradients = draw(rng)
    weight, halves = weight.astype("float16"), [gradient.astype("float16") for gradient in gradients]
    wanted = by_hand(weight.astype("float64"), [half.astype("float64") for half in halves], [0.01] * 30, wd=0.1)
    found = updated(weight, halves, "float16", multi_precision=True, **SETTINGS)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)  # rounded once, to 11 bits
    with pytest.warns(UserWarning, match="multi_precision"):
        with pytest.raises(gp.errors.PrecisionUnsupported, match='"multi_precision": True'):
            updated(weight, halves, "float16", **SETTINGS)


def test_a_setting_that_makes_no_sense_is_refused():
    for settings, words in (
        ({"beta1": 1.0}, "beta1 is 1.0, expected at least 0 and below 1"),
        ({"wd": -0.1}, "wd is -0.1, expected a finite number"),
        ({"learning_rate": float("nan")}, "learning_rate is nan, expected a finite number"),
    ):
        with pytest.raises(ValueError, match=words):
            mx.optimizer.create("adamw", **settings)


def test_parameters_with_wd_mult_0_do_not_decay():
    net = layers(2)
    net.collect_params(".*bias").setattr("wd_mult", 0.0)
    trainer = gluon.Trainer(net.collect_params(), "adamw", SETTINGS)
    before = {name: parameter.data().asnumpy() for name, parameter in net.collect_params().items()}
    for parameter in net.collect_params().values():
        parameter.grad()[:] = 0
        parameter.data()._fresh_grad = True
    trainer.step(1)
    for name, parameter in net.collect_params().items():
        kept = 1 if name.endswith("bias") else 1 - 0.01 * 0.1
        np.testing.assert_allclose(parameter.data().asnumpy(), kept * before[name], rtol=1e-12)


def test_sparse_gradients_make_the_same_updates_as_dense_ones():
    weights = []
    for sparse in (False, True):
        net = gluon.nn.Embedding(6, 3, sparse_grad=sparse)
        net.initialize(mx.init.Constant(0.5))
        trainer = gluon.Trainer(net.collect_params(), "adamw", {"learning_rate": 0.1, "wd": 0.1})
        for words in ([0, 1], [2], [0, 5]):
            with autograd.record():
                loss = (net(nd.array(words)) ** 2).sum()
            loss.backward()
            trainer.step(1)
        weights.append(net.weight.data().asnumpy())
    np.testing.assert_allclose(*weights, rtol=1e-6, atol=1e-6)  # the two kernels round differently
