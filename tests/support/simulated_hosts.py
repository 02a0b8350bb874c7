"""Simulated hosts: processes of this machine that take each other for processes of other hosts, without namespaces.

Only tests read the variable: ``3+2`` makes the first three processes one host, and the next two another one.
"""

import os
import sys

from gluon_parallel.environment import launched_rank
from gluon_parallel.kvstore.flight_recorder import ring
from gluon_parallel.kvstore.mpi import progress_engine

VARIABLE = "GLUON_PARALLEL_TESTS_HOSTS"
NONBLOCKING = "GLUON_PARALLEL_TESTS_NONBLOCKING"  # an MPI without persistent collective operations


def simulate():
    """Have this process share memory with those of its simulated host alone; before the store is created."""
    if NONBLOCKING in os.environ:
        progress_engine.has_persistent = lambda: False
    if VARIABLE in os.environ:
        sizes, real = [int(size) for size in os.environ[VARIABLE].split("+")], ring.host
        number = next(number for number in range(len(sizes)) if launched_rank() < sum(sizes[: number + 1]))
        for module in list(sys.modules.values()):  # each module that has imported it
            if vars(module).get("host") is real:
                module.host = lambda: f"{real()} simulated {number}"
