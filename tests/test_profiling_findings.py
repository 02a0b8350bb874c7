"""What a profile says about recordings with known times: the parts, and each sentence."""

import json

import numpy as np
import pytest
from profiling_recordings import MS, USUAL, recording

from gluon_parallel.commands.profiling import activities
from gluon_parallel.commands.profiling.activities import Interval, split_step
from gluon_parallel.commands.profiling.analysis import Analysis
from gluon_parallel.commands.profiling.findings import findings, summary
from gluon_parallel.commands.profiling.page import write_trace
from gluon_parallel.commands.profiling.recording import Operator, offset

NOTHING = "The devices compute 100% of the time, and nothing stands out."
SLOW = [(what, 2 * time) for what, time in USUAL]
LONG_UPDATE = [(activities.FORWARD, 30), (activities.BACKWARD, 40), (activities.UPDATE, 30)]
POOLING = [(activities.FORWARD, 30), (activities.BACKWARD, 42), ("pooling", 18), (activities.UPDATE, 10)]
CONVERTED = {"would_convert": {"global average pooling": 1}}
LATE = [[*USUAL, ("exchange", 100)], [(activities.FORWARD, 75), *USUAL, ("exchange", 25)]]
EARLY = [*USUAL[:2], (activities.LAUNCHING, 20), (activities.SUM, 1), (activities.UPDATE, 10)]
FIFTH = "20% of the step (25.0 ms)"

# work of the devices of each process, more about their recordings, what sentences say
SENTENCES = {
    "nothing": ([[USUAL, USUAL]], {}, [NOTHING]),
    "one step": ([[USUAL, SLOW]], {"num_steps": 1}, ["Too few steps were measured for findings: 1, "]),
    "two steps": ([[USUAL, SLOW]], {"num_steps": 2}, ["or skip fewer: --skip 1 of gluon-parallel profile"]),
    "slow process": (
        [[SLOW], [[*USUAL, (activities.LAUNCHING, 100)]]], {},
        ["Rank 0 is 2.0 times slower: it computes 200 ms per step, the other processes 100 ms. All wait for it;"],
    ),
    "slow device": ([[USUAL, SLOW]], {}, ["cpu(1) is 2.0 times slower: it computes 200 ms per step, the"]),
    "slow device of a process": ([[USUAL, SLOW]] * 2, {}, ["cpu(1) of rank 0 is 2.0 times slower"]),
    activities.READING: (
        [[[(activities.READING, 25), *USUAL]]], {},
        [f"The devices wait for data {FIFTH}: read ahead in more"],
    ),
    activities.SCRIPT: (
        [[[(activities.SCRIPT, 25), *USUAL]]], {},
        [f"The devices wait for the script between two steps {FIFTH}: look"],
    ),
    activities.LAUNCHING: (
        [[[*USUAL, (activities.LAUNCHING, 25)]]], {},
        [f"The devices wait for Python to launch operators {FIFTH}: write"],
    ),
    "a loop written by hand": (
        [[[*USUAL, (activities.LAUNCHING, 25)]]], {"is_by_hand": True},
        ["The devices wait for the loop, which launches operators or does something else, 20% of"],
    ),
    activities.ENGINE: (
        [[[*USUAL, (activities.ENGINE, 25)]]], {},
        [f"The devices wait for MXNet's engine to start what is launched {FIFTH}: leave a core"],
    ),
    activities.SUM: (
        [[[*USUAL, (activities.SUM, 25)]]], {},
        [f"Adding up the gradients of the devices takes {FIFTH}: use"],
    ),
    activities.DEVICES: (
        [[[*USUAL, (activities.DEVICES, 25)]]], {},
        ["The devices wait 20% of the step (25.0 ms) for each other in SyncBatchNorm layers, most in norm0 (25"],
    ),
    "short activities": (
        [[[(activities.READING, 0.4), *USUAL, (activities.SUM, 0.4)]]], {},
        [NOTHING.replace("100%", "99%")],
    ),
    activities.UPDATE: (
        [[LONG_UPDATE]], {},
        ["The update takes 30% of the step (30.0 ms): make the batch larger, or update less often: DataParallel("],
    ),
    "a late process": (
        [[work] for work in LATE], {},
        ["The processes wait 19% of the step (37.5 ms) for the one that comes last, which is rank 1 in 100% of this",
         "The exchange of gradients with other processes takes 12% of the step (25.0"],
    ),
    "the end of the backward pass": (
        [[EARLY, [(activities.FORWARD, 30), (activities.BACKWARD, 80), (activities.LAUNCHING, 1),
                  (activities.UPDATE, 10)]]], {},
        ["(10.0 ms) for each other before the gradients are summed"],
    ),
    "pooling": (
        [[POOLING]], CONVERTED,
        ["Pooling takes 30% of the backward pass (18.0 ms), and the net has global average pooling, which MXNet runs "
         "slowly on CPUs: gp.nn.convert_for_cpu(net)."],
    ),
    "converted pooling": ([[POOLING]], {}, [NOTHING]),
    "idle cores": ([[USUAL]], {"busy": 1.0}, ["Half of the 2 cores are idle: use more devices (--devices cpu:2), or"]),
    "idle cores and devices": (
        [[USUAL, USUAL]], {"busy": 0.8}, ["60% of the 2 cores are idle: there is a device for each, but"],
    ),
    "cores of all processes": ([[USUAL]] * 2, {"busy": 1.0, "idle": 0.0}, [NOTHING]),
    "other programs": (
        [[USUAL]], {"busy": 1.0, "idle": 0.1 * 2 * 0.4}, ["Other programs take 40% of the 2 cores: end them,"],
    ),
    "a container": ([[USUAL]], {"busy": 0.8, "idle": float("nan")}, ["60% of the 2 cores are idle"]),
    "the costliest first": (
        [[[(activities.READING, 20), *USUAL, (activities.LAUNCHING, 60)]]], {},
        ["launch operators", "The devices wait for data"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SENTENCES)
def test_what_a_profile_says(case):
    works, more, wanted = SENTENCES[case]
    said = findings(Analysis([recording(*works[rank], rank=rank, **more) for rank in range(len(works))]))
    places = [next((place for place, one in enumerate(said) if words in one), -1) for words in wanted]
    assert -1 not in places and places == sorted(places), said  # the costliest first
    assert "nothing stands out" not in wanted[0] or said == wanted


def test_a_step_that_takes_much_longer_is_named():
    one = recording(USUAL, num_steps=6)
    one.marks = [[mark + (80 * MS if mark > 300 * MS else 0) for mark in one.marks[0]]]
    assert "Steps differ: step 4 of 6 took 180 ms, a usual one 100 ms." in findings(Analysis([one]))


def test_waiting_is_told_from_the_transfer_and_from_sums_of_one_process():
    timelines = Analysis([recording(work, rank=rank) for rank, work in enumerate(LATE)]).timelines
    times = [(one.seconds(activities.LATE), one.seconds(activities.TRANSFER)) for one in timelines]
    assert np.ravel(times) == pytest.approx([0.075, 0.025, 0, 0.025])
    (timeline,) = Analysis([recording([*USUAL, ("exchange", 25)])]).timelines
    assert (
        timeline.seconds(activities.SUM),
        timeline.seconds(activities.TRANSFER),
        timeline.exchanged,
    ) == pytest.approx((0.025, 0, 0))
    late = [(activities.FORWARD, 30), (activities.BACKWARD, 80), (activities.LAUNCHING, 1), (activities.UPDATE, 10)]
    devices = [timeline.seconds(activities.DEVICES) for timeline in Analysis([recording(EARLY, late)]).timelines]
    assert devices == pytest.approx([0.02, 0])


def test_an_exchange_behind_the_backward_pass_is_hidden():
    both = [recording([*USUAL, (activities.LAUNCHING, 20)], rank=rank) for rank in range(2)]
    for one in both:  # an exchange from 70 to 120 ms of each step; until 100 the device computes
        begins = [begin + 70 * MS for begin in one.marks[0][:-1]]
        one.operators += [Operator(0, "gluon_parallel.mpi key 0", begin, begin + 50 * MS) for begin in begins]
        one.operators.sort(key=lambda operator: operator.begin)
    analysis = Analysis(both)
    timeline = analysis.timelines[0]
    assert (timeline.exchanged, timeline.hidden, timeline.seconds(activities.TRANSFER)) == pytest.approx(
        (0.05, 0.03, 0.02)
    )
    assert "and 60% of that of the gradients is hidden" in findings(analysis)[0]


def test_what_begins_before_a_steps_mark_counts_in_both_steps():
    """The mark of an update and the forward pass after it become ready at the same time."""
    one = recording(USUAL)
    one.marks = [[mark + 5 * MS for mark in marks] for marks in one.marks]
    [timeline] = Analysis([one]).timelines
    assert timeline.seconds(activities.FORWARD) == pytest.approx(
        3 * 0.03 / 4
    )  # the first one began before the recording
    assert timeline.seconds(activities.UPDATE) == pytest.approx(0.01)


def test_pieces_cover_a_step_and_the_first_activity_of_what_overlaps_counts():
    rng = np.random.default_rng(5)
    for _ in range(20):
        names = [activities.ACTIVITIES[number] for number in rng.integers(len(activities.ACTIVITIES), size=30)]
        intervals = [Interval(name, *sorted(map(int, rng.integers(-20, 120, 2)))) for name in names]
        pieces = split_step(0, 100, intervals, activities.SCRIPT)
        there = [[one.activity for one in intervals if one.begin <= moment < one.end] for moment in range(100)]
        by_moment = [min(names, key=activities.ACTIVITIES.index, default=activities.SCRIPT) for names in there]
        assert [part for part, begin, end in pieces for _ in range(begin, end)] == by_moment
        assert all(first.activity != second.activity for first, second in zip(pieces, pieces[1:]))
    for _ in range(300):
        first, second = ([(a, a + n) for a, n in rng.integers(0, 20, (num, 2)).tolist()] for num in (4, 3))
        moments = ({time for interval in intervals for time in range(*interval)} for intervals in (first, second))
        assert activities.overlap(first, second) == len(set.intersection(*moments)), (first, second)


def test_a_recording_on_the_clock_of_another_host_is_the_same_at_another_time():
    one = recording([*USUAL, (activities.DEVICES, 10), ("exchange", 10)])
    moved = one.moved(7)
    (before,), (after,) = (Analysis([made]).timelines for made in (one, moved))
    assert after.steps == [[(part, begin + 7, end + 7) for part, begin, end in step] for step in before.steps]
    assert (moved.begin, moved.end, moved.spans[0].begin) == (one.begin + 7, one.end + 7, one.spans[0].begin + 7)


def test_clocks_of_two_hosts_are_compared_through_exchanges():
    """Where messages take equally long in both directions, exactly."""
    rng = np.random.default_rng(5)
    ahead, enters = 1_000_000_000, np.arange(20)[:, None] * 1_000_000 + rng.integers(0, 300_000, (20, 2))
    leaves = enters.max(axis=1) + 50_000
    first, second = (np.stack([enters[:, one] + one * ahead, leaves + one * ahead], axis=1) for one in range(2))
    assert (offset(first, second), offset(second, first)) == (-ahead, ahead)


def test_a_trace_has_the_events_of_all_processes_in_microseconds_and_rows_for_what_overlaps(tmp_path):
    both = [recording([*USUAL, ("exchange", 10)], rank=rank, num_steps=1) for rank in range(2)]
    both[1].operators.append(Operator(0, "FullyConnected", 20 * MS, 50 * MS))
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
            **({"FullyConnected": (20_000, 30_000)} if rank else {}),
        }
    of_last = [event for event in events if event["pid"] == 1]
    rows = {event["name"]: event["tid"] for event in of_last if event["ph"] == "X"}
    assert rows["Convolution"] == rows["_backward_Convolution"] == rows["sgd_mom_update"] != rows["FullyConnected"]
    names = {event["tid"]: event["args"]["name"] for event in of_last if event["name"] == "thread_name"}
    assert names[rows["Convolution"]] == names[rows["FullyConnected"]] == "cpu(0)"


def test_the_summary_has_a_column_per_device_that_adds_up():
    text = summary(Analysis([recording(USUAL, USUAL), recording(USUAL, USUAL, rank=1)]), ["A finding."]).splitlines()
    assert text[0] == "4 steps of 100.0 ms, 4 devices in 2 processes"
    assert text[1].split("  ")[-1].strip() == "rank 1, cpu(1)"
    assert text[-2].split() == ["together", *["100.00"] * 4]
    assert text[-1] == "- A finding."
