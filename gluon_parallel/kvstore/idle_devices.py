"""Patches of ``gluon.Trainer``: a device without fresh gradients adds zero to the sums, and is updated like the others.

A batch with fewer samples than devices leaves devices idle. MXNet's Trainer adds what their gradients hold, which is
the gradient of an earlier batch, and updates on an idle device raise, or are left out. A parameter that no device of
any process has reached is left out of sum and update, as by MXNet with one device.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..allreduce import gradients as fresh
from ..compat import mx
from ..compat.array_types import as_legacy
from ..errors import GradientUnavailable, InexactUpdate, warn
from .background_sum import BackgroundSum
from .base import Store
from .contract import is_distributed
from .repetition import committing
from .reserved_keys import REACHED_BY_HAND
from .servers import Servers
from .update_copies import count_once, one_by_one, update_copies

_SKIPPED = types.SimpleNamespace(grad_req="null")  # in the place of a parameter that is left out
_summed_elsewhere: weakref.WeakSet = weakref.WeakSet()
_loops: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # trainer -> _Loop


def leave_to_caller(trainer: Any) -> None:
    """The caller says which gradients are fresh and has them summed: ``trainer.allreduce_grads`` is MXNet's."""
    _summed_elsewhere.add(trainer)


def forget(trainer: Any) -> None:
    """Forget the loop that `trainer` is used in, and sum anew with the processes that are left after a loss."""
    _loops.pop(trainer, None)


class _Loop:
    """What is known of the loop that one trainer is used in."""

    def __init__(self) -> None:
        self.refuses = False  # whether a step is under way that refuses parameters without fresh gradients
        self.is_separate: bool | None = None  # whether nobody sums the gradients; None where that is not known yet
        self.known: set[str] = set()  # names of parameters that were reached, or whose gradient was looked at
        self.has_warned = False
        self._flags: list[bool] | None = None
        self._values: Any = None
        self._sum: BackgroundSum | None = None

    def counts(self, trainer: Any, own: list[bool]) -> Any:
        """How many processes have reached each of the trainer's parameters; waits only where this one has not all."""
        if self._sum is None:
            self._sum = BackgroundSum(trainer._kvstore, REACHED_BY_HAND, len(own))
        if own != self._flags:
            self._flags, self._values = own, mx.nd.array(own, ctx=mx.cpu(), dtype="float64")
        total = self._sum.sum(self._values)
        missing = any(not flag for flag, parameter in zip(own, trainer._params) if parameter.grad_req != "null")
        return self._sum.read(total, "no word of which parameters their losses reached") if missing else own


def _loop(trainer: Any) -> _Loop:
    return _loops.setdefault(trainer, _Loop())


def _is_simple(trainer: Any) -> bool:
    """Whether MXNet's own way is right: one device of one process."""
    return len(trainer._contexts or ()) < 2 and not is_distributed(trainer._kvstore)


def _updates_on_store(trainer: Any) -> bool:
    return bool(trainer._kvstore and trainer._update_on_kvstore)


def step(step_in_mxnet: Callable[..., None], trainer: Any, batch_size: int, ignore_stale_grad: bool = False) -> None:
    """Make a step of MXNet's Trainer; without `ignore_stale_grad`, parameters without fresh gradients are refused."""
    loop = _loop(trainer)
    loop.refuses = not ignore_stale_grad
    try:
        step_in_mxnet(trainer, batch_size, ignore_stale_grad)
    finally:
        loop.refuses = False


def allreduce_grads(allreduce_in_mxnet: Callable[..., None], trainer: Any) -> None:
    """Sum the gradients of the parameters that any device has reached, with zero for devices that have not."""
    if trainer in _summed_elsewhere or _is_simple(trainer):
        allreduce_in_mxnet(trainer)
        return
    loop, flags = _loop(trainer), {parameter: fresh.flags(parameter) for parameter in fresh.trainable(trainer)}
    own = [parameter for parameter, marks in flags.items() if any(marks)]
    for parameter in own:
        fresh.refuse_second_sum(parameter)
    reached = _reached(trainer, loop, own)
    if not is_distributed(trainer._kvstore):
        _check_left_out(trainer, loop, flags)
    if trainer._kvstore is None:
        return
    for parameter in reached:
        if not all(flags[parameter]):
            fresh.zero_stale(parameter)
    everything, chosen, parts = trainer._params, set(reached), iter([slice(None)])
    if _updates_on_store(trainer) and not is_distributed(trainer._kvstore):
        count_once(trainer.optimizer, trainer._contexts)
        parts = one_by_one(trainer.optimizer, [trainer._param2idx[parameter.name] for parameter in reached])
    try:
        for part in parts:
            summed = set(reached[part])
            trainer._params = [parameter if parameter in summed else _SKIPPED for parameter in everything]
            allreduce_in_mxnet(trainer)
    finally:
        trainer._params = everything
    known = set(own) if own and _sends_zeros(trainer) else chosen
    for parameter in reached:
        if parameter in known:
            fresh.note_sum(parameter)
        elif not loop.refuses and not loop.has_warned:
            loop.has_warned = True
            _warn_of_zeros(trainer, parameter)


def _sends_zeros(trainer: Any) -> bool:
    """Whether the store updates when all processes have sent a gradient, so that this one cannot leave any out."""
    return _updates_on_store(trainer) and is_distributed(trainer._kvstore) and "async" not in trainer._kvstore.type


def _reached(trainer: Any, loop: _Loop, own: list[Any]) -> list[Any]:
    """The parameters to sum: those that the losses of any process have reached, where the processes can tell."""
    store = trainer._kvstore
    if _sends_zeros(trainer) or (is_distributed(store) and not isinstance(store, (Store, Servers))):
        return fresh.trainable(trainer)
    if not is_distributed(store) or _updates_on_store(trainer):
        return own
    found = set(own)
    counts = loop.counts(trainer, [parameter in found for parameter in trainer._params])
    return [parameter for parameter, count in zip(trainer._params, counts) if count]


def _check_left_out(trainer: Any, loop: _Loop, flags: Mapping[Any, Sequence[bool]]) -> None:
    """Refuse parameters without gradients before anything is changed: those of this step, or that the caller wrote."""
    for parameter, marks in flags.items():
        if any(marks) or fresh.is_summed(parameter):
            loop.known.add(parameter.name)
        elif loop.refuses:
            raise _stale(parameter, "nothing has been updated")
        elif _updates_on_store(trainer) and parameter.name not in loop.known:
            loop.known.add(parameter.name)
            if any(as_legacy(gradient).asnumpy().any() for gradient in parameter._grad):
                raise GradientUnavailable(
                    f"the gradients of {parameter.name} were written, but not by a backward pass, so that "
                    "ignore_stale_grad=True leaves the parameter out. Mark them before the step: for array in "
                    "parameter.list_data(): array._fresh_grad = True"
                )


def _stale(parameter: Any, what_happened: str) -> UserWarning:
    return UserWarning(
        f"Gradient of Parameter `{parameter.name}` has not been updated by backward since last `step`, on any device; "
        f"{what_happened}. If only a part of the parameters is meant to be used, call step with "
        "ignore_stale_grad=True, which leaves the others out"
    )


def _warn_of_zeros(trainer: Any, parameter: Any) -> None:
    warn(
        f"{parameter.name} has no fresh gradient in this process. The servers of {trainer._kvstore.type!r} update it "
        "all the same, with the other processes' gradients: if these have none either, weight decay and momentum still "
        "move it. gluon.Trainer(..., update_on_kvstore=False) leaves such parameters out",
        InexactUpdate,
    )


def update(update_in_mxnet: Callable[..., None], trainer: Any, ignore_stale_grad: bool = False) -> None:
    """Update all copies of the parameters that were summed, or refuse those that no device has reached."""
    survival = committing(trainer)
    if survival is not None:
        survival.commit(fresh.trainable(trainer))
    if _is_simple(trainer):
        if trainer._params:
            count_once(trainer.optimizer, trainer._params[0].list_ctx())
        update_in_mxnet(trainer, ignore_stale_grad)
        return
    loop, parameters = _loop(trainer), fresh.trainable(trainer)
    updates_here = not _updates_on_store(trainer)  # otherwise the store has updated
    if updates_here:
        _check_sums(trainer, loop, parameters)
        if loop.is_separate:
            update_in_mxnet(trainer, ignore_stale_grad)
            return
        scaler = getattr(trainer, "_amp_loss_scaler", None)
        if scaler is not None and scaler.has_overflow(trainer._params):
            fresh.forget_sums(parameters)
            for parameter in parameters:
                fresh.mark(parameter, False)
            return
    chosen = {each for each in parameters if fresh.is_summed(each) or (updates_here and any(fresh.flags(each)))}
    if not updates_here:
        fresh.forget_sums(chosen)
    if len(chosen) < len(parameters) and not ignore_stale_grad:
        missed = next(parameter for parameter in parameters if parameter not in chosen)
        raise _stale(missed, "nothing has been updated" if updates_here else "the other parameters have been updated")
    if updates_here:
        update_copies(trainer, [parameter for parameter in parameters if parameter in chosen])


def _check_sums(trainer: Any, loop: _Loop, parameters: Sequence[Any]) -> None:
    """Warn, once, of gradients that nobody sums; refuse a parameter of which some copies have no gradient."""
    if trainer._kvstore is None and loop.is_separate is None:
        loop.is_separate = _is_separate(parameters)
        if loop.is_separate:
            warn(
                f"gluon.Trainer(..., kvstore=None) sums no gradients: each of the devices {trainer._contexts} updates "
                "its own copy of the weights by its own gradients. Leave kvstore=None out, or sum before the update: "
                "gp.allreduce(parameter.list_grad()) for each parameter. Where separate copies are meant: "
                "import warnings; warnings.filterwarnings('ignore', category=gp.errors.InexactUpdate)",
                InexactUpdate,
            )
    if loop.is_separate:
        return
    for parameter in parameters:
        marks = fresh.flags(parameter)
        if fresh.is_summed(parameter):
            if any(marks) and (is_distributed(trainer._kvstore) or _differ(parameter._grad)):
                raise GradientUnavailable(
                    f"a backward pass has written the gradients of {parameter.name} after they were summed, so the "
                    "weights would differ after the update; call trainer.allreduce_grads() after the last backward pass"
                )
        elif any(marks) and not all(marks):
            idle = [device for device, mark in zip(parameter.list_ctx(), marks) if not mark]
            raise GradientUnavailable(
                f"{parameter.name} has no fresh gradient on {idle}, only on the other devices, and neither the trainer "
                "nor gp.allreduce has summed its gradients, so the copies would differ after the update. Before it, "
                "call trainer.allreduce_grads(), or with kvstore=None gp.allreduce(parameter.list_grad())"
            )


def _is_separate(parameters: Sequence[Any]) -> bool | None:
    """Whether the devices' gradients differ, so that nobody has summed them; None if only one device has any."""
    found = None
    for parameter in parameters:
        if fresh.is_summed(parameter):
            return False
        marks = fresh.flags(parameter)
        written = [array for array, mark in zip(parameter._grad, marks) if mark]
        if len(written) > 1:
            found = _differ(written)
        if found:
            break
    return found


def _differ(arrays: Sequence[mx.nd.NDArray]) -> bool:
    return len({as_legacy(array).asnumpy().tobytes() for array in arrays}) > 1
