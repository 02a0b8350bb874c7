"""Worker processes leave stop signals to a training that stops by itself, and the end of a pool of them has a limit."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing.pool
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import util
from typing import Any

import numpy as np

from .. import leftovers, native
from ..forks import SIGNALS, undo_in_forks
from ..native.records import address_of

_LIMIT = 5.0  # seconds for a pool to end; its workers are killed then
_END = 15  # when a pool ends at the program's end: the priority of Python's own pools
_END_FOLDER = -100  # when its folder is removed: after all pools, as Python's own


class _Memory:
    """(1,) int64 that this process shares with its forks: its number while it stops by itself, or else 0."""

    def __init__(self) -> None:
        self.words = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)[:1]


_memory, _of_parent = _Memory(), None


def _begin_fork() -> None:
    global _memory, _of_parent
    _memory, _of_parent = _Memory(), _memory


undo_in_forks(_begin_fork)


@contextlib.contextmanager
def left_to_this_process() -> Iterator[None]:
    """Within this block, daemons of this process ignore stop signals, unless this process is the sender."""
    before, _memory.words[0] = _memory.words[0], os.getpid()
    try:
        yield
    finally:
        _memory.words[0] = before


def _begin_daemon(_: object) -> None:
    """Leave stop signals to the parent, if this process is a daemon, which its parent ends.

    A worker that a signal ends takes what it had begun with it, and perhaps a lock, for which the others and the
    pool's own end then wait for ever. That the training stops is for its main process to see.
    """
    if multiprocessing.current_process().daemon and _of_parent is not None:
        for number in SIGNALS:
            native.function("gp_leave_to_parent", 2)(number, address_of(_of_parent.words))


util.register_after_fork(_Memory, _begin_daemon)  # in processes that multiprocessing forks


def make(initialize: Callable[..., None], pool: Any, *args: Any, **kwargs: Any) -> None:
    """``multiprocessing.pool.Pool.__init__``, of a pool that also ends where a killed worker held its lock."""
    if isinstance(pool, multiprocessing.pool.ThreadPool):
        initialize(pool, *args, **kwargs)
        return
    _make_folder()
    initialize(pool, *args, **kwargs)
    arguments = pool._terminate, pool._pool, pool._worker_handler, pool._change_notifier
    pool._terminate = util.Finalize(pool, _end, arguments, exitpriority=_END)


def _make_folder() -> None:
    """Make the folder of multiprocessing's sockets here; else each worker makes one, and leaves it when terminated."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None:
        leftovers.remove_leftovers()
        made = leftovers.make_folder()  # where this process is killed, the next such process or a launch removes it
        util.Finalize(None, _remove_folder, (config, *made), exitpriority=_END_FOLDER)
        config["tempdir"] = made[0]


def _remove_folder(config: dict, folder: str, lock: mmap.mmap) -> None:
    leftovers.remove_folder(folder, lock)
    config["tempdir"] = None  # a later pool, at the end of the program, makes another one


def _end(terminate: util.Finalize, workers: list, handler: Any, wakes_handler: Any) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            terminate()
        except BaseException as error:  # raised again below
            failures.append(error)

    thread = threading.Thread(target=run, name="gluon_parallel.pool", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12 starts no thread at its own end; then it is enough that the workers end
        terminate.cancel()  # which would run after this
        handler._state = multiprocessing.pool.TERMINATE
        wakes_handler.put(None)
        handler.join(_LIMIT)  # it may just begin other workers in the place of those that have ended
        _end_workers(list(workers))
        return
    thread.join(_LIMIT)
    if thread.is_alive():
        for worker in list(workers):
            worker.kill()
    for error in failures:
        raise error


def _end_workers(workers: list) -> None:
    until = time.monotonic() + _LIMIT
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
        if worker.is_alive():
            worker.kill()
