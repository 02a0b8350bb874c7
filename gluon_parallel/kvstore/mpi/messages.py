"""Messages between processes over MPI: small ones travel together in a packet, large ones by themselves.

Only point-to-point messages are used. A collective operation of MPI needs every process at the same place at the same
time; a message needs nobody, says by itself what it is about, and tells who has not sent one.
"""

from __future__ import annotations

import collections
import itertools
import struct
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

PACKET = 71  # MPI's tag
_BULK_TAGS = range(1000, 1 << 15)  # every MPI knows so many
_PIECE = 1 << 30  # bytes; MPI counts in 32 bits
_HEADER = struct.Struct("<BHHHQ")  # kind, tag of the payload or 0 if it is inside, length of name, of form, of payload
_ALIGN = 16


class Message(NamedTuple):
    """One part of an exchange on its way from one process to another."""

    kind: int
    name: bytes  # the key
    form: bytes  # shape and dtype in words, to be compared
    payload: Any  # NumPy uint8, or anything with the buffer interface when posted


def _padded(size):
    return -size % _ALIGN


def pack(message, tag=0):
    """A message as a list of bytes: its header, and its payload unless that has a tag of its own.

    Example:
        >>> parts = pack(Message(1, b"key", b"uint8 (2,)", np.array([1, 2], np.uint8)))
        >>> [(message, _, _)] = unpack(np.frombuffer(b"".join(parts), np.uint8))
        >>> message.name, message.payload.tolist()
        (b'key', [1, 2])
    """
    payload = memoryview(message.payload).cast("B")
    header = _HEADER.pack(message.kind, tag, len(message.name), len(message.form), payload.nbytes)
    words = header + message.name + message.form
    parts = [words, bytes(_padded(len(words)))]
    if not tag:
        parts += [payload.tobytes(), bytes(_padded(payload.nbytes))]  # now: the exchange may end before the flush
    return parts


def unpack(packet):
    """(message, tag of the payload to come or 0, its size) for each message in `packet`, a NumPy uint8 array."""
    data, at = memoryview(packet), 0
    while at < len(data):
        kind, tag, name, form, size = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        words = bytes(data[at : at + name + form])
        at += name + form
        at += _padded(_HEADER.size + name + form)
        payload = None
        if not tag:
            payload = packet[at : at + size]
            at += size + _padded(size)
        yield Message(kind, words[:name], words[name:], payload), tag, size


class _Bulk:
    """A payload that travels by itself: announced, and then received by MPI."""

    def __init__(self, source, message, tag, size):
        self.source, self.message, self.tag, self.size = source, message, tag, size
        self.requests: list = []


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
        self._bulk: dict[tuple, collections.deque] = {}  # (source, kind, name) -> bulk to come, in the order of sending
        self._tags = itertools.cycle(_BULK_TAGS)
        self._status = MPI.Status()

    def post(self, rank, message, sent: Optional[Callable[[], None]] = None):
        """Send a message; with the next :meth:`flush` it is on its way.

        Args:
            rank: to whom.
            message: its payload is copied, unless `sent` is given; then it is bulk, which travels by itself, and may
                lie on a GPU if MPI is CUDA-aware.
            sent: called when the memory of the payload may be used again.
        """
        tag = 0 if sent is None else next(self._tags)
        self._outbox.setdefault(rank, []).extend(pack(message, tag))
        if sent is None:
            return
        data = memoryview(message.payload).cast("B")
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
                into, contiguous bytes, or None to be asked again later. Bulk of one kind and key is received one after
                the other; it holds up nothing else, for it has a tag of its own.

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
                for message, tag, size in unpack(queue.popleft()[1]):
                    if tag:
                        key = source, message.kind, message.name
                        self._bulk.setdefault(key, collections.deque()).append(_Bulk(source, message, tag, size))
                    else:
                        arrived.append((source, message))
        for key, coming in list(self._bulk.items()):
            bulk = coming[0]
            if not bulk.requests:
                moved |= self._receive(bulk, memory_for(bulk.source, bulk.message, bulk.size))
            if bulk.requests and self._mpi.Request.Testall(bulk.requests):
                arrived.append((bulk.source, bulk.message))
                moved = True
                coming.popleft()
                if not coming:
                    del self._bulk[key]
        return arrived, moved

    def _receive(self, bulk, memory):
        if memory is None:
            return False
        bulk.message = bulk.message._replace(payload=memory)
        bulk.requests = [
            self._comm.Irecv([memory[begin : begin + _PIECE], self._mpi.BYTE], bulk.source, bulk.tag)
            for begin in range(0, max(1, bulk.size), _PIECE)
        ]
        return True

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
        return bool(self._arriving.get(rank)) or any(source == rank for source, *_ in self._bulk)

    @property
    def sending(self):
        """Whether something posted has not gone yet."""
        return bool(self._sending or self._outbox)
