"""Environment variables of a launched process: its group, whom it goes on without, and the limit for every wait."""

import contextlib
import os
import zlib
from collections.abc import Iterator
from typing import NamedTuple, Optional

from . import bounds
from .errors import StoreUnavailable

MIN_PROCESSES = "GLUON_PARALLEL_MIN_PROCESSES"  # fewest processes that continue after a loss
MAX_PROCESSES = "GLUON_PARALLEL_MAX_PROCESSES"  # most processes that there are after others have joined
LAUNCH_FOLDER = "GLUON_PARALLEL_LAUNCH_FOLDER"  # of the logs, and of what a launch keeps for its next attempt
JOINS = "GLUON_PARALLEL_JOINS"  # set for a process that joins a training under way

_MPIRUN = (
    "mpirun and the library that mpi4py loads belong to different MPIs: take the mpirun that is installed with that "
    "library, or name the other library with MPI4PY_LIBMPI=/path/to/libmpi.so"
)
_SRUN = (
    "srun must offer the process-management interface (PMI) that the MPI library uses. Open MPI 5, its wheel's too: "
    "srun --mpi=pmix; MPICH: srun --mpi=pmi2; `srun --mpi=list` shows what this Slurm has. Where it lacks that, put "
    "gluon-parallel launch in the place of srun"
)
_HOROVODRUN = "`horovodrun --check-build` shows what Horovod was built with; with gloo, horovodrun needs --gloo"


def min_processes() -> Optional[int]:
    """How many processes must be left to go on without lost ones; None: a lost process ends all."""
    text = os.environ.get(MIN_PROCESSES)
    return None if text is None else bounds.whole(MIN_PROCESSES, text, 1, bounds.PROCESSES)


def may_join() -> bool:
    """Whether the launcher may start processes that join this training under way."""
    return MAX_PROCESSES in os.environ and taken_by() is None


def joins() -> Optional[int]:
    """The number of this process, if it is to join a training under way; else None."""
    return _number_in("GLUON_PARALLEL_RANK") if JOINS in os.environ and taken_by() is None else None


def _number_in(variable: str) -> Optional[int]:
    """The number in a variable of another program; None: there is none."""
    try:
        return bounds.whole(variable, os.environ.get(variable, ""), 0)
    except ValueError:
        return None


class LaunchedGroup(NamedTuple):
    """The processes that were started together with this one."""

    starter: str  # program that started the group, such as "srun"
    variable: str  # environment variable that gave `num_workers`
    num_workers: int
    rank: int  # of this process, or 0 where the environment does not give it
    store: str  # name of the store that the group should use
    advice: str  # for the error of a store that sees one process only


# (variable of the number of processes, of the rank, program, its store, advice). Inner programs first, since they
# inherit the variables of the outer ones: on Slurm's other hosts mpirun starts its daemons by srun, one task each.
_STARTERS = (
    ("DMLC_NUM_WORKER", "DMLC_TASK_ID", "the DMLC variables", "dist_sync", ""),
    ("HOROVOD_SIZE", "HOROVOD_RANK", "horovodrun", "horovod", _HOROVODRUN),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "Open MPI's mpirun", "mpi", _MPIRUN),
    ("PMI_SIZE", "PMI_RANK", "an mpirun of the MPICH family", "mpi", _MPIRUN),
    ("GLUON_PARALLEL_NUM_WORKERS", "GLUON_PARALLEL_RANK", "gluon-parallel launch", "mpi", _MPIRUN),
    # Set by srun only. A batch script has SLURM_NTASKS as well, but is one process.
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun", "mpi", _SRUN),
)

# What tells launches apart, beside the numbers of processes and ranks
_LAUNCHES = ("PMIX_NAMESPACE", "PMI_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT",
           "HOROVOD_GLOO_RENDEZVOUS_PORT", "GLUON_PARALLEL_REPORTS")  # fmt: skip
_TAKEN = "GLUON_PARALLEL_TAKEN"  # number of the process that has taken its rank in the group, and of which launch
ALONE = "A fork of a process of a group, or a program that it starts, is alone: create the store 'device' there"


def _launch() -> str:
    """Number of the launch and rank that the variables name; "" if they name none."""
    names = [*(name for starter in _STARTERS for name in starter[:2]), *_LAUNCHES]
    text = "\0".join(os.environ.get(name, "") for name in names)
    return f"{zlib.crc32(text.encode()):x}" if text.strip("\0") else ""


@contextlib.contextmanager
def taking_rank() -> Iterator[None]:
    """Take this process's rank in the group, in a block that opens a store of it; given back if the block raises.

    From then on the forks of this process, and the programs that it starts, which inherit the variables of its rank,
    are no processes of the group.
    """
    before, launch = os.environ.get(_TAKEN), _launch()
    if launch:
        os.environ[_TAKEN] = f"{os.getpid()}:{launch}"
    try:
        yield
    except BaseException:
        if before is None:
            os.environ.pop(_TAKEN, None)
        else:
            os.environ[_TAKEN] = before
        raise


def taken_by() -> Optional[int]:
    """The process that has taken the rank that this one's variables name; None: this one has, or may take it."""
    process, _, launch = os.environ.get(_TAKEN, "").partition(":")
    if process and launch == _launch() and int(process) != os.getpid():
        return int(process)
    return None


def launched_group() -> Optional[LaunchedGroup]:
    """The group of several processes that this one was started in and may take part in, or None.

    Example:
        >>> os.environ["OMPI_COMM_WORLD_SIZE"] = "4"
        >>> launched_group().starter, launched_group().num_workers
        ("Open MPI's mpirun", 4)
        >>> del os.environ["OMPI_COMM_WORLD_SIZE"]
    """
    if taken_by() is not None:
        return None
    for variable, rank_variable, starter, usual_store, advice in _STARTERS:
        num_workers = _number_in(variable)
        if num_workers is None:
            continue
        if variable == "PMI_SIZE" and os.environ.get("SLURM_MPI_TYPE", "none") != "none":
            starter, advice = "srun", _SRUN  # --mpi=pmi2 sets PMI_SIZE too
        store = os.environ.get("GLUON_PARALLEL_KVSTORE") or usual_store
        advice = advice if store == usual_store else ""
        names = ("GLUON_PARALLEL_RANK", rank_variable)  # launch itself may use mpirun or horovodrun
        rank = next((number for number in map(_number_in, names) if number is not None), 0)
        return LaunchedGroup(starter, variable, num_workers, rank, store, advice) if num_workers > 1 else None
    return None


def launched_rank() -> int:
    """The rank of this process in :func:`launched_group`, or 0 where the environment does not give it."""
    group = launched_group()
    return 0 if group is None else group.rank


def store_name() -> str:
    """The store to create for "auto": ``GLUON_PARALLEL_KVSTORE``, or that of :func:`launched_group`, or "device"."""
    group = launched_group()
    alone = "device" if taken_by() is not None else os.environ.get("GLUON_PARALLEL_KVSTORE") or "device"
    return alone if group is None else group.store


def refuse_if_alone(store: str, num_workers: int, library: str) -> None:
    """Raise ``StoreUnavailable`` if this process belongs to a launched group, of which `library` sees it alone."""
    group = launched_group()
    if num_workers > 1 or group is None or joins() is not None:
        return
    advice = group.advice if group.store == store else f"The name 'auto' stands for the store {group.store!r} here"
    raise StoreUnavailable(
        f"the store {store!r}: by {group.starter} this is one process of {group.num_workers} "
        f"({group.variable}={group.num_workers}), but {library} sees it alone, and each would train a model of its "
        f"own; where that is meant, create the store 'device'. {advice}"
    )


LIMIT = "GLUON_PARALLEL_TIMEOUT"
SILENT = 0.7  # part of the limit after which a silent process is given up; the rest is for ending the group
PATIENCE = 10  # limits to wait for a process that may evaluate or write, between two steps or at its end
_LONGEST = 9e8  # seconds; a wait of ten limits must stay below what threads can wait for, 9.2e9 seconds


def default_timeout(otherwise: float = 60) -> float:
    """The limit for every wait, in seconds: ``GLUON_PARALLEL_TIMEOUT``, or `otherwise`; ValueError: it is no limit."""
    text = os.environ.get(LIMIT, str(otherwise))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"{LIMIT}={text!r}: expected seconds above 0 and up to {_LONGEST:g}, as in {LIMIT}=60")
    return seconds
