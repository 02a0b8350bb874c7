"""What all processes of a training do together, which is called again where one is lost meanwhile."""

from __future__ import annotations

from typing import Any, Callable

from ..mxnet.attached import Attached
from ..mxnet.trainers import store_of
from .environment import joins, min_processes
from .protocols import Regrouping, offers

SURVIVALS: Attached[Any] = Attached("survival")  # of stores: the training that goes on after a loss


def survives(store: Any) -> bool:
    """Whether the processes of `store` go on without those that are lost, as the launcher was asked to."""
    meets_others = store is not None and (getattr(store, "num_workers", 1) > 1 or joins() is not None)
    return offers(store, Regrouping) and meets_others and min_processes() is not None


def has_failed(store: Any) -> bool:
    """Whether the exchanges of `store` have failed, for a lost process or for another reason."""
    try:
        store.check()
    except Exception:  # whatever it was has ended them all
        return True
    return False


def together(store: Any, function: Callable[[], Any], *loaders: Any) -> Any:
    """What ``function()`` returns, the same on all processes; it is repeated where a process is lost meanwhile.

    It is repeated only if the training divides each of `loaders` anew among the processes that are left.
    """
    survival = SURVIVALS.of(store)
    return function() if survival is None or not survival.divides(loaders) else survival.together(function)


def committing(trainer: Any) -> Any:
    """The object whose ``commit`` waits for all sums before an update of the trainer, or None."""
    survival = SURVIVALS.of(store_of(trainer))
    return survival if survival is not None and survival.trainer is trainer else None
