"""Collective functions, which all processes call: names in errors, repetition if a process is lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Callable

from ..errors import BarrierTimeout, WorkerLost
from .contract import contract
from .flight_recorder import CALL, RECORDER

_thread = threading.local()


@contextlib.contextmanager
def collective(name: str) -> Iterator[str]:
    """Within this block, or a function that it decorates, errors name the function `name`, such as "gp.evaluate()".

    Of blocks inside each other the outermost counts, which is what the user has called. Yields its name.

    Example:
        >>> with collective("training.evaluate()"), collective("gp.evaluate()") as name:
        ...     name
        'training.evaluate()'
    """
    if getattr(_thread, "name", None) is not None:
        yield _thread.name
        return
    _thread.name, number = name, RECORDER.begin((CALL, "", name), 0)
    gave_up = False
    try:
        yield name
    except (BarrierTimeout, WorkerLost):
        gave_up = True
        raise
    finally:
        _thread.name = None
        RECORDER.end(number, gave_up)


@contextlib.contextmanager
def outermost() -> Iterator[None]:
    """Within this block, the name that an outer :func:`collective` gave does not count.

    When a process is lost, all regroup by one function, to which they come from different ones.
    """
    _thread.name, name = None, getattr(_thread, "name", None)
    try:
        yield
    finally:
        _thread.name = name


def together(store: Any, function: Callable[[], Any], *loaders: Any) -> Any:
    """What ``function()`` returns, the same on all processes; it is repeated where a process is lost meanwhile.

    It is repeated only if the training divides each of `loaders` anew among the processes that are left.
    """
    survival = contract(store).survival
    return function() if survival is None or not survival.divides(loaders) else survival.together(function)


def committing(trainer: Any) -> Any:
    """The object whose ``commit`` waits for all sums before an update of the trainer, or None."""
    survival = None if trainer._kvstore is None else contract(trainer._kvstore).survival
    return survival if survival is not None and survival.trainer is trainer else None
