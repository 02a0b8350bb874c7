"""Handshake: all processes compare the versions that they run and the arrays that they will send, before they send."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import platform
import sys
import threading

import numpy as np

from ..compat import MXNET_VERSION, mx
from ..engine import push
from ..errors import WorkerLost, WorkersDiffer
from .timeout import LIMIT, default_timeout

DIGEST, WORDS = "digest", "words"  # the two sums, each of its own length
_PROTOCOL = 1  # of the messages; another number cannot be understood
_BYTES = 160  # of a process's words that the others can be shown

SAME_VERSIONS = "Install the same versions everywhere"
SAME_MODEL = "Every process must run the same model, with parameters made in the same order"


def version():
    """What must be the same in every process, in words."""
    ours = sys.modules[__name__.partition(".")[0]].__version__
    return (
        f"gluon_parallel {ours} (messages {_PROTOCOL}), MXNet {MXNET_VERSION}, "
        f"{sys.byteorder}-endian {platform.machine()}"
    )


def agree(store, start, verb, items, advice):
    """Go on only if all processes say the same; all call this equally often and in the same order.

    Each process sends 64 bits of a digest of its words, as zeros and ones. Where all are equal, every bit's sum is 0 or
    the number of processes: a message of the same length however many there are. Only if they differ, words themselves
    travel, one row per process, so that all can say who differs from whom.

    Args:
        store: what has `type`, `rank` and `num_workers`.
        start: function of (``DIGEST`` or ``WORDS``, a float32 array on the CPU) that starts to replace the array by its
            sum over the processes.
        verb, items: such as ``"send", ["float32 (2, 3) under key 4"]``.
        advice: the last sentence of the error.

    Raises:
        WorkersDiffer: somebody says something else; on every process, with the first item that differs.
        WorkerLost: a process does not answer within the limit, ``GLUON_PARALLEL_TIMEOUT``.
    """

    def total(name, bits):
        return _sum(store, lambda array: start(name, array), bits, items[0])

    def all_say(words):
        digest = hashlib.sha256(words.encode()).digest()[:8]
        sums = total(DIGEST, np.unpackbits(np.frombuffer(digest, np.uint8)))
        return np.isin(sums, (0, store.num_workers)).all()

    if store.num_workers == 1 or all_say("; ".join([verb, *items])):
        return
    # All know by now that somebody differs, so all go through their items until they come to where.
    for item in itertools.chain(items, itertools.repeat("nothing more")):
        if not all_say(item):
            break
    rows = np.zeros((store.num_workers, _BYTES), np.uint8)
    rows[store.rank] = words_of(item)
    rows = np.packbits(total(WORDS, np.unpackbits(rows, axis=1)).astype(np.uint8), axis=1)
    raise differ(store.type, verb, dict(enumerate(map(spelled, rows))), advice)


def _sum(store, start, bits, what):
    array = mx.nd.array(bits, ctx=mx.cpu(), dtype="float32")
    start(array)
    limit, arrived = default_timeout(), threading.Event()
    push(arrived.set, read=[array], name="handshake")
    if not arrived.wait(limit):
        leave_without_waiting()
        raise WorkerLost(
            f"store {store.type!r}, {what}: process {store.rank} of {store.num_workers} waited {limit:g} s for the "
            f"others. Every process must run the same program; look at their output. A longer limit: {LIMIT}=seconds"
        )
    return array.asnumpy()


def words_of(text):
    """`text` as (160,) numbers, cut off or filled with zeros.

    Example:
        >>> spelled(words_of("float32 (2, 3) under key 4"))
        'float32 (2, 3) under key 4'
    """
    data = text.encode()[:_BYTES]
    return np.frombuffer(data.ljust(_BYTES, b"\0"), np.uint8)


def spelled(numbers):
    """The text of :func:`words_of`."""
    return numbers.astype(np.uint8).tobytes().rstrip(b"\0").decode(errors="replace")


def described(keys, arrays):
    """What is about to be sent, in words, key by key.

    Example:
        >>> described([3, "b"], [mx.nd.zeros((2, 3)), [mx.nd.zeros(1, dtype="int32")]])
        ['float32 (2, 3) under key 3', 'int32 (1,) under key b']
    """
    return [f"{form(array)} under key {key}" for key, array in zip(keys, arrays)]


def form(arrays):
    """Shape and dtype of an array, or of the first of a list of them, in words.

    Example:
        >>> form([mx.nd.zeros((2, 3)).tostype("row_sparse")])
        'row_sparse float32 (2, 3)'
    """
    first = arrays[0] if isinstance(arrays, (list, tuple)) else arrays
    sparse = "" if first.stype == "default" else f"{first.stype} "
    return f"{sparse}{np.dtype(first.dtype).name} {tuple(first.shape)}"


def differ(store, verb, said, advice):
    """The error that tells who says what.

    Args:
        store: its type.
        verb: what they do with it.
        said: {rank: words}.
        advice: the last sentence.

    Example:
        >>> print(differ("dist_sync", "run", {0: "2.0", 1: "1.0", 2: "2.0"}, "Install the same"))
        store 'dist_sync': processes 0, 2 run 2.0, process 1 runs 1.0. Install the same
    """
    ranks: dict = {}
    for rank, words in said.items():
        ranks.setdefault(words, []).append(rank)
    parts = [
        f"process {who[0]} {verb}s {words}" if len(who) == 1 else f"processes {', '.join(map(str, who))} {verb} {words}"
        for words, who in ranks.items()
    ]
    return WorkersDiffer(f"store {store!r}: {', '.join(parts)}. {advice}")


def leave_without_waiting():
    """Let this program end when it comes to its end: MXNet's way out waits for others, who may never come."""

    def leave():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    atexit.register(leave)
