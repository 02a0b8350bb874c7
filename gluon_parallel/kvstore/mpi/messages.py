"""Messages between processes over MPI: small ones travel together in a packet, large ones right behind it.

Only point-to-point messages are used. A collective operation of MPI needs every process at the same place at the same
time; a message needs nobody, says by itself what it is about, and tells who has not sent one.
"""

from __future__ import annotations

import collections
import itertools
import struct
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

PACKET, BULK = 71, 72  # MPI's tags
_OFFERS = range(1000, 1 << 15)  # tags of memory that is offered; every MPI knows so many
_PIECE = 1 << 30  # bytes; MPI counts in 32 bits
_OFFER = struct.Struct("<Q")
_HEADER = struct.Struct("<BBHHQ")  # kind, whether the payload is inside, length of name, of form, of the payload
_ALIGN = 16


class Message(NamedTuple):
    """One part of an exchange on its way from one process to another."""

    kind: int
    name: bytes  # the key
    form: bytes  # shape and dtype in words, to be compared
    payload: Any  # NumPy uint8, or anything with the buffer interface when posted


class _Announced(NamedTuple):
    message: Message
    size: int


def _padded(size):
    return -size % _ALIGN


def pack(message, inside):
    """A message as a list of bytes: its header, and its payload if that travels inside.

    Example:
        >>> parts = pack(Message(1, b"key", b"uint8 (2,)", np.array([1, 2], np.uint8)), inside=True)
        >>> [(message, _)] = unpack(np.frombuffer(b"".join(parts), np.uint8))
        >>> message.name, message.payload.tolist()
        (b'key', [1, 2])
    """
    payload = memoryview(message.payload).cast("B")
    header = _HEADER.pack(message.kind, inside, len(message.name), len(message.form), payload.nbytes)
    words = header + message.name + message.form
    parts = [words, bytes(_padded(len(words)))]
    if inside:
        parts += [payload.tobytes(), bytes(_padded(payload.nbytes))]  # now: the exchange may end before the flush
    return parts


def unpack(packet):
    """(message, size of the payload to come or None) for each message in `packet`, a NumPy uint8 array."""
    data, at = memoryview(packet), 0
    while at < len(data):
        kind, inside, name, form, size = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        words = bytes(data[at : at + name + form])
        at += name + form
        at += _padded(_HEADER.size + name + form)
        payload = None
        if inside:
            payload = packet[at : at + size]
            at += size + _padded(size)
        yield Message(kind, words[:name], words[name:], payload), (None if inside else size)


class Messages:
    """One process's end of the messages to and from all others; used by one thread at a time.

    Args:
        comm: an mpi4py communicator of its own.
    """

    def __init__(self, comm):
        from mpi4py import MPI  # here: whoever has no MPI uses the other stores

        self._mpi = MPI
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._outbox: dict[int, list] = {}
        self._sending: list = []  # (request, what must live until it has gone, whom to tell)
        self._arriving: dict[int, collections.deque] = {}  # source -> (request, packet), in the order of sending
        self._announced: dict[int, collections.deque] = {}  # source -> bulk that was announced, not yet received
        self._receiving: dict[int, collections.deque] = {}  # source -> (requests, message) of bulk being received
        self._tags = itertools.cycle(_OFFERS)
        self._filling: dict[int, list] = {}  # source -> (requests, message) of offered memory being received
        self._status = MPI.Status()

    def post(self, rank, message, sent: Optional[Callable[[], None]] = None):
        """Send a message; with the next :meth:`flush` it is on its way.

        Args:
            rank: to whom.
            message: its payload is copied, unless `sent` is given.
            sent: called when the memory of the payload may be used again.
        """
        self._outbox.setdefault(rank, []).extend(pack(message, inside=sent is None))
        if sent is not None:
            self._send(rank, memoryview(message.payload).cast("B"), BULK, sent)

    def _send(self, rank, data, tag, sent):
        begins = range(0, max(1, data.nbytes), _PIECE)
        left = len(begins)  # pieces may go in another order than they were handed over

        def one_sent():
            nonlocal left
            left -= 1
            if not left:
                sent()

        for begin in begins:
            part = data[begin : begin + _PIECE]
            self._sending.append((self._comm.Isend([part, self._mpi.BYTE], rank, tag), part, one_sent))

    def _receive(self, source, memory, size, tag):
        return [
            self._comm.Irecv([memory[begin : begin + _PIECE], self._mpi.BYTE], source, tag)
            for begin in range(0, max(1, size), _PIECE)
        ]

    def offer(self, rank, message, memory, sent):
        """Send memory that nobody but MPI touches, under a tag of its own, and a message that tells the tag.

        Bulk is received in the order of sending, so one that has no place yet holds up what follows, or is received
        elsewhere first. What is offered waits for nothing, and is received to where it belongs or not at all.

        Args:
            rank: to whom.
            message: without a payload; whoever has it calls :meth:`fill`.
            memory: bytes with ``nbytes`` and slices, as mpi4py takes them; of a GPU if MPI is CUDA-aware.
            sent: called when the memory may be used again.
        """
        tag = next(self._tags)
        self.post(rank, message._replace(payload=_OFFER.pack(tag)))
        self._send(rank, memory, tag, sent)

    def fill(self, source, offered, memory, message):
        """Receive the memory that a message has offered.

        Args:
            source: who has sent it.
            offered: the message's payload.
            memory: of the size of what was offered, as there.
            message: :meth:`poll` returns it when all is here.
        """
        (tag,) = _OFFER.unpack(bytes(offered))
        requests = self._receive(source, memory, memory.nbytes, tag)
        self._filling.setdefault(source, []).append((requests, message))

    def flush(self):
        """Send what was posted."""
        if self._outbox:
            for rank, parts in self._outbox.items():
                packet = b"".join(parts)
                self._sending.append((self._comm.Isend([packet, self._mpi.BYTE], rank, PACKET), packet, None))
            self._outbox = {}

    def poll(self, memory_for):
        """Move on whatever can be moved, without waiting.

        Args:
            memory_for: function of (source, message without payload, size) that returns the memory to receive bulk
                into, a contiguous NumPy uint8 array, or None to be asked again later.

        Returns:
            (messages that arrived as (source, message) in order, whether anything has moved).
        """
        moved = self._collect_sent()
        while True:
            coming = self._comm.Improbe(self._mpi.ANY_SOURCE, PACKET, self._status)
            if coming is None:
                break
            source = self._status.Get_source()
            packet = np.empty(self._status.Get_count(self._mpi.BYTE), np.uint8)
            request = coming.Irecv([packet, self._mpi.BYTE])
            self._arriving.setdefault(source, collections.deque()).append((request, packet))
        arrived = []
        for source, queue in self._arriving.items():
            while queue and queue[0][0].Test():
                moved = True
                for message, size in unpack(queue.popleft()[1]):
                    if size is None:
                        arrived.append((source, message))
                    else:
                        self._announced.setdefault(source, collections.deque()).append(_Announced(message, size))
        for source, announced in self._announced.items():
            while announced:
                message, size = announced[0]
                memory = memory_for(source, message, size)
                if memory is None:
                    break
                announced.popleft()
                requests = self._receive(source, memory, size, BULK)
                self._receiving.setdefault(source, collections.deque()).append(
                    (requests, message._replace(payload=memory))
                )
                moved = True
        for source, queue in self._receiving.items():
            while queue and self._mpi.Request.Testall(queue[0][0]):
                arrived.append((source, queue.popleft()[1]))
                moved = True
        for source, filling in self._filling.items():
            self._filling[source] = waiting = []
            for requests, message in filling:
                if self._mpi.Request.Testall(requests):
                    arrived.append((source, message))
                    moved = True
                else:
                    waiting.append((requests, message))
        return arrived, moved

    def _collect_sent(self):
        if not self._sending:
            return False
        # All of them, not only the oldest: the receiver may wait with one until another is known to have gone.
        gone = self._mpi.Request.Testsome([entry[0] for entry in self._sending])
        if not gone:
            return False
        entries = [self._sending[index] for index in gone]
        for index in sorted(gone, reverse=True):
            del self._sending[index]
        for _, _, sent in entries:
            if sent is not None:
                sent()
        return True

    def expects_from(self, rank):
        """Whether something that `rank` has sent is known and not here yet."""
        queues = (self._arriving, self._announced, self._receiving, self._filling)
        return any(queue.get(rank) for queue in queues)

    @property
    def sending(self):
        """Whether something posted has not gone yet."""
        return bool(self._sending or self._outbox)
