"""Agreement before processes exchange: they compare sentences, and an error tells which process says what."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import platform
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..environment import default_timeout
from ..errors import WorkerLost, WorkersDiffer
from ..mxnet.compat import MXNET_VERSION
from .gathering import gathered
from .reserved_keys import HANDSHAKE_DIGEST, HANDSHAKE_WORDS
from .state import state_of

_PROTOCOL = 2  # version of the messages; processes of different ones cannot exchange
_BYTES = 160  # of a process's words that the others can be shown

SAME_VERSIONS = "Install the same versions everywhere"
SAME_MODEL = "Every process must run the same model, with parameters made in the same order"
ONE_DIVISOR = (
    "Otherwise the weights come apart. Divide by the number of samples of all processes: "
    "num = gp.metrics.gather_rows([len(data)], store).sum(), then trainer.step(num)"
)
ONE_RATE = "Otherwise the weights come apart: give the optimizer the same learning rate and schedule everywhere"

FEWER_PASSES = (
    "A process without samples in the last pass would add the gradients of an earlier one. Before its step: "
    "for parameter in net.collect_params().values(): for array in parameter.list_data(): array._fresh_grad = False"
)


def version() -> str:
    """What must be the same in every process, in words."""
    ours = sys.modules[__name__.partition(".")[0]].__version__
    return (
        f"run gluon_parallel {ours} (messages {_PROTOCOL}), MXNet {MXNET_VERSION}, "
        f"{sys.byteorder}-endian {platform.machine()}"
    )


def words_of(text: str) -> np.ndarray:
    """`text` as (160,) numbers, filled with zeros. A longer one is cut off, and ends with a digest of all of it."""
    data = text.encode()
    if len(data) > _BYTES:
        data = data[: _BYTES - 17] + b"~" + hashlib.sha256(data).hexdigest()[:16].encode()
    return np.frombuffer(data.ljust(_BYTES, b"\0"), np.uint8)


def spelled(numbers: np.ndarray) -> str:
    """The text of :func:`words_of`."""
    return numbers.astype(np.uint8).tobytes().rstrip(b"\0").decode(errors="replace")


def described(keys: Sequence[Hashable], arrays: Sequence[Any]) -> list[str]:
    """What is about to be sent, in words, key by key: ``send float32 (2, 3) under key 3``."""
    return [f"send {signature(array)} under key {key}" for key, array in zip(keys, arrays)]


def signature(arrays: Any) -> str:
    """Shape and dtype of an array, or of the first of a list of them, in words: ``row_sparse float32 (2, 3)``."""
    first = arrays[0] if isinstance(arrays, (list, tuple)) else arrays
    sparse = "" if first.stype == "default" else f"{first.stype} "
    return f"{sparse}{np.dtype(first.dtype).name} {tuple(first.shape)}"


def divided_by(number: float) -> str:
    """What a process divides the sums of gradients by, in words: ``divide by 49``."""
    return f"divide by {number:.7g}"


def differ(where: str, said: Mapping[int, str], advice: str) -> WorkersDiffer:
    """The error that tells who says what, from {rank: sentence that begins with a verb}.

    Example:
        >>> print(differ("store 'dist_sync'", {0: "run 2.0", 1: "run 1.0", 2: "run 2.0"}, "Install the same"))
        store 'dist_sync': processes 0, 2 run 2.0, process 1 runs 1.0. Install the same
    """
    ranks: dict[str, list] = {}
    for rank, sentence in said.items():
        ranks.setdefault(sentence, []).append(rank)
    parts = []
    for sentence, who in ranks.items():
        verb, space, rest = sentence.partition(" ")
        named = f"process {who[0]} {verb}s" if len(who) == 1 else f"processes {', '.join(map(str, who))} {verb}"
        parts.append(named + space + rest)
    return WorkersDiffer(f"{where}: {', '.join(parts)}. {advice}")


def agree(store: Any, says: Sequence[str], advice: str) -> None:
    """Go on only if all processes say the same sentences; all call this equally often and in the same order.

    Each process sends 64 bits of a digest of its sentences. Only if they differ, the sentences themselves travel.

    Args:
        store: a :class:`.Contract`.
        says: what this process does, each beginning with a verb, such as "run MXNet 1.9.1".
        advice: what to do where processes differ.

    Raises:
        WorkersDiffer: another process says something else; names who says what.
        WorkerLost: another process does not call it within ``GLUON_PARALLEL_TIMEOUT``.
    """
    if store.num_workers == 1 or not state_of(store).compares:
        return
    if not store.sums:
        store.agree_with_first(says, advice)
        return
    digest = hashlib.sha256("; ".join(says).encode()).digest()[:8]
    if _all_say(store, HANDSHAKE_DIGEST, np.frombuffer(digest, np.uint8), says):
        return
    # All know by now that they differ, so all go through their sentences until they come to where.
    end = f"{says[0].partition(' ')[0] if says else 'say'} nothing more"
    for sentence in itertools.chain(says, itertools.repeat(end)):
        _all_say(store, HANDSHAKE_WORDS, words_of(sentence), says, f"store {store.type!r}", advice)


@contextlib.contextmanager
def without_comparison(store: Any) -> Iterator[None]:
    """Within this block, this process compares nothing: the others did so before it joined them."""
    state_of(store).compares = False
    try:
        yield
    finally:
        state_of(store).compares = True


def _all_say(store: Any, key: int, numbers: np.ndarray, says: Sequence[str], where: str = "", advice: str = "") -> bool:
    """Whether all processes send the same numbers; if they are `where` words, WorkersDiffer where they do not."""
    said = f"store {store.type!r}, {says[0] if says else 'nothing'}"
    rows = gathered(store, key, numbers, default_timeout(), said, WorkerLost)
    is_same = (rows == rows[0]).all()
    if where and not is_same:
        raise differ(where, dict(zip(store.ranks, map(spelled, rows))), advice)
    return is_same


def compare(store: Any, keys: Sequence[Hashable], arrays: Sequence[Any]) -> None:
    """Raise WorkersDiffer on all processes if one is about to send other arrays under these keys; all call it."""
    _agree_to_send(store, described(keys, arrays))


def compare_once(store: Any, keys: Sequence[Hashable], arrays: Sequence[Any], bounds: Sequence[Any] = ()) -> None:
    """The same, if that has not been compared before; `bounds`: how each array is divided among the processes."""
    words = described(keys, arrays)
    words = [f"{word} in parts {[*ends]}" for word, ends in zip(words, bounds)] or words
    if not state_of(store).agreed.issuperset(words):
        _agree_to_send(store, words)


def _agree_to_send(store: Any, words: Sequence[str]) -> None:
    agree(store, words, SAME_MODEL)
    state_of(store).agreed.update(words)
