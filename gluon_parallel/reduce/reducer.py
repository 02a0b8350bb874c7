"""Reducer: sums a trainer's gradients over devices and processes, and updates all copies; prepared once.

All that makes steps uses it: ``DataParallel``, pipelines, and loops that are written with ``gluon.Trainer``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from ..allreduce import CopySums, broadcast, gradients
from ..allreduce.copy_sums import push_sums
from ..allreduce.marks import Marks, get_marks, set_marks, watch
from ..environment import launched_group
from ..errors import LOG, GluonParallelError
from ..kvstore.contract import Plan, adds_up_copies, contract, is_distributed
from ..kvstore.protocols import SparseSums, offers, summing_for
from ..kvstore.trainer_parameters import follow_parameters
from ..mxnet.attached import Attached
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import set_zero
from ..mxnet.library import check_call
from ..mxnet.optimizers import count_for, counts_by_device
from ..mxnet.parameters import checked_values, gradients_of, has_values, trainer_of, values_of, weight_storage
from ..mxnet.trainers import (
    compression_of,
    devices_of,
    is_distributed_in_mxnet,
    parameters_of,
    store_of,
    updaters_of,
    updates_on_store,
)
from ..native import provide
from ..native.records import address_of
from .update_order import among_others, counts_of, one_by_one

T = TypeVar("T")
_reducers: Attached[Reducer] = Attached("reducer")  # of trainers
_shards: Attached[Any] = Attached("shards")  # of trainers whose optimizer's state is divided, see :mod:`.shards`
_hooks: Attached[Any] = Attached("hooked_sum")  # of trainers with a communication hook, see :mod:`.hooked_sum`


class Reducer:
    """Sums the gradients of one trainer over devices and processes, as long as its parameters have these arrays.

    Attributes:
        everything, arrays: the trainer's parameters, and their weights and gradients when this was made.
        parameters: those that have a gradient; an index, below, counts in this list, from 0.
        numbers: their numbers in the trainer, which are their keys in its store.
        devices: all that hold a weight.
        of_devices: for each device (gradients, weights), lists of arrays in the order of the parameters.
        weights, gradients: their arrays, one list per parameter, one array per device.
        shards: how the optimizer's state is divided; None if every device keeps all of it.
        hook: what sums the gradients of steps by a communication hook; None if there is none.
        marks: (parameters, devices), which gradients were fresh at the last :meth:`all_fresh` or :meth:`reached`.
    """

    def __init__(self, trainer: mx.gluon.Trainer) -> None:
        everything = parameters_of(trainer)
        self.everything, self.arrays = everything, ([*map(values_of, everything)], [*map(gradients_of, everything)])
        self.parameters = gradients.trainable(trainer)
        chosen = {id(parameter) for parameter in self.parameters}
        self.numbers = [number for number, parameter in enumerate(everything) if id(parameter) in chosen]
        self.weights = [checked_values(parameter) for parameter in self.parameters]
        self.gradients = [parameter.list_grad() for parameter in self.parameters]
        self.indices = range(len(self.parameters))
        self._adds = any(parameter.grad_req == "add" for parameter in self.parameters)
        self._marks = Marks(self.parameters, is_one_of_several=launched_group() is not None)
        self.marks = self._marks.fresh
        self._record, self._fresh = self._marks.record, address_of(self.marks)
        self._sums: Plan | CopySums | None = None  # what sums all gradients together, over this store
        self._store: Any = None
        self.shards, self.hook = shards_of(trainer), hook_of(trainer)
        self.of_devices = [*zip(map(list, zip(*self.gradients)), map(list, zip(*self.weights)))]
        self.devices = list({array.ctx: None for arrays in self.weights for array in arrays})

    def all_fresh(self) -> bool:
        """Whether a backward pass has written the gradients of all copies; :attr:`marks` says which."""
        return get_marks(self._record, 0, len(self.indices), self._fresh) == self.marks.size

    def mark(self, fresh: bool, indices: Sequence[int] | None = None) -> None:
        """Mark the gradients at these indices, by default all, as fresh or as not."""
        if indices is None or len(indices) == len(self.indices):
            set_marks(self._record, 0, len(self.indices), fresh)
            return
        for index in indices:
            set_marks(self._record, index, index + 1, fresh)

    def reached(self) -> Sequence[int]:
        """The indices of the parameters that the last backward pass has reached on any device."""
        if get_marks(self._record, 0, len(self.indices), self._fresh) == self.marks.size:
            return self.indices
        return np.flatnonzero(self.marks.any(axis=1)).tolist()

    def count_passes(self) -> int:
        """How many backward passes over one device have reached any parameter since the last call, 0 if they add up."""
        num = 0 if self._adds else int(self._marks.passes.max(initial=0))
        self._marks.passes[:] = 0
        return num

    def forget(self) -> None:
        """Discard the gradients of earlier backward passes, the caller's own or those of a step that failed."""
        self._marks.passes[:] = 0
        if self._adds:
            gradients.forget(self.parameters)
            return
        self.mark(False)
        if gradients.summed:
            gradients.summed.difference_update(self.parameters)

    def zero_stale(self, indices: Sequence[int]) -> None:
        """Gradients at these indices that are not fresh become zero, unless they accumulate: no samples there."""
        if not self.all_fresh():
            for index in indices:
                if not self.marks[index].all() and self.parameters[index].grad_req == "write":
                    for fresh, gradient in zip(self.marks[index], self.gradients[index]):
                        if not fresh:
                            set_zero(gradient)

    def complete(self, indices: Sequence[int]) -> None:
        """Set gradients at these indices that are not fresh to zero, as :meth:`zero_stale`, and mark all as fresh."""
        if not self.all_fresh():
            self.zero_stale(indices)
            self.mark(True, indices)

    def discard(self) -> None:
        """Discard the gradients of the last sum, which no update uses: a hook takes back what it kept of them."""
        self.forget()
        if self.hook is not None:
            self.hook.undo()

    def refuse_second_sum(self, indices: Sequence[int]) -> None:
        """As :func:`.gradients.refuse_second_sum`, of each parameter."""
        for index in indices if self._adds else ():
            gradients.refuse_second_sum(self.parameters[index])

    def note_sums(self, indices: Sequence[int]) -> None:
        """All copies of these gradients hold the sum from now on."""
        self.mark(False, indices)
        gradients.summed.update(self.parameters[index] for index in indices)

    def summed(self, with_reached: bool) -> Sequence[int]:
        """The indices of the parameters whose gradients hold a sum; `with_reached`, also of those with fresh ones."""
        reached = {*self.reached()} if with_reached else ()
        found = [index for index in self.indices if index in reached or self.parameters[index] in gradients.summed]
        return self.indices if len(found) == len(self.indices) else found

    def sum(
        self,
        trainer: mx.gluon.Trainer,
        indices: Sequence[int],
        divisor: Callable[[], float] | None = None,
        whole: bool = True,
    ) -> None:
        """Sum the gradients at these indices over devices and processes; where the trainer's store updates, update.

        Args:
            divisor: returns what an update divides the sums by, which a communication hook needs to know; None in a
                loop that says it later, where sums are exact.
            whole: every process gets the whole sums; otherwise, of a sharded state, those of what it owns.
        """
        store, sums = store_of(trainer), self._sums
        if self.hook is not None and divisor is not None:
            self.hook.sum([self.parameters[index] for index in indices], divisor())
            return
        if self.shards is not None and not whole and is_distributed(store):
            self.shards.sum()
            return
        if len(indices) < len(self.indices):
            sums = self._chosen(trainer, indices)
        elif sums is None or self._store is not store:
            sums, self._store = self._chosen(trainer, indices), store
            self._sums = sums
        if sums is None:
            for index in indices:
                self._exchange(trainer, index)
        elif isinstance(sums, CopySums) and sums.is_all_in_c:
            for record in sums.records:
                check_call(push_sums(record, 0))
        elif compression_of(trainer) and store is not None:
            with summing_for(store, trainer):
                sums.push()
        else:
            sums.push()

    def _chosen(self, trainer: mx.gluon.Trainer, indices: Sequence[int]) -> Plan | CopySums | None:
        """Choose what sums the gradients at these indices by one call; None where each parameter needs a call."""
        store = store_of(trainer)
        if updates_on_store(trainer):
            return None
        if store is None or (adds_up_copies(store) and not compression_of(trainer)):
            sums = CopySums([self.gradients[index] for index in indices], are_plain=len(indices) == len(self.indices))
            if store is None or sums.is_all_in_c:
                return sums
        is_dense = all(self.gradients[index][0].stype == "default" for index in indices)
        return self._plan_for(store, indices) if is_dense or offers(store, SparseSums) else None

    def _plan_for(self, store: Any, indices: Sequence[int]) -> Plan:
        """The store's plan of these sums; dense gradients first, for row_sparse ones are waited for."""
        is_dense = [self.gradients[index][0].stype == "default" for index in indices]
        order = [index for index, dense in zip(indices, is_dense) if dense]
        order += [index for index, dense in zip(indices, is_dense) if not dense]
        numbers, grads = ([every[index] for index in order] for every in (self.numbers, self.gradients))
        return contract(store).plan(numbers, grads)

    def _exchange(self, trainer: mx.gluon.Trainer, index: int) -> None:
        """Sum one parameter's gradients by a store of MXNet or of another library, as MXNet's Trainer does."""
        store, number, grads = store_of(trainer), self.numbers[index], self.gradients[index]
        outs = self.weights[index] if updates_on_store(trainer) else grads
        if grads[0].stype == "default":
            store.pushpull(number, grads, out=outs, priority=-number)
            return
        store.push(number, grads, priority=-number)
        if weight_storage(self.parameters[index]) == "default":
            store.pull(number, outs, priority=-number, ignore_sparse=is_distributed_in_mxnet(trainer))


def reducer_of(trainer: mx.gluon.Trainer) -> Reducer:
    """The trainer's reducer, made anew where its parameters have other arrays: of another device, dtype or grad_req."""
    everything = parameters_of(trainer)
    try:
        reducer: Reducer | None = _reducers.read(trainer)
    except AttributeError:
        reducer = None
    if reducer is not None:
        weights, grads = reducer.arrays
        if (
            everything is reducer.everything
            and len(everything) == len(weights)
            and all(map(operator.is_, map(values_of, everything), weights))
            and all(map(operator.is_, map(gradients_of, everything), grads))
        ):
            return reducer
    follow_parameters(trainer)
    return _reducers.set(trainer, Reducer(trainer))


def shards_of(trainer: mx.gluon.Trainer) -> Any:
    """How the optimizer's state of this trainer is divided, :class:`.Shards`; None if every device keeps all of it."""
    return _shards.of(trainer)


def hook_of(trainer: mx.gluon.Trainer) -> Any:
    """What sums the gradients of this trainer's steps by a communication hook, :class:`.HookedSum`, or None."""
    return _hooks.of(trainer)


def sum_by_hook(trainer: mx.gluon.Trainer, hook: Any) -> None:
    """From now on, steps sum the gradients of this trainer by this :class:`.HookedSum`; None: as its store does."""
    _hooks.set(trainer, hook)
    _reducers.pop(trainer)


def shard_updates(trainer: mx.gluon.Trainer, shards: Any) -> None:
    """From now on, shard every update of this trainer as these :class:`.Shards` say, in a hand-written loop too."""
    _shards.set(trainer, shards)
    _reducers.pop(trainer)


_num_changes = 0  # of gradients, for which reducers and marks are made


def _make_reducers() -> int:
    """Make the reducers of new gradients, so that their marks count from the first pass on.

    Called by the C library before a backward pass.
    """
    global _num_changes
    made = [parameter for parameter, number in gradients.numbers.items() if number > _num_changes]
    _num_changes = gradients.num_changes
    try:
        watch(parameter for parameter in made if trainer_of(parameter) is None)
        for trainer in {id(trainer_of(parameter)): trainer_of(parameter) for parameter in made}.values():
            is_simple = trainer is None or (len(devices_of(trainer) or ()) < 2 and launched_group() is None)
            if not is_simple and all(one.grad_req == "null" or has_values(one) for one in parameters_of(trainer)):
                reducer_of(trainer)
    except (GluonParallelError, RuntimeError) as error:  # which the step raises, too: it makes the reducer then
        LOG.debug("gluon_parallel: no reducer before the first backward pass: %s", error)
    return 0


provide("make_reducers", _make_reducers)


# A trainer has one optimizer for all devices. Beside the states of each device, it keeps what its calls change: counts
# of updates (by the device's number), the schedule's learning rate, Nadam's and LARS's factors. So the update of each
# device starts with what was there before the update of the first one.


def count_once(optimizer: mx.optimizer.Optimizer, devices: Sequence[mx.Context]) -> None:
    """Have all devices share one table of counts of updates; a loaded file of states may lack those of some devices."""
    tables = counts_by_device(optimizer)
    if len(tables) == 1 and all(device.device_id in tables for device in devices):
        return
    numbers = {*tables, *(device.device_id for device in devices)}
    if len({id(tables.get(number)) for number in numbers}) > 1:
        tables.update(dict.fromkeys(numbers, counts_of(optimizer)))


def from_one_state(optimizer: mx.optimizer.Optimizer, items: Iterable[T]) -> Iterator[T]:
    """Iterate over `items`: for each, the optimizer is what it is for the first; :func:`count_once` comes before."""
    schedule = optimizer.lr_scheduler
    parts = [optimizer, schedule] if hasattr(schedule, "__dict__") else [optimizer]
    for part in parts:  # and the schedules that a schedule holds
        held = [one for one in vars(part).values() if isinstance(one, mx.lr_scheduler.LRScheduler)]
        parts += [one for one in held if one not in parts]
    before = [dict(vars(part)) for part in parts]
    table = next(iter(counts_by_device(optimizer).values()))
    counts = dict(table)
    for index, item in enumerate(items):
        if index:
            for part, values in zip(parts, before):
                vars(part).update(values)
            table.clear()
            table.update(counts)
        yield item


def update_copies(trainer: mx.gluon.Trainer, reducer: Reducer, indices: Sequence[int]) -> None:
    """Update all copies of the parameters at these indices, whose gradients are summed; these count as used then.

    Each device updates what it owns, and gets the rest from its owners: of a sharded state, parts of the
    parameters; otherwise all, or, where it is not known that the optimizer repeats an update, the first device all.
    """
    if not indices:
        return
    shards = reducer.shards
    optimizer, is_whole = trainer.optimizer, len(indices) == len(reducer.indices)
    numbers = reducer.numbers if is_whole else [reducer.numbers[index] for index in indices]
    count_once(optimizer, reducer.devices)
    if shards is not None:
        owned = shards.of_devices(reducer, indices)
    elif is_whole:
        owned = [(numbers, grads, weights) for grads, weights in reducer.of_devices]
    else:
        owned = [(numbers, [g[at] for at in indices], [w[at] for at in indices]) for g, w in reducer.of_devices]
    # Whether an update from the same state, with the same gradients, gives the same weights: SGLD draws noise, LBSGD
    # keeps arrays of one device, and of optimizers of others it is not known.
    has_updated_all = shards is not None or len(owned) == 1
    if not has_updated_all:
        is_known = type(optimizer).__module__.partition(".")[0] in ("mxnet", "gluon_parallel")
        has_updated_all = is_known and not isinstance(optimizer, (mx.optimizer.SGLD, mx.optimizer.LBSGD))
    devices = zip(updaters_of(trainer), devices_of(trainer), owned if has_updated_all else owned[:1])
    try:
        for updater, device, (own, grads, weights) in from_one_state(optimizer, devices) if len(owned) > 1 else devices:
            if len(own) == len(numbers):
                turns = [slice(None)] if updater.aggregate_updates else one_by_one(optimizer, own)
            else:
                count_for(optimizer, device.device_id)
                turns = among_others(updater, numbers, own, [reducer.weights[index][0].dtype for index in indices])
            for part in turns:
                if own[part]:
                    updater(own[part], grads[part], weights[part])
    except BaseException:  # Ctrl-C too, which may come between two devices
        has_updated_all = shards is not None
        raise
    finally:
        for index in () if has_updated_all else indices:
            broadcast(reducer.weights[index])
    if shards is not None:
        shards.share(reducer, indices)
    reducer.mark(False, indices)
    if gradients.summed:
        gradients.use_sums([reducer.parameters[index] for index in indices], contract(store_of(trainer)).rank == 0)
