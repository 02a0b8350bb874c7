"""Agreement on new keys: all processes prepare them in one order, which process 0 of a tree of messages decides."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from .. import flight_recorder
from ..handshake import SAME_MODEL, differ
from .transport import PACKET, Message


def key_of(name: bytes) -> str:
    """The key in the name of an exchange, for errors.

    Example:
        >>> key_of(b"0s:weight")
        'weight'
    """
    return name.decode().partition(":")[2]


def key_in_words(name: bytes) -> str:
    """What the key in the name of an exchange belongs to, such as a parameter, or the key itself, for errors.

    Example:
        >>> key_in_words(b"0s:weight")
        'key weight'
    """
    return flight_recorder.RECORDER.kind_key_label(name)[2] or f"key {key_of(name)}"


class ProcessGroup:
    """Processes that call operations together, and agree on the order of new keys.

    Each process tells its parent in a binary tree when it and all below it have come to a key; then all are told.
    A new key costs each process one message up and one to each of its two children, however many processes there are.

    Args:
        progress: the progress engine, whose lock is held by whoever calls.
        comm: their communicator.
        ranks: of those that agree, in the same order on each; the first one decides.
        kinds: of the two messages, (up, down).
    """

    def __init__(self, progress: Any, comm: Any, ranks: Sequence[int], kinds: tuple[int, int]) -> None:
        self.progress, self.comm, self.ranks, self._kinds = progress, comm, ranks, kinds
        self.rank = rank = ranks.index(progress.rank)
        self._parent = ranks[(rank - 1) // 2] if rank else None
        self._children = [ranks[child] for child in (2 * rank + 1, 2 * rank + 2) if child < len(ranks)]
        self._mine: dict = {}  # name -> deque of the exchanges that this process has announced
        self._theirs: dict = {}  # (name, child) -> deque of the signatures that all below that child have announced
        self.tags = itertools.count(PACKET + 1)  # MPI's, for operations that are made in the same order everywhere
        self._told: set = set()  # names whose first announcement has gone to the parent

    def pending(self) -> bool:
        """Whether an exchange waits for the agreement."""
        return bool(self.active())

    def active(self) -> list[Any]:
        """The exchanges that wait for the agreement; what may take any time is not waited for."""
        return [queue[0] for queue in list(self._mine.values()) if not getattr(queue[0], "takes_any_time", False)]

    def announce(self, exchange: Any) -> None:
        """Say that this process has come to an exchange; when all have, its ``agreed()`` is called, in one order."""
        self._mine.setdefault(exchange.name, collections.deque()).append(exchange)
        self._look(exchange.name)

    def deliver(self, source: int, message: Message) -> None:
        """Take a message of one of the two kinds."""
        if message.kind == self._kinds[0]:
            self._theirs.setdefault((message.name, source), collections.deque()).append(message.signature)
            self._look(message.name)
        else:
            self._settle(message.name)

    def _look(self, name: bytes) -> None:
        if name not in self._mine:
            return
        signature = self._mine[name][0].signature
        queues = {child: self._theirs.get((name, child)) for child in self._children}
        for child, signatures in queues.items():
            if signatures and signatures[0] != signature:
                self.refuse(name, {self.progress.rank: signature, child: signatures[0]})
                return
        if name not in self._told and all(queues.values()):
            self._told.add(name)
            if self._parent is None:
                self._settle(name)
            else:
                self.progress.messages.post(self._parent, Message(self._kinds[0], name, signature))

    def refuse(self, name: bytes, signatures: Mapping[int, bytes]) -> None:
        """End all exchanges: under that name the processes send what {rank: signature} says."""
        said = {self.progress.ranks[rank]: f"send {signature.decode()}" for rank, signature in signatures.items()}
        self.progress.fail(differ(f"store 'mpi', {key_in_words(name)}", said, SAME_MODEL))

    def _settle(self, name: bytes) -> None:
        exchange = _take_first(self._mine, name)
        self._told.discard(name)
        for child in self._children:
            _take_first(self._theirs, (name, child))
            self.progress.messages.post(child, Message(self._kinds[1], name, exchange.signature))
        exchange.agreed()
        self._look(name)


def _take_first(queues: dict, key: Hashable) -> Any:
    queue = queues[key]
    first = queue.popleft()
    if not queue:
        del queues[key]
    return first
