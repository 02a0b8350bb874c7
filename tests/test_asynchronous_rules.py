"""Every update rule is its formula in float64, and MXNet's optimizers and ours take the same steps."""

import numpy as np
import pytest

import mxnet as mx
from gluon_parallel.asynchronous import MODES, parse_mode, rules

pytestmark = pytest.mark.arithmetic


@pytest.fixture
def vectors(rng):
    return [rng.normal(size=7) for _ in range(4)]


@pytest.mark.parametrize("params", [{}, {"momentum": 0.9}, {"momentum": 0.5, "wd": 0.1}, {"wd": 0.01}])
def test_sgd_is_its_formula_and_mxnets(vectors, params):
    weights, *gradients = vectors
    momentum, wd, lr = params.get("momentum", 0), params.get("wd", 0), 0.3
    wanted, velocity, state, got = weights.copy(), 0.0, (), weights
    theirs, array = mx.optimizer.SGD(learning_rate=lr, **params), mx.nd.array(weights, dtype="float64")
    their_state = theirs.create_state(0, array)
    for gradient in gradients:
        velocity = momentum * velocity - lr * (gradient + wd * wanted)
        wanted = wanted + velocity
        got, state = rules.sgd(got, gradient, state, lr, **params)
        theirs.update(0, array, mx.nd.array(gradient, dtype="float64"), their_state)
    np.testing.assert_allclose(got, wanted, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(got, array.asnumpy(), rtol=1e-6, atol=1e-7)  # its scalars are float32


@pytest.mark.parametrize("wd", [0, 0.1])
def test_adam_is_its_formula_and_mxnets(vectors, wd):
    weights, *gradients = vectors
    wanted, state, got, m, v = weights.copy(), (), weights, 0.0, 0.0
    theirs, array = mx.optimizer.Adam(learning_rate=0.1, wd=wd), mx.nd.array(weights, dtype="float64")
    their_state = theirs.create_state(0, array)
    for step, gradient in enumerate(gradients, start=1):
        g = gradient + wd * wanted
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        rate = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        wanted = wanted - rate * m / (np.sqrt(v) + 1e-8)
        got, state = rules.adam(got, gradient, state, 0.1, wd=wd)
        theirs.update(0, array, mx.nd.array(gradient, dtype="float64"), their_state)
    np.testing.assert_allclose(got, wanted, rtol=1e-13, atol=1e-14)  # values of size 1, roundings of 1e-16
    # Its scalars are float32, 1 - 0.999 among them.
    np.testing.assert_allclose(got, array.asnumpy(), rtol=1e-3, atol=1e-4)


def test_average_compensate_attract_and_clip_are_their_formulas(vectors):
    a, b, c, d = vectors
    np.testing.assert_allclose(rules.average([a, b, c], [3, 1, 2]), (3 * a + b + 2 * c) / 6, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(rules.compensate(a, b, c, 0.3), a + 0.3 * a**2 * (b - c), rtol=1e-14, atol=1e-14)
    local, centre = rules.attract(a, b, 0.2)
    np.testing.assert_allclose([local, centre], [a - 0.2 * (a - b), b + 0.2 * (a - b)], rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(rules.clip(d, 0.1), 0.1 * d / np.sqrt(np.sum(d**2)), rtol=1e-13, atol=1e-15)
    assert rules.clip(d, 1e9) is d
    assert rules.clip(d, None) is d


def test_no_rule_changes_what_it_is_given(vectors):
    for vector in vectors:
        vector.flags.writeable = False
    a, b, c, d = vectors
    _, state = rules.sgd(a, b, (), 0.1, momentum=0.9, wd=0.1)
    rules.sgd(a, b, state, 0.1, momentum=0.9, wd=0.1)
    _, state = rules.adam(a, b, (), 0.1, wd=0.1)
    rules.adam(a, b, state, 0.1, wd=0.1)
    rules.average([a, b], [1, 2])
    rules.compensate(a, b, c, 0.1)
    rules.attract(a, d, 0.1)


def test_float32_stays_float32():
    a, b = np.ones(3, np.float32), np.full(3, 0.5, np.float32)
    for rule in (rules.sgd, rules.adam):
        weights, state = rule(a, b, (), 0.1)
        weights, state = rule(weights, b, state, 0.1)
        assert weights.dtype == np.float32
    assert rules.average([a, b], np.array([2, 3])).dtype == np.float32
    assert rules.clip(a, 0.1).dtype == np.float32


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [("rmsprop", {}, "'rmsprop' is not among sgd, adam"), ("sgd", {"beta1": 0.9}, "sgd has no 'beta1'")],
)
def test_an_unknown_rule_or_parameter_is_refused_with_the_right_ones(name, params, message):
    with pytest.raises(ValueError, match=message):
        rules.optimizer(name, params)


@pytest.mark.parametrize("name", MODES)
def test_a_mode_reads_what_it_writes(name):
    mode = parse_mode(name)
    assert mode.name == name
    assert parse_mode(str(mode)) == mode


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("asinc", "Did you mean async"),
        ("sync:3", "sync has no number"),
        ("ssp:-1", "'-1' is not a whole number, 0 or more; it says how many steps"),
        ("local:0", "1 or more"),
        ("local:2.5", "whole number"),
        ("elastic:1.5", "0 to 1"),
        ("dc:nan", "lambda"),
    ],
)
def test_a_mode_that_is_none_is_refused_with_what_is_wanted(text, message):
    with pytest.raises(ValueError, match=message):
        parse_mode(text)
