"""Call a function once per shard, each time from the thread of the shard's device."""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Sequence
from typing import Any, Callable, TypeVar

from ..compat import mx
from ..compat.array_types import Nested, leaves
from ..errors import BatchMismatch
from .thread import State, acting_as, current_device, thread_of

_Result = TypeVar("_Result")


def parallel_apply(function: Callable[..., _Result], shards: Iterable[Nested]) -> list[_Result]:
    """Call ``function(*shard)`` once per shard, each time from the thread of the device that the shard lies on.

    It is called for one shard after the other, never for two at the same time: MXNet's operators are asynchronous, so
    the devices compute in parallel all the same. If forward and backward pass are launched like this, the devices share
    neither MXNet's temporary buffers nor its random generators.

    The function sees the caller's recording and training mode, NumPy mode, name and attribute scopes, default device
    and context variables; the caller does not see those that it sets. Random numbers are those of the last
    ``mx.random.seed``, and differ between devices. The thread of a device starts at its first use and ends with the
    program.

    Args:
        function: must not read a result (``asnumpy``, ``asscalar``, ``wait_to_read``) if the net has layers that wait
            for the other devices, because the calls for these have not begun.
        shards: one per device, for instance from :func:`split_and_load`: a tuple or list of arguments, or one argument.
            Arguments may be nested. All NDArrays in one shard lie on one device; those of a GPU's shard may also be on
            a CPU.

    Returns:
        The list of results, in the order of the shards.

    Raises:
        BatchMismatch: a shard holds no NDArray, NDArrays of several GPUs, or of several CPU devices and no GPU.
        Exception: what `function` raised for a shard, with its own traceback. The later shards are not launched.

    Example:
        >>> net = mx.gluon.nn.Dense(1, in_units=2)
        >>> net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
        >>> shards = [(mx.nd.ones((3, 2), mx.cpu(0)),), (mx.nd.ones((1, 2), mx.cpu(1)),)]
        >>> [y.shape for y in parallel_apply(net, shards)]
        [(3, 1), (1, 1)]
    """
    calls = []
    for number, shard in enumerate(shards):
        arguments = tuple(shard) if isinstance(shard, (tuple, list)) else (shard,)
        calls.append((device_of(arguments, number), arguments))
    return [call_from(device, function, *arguments) for device, arguments in calls]


def apply_on(function: Callable[..., _Result], calls: Sequence[tuple[mx.Context, Sequence[Any]]]) -> list[_Result]:
    """:func:`parallel_apply` of the arguments for each device; for a single one from the caller's thread."""
    if len(calls) > 1:
        return [call_from(device, function, *arguments) for device, arguments in calls]
    results = []
    for device, arguments in calls:
        with acting_as(device):
            results.append(function(*arguments))
    return results


def call_from(device: mx.Context, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call ``function(*arguments)`` from the thread of `device`, as :func:`parallel_apply` does."""
    context = contextvars.copy_context()
    if current_device() == device:
        return context.run(function, *arguments)
    state = State()

    def call() -> _Result:
        state.apply()
        return context.run(function, *arguments)

    return thread_of(device)(call)


def device_of(arguments: Nested, number: int) -> mx.Context:
    """The one device of a shard's NDArrays: its GPU if there is one, else its CPU device."""
    found: dict[mx.Context, str] = {}  # where the first one of each device is
    for where, leaf in leaves(arguments, f"shards[{number}]"):
        if isinstance(leaf, mx.nd.NDArray):
            found.setdefault(leaf.ctx, where)
    candidates = [device for device in found if device.device_type == "gpu"] or list(found)
    if len(candidates) != 1:
        places = "; ".join(f"{where} is on {device}" for device, where in found.items()) or "there is none"
        raise BatchMismatch(
            f"shards[{number}] must hold NDArrays of one GPU or of one CPU device, which decides the thread; got: "
            f"{places}. gp.split_and_load(batch, devices) makes such shards"
        )
    return candidates[0]
