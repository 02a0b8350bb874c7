"""Weights that became NaN or infinite are an error soon after, although the loss stays finite."""

import re

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.step.weight_checks import FiniteWeights
from mxnet import gluon, nd


def make(num_devices, **options):
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Dense(4, in_units=3, activation="relu"), gluon.nn.Dense(1, in_units=4))
    net.initialize(mx.init.Xavier(), ctx=[mx.cpu(index) for index in range(num_devices)])
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    return net, gp.DataParallel(net, gluon.loss.L2Loss(), trainer, **options)


def batch(rng, num=7, bad=False):
    x = rng.standard_normal((num, 3))
    if bad:
        x[num // 2, 1] = np.nan
    return nd.array(x), nd.ones((num, 1))


def steps_named(error):
    """The first and the last step that the error names."""
    found = re.search(r"parameter net_dense0_weight is NaN or infinite since \D*(\d+)(?: to (\d+))?\.", error)
    return int(found[1]), int(found[2] or found[1])


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize(("bad", "size"), [(1, 7), (3, 1), (11, 7), (17, 2)])
def test_a_nan_that_relu_hides_is_noticed_within_eighteen_steps_with_its_parameter_and_step(
    num_devices, bad, size, rng
):
    net, step = make(num_devices)
    losses = []
    with pytest.raises(gp.errors.NotFinite) as caught:
        for number in range(1, bad + 18):
            losses.append(step(*batch(rng, size, number == bad)))
    assert np.isnan(net[0].weight.data(mx.cpu(0)).asnumpy()[:, 1]).all()
    assert np.isfinite([loss.asscalar() for loss in losses]).all()
    first, last = steps_named(str(caught.value))
    assert first <= bad <= last <= first + 7 and len(losses) == last + 9


def test_accumulated_steps_are_counted_as_steps(rng):
    _, step = make(2, accumulate=3)
    with pytest.raises(gp.errors.NotFinite, match=r"one of the steps 7 to 12"):
        for number in range(1, 60):
            step(*batch(rng, bad=number == 8))


def test_the_updates_before_a_loss_of_processes_are_counted(rng):
    net, step = make(1)
    step(*batch(rng))
    weights = FiniteWeights(step.trainer, 3, updates_before=4)
    net[0].weight.data()[:] = np.nan
    for number in (1, 2):
        weights.look(number)
    with pytest.raises(gp.errors.NotFinite, match=r"one of the steps 13 to 15"):
        weights.check(2, last=True)


def test_update_looks_at_the_weights_of_the_last_step(rng):
    _, step = make(2)
    for _ in range(10):
        step(*batch(rng))
    step.update()
    step(*batch(rng, bad=True))
    with pytest.raises(gp.errors.NotFinite, match="since step 11"):
        step.update()


def test_nothing_is_saved_and_the_parameter_is_named(tmp_path, rng):
    net, step = make(2)
    training = gp.prepare(net, step.loss, step.trainer, run=gp.Run(tmp_path))
    training.step(*batch(rng, bad=True))
    with pytest.raises(gp.errors.NotFinite, match="parameter net_dense0_weight is NaN or infinite since step 1"):
        training.end_epoch()
    assert training.run.checkpoints() == []


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinity_is_noticed_in_what_is_trained_and_no_large_number_is_taken_for_it(value, rng):
    net, _ = make(1)
    frozen, idle = gluon.Parameter("frozen", shape=(2,), grad_req="null"), gluon.Parameter("idle", shape=(2,))
    for parameter, number in ((frozen, value), (idle, -3e38)):  # whose sum is infinite
        parameter.initialize(mx.init.Constant(number))
    trainer = gluon.Trainer([frozen, idle, *net.collect_params().values()], "sgd")
    step = gp.DataParallel(net, gluon.loss.L2Loss(), trainer, ignore_stale_grad=True)
    for _ in range(3):
        step(*batch(rng))
    step.update()
    idle.data()[1] = value
    step(*batch(rng))
    with pytest.raises(gp.errors.NotFinite, match="parameter idle is NaN or infinite since step 4"):
        step.update()
