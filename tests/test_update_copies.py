"""Every optimizer of MXNet updates the copies of all devices, however a loop is written, with the bits of one device.

Gradients are sums of small whole numbers, exact in any order, so the weights have the bits of MXNet's updater.
"""

import itertools

import numpy as np
import pytest
from update_loops import OPTIMIZERS, STEPS, Loop, OneDevice, assert_same_bits, options_of

import mxnet as mx
from mxnet import nd


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_all_copies_have_the_bits_of_mxnets_updater_on_one_device(case):
    layouts = [("gp.DataParallel", 1), ("gp.DataParallel", 3), ("step", 1), ("step", 2), ("update", 3), ("store", 2)]
    mx.random.seed(1)  # SGLD draws noise
    one = OneDevice(case)
    for number, step in enumerate(STEPS):
        one.step(number, *step)
    for way, num_devices in layouts:
        mx.random.seed(1)
        loop = Loop(case, way, range(num_devices))
        for number, step in enumerate(STEPS):
            loop.step(number, *step)
        assert_same_bits(loop, one)


@pytest.mark.skipif(not mx.runtime.Features().is_enabled("MKLDNN"), reason="this build of MXNet has no oneDNN")
@pytest.mark.parametrize("case", [case for case in OPTIMIZERS if case != "groupadagrad"])  # which accepts matrices only
def test_an_update_is_the_same_where_a_convolution_has_predicted_before(case):
    """A prediction leaves the weight in oneDNN's memory layout, as an evaluation on the first device does."""
    random, found = np.random.RandomState(1), []
    weight, *gradients = random.standard_normal((4, 16, 16, 3, 3)).astype("float32")
    for has_predicted in (False, True):
        name, options = options_of(case)
        updater = mx.optimizer.get_updater(mx.optimizer.create(name, **{"wd": 0.1, **options}))
        array = nd.array(weight)
        for gradient in gradients:
            if has_predicted:
                pixels = nd.ones((2, 16, 8, 8))
                nd.Convolution(pixels, array, kernel=(3, 3), num_filter=16, no_bias=True).wait_to_read()
            mx.random.seed(1)  # SGLD draws noise
            updater(0, nd.array(gradient), array)
        found.append(array.asnumpy())
    np.testing.assert_array_equal(*found)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # MXNet's store does not close it
@pytest.mark.parametrize("case", [case for case in OPTIMIZERS if case != "sgld"])  # which has no states
def test_states_continue_on_other_devices_and_where_another_updates(case, tmp_path):
    layouts = [
        ("store", (0, 1)), ("gp.DataParallel", (0, 1)), ("update", (2, 3)), ("step", (0,)), ("store", (3, 1, 2)),
        ("gp.DataParallel", (0,)), ("step", (1, 0)), ("store", (0, 1)), ("step", (2,)),
    ]  # fmt: skip
    one, file, steps = OneDevice(case), str(tmp_path / "states"), enumerate(itertools.cycle(STEPS))
    weights = None
    for layout in layouts:
        loop = Loop(case, *layout, weights)
        if weights is not None:
            loop.trainer.load_states(file)
        for number, step in itertools.islice(steps, 2):
            one.step(number, *step)
            loop.step(number, *step)
        assert_same_bits(loop, one)
        weights = [copies[0] for copies in loop.weights()]  # save_parameters would round their mean
        loop.trainer.save_states(file)
