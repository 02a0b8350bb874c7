"""Update of all copies of a trainer's parameters: each copy is updated as MXNet updates that of one device.

A trainer has one optimizer for all devices. Beside the states of each device, it keeps what its calls change: counts of
updates (by the device's number), the schedule's learning rate, Nadam's and LARS's factors. So the update of each device
starts with what was there before the update of the first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ..allreduce import broadcast, gradients
from ..compat import mx
from .contract import contract
from .step_plan import StepPlan

T = TypeVar("T")


def counts_of(optimizer: mx.optimizer.Optimizer) -> dict[int, int]:
    """Number of a parameter -> how often it was updated; the largest of all devices' counts."""
    merged: dict[int, int] = {}
    for table in optimizer._all_index_update_counts.values():
        merged.update((number, max(count, merged.get(number, 0))) for number, count in table.items())
    return merged


def count_once(optimizer: mx.optimizer.Optimizer, devices: Iterable[mx.Context]) -> None:
    """Give all devices one table of counts, which a file of states may have for other devices alone."""
    tables = optimizer._all_index_update_counts
    numbers = {*tables, *(device.device_id for device in devices)}
    if len({id(tables.get(number)) for number in numbers}) > 1:
        tables.update(dict.fromkeys(numbers, counts_of(optimizer)))


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
        for place in range(begin, min(begin + size, len(numbers))):
            optimizer.last_lr, optimizer.cur_lr = before
            yield slice(place, place + 1)


def from_one_state(optimizer: mx.optimizer.Optimizer, items: Iterable[T]) -> Iterator[T]:
    """Iterate over `items`: for each, the optimizer is what it is for the first; :func:`count_once` comes before."""
    parts = [optimizer, *_schedules(optimizer.lr_scheduler)]
    before = [dict(vars(part)) for part in parts]
    table = next(iter(optimizer._all_index_update_counts.values()))
    counts = dict(table)
    for place, item in enumerate(items):
        if place:
            for part, values in zip(parts, before):
                vars(part).update(values)
            table.clear()
            table.update(counts)
        yield item


def _schedules(schedule: Any) -> Iterator[Any]:
    """A learning rate schedule, and the schedules that it holds."""
    if hasattr(schedule, "__dict__"):
        yield schedule
        for held in vars(schedule).values():
            if isinstance(held, mx.lr_scheduler.LRScheduler):
                yield from _schedules(held)


def _repeats(optimizer: mx.optimizer.Optimizer) -> bool:
    """Whether it is known that an update from the same state, with the same gradients, gives the same weights.

    SGLD draws noise, LBSGD keeps arrays of one device.
    """
    is_known = type(optimizer).__module__.partition(".")[0] in ("mxnet", "gluon_parallel")
    return is_known and not isinstance(optimizer, (mx.optimizer.SGLD, mx.optimizer.LBSGD))


def update_copies(trainer: mx.gluon.Trainer, plan: StepPlan, places: Sequence[int]) -> None:
    """Update all copies of the parameters at these places, whose gradients are summed; these count as used then.

    Where it is not known that an optimizer repeats an update, it updates the first device's copies, and the other
    devices get these.
    """
    if not places:
        return
    optimizer, numbers, of_devices, parameters = trainer.optimizer, plan.numbers, plan.of_devices, plan.parameters
    if len(places) < len(plan.places):
        numbers, parameters = ([every[place] for place in places] for every in (numbers, parameters))
        of_devices = [([g[place] for place in places], [w[place] for place in places]) for g, w in of_devices]
    count_once(optimizer, plan.devices)
    repeats = _repeats(optimizer)
    updaters = trainer._updaters if repeats else trainer._updaters[:1]
    for updater, (slopes, weights) in from_one_state(optimizer, zip(updaters, of_devices)):
        for part in [slice(None)] if updater.aggregate_updates else one_by_one(optimizer, numbers):
            updater(numbers[part], slopes[part], weights[part])
    if not repeats:
        for place in places:
            broadcast(plan.weights[place])
    plan.mark(False, places)
    if gradients.summed:
        gradients.use_sums(parameters, is_first=contract(trainer._kvstore).rank == 0)
