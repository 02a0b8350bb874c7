"""The same step draws the same numbers, in whichever process and after whatever went before."""

import random

import numpy as np

import gluon_parallel as gp  # noqa: F401 - makes MXNet importable
import mxnet as mx
from gluon_parallel.mxnet.device_threads.seeds import derive_seed
from gluon_parallel.training.seeding import reseed
from mxnet import autograd


def draw(devices):
    """Numbers of every kind that a training step may draw."""
    with autograd.record():
        dropped = [mx.nd.Dropout(mx.nd.ones((50, 7), ctx=device), p=0.5) for device in devices for _ in range(5)]
    numbers = [mx.nd.random.normal(shape=11, ctx=device) for device in devices] + dropped
    return [*(array.asnumpy().tolist() for array in numbers), np.random.rand(), random.random()]  # noqa: NPY002


def test_a_step_draws_the_same_whatever_was_drawn_before_and_others_draw_other_numbers():
    devices, drawn = [mx.cpu(i) for i in range(3)], []
    for step in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (11, 1, 0), (1, 11, 0)]:
        reseed(*step)
        drawn.append(draw(devices))
        draw(devices)
        reseed(*step)
        assert draw(devices) == drawn[-1]
    assert all(a != b for i, a in enumerate(drawn) for b in drawn[:i])


def test_seeds_are_what_every_generator_accepts():
    seeds = {derive_seed(seed, epoch, step) for seed in (0, 2**40) for epoch in range(30) for step in range(30)}
    assert len(seeds) == 1800
    assert all(0 <= number < 2**31 for number in seeds)
