"""Stores through which processes meet: what makes each, and what starts its processes. Nothing is imported for it."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One store; classes are written as ``"module:class"``, and imported at their first use."""

    made_by: str  # a class of stores
    engine: str  # by which name ``gluon-parallel launch --engine`` knows what starts its processes
    started_by: str  # an :class:`.LaunchEngine`


# Name of a store -> its row. `launch`, `doctor` and `gp.kvstore.create` read it at every call. MXNet's other names
# with servers, such as dist_async, are those of the same store.
STORES = {
    "mpi": Row("gluon_parallel.kvstore.mpi.store:MPI", "mpi", "gluon_parallel.launch_engines:MPI"),
    "dist_sync": Row("gluon_parallel.kvstore.servers:Servers", "ps", "gluon_parallel.launch_engines:PS"),
    "horovod": Row("gluon_parallel.kvstore.horovod:Horovod", "horovod", "gluon_parallel.launch_engines:Horovod"),
}

INSTALL_HOROVOD = (
    "`sh scripts/make_horovod.sh` in a clone of gluon_parallel's repository builds it into .venv-horovod (3 minutes, "
    "with a C++ compiler), and shows how to build it into another environment"
)


def load(path: str) -> Any:
    """The class that is written as ``"module:class"``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def launch_engines() -> dict[str, Any]:
    """Name of an engine -> its class, in the order of the table.

    Example:
        >>> list(launch_engines())[:3]
        ['mpi', 'ps', 'horovod']
    """
    return {row.engine: load(row.started_by) for row in STORES.values()}
