"""Placement of a pipeline's parameters: one trainer for stages on different devices, and sums of their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from ..allreduce.gradients import flags
from ..compat import mx
from ..compat.array_types import set_zero


class StageDevices(list):
    """The devices of one stage's parameters, one per replica; a list that compares equal to those of other stages.

    A ``gluon.Trainer`` refuses parameters whose device lists differ, and uses only their length.
    """

    def __init__(self, devices: Iterable[mx.Context], pipeline: object) -> None:
        super().__init__(devices)
        self.pipeline = pipeline

    def __eq__(self, other: object) -> bool:
        is_ours = isinstance(other, StageDevices) and other.pipeline is self.pipeline
        return is_ours or list.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __reduce__(self) -> tuple[type[list], tuple[list[mx.Context]]]:
        return list, (list(self),)


def place(
    parameters: Iterable[mx.gluon.Parameter], stage: int, replicas: Sequence[Sequence[mx.Context]], pipeline: object
) -> None:
    """Put the parameters of a stage on its devices, one for each replica.

    ``parameter.data(device)`` then works for every device of a replica, as trainers and checkpoints need it.
    """
    devices = [replica[stage] for replica in replicas]
    for parameter in parameters:
        if parameter._data is not None and getattr(parameter._ctx_list, "pipeline", None) is pipeline:
            continue
        if list(parameter.list_ctx()) != devices:
            parameter.reset_ctx(devices)
        if parameter._data is None:  # deferred: its initialisation makes a plain list, the next call does the rest
            init, _, *rest = parameter._deferred_init
            parameter._deferred_init = (init, StageDevices(devices, pipeline), *rest)
            continue
        parameter._ctx_list = StageDevices(devices, pipeline)
        parameter._ctx_map = [[], []]  # as MXNet's `_init_impl`, but every device of a replica has the replica's copy
        for index, replica in enumerate(replicas):
            for device in replica:
                indices = parameter._ctx_map[device.device_typeid & 1]
                indices.extend([None] * (device.device_id + 1 - len(indices)))
                indices[device.device_id] = index


@contextlib.contextmanager
def accumulating(parameters: Sequence[mx.gluon.Parameter]) -> Iterator[None]:
    """Within this block backward passes add to the parameters' gradients, first zero if an update has used them."""
    marked = []
    try:
        for parameter in parameters:
            for fresh, gradient in zip(flags(parameter), parameter.list_grad()):
                if not fresh:
                    set_zero(gradient)
            marked.append(parameter)
            _mark(parameter, "add")
        yield
    finally:
        for parameter in marked:
            _mark(parameter, parameter.grad_req)


def _mark(parameter: mx.gluon.Parameter, grad_req: str) -> None:
    fresh = flags(parameter)  # which `mark_variables` resets
    mx.autograd.mark_variables(parameter.list_data(), parameter.list_grad(), grad_req)
    for array, flag in zip(parameter.list_data(), fresh):
        array._fresh_grad = flag
