"""NumPy mode over processes: the same sums and the same training as in one process."""

from pathlib import Path

import pytest
from processes import run_mpi, run_servers

CHECKS = Path(__file__).with_name("support") / "numpy_mode_checks.py"


@pytest.mark.parametrize("shared", ["1", pytest.param("0", marks=pytest.mark.slow)], ids=["shared memory", "messages"])
def test_processes_sum_and_train_over_mpi(monkeypatch, shared):
    monkeypatch.setenv("GLUON_PARALLEL_SHARED_MEMORY", shared)
    status, said = run_mpi(2, CHECKS, "mpi", "sums", "training")
    assert status == 0, said
    assert said.count("right") == 2, said


def test_processes_train_over_servers_of_mxnet():
    status, said = run_servers(2, CHECKS, "dist_sync", "training")
    assert status == 0, said
    assert said.count("right") == 2, said
