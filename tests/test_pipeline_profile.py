"""What a pipeline says about a step's schedule, its time and its memory."""

import gc

import pytest
from pipeline_nets import TOLERANCE, assert_equal, batch, cpus, layers, set_weights, trainer_of

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.pipeline.orders import ORDERS, Task
from gluon_parallel.pipeline.profile import peaks
from mxnet import gluon

LOSS = gluon.loss.L2Loss()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rows", [[cpus(0, 1)], [cpus(0, 1), cpus(2, 3)]])
def test_devices_run_one_pass_after_the_other_in_the_order_asked_for(order, recompute, rows):
    net, other = layers(6, width=60), layers(6, width=60)
    profiled, plain = (gp.Pipeline(one, rows, 5, order, recompute) for one in (net, other))
    x, y = batch(40, width=60)
    trainer = trainer_of(profiled.collect_params())
    profile = profiled.profile(LOSS, trainer, x, y)
    plain.step(LOSS, trainer_of(plain.collect_params()), x, y)
    assert_equal(net, other)  # a profiled step is a step
    for passes in profile.passes:
        assert len(passes) == 2 * 2 * 5
        for stage in range(2):
            ours = sorted((times, task) for task, times in passes.items() if task.stage == stage)
            assert [task for _, task in ours] == ORDERS[order](stage, 2, 5)
            assert all(before[1] <= after[0] for (before, _), (after, _) in zip(ours, ours[1:]))
            for number in range(5):  # never before what it works on
                assert passes[Task(1, "forward", number)][0] >= passes[Task(0, "forward", number)][1]
                assert passes[Task(0, "backward", number)][1] >= passes[Task(1, "backward", number)][0]


def test_a_profile_says_times_memory_and_other_numbers_of_micro_batches(tmp_path):
    pipe = gp.Pipeline(layers(4), cpus(0, 1), 4)
    trainer = trainer_of(pipe.collect_params())
    x, y = batch(8)
    profile = pipe.profile(LOSS, trainer, x, y)
    # Two layers of 6 x 6 weights and 6 biases in float64, with gradients; each returns (2, 6) twice: Dense and tanh.
    assert profile.parameters == [2 * 2 * 42 * 8] * 2
    assert profile.activations == [2 * 2 * 12 * 8] * 2
    assert profile.num_held == [2, 1]
    assert profile.memory(0) == profile.parameters[0] + 2 * profile.activations[0]
    assert profile.predicted_seconds(1) == pytest.approx(
        4 * sum(profile.duration(stage, kind) for stage in range(2) for kind in ("forward", "backward"))
    )
    said = str(profile)
    assert "2 stages, 4 micro-batches, order 1f1b" in said and "predicted 20%" in said
    assert said.splitlines()[-1].split()[:2] == ["16", "6%"]
    profile.draw(tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_count_with_the_type_that_each_has_and_recomputation_holds_those_of_one_micro_batch(recompute):
    first = gluon.nn.HybridSequential()
    first.add(gluon.nn.HybridLambda(lambda F, x: F.cast(x, "float64")), gluon.nn.Dense(6, in_units=6))
    pipe = gp.Pipeline([set_weights(first), layers(1)], cpus(0, 1), 4, "gpipe", recompute)
    x, y = batch(8)
    profile = pipe.profile(LOSS, trainer_of(pipe.collect_params()), x.astype("uint8"), y)
    assert profile.activations == [2 * 12 * 8] * 2
    held = 4 * 12 + 2 * 12 * 8 if recompute else 4 * 2 * 12 * 8  # inputs are bytes
    assert profile.memory(0) == profile.parameters[0] + held


def test_a_step_that_fails_while_it_is_profiled_leaves_the_next_one_alone():
    pipe = gp.Pipeline(layers(2), cpus(0, 1), 4)
    trainer = trainer_of(pipe.collect_params())
    with pytest.raises(gp.errors.BatchMismatch):
        pipe.profile(LOSS, trainer, *batch(3))
    x, y = batch(8)
    assert pipe.step(LOSS, trainer, x, y).asscalar() == pytest.approx(
        LOSS(layers(2)(x), y).mean().asscalar(), rel=TOLERANCE["rtol"]
    )


def test_a_profile_of_a_frozen_first_stage_can_be_read():
    net = layers(4)
    net[0].collect_params().setattr("grad_req", "null")
    net[1].collect_params().setattr("grad_req", "null")
    pipe = gp.Pipeline(net, cpus(0, 1), 4)
    profile = pipe.profile(LOSS, trainer_of(pipe.collect_params()), *batch(8))
    assert profile.duration(0, "backward") == 0
    assert "2 stages" in str(profile)


def test_the_measured_memory_is_that_of_the_arrays_which_a_stage_holds():
    batch_of_one_mb, measured = batch(2048, width=64), []
    for order, recompute in (("gpipe", False), ("1f1b", False), ("gpipe", True)):
        pipe = gp.Pipeline(layers(8, width=64), cpus(0, 1), 8, order, recompute)
        trainer = trainer_of(pipe.collect_params())
        pipe.step(LOSS, trainer, *batch_of_one_mb)
        profile = pipe.profile(LOSS, trainer, *batch_of_one_mb)
        measured.append(profile.measured_memory(0))
        # Beside what the stage holds: gradients of activations, and a micro-batch's arrays on their way.
        assert profile.memory(0) < measured[-1] < profile.memory(0) + 2e6
        assert f"{measured[-1] / 1e6:.2f}" in str(profile)
    assert measured[0] > 2 * max(measured[1:])


def test_arrays_that_nothing_refers_to_do_not_count_when_they_are_freed():
    ring = [mx.nd.ones(250_000)]
    ring.append(ring)
    mx.nd.waitall()
    del ring

    def function():
        gc.collect()
        mx.nd.zeros(1000)

    assert peaks([mx.cpu(0)], function) == [4000]
