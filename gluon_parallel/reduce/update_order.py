"""In which parts an optimizer updates parameters one after the other, with the counts that it would have for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..mxnet.compat import mx
from ..mxnet.optimizers import count_updates, counts_by_device


def counts_of(optimizer: mx.optimizer.Optimizer) -> dict[int, int]:
    """Number of a parameter -> how often it was updated; the largest of all devices' counts."""
    merged: dict[int, int] = {}
    for table in counts_by_device(optimizer).values():
        merged.update((number, max(count, merged.get(number, 0))) for number, count in table.items())
    return merged


def one_by_one(optimizer: mx.optimizer.Optimizer, numbers: Sequence[int]) -> Iterator[slice]:
    """Parts of the parameters of these numbers, for what updates one parameter after the other: a store, a pipeline.

    On one device SGD and LARS update several parameters at once: they count all of these before they ask for the
    learning rate, and LARS takes the rate of the update before for all of them. Here this is done for each part.
    """
    is_lars, after = isinstance(optimizer, mx.optimizer.LARS), []
    if is_lars or (isinstance(optimizer, mx.optimizer.SGD) and optimizer.lr_scheduler is not None):
        counts = counts_of(optimizer)
        after = [counts.get(number, optimizer.begin_num_update) + 1 for number in numbers]
    if not is_lars and len(set(after)) < 2:
        yield slice(None)
        return
    size = max(optimizer.aggregate_num, 1)
    for begin in range(0, len(numbers), size):
        optimizer.num_update = max([optimizer.num_update, *after[begin : begin + size]])
        if not is_lars:
            yield slice(begin, begin + size)
            continue
        before = optimizer.last_lr, optimizer.cur_lr
        for index in range(begin, min(begin + size, len(numbers))):
            optimizer.last_lr, optimizer.cur_lr = before
            yield slice(index, index + 1)


def among_others(
    updater: mx.optimizer.Updater, numbers: Sequence[int], own: Sequence[int], dtypes: Sequence[Any]
) -> Iterator[slice]:
    """Parts of an owner's parameters; before and after each, the parameters of others are counted as updated.

    Schedules and Adam's corrections go by the counts. Where counts differ, since a parameter was frozen for some steps,
    a schedule's rate depends on the order: each part counts as it would beside all parameters, and what came before it.

    Args:
        updater: the owner's device's.
        numbers: of all parameters, in the order of their updates; `own`: those of which the owner has values.
        dtypes: of all, for an optimizer that updates several at once has those of one dtype together.
    """
    optimizer, mine = updater.optimizer, {*own}
    counts = next(iter(counts_by_device(optimizer).values()))
    are_equal = len({counts.get(number, optimizer.begin_num_update) for number in numbers}) < 2
    if optimizer.lr_scheduler is None or are_equal:
        count_updates(optimizer, [number for number in numbers if number not in mine])
        yield from [slice(None)] if updater.aggregate_updates else one_by_one(optimizer, own)
        return
    together: dict[Any, list[int]] = {}
    for number, dtype in zip(numbers, dtypes):
        together.setdefault(dtype if updater.aggregate_updates else None, []).append(number)
    # SGD counts all that it updates at once before it asks for a rate, others one after the other.
    size = max(optimizer.aggregate_num, 1) if isinstance(optimizer, mx.optimizer.SGD) else 1
    index = {number: index for index, number in enumerate(own)}
    for group in together.values():
        for begin in range(0, len(group), size):
            turn = group[begin : begin + size]
            after = [counts.get(number, optimizer.begin_num_update) + 1 for number in turn]
            optimizer.num_update = max(optimizer.num_update, *after)
            count_updates(optimizer, [number for number in turn if number not in mine])
            yield from (slice(index[number], index[number] + 1) for number in turn if number in mine)
