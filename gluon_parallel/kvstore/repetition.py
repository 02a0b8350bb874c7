"""Repetition after a loss: finds the object that repeats a store's exchanges, or that commits a trainer's updates.

The object is a ``Survival`` of ``gluon_parallel.training``, which the store knows by its attribute ``survival``.
"""

from __future__ import annotations

from typing import Any, Callable

from .contract import contract


def together(store: Any, function: Callable[[], Any], *loaders: Any) -> Any:
    """What ``function()`` returns, the same on all processes; it is repeated where a process is lost meanwhile.

    It is not repeated if it reads other `loaders` than those that a training divides anew among those that are left.
    """
    survival = contract(store).survival
    return function() if survival is None or not survival.divides(loaders) else survival.together(function)


def committing(trainer: Any) -> Any:
    """What has to agree to each update of a trainer, by its method ``commit``; None: nobody."""
    survival = None if trainer._kvstore is None else contract(trainer._kvstore).survival
    return survival if survival is not None and survival.trainer is trainer else None
