"""Handshake: all processes compare the versions that they run and the arrays that they will send, before they send."""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import os
import platform
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ..compat import MXNET_VERSION
from ..errors import WorkersDiffer
from . import flight_recorder
from .contract import Contract, gather_by_sum
from .environment import LIMIT, default_timeout
from .reserved_keys import HANDSHAKE_DIGEST, HANDSHAKE_WORDS

_PROTOCOL = 1  # of the messages; another number cannot be understood
_BYTES = 160  # of a process's words that the others can be shown

SAME_VERSIONS = "Install the same versions everywhere"
SAME_MODEL = "Every process must run the same model, with parameters made in the same order"
ONE_DIVISOR = (
    "Otherwise the weights come apart. Divide by the number of samples of all processes: "
    "num = gp.metrics.gather_rows([len(data)], store).sum(), then trainer.step(num)"
)
ONE_RATE = "Otherwise the weights come apart: give the optimizer the same learning rate and schedule everywhere"


def version() -> str:
    """What must be the same in every process, in words."""
    ours = sys.modules[__name__.partition(".")[0]].__version__
    return (
        f"gluon_parallel {ours} (messages {_PROTOCOL}), MXNet {MXNET_VERSION}, "
        f"{sys.byteorder}-endian {platform.machine()}"
    )


class Comparing(Contract):
    """Mixin of stores: before their first exchanges, processes compare what they are about to send."""

    _number: Any = 0  # of the store, for the flight recorder

    def describe(self, key: Hashable, text: str) -> None:
        flight_recorder.RECORDER.describe(self._number, key, text)

    @functools.cached_property
    def _agreed(self) -> set[str]:
        return set()  # what all processes send under a key, in words

    def compare(self, keys: Sequence[Hashable], arrays: Sequence[Any]) -> None:
        """Raise WorkersDiffer on all processes if one is about to send other arrays under these keys; all call it."""
        self._agree_on(described(keys, arrays))

    def _compare_once(self, keys: Sequence[Hashable], arrays: Sequence[Any], parts: Sequence[Any] = ()) -> None:
        """The same, if that has not been compared before; `parts`: and how each array is divided among processes."""
        words = described(keys, arrays)
        words = [f"{word} in parts {[*ends]}" for word, ends in zip(words, parts)] or words
        if not self._agreed.issuperset(words):
            self._agree_on(words)

    def _agree_on(self, words: Sequence[str]) -> None:
        self._agree("send", words, SAME_MODEL)
        self._agreed.update(words)

    def compare_divisors(self, rescale_grad: float, advice: str = ONE_DIVISOR) -> None:
        """Raise WorkersDiffer on all processes if one is about to scale the sums of gradients by another number."""
        self._agree("divide", [divided_by(1 / rescale_grad)], advice)

    def _compare_versions(self) -> None:
        self._agree("run", [version()], SAME_VERSIONS)

    def _agree(self, verb: str, items: Sequence[str], advice: str) -> None:
        """Go on only if all processes say the same `items`; all call this equally often and in the same order.

        Each process sends 64 bits of a digest of its words. Only if they differ, words themselves travel, so that all
        can say which ones differ.
        """
        digest = hashlib.sha256("; ".join([verb, *items]).encode()).digest()[:8]
        what = items[0] if items else "nothing"
        if self.num_workers == 1 or self._all_equal(HANDSHAKE_DIGEST, np.frombuffer(digest, np.uint8), what):
            return
        # All know by now that they differ, so all go through their items until they come to where.
        for item in itertools.chain(items, itertools.repeat("nothing more")):
            if not self._all_equal(HANDSHAKE_WORDS, words_of(item), what):
                said = dict(zip(self.ranks, map(spelled, self._rows)))
                raise differ(f"store {self.type!r}", verb, said, advice)

    def _all_equal(self, key: int, numbers: np.ndarray, what: str) -> bool:
        self._rows = self._gathered(key, numbers, what)
        return (self._rows == self._rows[0]).all()

    def _gathered(self, key: int, numbers: np.ndarray, what: str) -> np.ndarray:
        rows = self._gather_numbers(key, numbers)
        if rows is None:
            leave_without_waiting()
            problem = (
                f"store {self.type!r}, {what}: process {self.rank} of {self.num_workers} waited "
                f"{default_timeout():g} s for the others. "
            ) + flight_recorder.advice(
                f"Every process must run the same program; look at their output. A longer limit: {LIMIT}=seconds"
            )
            raise flight_recorder.gave_up(problem)
        return rows

    def _move_recorder(self) -> None:
        """Let the processes of a host read each other's flight recorders, if the store has not done so."""

        def gather(text: str) -> list[str]:
            return [spelled(row) for row in self._gathered(HANDSHAKE_WORDS, words_of(text), "flight recorder")]

        if self.num_workers > 1:
            flight_recorder.move_to_shared_memory(gather)

    def _start_sum(self, key: int, array: Any) -> None:
        """Start to replace `array` by its sum over the processes."""
        raise NotImplementedError

    def _gather_numbers(self, key: int, numbers: np.ndarray) -> np.ndarray | None:
        """Every process's uint8 `numbers`, (n,), by rank; None if they did not come within the limit."""
        return gather_by_sum(self, functools.partial(self._start_sum, key), numbers, default_timeout())


def words_of(text: str) -> np.ndarray:
    """`text` as (160,) numbers, filled with zeros. A longer one is cut off, and ends with a digest of all of it.

    Example:
        >>> spelled(words_of("float32 (2, 3) under key 4"))
        'float32 (2, 3) under key 4'
    """
    data = text.encode()
    if len(data) > _BYTES:
        data = data[: _BYTES - 17] + b"~" + hashlib.sha256(data).hexdigest()[:16].encode()
    return np.frombuffer(data.ljust(_BYTES, b"\0"), np.uint8)


def spelled(numbers: np.ndarray) -> str:
    """The text of :func:`words_of`."""
    return numbers.astype(np.uint8).tobytes().rstrip(b"\0").decode(errors="replace")


def described(keys: Sequence[Hashable], arrays: Sequence[Any]) -> list[str]:
    """What is about to be sent, in words, key by key.

    Example:
        >>> from mxnet import nd
        >>> described([3, "b"], [nd.zeros((2, 3)), [nd.zeros(1, dtype="int32")]])
        ['float32 (2, 3) under key 3', 'int32 (1,) under key b']
    """
    return [f"{signature(array)} under key {key}" for key, array in zip(keys, arrays)]


def signature(arrays: Any) -> str:
    """Shape and dtype of an array, or of the first of a list of them, in words.

    Example:
        >>> from mxnet import nd
        >>> signature([nd.zeros((2, 3)).tostype("row_sparse")])
        'row_sparse float32 (2, 3)'
    """
    first = arrays[0] if isinstance(arrays, (list, tuple)) else arrays
    sparse = "" if first.stype == "default" else f"{first.stype} "
    return f"{sparse}{np.dtype(first.dtype).name} {tuple(first.shape)}"


def divided_by(number: float) -> str:
    """What a process divides the sums of gradients by, in words.

    Example:
        >>> divided_by(1 / (1 / 49))
        'by 49'
    """
    return f"by {number:.7g}"


def differ(where: str, verb: str, said: Mapping[int, str], advice: str) -> WorkersDiffer:
    """The error that tells who says what, from {rank: words}.

    Example:
        >>> print(differ("store 'dist_sync'", "run", {0: "2.0", 1: "1.0", 2: "2.0"}, "Install the same"))
        store 'dist_sync': processes 0, 2 run 2.0, process 1 runs 1.0. Install the same
    """
    ranks: dict = {}
    for rank, words in said.items():
        ranks.setdefault(words, []).append(rank)
    parts = [
        f"process {who[0]} {verb}s {words}" if len(who) == 1 else f"processes {', '.join(map(str, who))} {verb} {words}"
        for words, who in ranks.items()
    ]
    return WorkersDiffer(f"{where}: {', '.join(parts)}. {advice}")


def leave_without_waiting() -> None:
    """At the program's end, leave with ``os._exit``: MXNet's exit, or MPI's, waits for others, who may never come."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    atexit.register(leave)
