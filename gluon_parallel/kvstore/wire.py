"""Messages between processes over MPI: small ones travel together in an envelope, large ones right behind it.

Only point-to-point messages are used. A collective operation of MPI needs every process at the same place at the same
time; a message needs nobody, says by itself what it is about, and tells who has not sent one.
"""

from __future__ import annotations

import collections
import struct
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

ENVELOPE, BULK = 71, 72  # MPI's tags
_HEADER = struct.Struct("<BBHHQ")  # kind, whether the payload is inside, length of name, of form, of the payload
_ALIGN = 16


class Letter(NamedTuple):
    """One part of an exchange on its way from one process to another."""

    kind: int
    name: bytes  # the key
    form: bytes  # shape and dtype in words, to be compared
    payload: Any  # NumPy uint8, or anything with the buffer interface when posted


class _Announced(NamedTuple):
    letter: Letter
    size: int


def _padded(size):
    return -size % _ALIGN


def pack(letter, inside):
    """A letter as a list of bytes: its header, and its payload if that travels inside.

    Example:
        >>> parts = pack(Letter(1, b"key", b"uint8 (2,)", np.array([1, 2], np.uint8)), inside=True)
        >>> [(letter.name, letter.payload.tolist()) for letter, _ in unpack(np.frombuffer(b"".join(parts), np.uint8))]
        [(b'key', [1, 2])]
    """
    payload = memoryview(letter.payload).cast("B")
    header = _HEADER.pack(letter.kind, inside, len(letter.name), len(letter.form), payload.nbytes)
    words = header + letter.name + letter.form
    parts = [words, bytes(_padded(len(words)))]
    if inside:
        parts += [payload.tobytes(), bytes(_padded(payload.nbytes))]  # now: the exchange may end before the flush
    return parts


def unpack(envelope):
    """(letter, size of the payload to come or None) for each letter in `envelope`, a NumPy uint8 array."""
    data, at = memoryview(envelope), 0
    while at < len(data):
        kind, inside, name, form, size = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        words = bytes(data[at : at + name + form])
        at += name + form
        at += _padded(_HEADER.size + name + form)
        payload = None
        if inside:
            payload = envelope[at : at + size]
            at += size + _padded(size)
        yield Letter(kind, words[:name], words[name:], payload), (None if inside else size)


class Wire:
    """One process's end of the messages to and from all others; used by one thread at a time.

    Args:
        comm: an mpi4py communicator of its own.
    """

    def __init__(self, comm):
        from mpi4py import MPI  # here: whoever has no MPI uses the other stores

        self._mpi = MPI
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.num_envelopes = self.num_letters = 0  # sent, for whoever wants to know how many travelled together
        self._outbox: dict[int, list] = {}
        self._sending: list = []  # (request, what must live until it has gone, whom to tell)
        self._arriving: dict[int, collections.deque] = {}  # source -> (request, envelope), in the order of sending
        self._announced: dict[int, collections.deque] = {}  # source -> bulk that was announced, not yet received
        self._receiving: dict[int, collections.deque] = {}  # source -> (request, letter) of bulk being received
        self._status = MPI.Status()

    def post(self, rank, letter, sent: Optional[Callable[[], None]] = None):
        """Send a letter; with the next :meth:`flush` it is on its way.

        Args:
            rank: to whom.
            letter: its payload is copied, unless `sent` is given.
            sent: called when the memory of the payload may be used again.
        """
        self._outbox.setdefault(rank, []).extend(pack(letter, inside=sent is None))
        self.num_letters += 1
        if sent is not None:
            data = memoryview(letter.payload).cast("B")
            for begin in range(0, max(1, data.nbytes), 1 << 30):  # MPI counts in 32 bits
                part = data[begin : begin + (1 << 30)]
                last = begin + (1 << 30) >= data.nbytes
                request = self._comm.Isend([part, self._mpi.BYTE], rank, BULK)
                self._sending.append((request, part, sent if last else None))

    def flush(self):
        """Send what was posted."""
        if self._outbox:
            for rank, parts in self._outbox.items():
                envelope = b"".join(parts)
                self._sending.append((self._comm.Isend([envelope, self._mpi.BYTE], rank, ENVELOPE), envelope, None))
                self.num_envelopes += 1
            self._outbox = {}

    def poll(self, place):
        """Move on whatever can be moved, without waiting.

        Args:
            place: function of (source, letter without payload, size) that returns the memory to receive bulk into, a
                contiguous NumPy uint8 array, or None to be asked again later.

        Returns:
            (letters that arrived as (source, letter) in order, whether anything has moved).
        """
        moved = self._collect_sent()
        while True:
            message = self._comm.Improbe(self._mpi.ANY_SOURCE, ENVELOPE, self._status)
            if message is None:
                break
            source = self._status.Get_source()
            envelope = np.empty(self._status.Get_count(self._mpi.BYTE), np.uint8)
            request = message.Irecv([envelope, self._mpi.BYTE])
            self._arriving.setdefault(source, collections.deque()).append((request, envelope))
        arrived = []
        for source, queue in self._arriving.items():
            while queue and queue[0][0].Test():
                moved = True
                for letter, size in unpack(queue.popleft()[1]):
                    if size is None:
                        arrived.append((source, letter))
                    else:
                        self._announced.setdefault(source, collections.deque()).append(_Announced(letter, size))
        for source, announced in self._announced.items():
            while announced:
                letter, size = announced[0]
                memory = place(source, letter, size)
                if memory is None:
                    break
                announced.popleft()
                requests = [
                    self._comm.Irecv([memory[begin : begin + (1 << 30)], self._mpi.BYTE], source, BULK)
                    for begin in range(0, max(1, size), 1 << 30)
                ]
                self._receiving.setdefault(source, collections.deque()).append(
                    (requests, letter._replace(payload=memory))
                )
                moved = True
        for source, queue in self._receiving.items():
            while queue and self._mpi.Request.Testall(queue[0][0]):
                arrived.append((source, queue.popleft()[1]))
                moved = True
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
        return any(queues.get(rank) for queues in (self._arriving, self._announced, self._receiving))

    @property
    def sending(self):
        """Whether something posted has not gone yet."""
        return bool(self._sending or self._outbox)
