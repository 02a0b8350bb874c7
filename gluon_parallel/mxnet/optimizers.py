"""What an optimizer, and a store that updates, keep to themselves: counts of updates, the updater with the states."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Callable

from .compat import mx

# {number of a device: {number of a parameter: how often it was updated}}
counts_by_device: Callable[[Any], dict[int, dict[int, int]]] = attrgetter("_all_index_update_counts")


def set_counts(optimizer: mx.optimizer.Optimizer, counts: dict[int, int]) -> None:
    """Set how often each parameter was updated, by its number, for the first device alone."""
    optimizer._all_index_update_counts = {0: counts}


def num_updates(optimizer: mx.optimizer.Optimizer) -> int:
    """How many updates the parameters have had, all together, on the device that has had most.

    MXNet's ``num_update`` is that of the parameter that has had most, so it misses updates of others alone.
    """
    return max((sum(counts.values()) for counts in optimizer._all_index_update_counts.values()), default=0)


def count_updates(optimizer: mx.optimizer.Optimizer, numbers: Sequence[int]) -> None:
    """Count one update of each of these parameters, on the device that :func:`count_for` has chosen."""
    optimizer._update_count(numbers)


def count_for(optimizer: mx.optimizer.Optimizer, device: int) -> None:
    """Have the optimizer count for the device of this number, as an updater does before each update."""
    optimizer._set_current_context(device)


def updater_in(store: Any) -> mx.optimizer.Updater | None:
    """What updates the weights in this process's part of the store; None if nothing does."""
    return getattr(store, "_updater", None)


def set_updater(store: mx.kv.KVStore, updater: mx.optimizer.Updater) -> None:
    """Have the store update the weights with this updater, and its states."""
    store._set_updater(updater)
