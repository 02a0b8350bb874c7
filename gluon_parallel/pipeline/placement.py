"""Each stage's parameters on the stage's devices, under one ``gluon.Trainer``, and their gradients' accumulation."""

from __future__ import annotations

import contextlib

from ..compat import mx
from ..compat.array_types import as_legacy


class StageDevices(list):
    """The devices of one stage's parameters, one per replica, in the eyes of MXNet's trainer equal to other stages'.

    A ``gluon.Trainer`` refuses parameters on different devices, but needs no more of them than equally many copies.

    Args:
        devices: list of ``mx.Context``, one per replica.
        pipeline: any object; whose stages are alike.
    """

    def __init__(self, devices, pipeline):
        super().__init__(devices)
        self.pipeline = pipeline

    def __eq__(self, other):
        if isinstance(other, StageDevices) and other.pipeline is self.pipeline:
            return True
        return list.__eq__(self, other)

    def __ne__(self, other):
        return not self == other

    def __reduce__(self):
        return list, (list(self),)


def place(parameters, stage, replicas, pipeline):
    """Put parameters on the devices of their stage, with one copy per replica.

    The copy of a replica is what ``parameter.data(device)`` returns for any device of this replica: a trainer, and a
    checkpoint, ask for all parameters' copies on the first one's device.

    Args:
        parameters: of one stage.
        stage: its number.
        replicas: a list of the stages' devices for each replica.
        pipeline: see :class:`StageDevices`.
    """
    devices = [replica[stage] for replica in replicas]
    for parameter in parameters:
        if parameter._data is not None and getattr(parameter._ctx_list, "pipeline", None) is pipeline:
            continue
        if list(parameter.list_ctx()) != devices:
            parameter.reset_ctx(devices)
        if parameter._data is None:  # deferred
            init, _, *rest = parameter._deferred_init
            parameter._deferred_init = (init, StageDevices(devices, pipeline), *rest)
            continue
        parameter._ctx_list = StageDevices(devices, pipeline)
        parameter._ctx_map = [[], []]
        for number, replica in enumerate(replicas):
            for device in replica:
                copies = parameter._ctx_map[device.device_typeid & 1]
                copies.extend([None] * (device.device_id + 1 - len(copies)))
                copies[device.device_id] = number


def share_counts(optimizer, replicas):
    """Have an optimizer count the updates of each parameter once per replica, on whichever device.

    MXNet counts them by the device of the first parameter that it updates, which is another one after a stage was
    frozen, or was not reached.

    Args:
        optimizer: the trainer's; what it has counted is kept.
        replicas: a list of the stages' devices for each replica.
    """
    counts = optimizer._all_index_update_counts
    for replica in replicas:
        shared: dict = {}
        for device in replica:
            for index, count in counts.get(device.device_id, {}).items():
                shared[index] = max(count, shared.get(index, 0))
        counts.update((device.device_id, shared) for device in replica)


@contextlib.contextmanager
def accumulating(parameters):
    """Within this block backward passes add to the parameters' gradients, which start from zero if they are not fresh.

    Afterwards the parameters have the ``grad_req`` that they had before.
    """
    stale: dict = {}  # device -> gradients
    for parameter in parameters:
        for array, gradient in zip(parameter.list_data(), parameter.list_grad()):
            if not array._fresh_grad:
                stale.setdefault(gradient.ctx, []).append(as_legacy(gradient))
        _mark(parameter, "add")
    for gradients in stale.values():
        mx.nd.reset_arrays(*gradients, num_arrays=len(gradients))
    try:
        yield
    finally:
        for parameter in parameters:
            _mark(parameter, parameter.grad_req)


def _mark(parameter, grad_req):
    arrays = parameter.list_data()
    fresh = [array._fresh_grad for array in arrays]  # which marking forgets
    mx.autograd.mark_variables(arrays, parameter.list_grad(), grad_req)
    for array, flag in zip(arrays, fresh):
        array._fresh_grad = flag
