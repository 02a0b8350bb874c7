"""Patches of ``gluon.Trainer``: a device without fresh gradients adds zero to the sums, and is updated like the others.

A batch with fewer samples than devices leaves devices idle. MXNet's Trainer adds what their gradients hold, which is
the gradient of an earlier batch, and updates on an idle device raise, or are left out. A parameter that no device of
any process has reached is left out of sum and update, as by MXNet with one device. Processes that divide the sums by
different numbers are refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..allreduce import gradients as fresh
from ..errors import GradientUnavailable, InexactUpdate, warn
from ..kvstore.contract import contract, is_distributed, is_ours
from ..kvstore.together import repetition_of
from ..kvstore.trainer_parameters import follow_parameters
from ..mxnet.attached import Attached
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import as_legacy
from ..mxnet.parameters import gradients_of
from ..mxnet.trainers import (
    devices_of,
    has_made_store,
    loss_scaler_of,
    optimizer_of,
    parameters_of,
    scale_of,
    store_of,
    updates_on_store,
)
from ..reduce.reducer import Reducer, count_once, reducer_of, update_copies
from ..reduce.step_header import ZERO_RATE, header_of
from ..reduce.update_order import one_by_one

_sums_over_devices: weakref.WeakSet = weakref.WeakSet()  # trainers without a store, whose devices are summed over here
# Parameters that a backward pass has reached, or whose gradients were looked at, in the loop of any trainer.
_known: weakref.WeakSet = weakref.WeakSet()
_loops: Attached[_Loop] = Attached("loop")  # of trainers


def sum_over_devices(trainer: Any) -> None:
    """From now on, a step of this trainer sums over its devices although it has no store."""
    _sums_over_devices.add(trainer)


def forget(trainer: Any) -> None:
    """Forget the loop that `trainer` is used in, and sum anew, with the processes that there are now."""
    _loops.pop(trainer)


class _Loop:
    """What is known of the loop that one trainer is used in."""

    def __init__(self) -> None:
        self.in_step = False  # whether trainer.step runs, which divides by one number for sum and update
        self.refuses = False  # whether a step is under way that refuses parameters without fresh gradients
        self.is_separate: bool | None = None  # whether nobody sums the gradients; None where that is not known yet
        self.all_known: Reducer | None = None  # the reducer all of whose parameters are known, see `_known`
        self.devices: np.ndarray | None = None  # whether each had a gradient in the last sum; None if all had
        self.sums_in_step = False  # whether the step that is under way has summed
        self.has_warned = False
        self._own: list[bool] = []  # in the last sum, whether each parameter was reached
        self._passes = 0  # backward passes before the last sum that had any

    def counts(self, trainer: Any, own: list[bool], updates: bool, num_passes: int = 0) -> Any:
        """How many processes have reached each of the trainer's parameters; waits for all of them.

        The same header says what each process divides by, and its learning rate, if it `updates` by these gradients at
        once, and the number of backward passes; those that differ are refused.
        """
        header, fewer = header_of(trainer), 0 < num_passes < self._passes
        header.own["reached"] = own
        header.own["passes"][header.rank] = -num_passes if fewer else num_passes
        self._own, self._passes = own, num_passes or self._passes
        if updates:
            rescale = optimizer_of(trainer).rescale_grad
            header.own["divisors"][header.rank] = scale_of(trainer) / rescale if rescale else 0.0
            header.own["rates"][header.rank] = optimizer_of(trainer).learning_rate or ZERO_RATE
        header.send()
        return header.read()["reached"]

    def before_update(self, trainer: Any) -> None:
        """In ``trainer.update``, which alone knows the number: refuse to divide by another one than other processes."""
        if self._own and not self.in_step:
            self.counts(trainer, self._own, updates=True)


def _loop(trainer: Any) -> _Loop:
    return _loops.of(trainer) or _loops.set(trainer, _Loop())


def _is_simple(trainer: Any) -> bool:
    """Whether MXNet's own way is right: one device of one process."""
    is_one = len(devices_of(trainer) or ()) < 2
    return is_one and (store_of(trainer) is None or not is_distributed(store_of(trainer)))


def _updates_on_store(trainer: Any) -> bool:
    return bool(store_of(trainer) and updates_on_store(trainer))


def step(step_in_mxnet: Callable[..., None], trainer: Any, batch_size: int, ignore_stale_grad: bool = False) -> None:
    """Make a step of MXNet's Trainer; without `ignore_stale_grad`, parameters without fresh gradients are refused."""
    follow_parameters(trainer)
    if has_made_store(trainer) and _is_simple(trainer):
        step_in_mxnet(trainer, batch_size, ignore_stale_grad)
        return
    loop = _loop(trainer)
    loop.in_step, loop.refuses = True, not ignore_stale_grad
    try:
        step_in_mxnet(trainer, batch_size, ignore_stale_grad)
    finally:
        loop.in_step = loop.refuses = False


def allreduce_grads(allreduce_in_mxnet: Callable[..., None], trainer: Any) -> None:
    """Sum the gradients of the parameters that any device has reached, with zero for devices that have not."""
    follow_parameters(trainer)
    if _is_simple(trainer):
        allreduce_in_mxnet(trainer)
        return
    loop, reducer = _loop(trainer), reducer_of(trainer)
    own = reducer.reached()
    before, loop.devices = loop.devices, None if own is reducer.indices else np.any(reducer.marks, axis=0)
    if before is not None and loop.devices is not None:
        _refuse_sum_per_device(trainer, loop, before)
    reducer.refuse_second_sum(own)
    if fresh.clipped:
        fresh.refuse_clipped(reducer.parameters, _sums_over_processes(trainer))
    reached = _reached(trainer, loop, reducer, own)
    if not is_distributed(store_of(trainer)) and (len(own) < len(reducer.indices) or loop.all_known is not reducer):
        _check_left_out(trainer, loop, reducer)
    if store_of(trainer) is None and trainer not in _sums_over_devices:
        return
    reducer.zero_stale(reached)
    if _updates_on_store(trainer) and not is_distributed(store_of(trainer)):
        count_once(trainer.optimizer, devices_of(trainer))
        for part in one_by_one(trainer.optimizer, [reducer.numbers[index] for index in reached]):
            reducer.sum(trainer, reached[part])
    else:
        reducer.sum(trainer, reached)
    known = own if own and _sends_zeros(trainer) else reached
    reducer.note_sums(known)
    loop.sums_in_step = loop.in_step
    if len(known) < len(reached) and not loop.refuses and not loop.has_warned:
        loop.has_warned = True
        _warn_of_zeros(trainer, reducer.parameters[next(index for index in reached if index not in {*known})])


def _sums_over_processes(trainer: Any) -> bool:
    return is_distributed(store_of(trainer)) and not contract(store_of(trainer)).is_asynchronous


def _refuse_sum_per_device(trainer: Any, loop: _Loop, before: np.ndarray) -> None:
    """Refuse a step within the loop over the devices, where each has its gradients alone, or warn if it leaves out any.

    Batches with few samples fill the first devices. So later ones have gradients without the first only in such a loop,
    right after a step in which they had none.
    """
    here = loop.devices
    if here is None or here[0] or not here.any() or not before.any() or (here & before).any():
        return
    names = [str(device) for device, has in zip(devices_of(trainer), here) if has]
    text = (
        f"gluon.Trainer sums over {devices_of(trainer)}, but only {', '.join(names)} has new gradients, and in the "
        "step before others had. Call trainer.step(num_samples) once for all devices, behind the loop over them, with "
        "the number of all samples. Where some devices are meant to have no samples, let it be the last ones"
    )
    if loop.refuses:
        raise GradientUnavailable(f"{text}, or call step with ignore_stale_grad=True")
    warn(text, InexactUpdate)


def _sends_zeros(trainer: Any) -> bool:
    """Whether the store updates when all processes have sent a gradient, so that this one cannot leave any out."""
    return _updates_on_store(trainer) and _sums_over_processes(trainer)


def _reached(trainer: Any, loop: _Loop, reducer: Reducer, own: Sequence[int]) -> Sequence[int]:
    """The indices of the parameters to sum: those that the losses of any process have reached, where they can tell."""
    store = store_of(trainer)
    if _sends_zeros(trainer) or (is_distributed(store) and not is_ours(store)):
        return reducer.indices
    if not is_distributed(store) or _updates_on_store(trainer):
        return own
    found = {reducer.numbers[index] for index in own}
    reached, num_passes = [number in found for number in range(len(parameters_of(trainer)))], reducer.count_passes()
    counts = loop.counts(trainer, reached, loop.in_step, num_passes if own else 0)
    return [index for index in reducer.indices if counts[reducer.numbers[index]]]


def _check_left_out(trainer: Any, loop: _Loop, reducer: Reducer) -> None:
    """Refuse parameters without gradients before anything is changed: those of this step, or that the caller wrote."""
    for index, parameter in enumerate(reducer.parameters):
        if reducer.marks[index].any() or parameter in fresh.summed:
            _known.add(parameter)
        elif loop.refuses:
            raise _stale(parameter, "nothing has been updated")
        elif _updates_on_store(trainer) and parameter not in _known:
            _known.add(parameter)
            if any(as_legacy(gradient).asnumpy().any() for gradient in gradients_of(parameter)):
                raise GradientUnavailable(
                    f"the gradients of {parameter.name} were written by no backward pass, so ignore_stale_grad=True "
                    "leaves it out. Mark them before: for array in parameter.list_data(): array._fresh_grad = True"
                )
    loop.all_known = reducer if all(parameter in _known for parameter in reducer.parameters) else None


def _stale(parameter: Any, what_happened: str) -> UserWarning:
    return UserWarning(
        f"Gradient of Parameter `{parameter.name}` has not been updated by backward since last `step`, on any device; "
        f"{what_happened}. Where only a part of the parameters is used, call step with ignore_stale_grad=True"
    )


def _warn_of_zeros(trainer: Any, parameter: Any) -> None:
    warn(
        f"{parameter.name} has no fresh gradient in this process. The servers of {store_of(trainer).type!r} update it "
        "all the same, if only by weight decay and momentum; gluon.Trainer(..., update_on_kvstore=False) leaves it out",
        InexactUpdate,
    )


def update(update_in_mxnet: Callable[..., None], trainer: Any, ignore_stale_grad: bool = False) -> None:
    """Update all copies of the parameters that were summed, or refuse those that no device has reached."""
    follow_parameters(trainer)
    is_simple = _is_simple(trainer)
    if not is_simple:
        _loop(trainer).before_update(trainer)
    repetition = repetition_of(trainer)
    if repetition is not None:
        repetition.commit(fresh.trainable(trainer))
    if is_simple:
        if parameters_of(trainer):
            count_once(trainer.optimizer, parameters_of(trainer)[0].list_ctx())
        update_in_mxnet(trainer, ignore_stale_grad)
        return
    loop, reducer = _loop(trainer), reducer_of(trainer)
    updates_here = not _updates_on_store(trainer)  # otherwise the store has updated
    if updates_here:
        _check_sums(trainer, loop, reducer)
        if loop.is_separate:
            update_in_mxnet(trainer, ignore_stale_grad)
            return
        scaler = loss_scaler_of(trainer)
        if scaler is not None and scaler.has_overflow(parameters_of(trainer)):
            fresh.summed.difference_update(reducer.parameters)
            reducer.mark(False)
            return
    chosen = reducer.summed(with_reached=updates_here)
    if not updates_here:
        fresh.summed.difference_update(reducer.parameters[index] for index in chosen)
    if len(chosen) < len(reducer.indices) and not ignore_stale_grad:
        missed = next(reducer.parameters[index] for index in reducer.indices if index not in {*chosen})
        raise _stale(missed, "nothing has been updated" if updates_here else "the other parameters have been updated")
    if updates_here:
        update_copies(trainer, reducer, chosen)


def _check_sums(trainer: Any, loop: _Loop, reducer: Reducer) -> None:
    """Warn, once, of gradients that nobody sums; refuse a parameter of which some copies have no gradient."""
    if store_of(trainer) is None and trainer not in _sums_over_devices and loop.is_separate is None:
        loop.is_separate = _is_separate(reducer.parameters)
        if loop.is_separate:
            warn(
                f"gluon.Trainer(..., kvstore=None) sums no gradients: each of {devices_of(trainer)} updates its own "
                "copy of the weights. Leave kvstore=None out, or sum before: gp.allreduce(parameter.list_grad()) for "
                "each. Where that is meant: warnings.filterwarnings('ignore', category=gp.errors.InexactUpdate)",
                InexactUpdate,
            )
    if loop.is_separate:
        return
    if loop.in_step and loop.sums_in_step:  # nothing can have come between sum and update
        loop.sums_in_step = False
        return
    reducer.all_fresh()
    for index, parameter in enumerate(reducer.parameters):
        marks = reducer.marks[index]
        if parameter in fresh.summed:
            if marks.any() and (is_distributed(store_of(trainer)) or _differ(gradients_of(parameter))):
                raise GradientUnavailable(
                    f"a backward pass has written the gradients of {parameter.name} after they were summed; call "
                    "trainer.allreduce_grads() after the last backward pass"
                )
            fresh.refuse_different_copies(parameter)
        elif marks.any() and not marks.all():
            idle = [device for device, mark in zip(parameter.list_ctx(), marks) if not mark]
            raise GradientUnavailable(
                f"{parameter.name} has no fresh gradient on {idle}, only on the other devices, and nothing has summed "
                "its gradients; first call trainer.allreduce_grads(), or, without a store, gp.allreduce of them"
            )


def _is_separate(parameters: Sequence[Any]) -> bool | None:
    """Whether the devices' gradients differ, so that nobody has summed them; None if only one device has any."""
    found = None
    for parameter in parameters:
        if parameter in fresh.summed:
            return False
        written = [array for array, mark in zip(gradients_of(parameter), fresh.flags(parameter)) if mark]
        if len(written) > 1:
            found = _differ(written)
        if found:
            break
    return found


def _differ(arrays: Sequence[mx.nd.NDArray]) -> bool:
    return len({as_legacy(array).asnumpy().tobytes() for array in arrays}) > 1
