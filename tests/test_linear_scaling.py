"""LinearScalingScheduler: a schedule times batch_size / base_batch_size, reached by a linear warm-up."""

import math

import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

scheduler = mx.lr_scheduler
SCHEDULES = {
    "constant": (lambda: 0.1, lambda n: 0.1),
    "factor": (lambda: scheduler.FactorScheduler(10, 0.5, base_lr=0.1), lambda n: 0.1 * 0.5 ** ((n - 1) // 10)),
    "multi_factor": (
        lambda: scheduler.MultiFactorScheduler([8, 20], 0.1, 0.1), lambda n: 0.1 * 0.1 ** ((n > 8) + (n > 20)),
    ),
    "poly": (lambda: scheduler.PolyScheduler(40, 0.1, pwr=2), lambda n: 0.1 * (1 - n / 40) ** 2),
    "cosine": (lambda: scheduler.CosineScheduler(40, 0.1), lambda n: 0.1 * (1 + math.cos(math.pi * n / 40)) / 2),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("batch_size", [1024, 64])
def test_each_of_mxnets_schedules_is_scaled_and_warmed_up(name, batch_size):
    schedule, rate = SCHEDULES[name]
    scaled = gp.LinearScalingScheduler(schedule(), batch_size, 256, warmup_steps=15, warmup_begin_lr=0.01)
    assert scaled.base_lr == pytest.approx(0.1 * batch_size / 256)
    assert gp.LinearScalingScheduler(0.1, 2 * batch_size)(1) == pytest.approx(0.1 * batch_size / 128)  # no warm-up
    for number in range(1, 41):
        wanted = rate(number) * batch_size / 256
        if number < 15:
            wanted = 0.01 + (wanted - 0.01) * number / 15
        assert scaled(number) == pytest.approx(wanted), number


def make(num_devices=1, optimizer="sgd", accumulate=1, **settings):
    net = gluon.nn.Dense(2, in_units=3, use_bias=False)
    net.cast("float64")
    net.initialize(mx.init.Constant(0.5), ctx=[mx.cpu(index) for index in range(num_devices)])
    schedule = gp.LinearScalingScheduler(scheduler.FactorScheduler(3, 0.5, base_lr=0.01), 64, 8, warmup_steps=4)
    trainer = gluon.Trainer(net.collect_params(), optimizer, {"lr_scheduler": schedule, **settings})
    return net, trainer, gp.DataParallel(net, gluon.loss.L2Loss(), trainer, accumulate=accumulate)


REFUSED = {
    "no schedule": (lambda: gp.LinearScalingScheduler("cosine", 64), "schedule is 'cosine', expected an mx.lr_sched"),
    "no batch": (lambda: gp.LinearScalingScheduler(0.1, 0), "batch_size is 0, expected a whole number, 1 or more"),
    "half a step": (lambda: gp.LinearScalingScheduler(0.1, 64, warmup_steps=1.5), "warmup_steps is 1.5, expected"),
    "two warm-ups": (
        lambda: gp.LinearScalingScheduler(scheduler.CosineScheduler(9, warmup_steps=2), 64), "has warmup_steps=2; pass",
    ),
    "warm-up from above": (
        lambda: gp.LinearScalingScheduler(0.1, 256, warmup_begin_lr=1), "warmup_begin_lr is 1, expected 0 to .* 0.1",
    ),
    "another rate": (lambda: make(learning_rate=0.1), r"learning_rate is 0.1 .* is 0.08: write .*scheduler.base_lr"),
    "the default of Adam": (lambda: make(optimizer="adam"), "learning_rate is 0.001 .its default, if you passed none"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_with_what_to_write(what):
    call, words = REFUSED[what]
    with pytest.raises(ValueError, match=words):
        call()
