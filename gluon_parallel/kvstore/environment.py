"""Launch environment: which program started this process as one of several, read from its variables."""

import os
from typing import NamedTuple, Optional

from ..errors import StoreUnavailable

_MPIRUN = (
    "mpirun and the library that mpi4py loads belong to different MPIs: take the mpirun that is installed with that "
    "library, or name the other library with MPI4PY_LIBMPI=/path/to/libmpi.so"
)
_SRUN = (
    "Slurm and MPI need a language that both know. Open MPI 5, its wheel's too: srun --mpi=pmix; MPICH: srun "
    "--mpi=pmi2; `srun --mpi=list` shows what this Slurm has. Where it lacks that, put gluon-parallel launch in the "
    "place of srun"
)
_HOROVODRUN = "`horovodrun --check-build` shows what Horovod was built with; with gloo, horovodrun needs --gloo"


class LaunchedGroup(NamedTuple):
    """The processes that were started together with this one."""

    starter: str  # such as "srun"
    variable: str  # in which it said so
    num_workers: int  # how many processes it started
    store: str  # through which they meet
    advice: str  # where they do not meet through it


# In this order, because what stands first may run inside of what stands behind it, and inherits its variables: mpirun
# starts processes on Slurm's other hosts by an srun of its own, in which every host counts as one task.
_STARTERS = (
    ("DMLC_NUM_WORKER", "the DMLC variables", "dist_sync", ""),
    ("HOROVOD_SIZE", "horovodrun", "horovod", _HOROVODRUN),
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun", "mpi", _MPIRUN),
    ("PMI_SIZE", "the mpirun of MPICH or its kin", "mpi", _MPIRUN),
    ("GLUON_PARALLEL_NUM_WORKERS", "gluon-parallel launch", "mpi", _MPIRUN),
    # Of the srun that started this process. A batch script has SLURM_NTASKS as well, but is one process.
    ("SLURM_STEP_NUM_TASKS", "srun", "mpi", _SRUN),
)

_RANKS = ("GLUON_PARALLEL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK", "SLURM_PROCID")


def launched_group() -> Optional[LaunchedGroup]:
    """The group of several processes that this one was started in, or None.

    Example:
        >>> os.environ["OMPI_COMM_WORLD_SIZE"] = "4"
        >>> launched_group().starter, launched_group().num_workers
        ("Open MPI's mpirun", 4)
        >>> del os.environ["OMPI_COMM_WORLD_SIZE"]
    """
    for variable, starter, store, advice in _STARTERS:
        text = os.environ.get(variable, "")
        if not text.isdecimal():
            continue
        if variable == "PMI_SIZE" and os.environ.get("SLURM_MPI_TYPE", "none") != "none":
            starter, advice = "srun", _SRUN  # with --mpi=pmi2 it speaks as MPICH's mpirun does
        if starter == "gluon-parallel launch":
            store = os.environ.get("GLUON_PARALLEL_KVSTORE", store)
        return LaunchedGroup(starter, variable, int(text), store, advice) if int(text) > 1 else None
    return None


def launched_rank() -> int:
    """The number of this process in that group, or 0 where the environment does not tell."""
    known = [os.environ[name] for name in _RANKS if os.environ.get(name, "").isdecimal()]
    return int(known[0]) if known and launched_group() is not None else 0


def store_name() -> str:
    """The store that fits how this process was started: ``GLUON_PARALLEL_KVSTORE``, or by who started it."""
    ours = launched_group()
    return os.environ.get("GLUON_PARALLEL_KVSTORE") or ("device" if ours is None else ours.store)


def refuse_if_alone(store: str, num_workers: int, library: str) -> None:
    """Let no process of a group train by itself, as each one would whose `library` sees only `num_workers` == 1."""
    ours = launched_group()
    if num_workers > 1 or ours is None:
        return
    if ours.store == store:
        advice = ours.advice
    else:
        advice = f"Such processes meet through the store {ours.store!r}, which the name 'auto' stands for"
    raise StoreUnavailable(
        f"the store {store!r}: by {ours.starter} this is one process of {ours.num_workers} "
        f"({ours.variable}={ours.num_workers}), but {library} sees it alone, and each would train a model of its own; "
        f"where that is meant, create the store 'device'. {advice}"
    )
