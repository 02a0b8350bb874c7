"""Create a store by its name. ``mx.kv.create`` is replaced by :func:`create`."""

import difflib
import os
from typing import Any

from .. import launcher
from ..environment import ALONE, store_name, taken_by, taking_rank
from ..errors import StoreUnavailable
from ..mxnet.compat import mx
from ..store_table import STORES, load
from . import separate_training
from .contract import is_ours
from .servers import Servers, the_store

_OF_ONE_PROCESS = ("local", "device", "nccl")
_OVER_SERVERS = ("dist_sync", "dist_device_sync", "dist_async")
# Others that MXNet's own factory reads; whatever it does not know becomes "local" there.
_OLD_NAMES = ("local_update_cpu", "local_allreduce_cpu", "local_allreduce_device", "dist", "dist_sync_device",
              "dist_async_device", "dist_device_async", "dist_sync_p3")  # fmt: skip

_create_in_mxnet = mx.kvstore.create


def names() -> list[str]:
    """The names of all stores."""
    return [*_OF_ONE_PROCESS, *_OVER_SERVERS, *(name for name in STORES if name not in _OVER_SERVERS)]


NAMES = tuple(names())


def connects_processes(name: Any) -> bool:
    """Whether a store of that name connects several processes; ``auto`` may."""
    lower = name.lower() if isinstance(name, str) else ""
    return lower == "auto" or lower.startswith("dist") or lower in STORES


def create(name: str = "local") -> Any:
    """The store of that name; ``mx.kv.create`` and ``gluon.Trainer(..., kvstore=name)`` know the same ones.

    Args:
        name: ``auto`` (what fits how this process was started: ``GLUON_PARALLEL_KVSTORE`` if that is set; ``mpi`` under
            mpirun and srun; ``dist_sync`` with the DMLC variables; ``horovod`` under horovodrun; or else ``device``).
            ``local``, ``device``, ``nccl`` (devices of one process), ``dist_sync``, ``dist_device_sync``,
            ``dist_async`` (MXNet's servers), ``mpi`` (processes that mpirun, srun or the launcher has started), or
            ``horovod``. Where processes take part, all must create their stores in the same order. Over MXNet's
            servers a process has one store, which is handed out again.

    Raises:
        StoreUnavailable: the library under the store is missing, nobody has started its servers, or this process was
            started as one of several and the library does not see the others; or it is a fork of a process of a
            group, or a program that such a process has started. ``auto`` is ``device`` there, with a warning.
        WorkersDiffer: another process runs other versions.
        WorkerLost: another process does not come within the limit.
        ValueError: there is no store of that name.

    Example:
        >>> create("local").num_workers
        1
    """
    if isinstance(name, str) and name.lower() == "auto":
        separate_training.note_child()
    name = known_name(name)
    if name.lower() == "nccl" and not mx.runtime.Features().is_enabled("NCCL"):
        raise StoreUnavailable("the store 'nccl' needs an MXNet that was built with NCCL; 'device' does the same work")
    over_servers = name.lower().startswith("dist")
    is_worker = os.environ.get("DMLC_ROLE", "worker") == "worker"  # a server makes itself a store, too
    if not connects_processes(name):
        return separate_training.note_store(_create_in_mxnet(name))
    with taking_rank():
        launcher.send(launcher.ARRIVED)
        if not over_servers:
            store = load(STORES[name.lower()].made_by)()
        else:
            store = the_store(name, _create_in_mxnet) if is_worker else _create_in_mxnet(name)
    return separate_training.note_store(store)


def kind_of(store: Any) -> Any:
    """What :func:`.offers` is asked of for a trainer's store: the store, the class that a name stands for, or None.

    None is a store of MXNet for one process, or of another library.
    """
    name = store.lower() if isinstance(store, str) else ""
    name = store_name() if name == "auto" else name
    if name.startswith("dist"):
        return Servers
    if name in STORES:
        return load(STORES[name].made_by)
    return store if is_ours(store) else None


def known_name(name: str) -> str:
    """The name of a store that can be made here; MXNet would take a misspelt one for ``local``."""
    lower = name.lower() if isinstance(name, str) else ""
    if lower == "auto":
        return known_name(store_name())
    if lower not in (*names(), *_OLD_NAMES, *mx.kvstore.KVStoreBase.kv_registry):
        close = difflib.get_close_matches(lower, ("auto", *names()), n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"kvstore: there is no store {name!r}; {meant}expected auto or one of {', '.join(names())}")
    if connects_processes(lower) and (process := taken_by()) is not None:
        raise StoreUnavailable(
            f"the store {name!r}: process {process}, of which this one is a fork or a child, has taken its rank in "
            f"the group. {ALONE}"
        )
    if lower.startswith("dist") and "DMLC_NUM_WORKER" not in os.environ:
        raise StoreUnavailable(
            f"the store {name!r} meets other processes at MXNet's servers, and nobody has started these for this "
            "process: gluon-parallel launch --engine ps -n 2 script.py, or set the DMLC variables yourself"
        )
    return name


def as_store(store: Any, where: str) -> Any:
    """`store`, which must be a KVStore; TypeError: it is a name or something else, handed to the function `where`."""
    if all(hasattr(store, name) for name in ("pushpull", "broadcast", "rank", "num_workers")):
        return store
    hint = (
        f"create it once: store = gp.kvstore.create({store!r})" if isinstance(store, str) else "see gp.kvstore.create"
    )
    raise TypeError(f"{where}: store is {store!r}, expected a KVStore; {hint}")
