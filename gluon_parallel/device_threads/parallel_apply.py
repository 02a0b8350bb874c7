"""Call a function once per shard, each time from the thread of the shard's device."""

import contextvars
import functools

from ..compat import mx
from ..compat.array_types import leaves
from ..errors import BatchMismatch
from .state import State
from .thread import current_device, thread_of


def parallel_apply(function, shards):
    """Call ``function(*shard)`` once per shard, each time from the thread of the device that the shard lies on.

    Calls follow each other, and no Python code runs at the same time as another: MXNet's operators are asynchronous, so
    the devices compute in parallel although they are launched one after the other. Launch the forward and the backward
    pass like this, and MXNet's temporary buffers and random generators are no longer shared between devices.

    The function sees the caller's recording and training mode, NumPy mode, name and attribute scopes, default device
    and context variables. Random numbers follow from the last ``mx.random.seed``, and differ between devices. The
    thread of a device starts at its first use and ends with the program.

    Args:
        function: must not read a result (``asnumpy``, ``asscalar``, ``wait_to_read``) if the net has layers that wait
            for the other devices, because these are launched later.
        shards: one per device, for instance from :func:`split_and_load`: a tuple or list of arguments, or one argument.
            Arguments may be nested. All NDArrays in one shard lie on one device; those of a GPU's shard may also be on
            a CPU.

    Returns:
        The list of results, in the order of the shards.

    Raises:
        BatchMismatch: a shard holds no NDArray, or NDArrays of several devices.
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
    state = State()
    results = []
    for device, arguments in calls:
        if current_device() == device:
            results.append(function(*arguments))
        else:
            run = contextvars.copy_context().run
            results.append(thread_of(device)(functools.partial(_call, state, run, function, arguments)))
    return results


def _call(state, run, function, arguments):
    state.apply()
    return run(function, *arguments)


def device_of(arguments, number):
    """The device on which the NDArrays of a shard lie."""
    found: dict[mx.Context, str] = {}  # where the first one of each device is
    for where, leaf in leaves(arguments, f"shards[{number}]"):
        if isinstance(leaf, mx.nd.NDArray):
            found.setdefault(leaf.ctx, where)
    gpus = [device for device in found if device.device_type == "gpu"]
    if len(gpus or found) != 1:
        places = "; ".join(f"{where} is on {device}" for device, where in found.items()) or "there is none"
        raise BatchMismatch(
            f"parallel_apply: shards[{number}] must hold NDArrays of one device, which decides the thread; got: "
            f"{places}. gp.split_and_load(batch, devices) makes such shards"
        )
    return next(iter(gpus or found))
