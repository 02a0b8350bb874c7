"""Update of ``mx.mod.Module`` on its devices: once, on the first one, as a store would, and copied to the others.

MXNet updates each device by one optimizer that they share: what it keeps beside the states, such as Nadam's factor of
all updates so far, would count every device. And it numbers the states by the devices, so that their file fits no
other number of these; here they have the parameters' names, as in a store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..allreduce import broadcast
from ..errors import CheckpointError
from ..kvstore.protocols import SparseSums, offers
from ..mxnet.attached import Attached
from ..mxnet.compat import mx
from ..mxnet.modules import (
    devices_of_module,
    parameter_names,
    store_of_module,
    updater_of_module,
    updates_on_modules_store,
)

# An updater -> for each name the sum of the gradients; these themselves stay, since a backward pass may add to them.
_sums: Attached[dict[str, mx.nd.NDArray]] = Attached("sums")


def update_params(
    update_in_mxnet: Callable[..., None],
    param_arrays: Sequence[Sequence[mx.nd.NDArray]],
    grad_arrays: Sequence[Sequence[Any]],
    updater: Any,
    num_device: int,
    kvstore: Any = None,
    param_names: Sequence[str] | None = None,
) -> None:
    """Sum the gradients by the store, and update; ``None`` stands for the gradient of a parameter that has none."""
    if num_device == 1 or kvstore is None:
        update_in_mxnet(param_arrays, grad_arrays, updater, num_device, kvstore, param_names)
        return
    assert param_names is not None
    trained = [index for index, grads in enumerate(grad_arrays) if grads[0] is not None]
    names = [param_names[index] for index in trained]
    sums = [_sum(kvstore, updater, param_names[index], grad_arrays[index], -index) for index in trained]
    if names:
        updater(names, sums, [param_arrays[index][0] for index in trained])
    for index in trained:
        broadcast(param_arrays[index])


def load_states(load_in_mxnet: Callable[..., None], module: Any, fname: str) -> None:
    """Load a file of ``save_optimizer_states``, also of another number of devices: on one, states have numbers."""
    load_in_mxnet(module, fname)
    updater = updater_of_module(module)
    if updater is None or (len(devices_of_module(module)) > 1 and store_of_module(module) is None):
        return
    names = parameter_names(module)
    if wrong := [key for key in updater.states if not isinstance(key, str) and key >= len(names)]:
        raise CheckpointError(
            f"{fname}: the optimizer's state number {max(wrong)} is of none of the {len(names)} parameters. It is of "
            "another net, or of several devices without a sum, whose numbers nobody knows"
        )
    has_numbers = len(devices_of_module(module)) == 1 and not updates_on_modules_store(module)
    known = {name: number for number, name in enumerate(names)} if has_numbers else dict(enumerate(names))
    for table in (updater.states, updater.states_synced):
        items = [(known.get(key, key), value) for key, value in table.items()]
        table.clear()
        table.update(items)


def _sum(store: Any, updater: Any, name: str, grads: Sequence[mx.nd.NDArray], priority: int) -> mx.nd.NDArray:
    """The sum of a gradient over devices and processes, on the first device."""
    known, first = _sums.of(updater), grads[0]
    if known is None:
        known = _sums.set(updater, {})
    if name not in known:
        known[name] = mx.nd.zeros(first.shape, first.ctx, first.dtype, stype=first.stype)
    if first.stype == "default" or offers(store, SparseSums):
        store.pushpull(name, grads, out=[known[name]], priority=priority)
    else:
        store.push(name, grads, priority=priority)
        store.pull(name, out=[known[name]], priority=priority, ignore_sparse=False)
    return known[name]
