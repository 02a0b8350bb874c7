"""What a profile says about recordings with known times: the parts, and each sentence."""

import json
import pickle

import numpy as np
import pytest
from profiling_recordings import MS, USUAL, recording

from gluon_parallel.commands.profiling import parts
from gluon_parallel.commands.profiling.analysis import Analysis
from gluon_parallel.commands.profiling.findings import findings
from gluon_parallel.commands.profiling.parts import Interval, cut
from gluon_parallel.commands.profiling.recording import Operator, offset
from gluon_parallel.commands.profiling.summary import summary
from gluon_parallel.commands.profiling.trace import write_trace


def said(*recordings):
    return findings(Analysis(list(recordings)))


def test_nothing_is_said_about_a_step_that_only_computes():
    assert said(recording(USUAL, USUAL)) == ["The devices compute 100% of the time, and nothing stands out."]


@pytest.mark.parametrize("num_steps", [1, 2])
def test_nothing_follows_from_fewer_than_three_steps_and_how_to_measure_more_is_said(num_steps):
    slow = [(parts.FORWARD, 60), (parts.BACKWARD, 120), (parts.UPDATE, 20)]
    [sentence] = said(recording(USUAL, slow, num_steps=num_steps))
    assert sentence.startswith(f"Too few steps were measured for findings: {num_steps}, ") and "--skip 1" in sentence


def test_a_slow_process_is_named():
    slow = [(what, 1.8 * time) for what, time in USUAL]
    sentences = said(recording(slow), recording([*USUAL, (parts.LAUNCHING, 80)], rank=1))
    assert sentences[0].startswith(
        "Rank 0 is 1.8 times slower: it computes 180 ms per step, the other processes 100 ms. All wait for it;"
    )


def test_a_slow_device_is_named_with_its_process_where_there_are_several():
    slow = [(parts.FORWARD, 60), (parts.BACKWARD, 120), (parts.UPDATE, 20)]
    assert said(recording(USUAL, slow))[0].startswith("cpu(1) is 2.0 times slower: it computes 200 ms per step, the")
    both = said(recording(USUAL, slow), recording(USUAL, slow, rank=1))
    assert any(one.startswith("cpu(1) of rank 0 is 2.0 times slower") for one in both)


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (parts.READING, "The devices wait for data 20% of the step (25.0 ms): read ahead in more processes"),
        (parts.SCRIPT, "The devices wait for the script between two steps 20% of the step (25.0 ms): look at what"),
        (parts.LAUNCHING, "The devices wait for Python to launch operators 20% of the step (25.0 ms): write"),
        (
            parts.ENGINE,
            "The devices wait for MXNet's engine to start what is launched 20% of the step (25.0 ms): leave",
        ),
        (parts.SUM, "Adding up the gradients of the devices takes 20% of the step (25.0 ms): use fewer devices"),
        (
            parts.DEVICES,
            "The devices wait 20% of the step (25.0 ms) for each other in SyncBatchNorm layers, most in norm0 (25",
        ),
    ],
)
def test_a_part_that_takes_a_fifth_of_the_step_is_named(part, sentence):
    begin = part in (parts.READING, parts.SCRIPT)
    work = [(part, 25), *USUAL] if begin else [*USUAL, (part, 25)]
    assert [one for one in said(recording(work)) if one.startswith(sentence)]
    small = [(part, 1), *USUAL] if begin else [*USUAL, (part, 1)]
    assert said(recording(small)) == ["The devices compute 99% of the time, and nothing stands out."]


def test_an_update_that_takes_long_is_named():
    work = [(parts.FORWARD, 30), (parts.BACKWARD, 40), (parts.UPDATE, 30)]
    assert said(recording(work)) == [
        "The update takes 30% of the step (30.0 ms): make the batch larger, or update less often: "
        "DataParallel(accumulate=...)."
    ]


def test_waiting_for_a_late_process_is_told_from_the_transfer():
    early = recording([*USUAL, ("exchange", 100)])
    late = recording([(parts.FORWARD, 75), *USUAL, ("exchange", 25)], rank=1)
    analysis = Analysis([early, late])
    first, second = analysis.timelines
    assert (first.seconds(parts.LATE), first.seconds(parts.TRANSFER)) == pytest.approx((0.075, 0.025))
    assert (second.seconds(parts.LATE), second.seconds(parts.TRANSFER)) == pytest.approx((0, 0.025))
    sentences = findings(analysis)
    assert [one for one in sentences if one.startswith("The processes wait 19% of the step (37.5 ms) for the one that")]
    assert "which is rank 1 in 100% of this time" in " ".join(sentences)
    assert [
        one
        for one in sentences
        if one.startswith("The exchange of gradients with other processes takes 12% of the step (25.0")
    ]


def test_the_sum_over_the_devices_of_a_single_process_is_no_exchange():
    (timeline,) = Analysis([recording([*USUAL, ("exchange", 25)])]).timelines
    assert (timeline.seconds(parts.SUM), timeline.seconds(parts.TRANSFER), timeline.exchanged) == pytest.approx(
        (0.025, 0, 0)
    )


def test_an_exchange_behind_the_backward_pass_is_hidden():
    both = [recording([*USUAL, (parts.LAUNCHING, 20)], rank=rank) for rank in range(2)]
    for one in both:  # an exchange from 70 to 120 ms of each step; until 100 the device computes
        begins = [begin + 70 * MS for begin in one.marks[0][:-1]]
        one.operators += [Operator(0, "gluon_parallel.mpi key 0", begin, begin + 50 * MS, 1) for begin in begins]
        one.operators.sort(key=lambda operator: operator.begin)
    timeline = Analysis(both).timelines[0]
    assert (timeline.exchanged, timeline.hidden, timeline.seconds(parts.TRANSFER)) == pytest.approx((0.05, 0.03, 0.02))
    assert "and 60% of that of the gradients is hidden" in said(*both)[0]


def test_pooling_that_convert_for_cpu_replaces_is_named():
    work = [(parts.FORWARD, 30), (parts.BACKWARD, 42), ("pooling", 18), (parts.UPDATE, 10)]
    net = {"global average pooling": 1}
    assert said(recording(work, would_convert=net)) == [
        "Pooling takes 30% of the backward pass (18.0 ms), and the net has global average pooling, which MXNet runs "
        "slowly on CPUs: gp.nn.convert_for_cpu(net)."
    ]
    assert not [one for one in said(recording(work)) if "ooling" in one]  # it is converted already


def test_idle_cores_are_counted_over_the_processes_of_a_host():
    assert said(recording(USUAL, busy=1.0)) == [
        "Half of the 2 cores are idle: use more devices (--devices cpu:2), or more threads for each (OMP_NUM_THREADS)."
    ]
    both = [recording(USUAL, busy=1.0, idle=0.0, rank=rank) for rank in range(2)]
    assert said(*both) == ["The devices compute 100% of the time, and nothing stands out."]
    assert "60% of the 2 cores are idle: there is a device for each, but the devices wait." in said(
        recording(USUAL, USUAL, busy=0.8)
    )


def test_programs_that_take_cores_are_counted():
    assert said(recording(USUAL, busy=1.0, idle=0.1 * 2 * 0.4)) == [
        "Other programs take 40% of the 2 cores: end them, and measure again."
    ]


def test_in_a_container_with_a_limit_nothing_is_said_of_other_programs():
    [sentence] = said(recording(USUAL, busy=0.8, idle=float("nan")))
    assert sentence.startswith("60% of the 2 cores are idle")


def test_a_loop_written_by_hand_may_do_something_else_than_launch():
    [sentence] = said(recording([*USUAL, (parts.LAUNCHING, 25)], is_by_hand=True))
    assert sentence.startswith("The devices wait for the loop, which launches operators or does something else, 20% of")


def test_a_device_that_has_ended_its_backward_pass_waits_for_the_others():
    early = [*USUAL[:2], (parts.LAUNCHING, 20), ("sum over devices", 1), (parts.UPDATE, 10)]
    late = [(parts.FORWARD, 30), (parts.BACKWARD, 80), (parts.LAUNCHING, 1), (parts.UPDATE, 10)]
    analysis = Analysis([recording(early, late)])
    assert [timeline.seconds(parts.DEVICES) for timeline in analysis.timelines] == pytest.approx([0.02, 0])
    assert [one for one in findings(analysis) if "(10.0 ms) for each other before the gradients are summed" in one]


def test_what_begins_before_a_steps_mark_counts_in_both_steps():
    """The mark of an update and the forward pass after it become ready at the same time."""
    one = recording(USUAL)
    one.marks = [[mark + 5 * MS for mark in marks] for marks in one.marks]
    [timeline] = Analysis([one]).timelines
    assert timeline.seconds(parts.FORWARD) == pytest.approx(3 * 0.03 / 4)  # the first one began before the recording
    assert timeline.seconds(parts.UPDATE) == pytest.approx(0.01)


def test_a_step_that_takes_much_longer_is_named():
    one = recording(USUAL, num_steps=6)
    one.marks = [[mark + (80 * MS if mark > 300 * MS else 0) for mark in one.marks[0]]]
    assert "Steps differ: step 4 of 6 took 180 ms, a usual one 100 ms." in said(one)


def test_the_costliest_finding_stands_first():
    sentences = said(recording([("reading data", 20), *USUAL, (parts.LAUNCHING, 60)]))
    assert ["launch" in one for one in sentences] == [True, False]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_cover_a_step_and_the_first_part_of_what_overlaps_counts(seed):
    rng = np.random.default_rng(seed)
    intervals = [
        Interval(parts.PARTS[rng.integers(len(parts.PARTS))], *sorted(map(int, rng.integers(-20, 120, 2))))
        for _ in range(30)
    ]
    pieces = cut(0, 100, intervals, parts.SCRIPT)
    by_moment = [
        min(
            (one.part for one in intervals if one.begin <= moment < one.end),
            key=parts.PARTS.index,
            default=parts.SCRIPT,
        )
        for moment in range(100)
    ]
    assert [part for part, begin, end in pieces for _ in range(begin, end)] == by_moment
    assert all(first.part != second.part for first, second in zip(pieces, pieces[1:]))


def test_a_recording_is_the_same_after_pickling():
    one = recording([*USUAL, (parts.DEVICES, 5)], would_convert={"clip": 2}, num_samples=8)
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize("seed", range(5))
def test_clocks_of_two_hosts_are_compared_through_exchanges(seed):
    """Where messages take equally long in both directions, exactly."""
    rng = np.random.default_rng(seed)
    ahead, enters = 1_000_000_000, np.arange(20)[:, None] * 1_000_000 + rng.integers(0, 300_000, (20, 2))
    leaves = enters.max(axis=1) + 50_000
    first, second = (np.stack([enters[:, one] + one * ahead, leaves + one * ahead], axis=1) for one in range(2))
    assert (offset(first, second), offset(second, first)) == (-ahead, ahead)


def test_what_overlaps_stands_in_several_rows_of_a_trace(tmp_path):
    one = recording(USUAL, num_steps=1)
    one.operators.append(Operator(0, "FullyConnected", 20 * MS, 50 * MS, 2))
    write_trace(tmp_path / "trace.json", Analysis([one]))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["name"]: event["tid"] for event in events if event["ph"] == "X"}
    assert rows["Convolution"] == rows["_backward_Convolution"] == rows["sgd_mom_update"] != rows["FullyConnected"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[rows["Convolution"]] == names[rows["FullyConnected"]] == "cpu(0)"


def test_a_trace_has_the_events_of_all_processes_in_microseconds(tmp_path):
    both = [recording([*USUAL, ("exchange", 10)], rank=rank, num_steps=1) for rank in range(2)]
    write_trace(tmp_path / "trace.json", Analysis(both))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank in range(2):
        complete = {one["name"]: (one["ts"], one["dur"]) for one in events if one["ph"] == "X" and one["pid"] == rank}
        assert complete == {
            "step 1": (0, 110_000),
            "Convolution": (0, 30_000),
            "_backward_Convolution": (30_000, 60_000),
            "sgd_mom_update": (90_000, 10_000),
            "key 0": (100_000, 10_000),
        }


def test_the_summary_has_a_column_per_device_that_adds_up():
    text = summary(Analysis([recording(USUAL, USUAL), recording(USUAL, USUAL, rank=1)]), ["A finding."]).splitlines()
    assert text[0] == "4 steps of 100.0 ms, 4 devices in 2 processes"
    assert text[1].split("  ")[-1].strip() == "rank 1, cpu(1)"
    assert text[-2].split() == ["together", *["100.00"] * 4]
    assert text[-1] == "- A finding."


def test_what_overlaps_is_the_moments_that_are_in_both_lists():
    random = np.random.default_rng(5)
    for _ in range(300):
        first, second = ([(a, a + n) for a, n in random.integers(0, 20, (num, 2)).tolist()] for num in (4, 3))
        moments = ({time for interval in intervals for time in range(*interval)} for intervals in (first, second))
        assert parts.overlap(first, second) == len(set.intersection(*moments)), (first, second)
