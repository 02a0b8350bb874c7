"""Collective functions, which all processes call: gather and broadcast; their names in errors."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import BarrierTimeout, WorkerLost
from .contract import contract
from .factory import as_store
from .flight_recorder import CALL, RECORDER
from .gathering import gathered, prepare_gather
from .handshake import agree
from .protocols import Broadcasts, offers
from .state import state_of
from .together import together

_SAME_CALLS = "Every process must call the same functions in the same order, with arguments that are alike"
_WORDS = 4096  # of 64 bits, in each exchange of objects: of one length, so a store opens one key only
_MOST_BYTES = 1 << 24  # of a message from one process to all: each has its own time limit
_thread = threading.local()


@contextlib.contextmanager
def collective(name: str) -> Iterator[str]:
    """Within this block, or a function that it decorates, errors name the function `name`, such as "gp.evaluate()".

    Of blocks inside each other the outermost counts, which is what the user has called. Yields its name.

    Example:
        >>> with collective("training.evaluate()"), collective("gp.evaluate()") as name:
        ...     name
        'training.evaluate()'
    """
    if getattr(_thread, "name", None) is not None:
        yield _thread.name
        return
    _thread.name, number = name, RECORDER.begin((CALL, "", name), 0)
    gave_up = False
    try:
        yield name
    except (BarrierTimeout, WorkerLost):
        gave_up = True
        raise
    finally:
        _thread.name = None
        RECORDER.end(number, gave_up)


@contextlib.contextmanager
def outermost() -> Iterator[None]:
    """Within this block, the name that an outer :func:`collective` gave does not count.

    When a process is lost, all regroup by one function, to which they come from different ones.
    """
    _thread.name, name = None, getattr(_thread, "name", None)
    try:
        yield
    finally:
        _thread.name = name


def gather(store: Any, purpose: str, vector: np.ndarray) -> np.ndarray:
    """Every process's `vector`, (n,) float64, by rank: (num_workers, n); all processes call it.

    Each says first which function it has called, `purpose`, unless an outer :func:`collective` has named another.

    Raises:
        WorkersDiffer: another process has called another function, or hands in another number of values.
        BarrierTimeout, WorkerLost: another process has not called it in time.
    """
    ours, length = contract(store), len(vector)
    if ours.num_workers == 1:
        return vector[None].copy()
    with collective(purpose) as name:
        agree(ours, [f"call {name} with {length} values"], _SAME_CALLS)
        if not length:
            return np.empty((ours.num_workers, 0))
        state = state_of(ours)
        if length not in state.keys:
            state.keys[length] = next(state.new_keys)
            ours.describe(state.keys[length], "functions that all call")
        prepare_gather(ours, state.keys[length], length)
        return gathered(ours, state.keys[length], vector)


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
        return object_of(0, value, store, "gp.broadcast_object()")

    return together(store, received)


def object_of(rank: int, value: Any, store: Any, purpose: str) -> Any:
    """The `value` of the process of that rank, on all, as :func:`gather`; there it is `value` itself, not a copy."""
    ours: Any = contract(store)
    is_source = ours.rank == rank
    if ours.num_workers == 1 or not offers(ours, Broadcasts):
        return gather_objects(value if is_source else None, store, purpose)[rank]
    with collective(purpose) as name:
        data, failed = _pickled(value if is_source else None)
        size, has_failed = gather(store, name, np.array([len(data), failed], np.float64))[rank].astype(int)
        ours.describe("object", "functions that all call")
        message = np.frombuffer(data, np.uint8) if is_source else np.empty(size, np.uint8)
        for begin in range(0, size, _MOST_BYTES):
            ours.broadcast_bytes("object", message[begin : begin + _MOST_BYTES], rank)
        if has_failed:
            raise TypeError(f"{name}: process {ours.ranks[rank]} handed in {message.tobytes().decode()}")
        return value if is_source else pickle.loads(message.data)


def gather_objects(value: Any, store: Any, purpose: str) -> list[Any]:
    """Objects of all processes, by rank, as :func:`gather`; this process's is `value` itself, not a copy."""
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
    """The object as bytes, and False; or why it cannot be pickled, and True: the other processes wait for an answer."""
    try:
        return pickle.dumps(value, protocol=5), False
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        why = f"which cannot be pickled, as lambdas and open files cannot: {type(error).__name__}: {error}"
        return f"a {kind}, {why}".encode(), True
