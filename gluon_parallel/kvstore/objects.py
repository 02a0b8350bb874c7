"""Python objects from all processes, or from the first one, through any KVStore."""

import pickle
from typing import Any

import numpy as np

from ..errors import WorkerLost
from .collective import collective, together
from .contract import contract
from .exchange import gather
from .factory import as_store

_WORDS = 4096  # of 64 bits, in each exchange: of one length, so a store opens one key only


def broadcast_object(value: Any, store: Any) -> Any:
    """Send the `value` of process 0 to every process; all call it.

    Args:
        value: anything that ``pickle`` takes, such as a dict of settings or NumPy arrays; only process 0's counts.
        store: a KVStore that sums, of any number of processes; ``training.store`` or one of ``gp.kvstore.create``.

    Returns:
        A copy of what process 0 handed in; there, and where it is alone, `value` itself.

    Raises:
        TypeError: on every process: process 0 handed in what cannot be pickled; or `store` is no KVStore.
        Exception: on this process alone: what ``pickle`` raises where the value's class cannot be imported.
        WorkersDiffer, WorkerLost, BarrierTimeout: another process has not called it.

    Example:
        >>> import mxnet as mx
        >>> broadcast_object({"run": "runs/3"}, mx.kv.create("local"))
        {'run': 'runs/3'}
    """
    store = as_store(store, "gp.broadcast_object")
    sender = contract(store).ranks[0]

    def received() -> Any:
        if contract(store).ranks[0] != sender:
            raise WorkerLost(f"gp.broadcast_object: process {sender} was lost before all had its object")
        return gather_objects(value if store.rank == 0 else None, store, "gp.broadcast_object()")[0]

    return together(store, received)


def gather_objects(value: Any, store: Any, purpose: str) -> list[Any]:
    """Objects of all processes, by rank; this process's is `value` itself, not a copy.

    Args:
        value, store: as of :func:`broadcast_object`.
        purpose: the function that all call, as of :func:`.exchange.gather`.

    Example:
        >>> import mxnet as mx
        >>> gather_objects("mine", mx.kv.create("local"), "a test")
        ['mine']
    """
    if store.num_workers == 1:
        return [value]
    with collective(purpose) as name:
        data, failed = _pickled(value)
        heads = gather(store, name, np.array([len(data), failed], np.float64)).astype(int)
        blocks = []
        for begin in range(0, heads[:, 0].max(), 8 * _WORDS):
            block = data[begin : begin + 8 * _WORDS].ljust(8 * _WORDS, b"\0")
            blocks.append(gather(store, name, np.frombuffer(block)))
        messages = [row.tobytes()[:size] for row, size in zip(np.concatenate(blocks, axis=1), heads[:, 0])]
        for rank, message, has_failed in zip(contract(store).ranks, messages, heads[:, 1]):
            if has_failed:
                raise TypeError(f"{name}: process {rank} handed in {message.decode()}")
        return [value if rank == store.rank else pickle.loads(message) for rank, message in enumerate(messages)]


def _pickled(value: Any) -> tuple[bytes, bool]:
    """(pickle, False), or (text of the error, True): the other processes wait for an answer in either case."""
    try:
        return pickle.dumps(value, protocol=5), False
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        return (
            f"a {kind}, which cannot be pickled: {type(error).__name__}: {error}. Numbers, strings, arrays, and lists "
            "and dicts of them can be; functions inside functions, lambdas and open files cannot"
        ).encode(), True
