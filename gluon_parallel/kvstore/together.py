"""Calls that all processes of a training make together; those that are left repeat them after a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Protocol

from ..environment import may_join, min_processes
from ..mxnet.attached import Attached
from ..mxnet.trainers import store_of
from .protocols import Regrouping, offers


class Repetition(Protocol):
    """Calls functions again that have broken off, with the processes that go on.

    Attributes:
        trainer: of the training.
    """

    trainer: Any

    @property
    def num_updates(self) -> int:
        """How many updates the processes have made."""

    def together(self, function: Callable[[], Any]) -> Any:
        """As :func:`together`."""

    def divides(self, loaders: Sequence[Any]) -> bool:
        """Whether each of these is a loader that is divided anew among the processes that go on."""

    def commit(self, parameters: Sequence[Any]) -> None:
        """Before the update of these parameters: wait until nothing can break it off."""


REPETITIONS: Attached[Repetition] = Attached("repetition")  # of stores


def repeats(store: Any) -> bool:
    """Whether what the processes of `store` call together is called again where it breaks off, as the launcher says."""
    may_have_others = store is not None and (getattr(store, "num_workers", 1) > 1 or may_join())
    return offers(store, Regrouping) and may_have_others and min_processes() is not None


def together(store: Any, function: Callable[[], Any], *loaders: Any) -> Any:
    """What ``function()`` returns, the same on all processes; it is called again where it breaks off, see `repeats`.

    So it is only if the training divides each of `loaders` anew among the processes that go on.
    """
    repetition = REPETITIONS.of(store)
    return function() if repetition is None or not repetition.divides(loaders) else repetition.together(function)


def repetition_of(trainer: Any) -> Any:
    """The :class:`Repetition` of this trainer's updates, or None."""
    repetition = REPETITIONS.of(store_of(trainer))
    return repetition if repetition is not None and repetition.trainer is trainer else None
