"""Profiles of tiny trainings in this process: steps are found, recorded in order, and add up."""

import json
import os
import sys
import time

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.__main__ import run
from gluon_parallel.commands.profiling import analysis, observers, parts
from gluon_parallel.commands.profiling.recording import Operator, Span
from gluon_parallel.device_threads.thread import thread_of
from mxnet import autograd, gluon

DEVICES = [mx.cpu(0), mx.cpu(1)]
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def net_of(norm=None):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(4, 3, in_channels=1), gluon.nn.Activation("relu"))
    if norm is not None:
        net.add(norm)
    net.add(gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(3, in_units=4))
    net.initialize(ctx=DEVICES)
    net.hybridize(static_alloc=True)
    return net


def trainer_of(net):
    return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})


def batch():
    return mx.nd.ones((8, 1, 12, 12)), mx.nd.zeros(8)


def profiled(folder, step, num=4, **options):
    with gp.profile(folder, **{"steps": 3, "skip": 1, **options}) as profile:
        for _ in range(num):
            step()
    return profile


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A profile of three steps of DataParallel with a SyncBatchNorm layer, and its folder."""
    net = net_of(gp.nn.SyncBatchNorm(in_channels=4, prefix="norm_"))
    parallel = gp.DataParallel(net, LOSS, trainer_of(net))
    data = gluon.data.DataLoader(gluon.data.ArrayDataset(np.ones((64, 1, 12, 12), "float32"), np.zeros(64)), 16)
    folder = tmp_path_factory.mktemp("profile")
    with gp.profile(folder, steps=3, skip=1) as profile:
        for x, y in data:
            parallel.step(x, y)
    return profile, folder


def test_each_step_of_each_device_is_covered_by_pieces_in_order(trained):
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


def test_the_parts_add_up_to_the_step(trained):
    for timeline in trained[0].analysis.timelines:
        together = sum(timeline.seconds(part) for part in parts.PARTS)
        assert together == pytest.approx(np.mean(timeline.durations()), rel=1e-9)
        for part in (parts.FORWARD, parts.BACKWARD, parts.UPDATE):
            assert timeline.seconds(part) > 0


def test_each_step_goes_forward_backward_and_is_updated(trained):
    for timeline in trained[0].analysis.timelines:
        for step in timeline.steps:
            begins = {part: [piece.begin for piece in step if piece.part == part] for part in parts.COMPUTING}
            # The gradient of a mean needs no values, so it may come while the forward pass waits.
            assert min(begins[parts.FORWARD]) < min(begins[parts.BACKWARD]) < min(begins[parts.UPDATE])
            assert max(begins[parts.FORWARD]) < max(begins[parts.BACKWARD]) < max(begins[parts.UPDATE])
        for name in ("Convolution", "Activation", "Pooling", "FullyConnected", "mean"):
            assert (parts.FORWARD, name) in timeline.operators
            assert (parts.BACKWARD, name) not in timeline.operators
            assert (parts.BACKWARD, f"_backward_{name}") in timeline.operators


def test_an_operator_goes_forward_while_gradients_that_need_no_values_are_there_already():
    names = ["Convolution", "CopyCPU2CPU", "_backward_mean", "squeeze", "Activation", "_mul_scalar", "mean",
             "_backward_Activation", "sum", "_backward_Convolution", "_backward_squeeze", "add_n"]  # fmt: skip
    operators = [Operator(0, name, 10 * number, 10 * number + 9, 1) for number, name in enumerate(names)]
    found = [part[0] for part in analysis._phases(operators)]
    assert "".join(found) == "ffbffffbbbbu"


def test_a_devices_operators_take_what_its_computing_takes(trained):
    """Computing, from the pieces, is the time in which an operator or a pass of a layer runs."""
    (recording,) = trained[0].analysis.recordings
    sums = [one for one in recording.operators if one.name == "gluon_parallel.allreduce"]
    for number, timeline in enumerate(trained[0].analysis.timelines):
        runs = [one for one in recording.operators if one.device == number and one not in sums]
        passes = [one for one in recording.passes if one.device == timeline.device]
        times = [(one.begin, one.end) for one in runs]
        times += [pair for one in passes for pair in ((one.began, one.came), (one.met, one.ended))]
        expected = parts.overlap(times, [(recording.marks[number][0], recording.marks[number][-1])]) / 1e9 / 3
        assert timeline.seconds(*parts.COMPUTING) == pytest.approx(expected, rel=0.05)


def test_the_passes_of_each_layer_are_recorded_with_what_they_wait_for(trained):
    (recording,) = trained[0].analysis.recordings
    assert len(recording.passes) == 3 * 2 * 2  # steps, directions, devices
    assert [layer.name for layer in trained[0].analysis.layers] == ["norm"]
    together = {}
    for one in recording.passes:
        assert one.began <= one.came <= one.complete <= one.met <= one.ended
        together.setdefault((one.direction, one.call), []).append(one)
    for first, second in together.values():
        assert {first.device, second.device} == {"cpu(0)", "cpu(1)"}
        assert first.complete == second.complete
        assert abs(max(first.came, second.came) - first.complete) < 50_000_000  # the last one completes it


def test_reading_data_and_steps_alternate(trained):
    (recording,) = trained[0].analysis.recordings
    assert [span.what for span in recording.spans][:6] == ["reading data", "step"] * 3
    assert all(one.end <= other.begin for one, other in zip(recording.spans, recording.spans[1:]))


def test_launches_are_recorded_on_the_thread_of_each_device(trained):
    (recording,) = trained[0].analysis.recordings
    assert {span.what for span in recording.launches} >= {"cpu(0)", "cpu(1)"}
    assert all(span.begin <= span.end for span in recording.launches)


def test_the_trace_holds_every_operator_and_names_its_rows(trained):
    events = json.loads((trained[1] / "profile.json").read_text())["traceEvents"]
    (recording,) = trained[0].analysis.recordings
    rows = {one["args"]["name"] for one in events if one["ph"] == "M" and one["name"] == "thread_name"}
    assert rows >= {"script", "cpu(0)", "cpu(1)", "cpu(1), launching", "cpu(1), SyncBatchNorm"}
    for number in range(2):
        own = {one["tid"] for one in events if one["ph"] == "M" and one["args"].get("name") == f"cpu({number})"}
        slices = [one for one in events if one["ph"] == "X" and one["tid"] in own]
        assert [one["name"] for one in slices] == [one.name for one in recording.operators if one.device == number]
        for row in own:  # what overlaps stands in several rows
            times = [(one["ts"], one["ts"] + one["dur"]) for one in slices if one["tid"] == row]
            assert all(end <= begin + 1e-3 for (_, end), (begin, _) in zip(times, times[1:]))
    assert all(one["ts"] >= 0 and one["dur"] >= 0 for one in events if one["ph"] == "X")


def test_a_hand_written_loop_is_profiled_by_its_trainer_steps(tmp_path):
    net = net_of()
    trainer = trainer_of(net)

    def step():
        x, y = (gp.split_and_load(one, DEVICES) for one in batch())
        with autograd.record():
            losses = [LOSS(net(x), y) for x, y in zip(x, y)]
        autograd.backward(losses)
        trainer.step(8)

    analysis = profiled(tmp_path, step).analysis
    assert analysis.num_steps == 3
    assert analysis.recordings[0].is_by_hand
    assert all(
        timeline.seconds(parts.BACKWARD) > 0 < timeline.seconds(parts.LAUNCHING) for timeline in analysis.timelines
    )
    assert analysis.seconds(parts.SCRIPT) == 0  # between two trainer steps the loop launches


def test_accumulated_steps_have_no_update(tmp_path):
    net = net_of()
    parallel = gp.DataParallel(net, LOSS, trainer_of(net), accumulate=2)
    (timeline, _) = profiled(tmp_path, lambda: parallel.step(*batch()), num=6, steps=4, skip=2).analysis.timelines
    assert len(timeline.steps) == 4
    updated = [any(piece.part == parts.UPDATE and piece.end - piece.begin for piece in step) for step in timeline.steps]
    names = [name for part, name in timeline.operators if part == parts.UPDATE and "sgd" in name]
    assert names
    assert updated[1] and updated[3]


@pytest.fixture
def pipeline_step():
    """A pipeline, and the arguments of its step."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(8, in_units=3, activation="relu"), gluon.nn.Dense(1, in_units=8))
    net.initialize()
    pipe = gp.Pipeline(net, DEVICES, num_micro_batches=2)
    trainer = gluon.Trainer(pipe.collect_params(), "sgd", {"learning_rate": 0.1})
    return pipe, (gluon.loss.L2Loss(), trainer, mx.nd.ones((4, 3)), mx.nd.ones((4, 1)))


def test_a_pipeline_is_profiled(tmp_path, pipeline_step):
    pipe, arguments = pipeline_step
    analysis = profiled(tmp_path, lambda: pipe.step(*arguments)).analysis
    assert [timeline.device for timeline in analysis.timelines] == ["cpu(0)", "cpu(1)"]
    assert all(
        timeline.seconds(parts.FORWARD) > 0 < timeline.seconds(parts.BACKWARD) for timeline in analysis.timelines
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


def test_nothing_is_watched_after_the_recorded_steps(tmp_path):
    net = net_of()
    parallel = gp.DataParallel(net, LOSS, trainer_of(net))
    data = gluon.data.DataLoader(gluon.data.ArrayDataset(np.ones((64, 1, 12, 12), "float32"), np.zeros(64)), 8)
    with gp.profile(tmp_path, steps=2, skip=1) as profile:
        for x, y in data:
            parallel.step(x, y)
            if profile.analysis is not None:
                assert not hasattr(gp.DataParallel.step, "__wrapped__")
    assert len(profile._reads) == 1 + 3  # of the iterator and the batches


def test_the_loop_goes_on_and_methods_are_put_back(tmp_path, capsys):
    originals = [vars(owner)[name] for owner, name in ((gp.DataParallel, "step"), (gluon.Trainer, "step"))]
    net = net_of()
    parallel = gp.DataParallel(net, LOSS, trainer_of(net))
    profile = profiled(tmp_path, lambda: parallel(*batch()), num=7)  # by its second name
    assert capsys.readouterr().out.startswith(str(profile))
    assert mx.profiler.dumps() == ""  # it adds up nothing; with that on, MXNet joins no operators of a symbol
    assert [vars(owner)[name] for owner, name in ((gp.DataParallel, "step"), (gluon.Trainer, "step"))] == originals
    assert {path.name for path in tmp_path.iterdir()} == {"profile.html", "profile.json"}


def test_a_loop_that_ends_early_is_profiled_as_far_as_it_went(tmp_path, capsys):
    net = net_of()
    parallel = gp.DataParallel(net, LOSS, trainer_of(net))
    assert profiled(tmp_path, lambda: parallel.step(*batch()), num=3, steps=9).analysis.num_steps == 2
    assert profiled(tmp_path, lambda: parallel.step(*batch()), num=2, skip=3).analysis is None
    assert "nothing was profiled: 3 steps are skipped, and the loop made 2" in capsys.readouterr().err


def test_a_script_that_ends_by_sys_exit_is_profiled(tmp_path):
    net = net_of()
    parallel = gp.DataParallel(net, LOSS, trainer_of(net))
    with pytest.raises(SystemExit), gp.profile(tmp_path, skip=1) as profile:
        for _ in range(3):
            parallel.step(*batch())
        sys.exit(0)
    assert profile.analysis.num_steps == 2


def test_an_error_in_the_loop_passes_and_another_profile_can_follow(tmp_path):
    net = net_of()
    parallel = gp.DataParallel(net, LOSS, trainer_of(net))
    with pytest.raises(ZeroDivisionError), gp.profile(tmp_path, steps=3, skip=1):
        for _ in range(2):
            parallel.step(*batch())
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    assert profiled(tmp_path, lambda: parallel.step(*batch())).analysis.num_steps == 3


def test_a_program_that_has_used_mxnets_profiler_before_is_profiled(tmp_path):
    mx.profiler.set_config(filename=str(tmp_path / "own.json"))  # which writes continuously
    mx.profiler.set_state("run")
    mx.nd.ones(2).wait_to_read()
    mx.profiler.set_state("stop")
    mx.profiler.dump()
    net = net_of()
    parallel = gp.DataParallel(net, LOSS, trainer_of(net))
    assert profiled(tmp_path, lambda: parallel.step(*batch())).analysis.num_steps == 3


def test_a_warning_names_the_line_of_the_program_with_and_without_a_profile(tmp_path, pipeline_step):
    stages = gluon.nn.HybridSequential()
    stages.add(gluon.nn.Dense(8, in_units=3), gluon.nn.BatchNorm(in_channels=8), gluon.nn.Dense(1, in_units=8))
    loss, _, x, y = pipeline_step[1]

    def lines():
        net = net_of(gluon.nn.BatchNorm(in_channels=4))
        stages.initialize(force_reinit=True)
        pipe = gp.Pipeline(stages, DEVICES, num_micro_batches=2)
        arguments = loss, trainer_of(pipe), x, y
        with pytest.warns(gp.errors.StatisticsPerDevice) as caught:
            gp.DataParallel(net, LOSS, trainer_of(net)).step(*batch())
            gp.DataParallel(net, LOSS, trainer_of(net))(*batch())
            pipe.step(*arguments)
        return [(one.filename, one.lineno - lines.__code__.co_firstlineno) for one in caught]

    expected = [(__file__, number) for number in (6, 7, 8)]
    assert lines() == expected
    with gp.profile(tmp_path):
        assert lines() == expected


def test_two_profiles_at_once_and_senseless_numbers_are_refused(tmp_path):
    with gp.profile(tmp_path), pytest.raises(RuntimeError, match="under way already"), gp.profile(tmp_path):
        pass
    for options in ({"steps": 0}, {"steps": 2.5}, {"skip": "1"}):
        with pytest.raises(ValueError, match="both are whole numbers of at least 1"):
            gp.profile(tmp_path, **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(gp.errors.OutputUnavailable, match="cannot be made"), gp.profile(tmp_path / "file" / "below"):
        pass


def test_a_device_that_mxnets_profiler_has_no_place_for_is_refused(tmp_path):
    net = gluon.nn.Dense(1, in_units=3)
    net.initialize(ctx=[mx.cpu(0), mx.cpu(500)])
    parallel = gp.DataParallel(net, gluon.loss.L2Loss(), gluon.Trainer(net.collect_params(), "sgd"))
    with pytest.raises(gp.errors.DeviceUnavailable, match=r"an operator of cpu\(500\)"), gp.profile(tmp_path, skip=1):
        parallel.step(mx.nd.ones((4, 3)), mx.nd.ones((4, 1)))


def test_the_command_refuses_senseless_numbers_and_scripts_that_cannot_be_read(capsys, tmp_path):
    before = dict(os.environ)
    assert run(["profile", "--skip", "0", "train.py"]) == 2
    assert capsys.readouterr().err == "gluon-parallel profile: steps=20, skip=0; both are whole numbers of at least 1\n"
    assert run(["profile", "--folder", str(tmp_path), "missing.py"]) == 2
    assert "'missing.py' cannot be read" in capsys.readouterr().err
    assert dict(os.environ) == before


def test_launches_of_two_devices_at_the_same_time_are_kept_apart(monkeypatch):
    threads, inside = [thread_of(device) for device in DEVICES], []

    def span(*values):
        if not inside:  # while the first span is made, the other device's thread notes one
            inside.append(values)
            threads[1](lambda: None)
        return Span(*values)

    monkeypatch.setattr(observers, "Span", span)
    monkeypatch.setattr(observers, "_JOINED", 10**12)
    with observers.recorded_launches() as spans:
        threads[0](lambda: None)
        begin = time.monotonic_ns()
        threads[0](lambda: None)
    assert {one.what: one.end > begin for one in spans} == {"cpu(0)": True, "cpu(1)": False}
