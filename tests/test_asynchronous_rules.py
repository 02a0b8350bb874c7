"""Every update rule is its formula in float64, and MXNet's optimizers and ours take the same steps."""

import numpy as np
import pytest

import mxnet as mx
from gluon_parallel.asynchronous import MODES, parse_mode, rules

pytestmark = pytest.mark.arithmetic


@pytest.fixture
def vectors(rng):
    return [rng.normal(size=7) for _ in range(4)]


def sgd_in_numpy(weights, gradients, momentum=0.0, wd=0.0):
    velocity = 0.0
    for gradient in gradients:
        velocity = momentum * velocity - 0.1 * (gradient + wd * weights)
        weights = weights + velocity
    return weights


def adam_in_numpy(weights, gradients, wd=0.0):
    mean = square = 0.0
    for step, gradient in enumerate(gradients, start=1):
        gradient = gradient + wd * weights
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        rate = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        weights = weights - rate * mean / (np.sqrt(square) + 1e-8)
    return weights


RULES = {"sgd": (sgd_in_numpy, rules.sgd, mx.optimizer.SGD), "adam": (adam_in_numpy, rules.adam, mx.optimizer.Adam)}


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("sgd", {}),
        ("sgd", {"momentum": 0.9}),
        ("sgd", {"momentum": 0.5, "wd": 0.1}),
        ("adam", {}),
        ("adam", {"wd": 0.1}),
    ],
)
def test_a_rule_is_its_formula_and_mxnets(vectors, name, params):
    (weights, *gradients), (in_numpy, rule, kind) = vectors, RULES[name]
    theirs, array = kind(learning_rate=0.1, **params), mx.nd.array(weights, dtype="float64")
    their_state, state, got = theirs.create_state(0, array), (), weights
    for gradient in gradients:
        got, state = rule(got, gradient, state, 0.1, **params)
        theirs.update(0, array, mx.nd.array(gradient, dtype="float64"), their_state)
    # Values of size 1, roundings of 1e-16; MXNet's scalars are float32, 1 - 0.999 among them.
    np.testing.assert_allclose(got, in_numpy(weights, gradients, **params), rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(got, array.asnumpy(), rtol=1e-3, atol=1e-4 if name == "adam" else 1e-7)


def test_average_compensate_attract_and_clip_are_their_formulas(vectors):
    a, b, c, d = vectors
    np.testing.assert_allclose(rules.average([a, b, c], [3, 1, 2]), (3 * a + b + 2 * c) / 6, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(rules.compensate(a, b, c, 0.3), a + 0.3 * a**2 * (b - c), rtol=1e-14, atol=1e-14)
    local, centre = rules.attract(a, b, 0.2)
    np.testing.assert_allclose([local, centre], [a - 0.2 * (a - b), b + 0.2 * (a - b)], rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(rules.clip(d, 0.1), 0.1 * d / np.sqrt(np.sum(d**2)), rtol=1e-13, atol=1e-15)
    assert rules.clip(d, 1e9) is d
    assert rules.clip(d, None) is d


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_rule_changes_what_it_is_given_or_its_dtype(vectors, dtype):
    vectors = [vector.astype(dtype) for vector in vectors]
    for vector in vectors:
        vector.flags.writeable = False
    a, b, c, d = vectors
    found = [rules.average([a, b], np.array([1, 2])), rules.compensate(a, b, c, 0.1), *rules.attract(a, d, 0.1)]
    for rule, params in ((rules.sgd, {"momentum": 0.9, "wd": 0.1}), (rules.adam, {"wd": 0.1})):
        weights, state = rule(a, b, (), 0.1, **params)
        found += [weights, rule(weights, b, state, 0.1, **params)[0]]
    assert {one.dtype for one in [*found, rules.clip(a, 0.1)]} == {np.dtype(dtype)}


def test_a_mode_reads_what_it_writes():
    for name in MODES:
        assert parse_mode(name).name == name and parse_mode(str(parse_mode(name))) == parse_mode(name)


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


def test_an_unknown_rule_or_parameter_is_refused_with_the_right_ones():
    with pytest.raises(ValueError, match="'rmsprop' is not among sgd, adam"):
        rules.optimizer("rmsprop")
    with pytest.raises(ValueError, match="sgd has no 'beta1'"):
        rules.optimizer("sgd", {"beta1": 0.9})
