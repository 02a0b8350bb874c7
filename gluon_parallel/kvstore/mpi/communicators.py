"""New communicators, for which MPI waits for other processes without a limit of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import WorkerLost
from .. import flight_recorder
from ..environment import MIN_PROCESSES
from ..handshake import leave_without_waiting
from .messages import MPI_LOCK

if TYPE_CHECKING:
    from .progress_engine import ProgressEngine


def made_within_limit(progress: ProgressEngine, make: Callable[[], Any]) -> Any:
    """What ``make()`` returns, a call of MPI that all processes of a new communicator must make.

    WorkerLost: it takes longer than the limit of the progress engine, so a process has not come.
    """
    made: list = []
    failures: list = []

    def run() -> None:
        try:
            with MPI_LOCK:
                made.append(make())
        except Exception as error:  # raised below, in the thread that asked
            failures.append(error)

    thread = threading.Thread(target=run, name="gluon_parallel.communicator", daemon=True)
    thread.start()
    thread.join(progress.timeout)
    if made:
        return made[0]
    if failures:
        if MIN_PROCESSES not in os.environ:  # else the others may go on without the process that is lost
            leave_without_waiting()
        raise WorkerLost(f"store 'mpi', {progress.name}: MPI made no new group: {failures[0]}") from failures[0]
    leave_without_waiting()
    problem = f"store 'mpi', {progress.name}: not all processes came to a new group within {progress.timeout:g} s"
    advice = flight_recorder.advice("Every process must make the same groups in the same order; look at their output")
    error = WorkerLost(f"{problem}. {advice}. A longer limit: GLUON_PARALLEL_TIMEOUT=seconds")
    progress.fail(error, tell=False)  # the thread that waits in MPI keeps the lock: nothing can be sent any more
    raise error
