"""Profiles of tiny trainings in this process: steps are found, recorded in order, and add up."""

import json
import types

import numpy as np
import pytest
from profiling_nets import DEVICES, LOSS, batch, net_of, profiled, trainer_of

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.commands.profiling import activities, analysis
from gluon_parallel.commands.profiling import recording as recordings
from gluon_parallel.commands.profiling.recording import Operator, Span
from mxnet import autograd, gluon


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A profile of three steps of DataParallel with a SyncBatchNorm layer, and its folder."""
    net = net_of(gp.nn.SyncBatchNorm(in_channels=4, prefix="norm_"))
    parallel = gp.DataParallel(net, LOSS, trainer_of(net), convert_for_cpu=False)  # which would replace the pooling
    data = gluon.data.DataLoader(gluon.data.ArrayDataset(np.ones((64, 1, 12, 12), "float32"), np.zeros(64)), 16)
    folder = tmp_path_factory.mktemp("profile")
    # However late a device is: an exchange that is left to Python has no moment at which all had come.
    net[2].sync_group.rendezvous.record.patience = 60 * 10**9
    with gp.profile(folder, steps=3, skip=1) as profile:
        for x, y in data:
            parallel.step(x, y)
    return profile, folder


def test_each_step_of_each_device_is_covered_by_pieces_in_order_which_add_up(trained):
    (recording,) = trained[0].analysis.recordings
    assert recording.num_samples == 48
    for timeline, marks in zip(trained[0].analysis.timelines, recording.marks):
        assert len(timeline.steps) == 3
        assert recording.begin == marks[0] < marks[-1] <= recording.end
        for step, begin, end in zip(timeline.steps, marks, marks[1:]):
            edges = [begin, *(piece.end for piece in step)]
            assert [piece.begin for piece in step] == edges[:-1]
            assert edges[-1] == end
            assert edges == sorted(edges)
        together = sum(timeline.seconds(part) for part in activities.ACTIVITIES)
        assert together == pytest.approx(np.mean(timeline.durations()), rel=1e-9)
        assert all(timeline.seconds(part) > 0 for part in activities.COMPUTING)


def test_each_step_goes_forward_backward_and_is_updated(trained):
    (recording,) = trained[0].analysis.recordings
    for number, timeline in enumerate(trained[0].analysis.timelines):

        def begins(name, device=number):
            return [one.begin for one in recording.operators if one.device == device and name in one.name]

        # What the data enforce, by operators: parts hide each other where a device's operators overlap, and an operator
        # that needs no weights may run before the step before it ends.
        forward, backward, last = begins("Convolution"), begins("_backward_Convolution"), begins("_update")
        forward = [begin for begin in forward if begin not in backward]
        assert len(forward) == len(backward) == 3 and len(last) % 3 == 0
        firsts = last[:: len(last) // 3]
        assert all(one < other for one, other in zip(forward, backward))
        assert all(one < other for one, other in zip(begins("_backward_FullyConnected"), firsts))
        for name in ("Convolution", "Activation", "Pooling", "FullyConnected", "mean"):
            assert (activities.FORWARD, name) in timeline.operators
            assert (activities.BACKWARD, name) not in timeline.operators
            assert (activities.BACKWARD, f"_backward_{name}") in timeline.operators


def test_an_operator_goes_forward_while_gradients_that_need_no_values_are_there_already():
    names = ["Convolution", "CopyCPU2CPU", "_backward_mean", "squeeze", "Activation", "_mul_scalar", "mean",
             "_backward_Activation", "sum", "_backward_Convolution", "_backward_squeeze", "add_n",
             "Convolution"]  # fmt: skip
    operators = [Operator(0, name, 10 * number, 10 * number + 9) for number, name in enumerate(names)]
    found = [part[0] for part in analysis._phases(operators, analysis._with_gradient(operators))]
    assert "".join(found) == "ffbffffbbbbuf"


def test_an_operator_goes_forward_although_its_gradient_ran_before_the_step_began():
    def step(number, names):
        return [Operator(0, name, 100 * number + 10 * at, 100 * number + 10 * at + 9) for at, name in enumerate(names)]

    device = [0, 100, 200], "cpu(0)"
    first = step(0, ["Convolution", "_backward_mean", "mean", "_backward_Convolution", "sgd_update", "_backward_mean"])
    second = step(1, ["Convolution", "_backward_Convolution", "mean", "_backward_Convolution", "sgd_update"])
    recording = types.SimpleNamespace(
        marks=device[:1], devices=device[1:], operators=[*first, *second], rank=0, passes=[], is_by_hand=False,
        spans=[Span("step", 0, 1), Span("step", 100, 101)],
    )  # fmt: skip
    (timeline,) = analysis._timelines(recording, [], 2)
    assert (activities.FORWARD, "mean") in timeline.operators
    assert (activities.BACKWARD, "mean") not in timeline.operators


def test_a_devices_operators_take_what_its_computing_takes(trained):
    """Computing, from the pieces, is the time in which an operator or a pass of a layer runs."""
    (recording,) = trained[0].analysis.recordings
    sums = [one for one in recording.operators if one.name == "gluon_parallel.allreduce"]
    for number, timeline in enumerate(trained[0].analysis.timelines):
        runs = [one for one in recording.operators if one.device == number and one not in sums]
        passes = [one for one in recording.passes if one.device == timeline.device]
        times = [(one.begin, one.end) for one in runs]
        times += [pair for one in passes for pair in ((one.began, one.arrived), (one.reduced, one.ended))]
        expected = activities.overlap(times, [(recording.marks[number][0], recording.marks[number][-1])]) / 1e9 / 3
        assert timeline.seconds(*activities.COMPUTING) == pytest.approx(expected, rel=0.05)


def test_passes_reading_and_steps_are_recorded_with_what_they_wait_for(trained):
    (recording,) = trained[0].analysis.recordings
    assert len(recording.passes) == 3 * 2 * 2  # steps, directions, devices
    assert [layer.name for layer in trained[0].analysis.layers] == ["norm"]
    together = {}
    for one in recording.passes:
        assert one.began <= one.arrived <= one.complete <= one.reduced <= one.ended
        together.setdefault((one.direction, one.call), []).append(one)
    for first, second in together.values():
        assert {first.device, second.device} == {"cpu(0)", "cpu(1)"}
        assert first.complete == second.complete
    assert [span.what for span in recording.spans][:6] == ["reading data", "step"] * 3
    assert all(one.end <= other.begin for one, other in zip(recording.spans, recording.spans[1:]))


def test_the_trace_holds_every_operator_and_names_its_rows(trained):
    events = json.loads((trained[1] / "profile.json").read_text())["traceEvents"]
    (recording,) = trained[0].analysis.recordings
    rows = {one["args"]["name"] for one in events if one["ph"] == "M" and one["name"] == "thread_name"}
    assert rows >= {"script", "cpu(0)", "cpu(1)", "cpu(1), SyncBatchNorm"}
    for number in range(2):
        own = {one["tid"] for one in events if one["ph"] == "M" and one["args"].get("name") == f"cpu({number})"}
        slices = [one for one in events if one["ph"] == "X" and one["tid"] in own]
        assert [one["name"] for one in slices] == [one.name for one in recording.operators if one.device == number]
    assert all(one["ts"] >= 0 and one["dur"] >= 0 for one in events if one["ph"] == "X")


def test_a_hand_written_loop_is_profiled_by_its_trainer_steps(tmp_path):
    net = net_of()
    trainer = trainer_of(net)

    def step():
        mx.nd.waitall()  # devices that are slow would have the launches of several steps before them
        x, y = (gp.split_and_load(one, DEVICES) for one in batch())
        with autograd.record():
            losses = [LOSS(net(x), y) for x, y in zip(x, y)]
        autograd.backward(losses)
        trainer.step(8)

    analysis = profiled(tmp_path, step).analysis
    assert analysis.num_steps == 3
    assert analysis.recordings[0].is_by_hand
    assert analysis.recordings[0].would_convert == {"global average pooling": 1}  # the net is found by its parameters
    assert all(
        timeline.seconds(activities.BACKWARD) > 0 < timeline.seconds(activities.LAUNCHING)
        for timeline in analysis.timelines
    )
    assert analysis.seconds(activities.SCRIPT) == 0  # between two trainer steps the loop launches


@pytest.mark.parametrize("head", ['{"traceEvents": [', '{"traceEvents": [,', ","])  # of a process's later files
def test_operators_are_read_without_our_bookkeeping_from_all_kinds_of_files(tmp_path, head):
    marks = enumerate([("mean", "B"), ("mean", "E"), ("arrives", "B"), ("arrives", "E")])
    events = [json.dumps({"ph": ph, "name": name, "pid": 0, "tid": 7, "ts": ts}) for ts, (name, ph) in marks]
    (tmp_path / "profile.json").write_text(f"{head}{','.join(events)}]}}")
    assert [one.name for one in recordings._read(tmp_path / "profile.json", DEVICES, 0)] == ["mean"]


def test_accumulated_steps_have_no_update(tmp_path):
    net = net_of()
    parallel = gp.DataParallel(net, LOSS, trainer_of(net), accumulate=2)
    (timeline, _) = profiled(tmp_path, lambda: parallel.step(*batch()), num=6, steps=4, skip=2).analysis.timelines
    assert len(timeline.steps) == 4
    updates = [[one for one in step if one.activity == activities.UPDATE] for step in timeline.steps]
    updated = [any(one.end - one.begin for one in step) for step in updates]
    names = [name for part, name in timeline.operators if part == activities.UPDATE and "sgd" in name]
    assert names
    assert updated[1] and updated[3]


@pytest.fixture
def pipeline_step():
    """A pipeline, and the arguments of its step."""
    net = gluon.nn.HybridSequential()
    # The trainer sorts names: the second stage's come first.
    net.add(gluon.nn.Dense(8, in_units=3, activation="relu", prefix="z_"), gluon.nn.Dense(1, in_units=8, prefix="a_"))
    net.initialize()
    pipe = gp.Pipeline(net, DEVICES, num_micro_batches=2)
    trainer = gluon.Trainer(pipe.collect_params(), "sgd", {"learning_rate": 0.1})
    return pipe, (gluon.loss.L2Loss(), trainer, mx.nd.ones((4, 3)), mx.nd.ones((4, 1)))


def test_a_pipeline_is_profiled(tmp_path, pipeline_step):
    pipe, arguments = pipeline_step
    analysis = profiled(tmp_path, lambda: pipe.step(*arguments)).analysis
    assert [timeline.device for timeline in analysis.timelines] == ["cpu(0)", "cpu(1)"]
    assert all(
        timeline.seconds(activities.FORWARD) > 0 < timeline.seconds(activities.BACKWARD)
        for timeline in analysis.timelines
    )


def test_a_step_of_each_of_several_trainers_ends_with_its_own_update(tmp_path):
    both = []
    for optimizer in ("sgd", "adam"):
        net = net_of()
        both.append(gp.DataParallel(net, LOSS, gluon.Trainer(net.collect_params(), optimizer)))

    x, y = mx.nd.ones((128, 1, 64, 64)), mx.nd.zeros(128)  # what takes longer than its launch

    def step():
        for parallel in both:
            parallel.step(x, y)
            mx.nd.waitall()

    (recording,) = profiled(tmp_path, step, steps=4).analysis.recordings
    for device, marks in enumerate(recording.marks):
        updates = [one for one in recording.operators if one.device == device and "_update" in one.name]
        names = [{one.name for one in updates if begin < one.end <= end} for begin, end in zip(marks, marks[1:])]
        assert [["adam" in name for name in found] for found in names] == [[True], [False]] * 2


def test_a_profile_ends_before_a_pipeline_measures_itself(tmp_path, pipeline_step):
    pipe, arguments = pipeline_step
    with gp.profile(tmp_path, steps=9, skip=1) as profile:
        for _ in range(3):
            pipe.step(*arguments)
        assert "measured, MB" in str(pipe.profile(*arguments))
        assert profile.analysis.num_steps == 2
        pipe.step(*arguments)
    assert profile.analysis.num_steps == 2
