"""A profile of two launched processes: one trace, one clock, and exchanges that wait for each other."""

import json
import sys
from pathlib import Path

import pytest
from processes import run_command

SCRIPT = str(Path(__file__).with_name("support") / "profiling_training.py")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What the command printed, the events of the trace by process, and how far their clocks may differ, in us."""
    folder = tmp_path_factory.mktemp("profile")
    command = [sys.executable, "-m", "gluon_parallel", "profile", "--folder", str(folder)]
    command += ["--steps", "3", "--skip", "2"]
    launch = ["launch", "-n", "2", "--devices", "cpu:2", "--logs", str(folder / "logs"), SCRIPT]
    status, output = run_command([*command, *launch], seconds=120, GLUON_PARALLEL_TIMEOUT="40")
    assert status == 0, output
    assert sorted(path.name for path in folder.iterdir()) == ["logs", "profile.html", "profile.json"]
    events = json.loads((folder / "profile.json").read_text())["traceEvents"]
    by_rank = [[one for one in events if one["pid"] == rank and one["ph"] == "X"] for rank in range(2)]
    clocks = [float(line.split("clocks ")[1]) for line in output.splitlines() if "clocks " in line]
    return output, by_rank, max(clocks) + 1000  # a millisecond for the clock of MXNet's profiler


def ends(event):
    return event["ts"] + event["dur"]


def test_the_summary_has_a_column_for_each_device_of_each_process(launched):
    output, *_ = launched
    assert "3 steps of" in output
    assert "4 devices in 2 processes" in output
    assert all(f"rank {rank}, cpu({device})" in output for rank in range(2) for device in range(2))
    assert output.count("loss ") == 2  # the script ran to its end in both


def test_no_step_or_exchange_ends_before_all_processes_are_in_it(launched):
    """All processes are on one clock."""
    _, ranks, clocks = launched
    assert any(event["name"] == "waiting for a late process" for event in ranks[0])  # which comes first
    found = [[event for event in events if event["name"].startswith(("key ", "step "))] for events in ranks]
    names = sorted({event["name"] for event in found[0]})
    assert len(names) >= 6 + 3  # parameters, the number of samples, and steps
    for name in names:
        first, second = ([one for one in events if one["name"] == name] for events in found)
        assert len(first) == len(second) > 0
        for one, other in zip(first, second):
            assert min(ends(one), ends(other)) >= max(one["ts"], other["ts"]) - clocks


def test_layers_wait_for_devices_and_then_for_processes(launched):
    _, ranks, _ = launched
    for events in ranks:
        passes = [event for event in events if event["name"] in ("norm, forward", "norm, backward")]
        assert len(passes) == 3 * 2 * 2
        exchanged = [event for event in events if event["name"] == "exchange with other processes"]
        assert len(exchanged) == len(passes)
        assert all(any(one["ts"] <= two["ts"] <= ends(two) <= ends(one) + 1 for one in passes) for two in exchanged)


@pytest.mark.slow
def test_what_mxnets_servers_exchange_is_transfer(tmp_path):
    command = [sys.executable, "-m", "gluon_parallel", "profile", "--folder", str(tmp_path), "--steps", "2"]
    launch = ["launch", "-n", "2", "--engine", "ps", "--devices", "cpu:2", "--logs", str(tmp_path / "logs"), SCRIPT]
    status, output = run_command([*command, "--skip", "2", *launch], seconds=120, GLUON_PARALLEL_TIMEOUT="40")
    assert status == 0, output
    events = json.loads((tmp_path / "profile.json").read_text())["traceEvents"]
    assert {one["pid"] for one in events if one["name"].startswith("KVStoreDist")} == {0, 1}
    assert "\n[0] exchange that is hidden" in output
