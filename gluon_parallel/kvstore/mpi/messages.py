"""Messages between processes over MPI: small ones travel together in a packet, large ones by themselves.

Only point-to-point messages are used. A collective operation of MPI needs every process at the same place at the same
time; a message needs nobody, says by itself what it is about, and tells who has not sent one.
"""

import collections
import itertools
import pickle
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

PACKET = 71  # MPI's tag
_BULK_TAGS = range(1000, 1 << 15)  # every MPI knows so many
_PICKLE = 4  # its protocol, the same in every Python
_PIECE = 1 << 30  # bytes; MPI counts in 32 bits


class Message(NamedTuple):
    """One part of an exchange on its way from one process to another."""

    kind: int
    name: bytes  # the key
    form: bytes  # shape and dtype in words, to be compared
    payload: Any  # NumPy uint8, or anything with the buffer interface when posted


class _Bulk:
    """A payload that travels by itself: announced, and then received by MPI."""

    def __init__(self, source, message, tag, size):
        self.source, self.message, self.tag, self.size = source, message, tag, size
        self.requests: list = []


class Messages:
    """One process's end of the messages through `comm`, an mpi4py communicator; used by one thread at a time."""

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
        """Send a message to `rank`; with the next :meth:`flush` it is on its way.

        Its payload is copied, unless `sent` is given, which is called when that memory may be used again. Then it is
        bulk, which travels by itself, and may lie on a GPU if MPI is CUDA-aware.
        """
        outbox = self._outbox.setdefault(rank, [])
        data = memoryview(message.payload).cast("B")
        if sent is None:
            outbox.append((*message[:3], data.tobytes()))  # now: the exchange may end before the flush
            return
        tag = next(self._tags)
        outbox.append((*message[:3], tag, data.nbytes))
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
            for rank, messages in self._outbox.items():
                packet = pickle.dumps(messages, _PICKLE)
                self._sending.append((self._comm.Isend([packet, self._mpi.BYTE], rank, PACKET), packet, None))
            self._outbox = {}

    def poll(self, memory_for):
        """Move on whatever can be moved, without waiting.

        Bulk of one kind and key is received one after the other; it holds up nothing else, for it has a tag of its own.

        Args:
            memory_for: function of (source, message without payload, size) that returns the memory to receive bulk
                into, contiguous bytes, or None to be asked again later.

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
                for kind, name, form, *rest in pickle.loads(queue.popleft()[1]):
                    if len(rest) == 1:
                        arrived.append((source, Message(kind, name, form, np.frombuffer(rest[0], np.uint8))))
                    else:
                        bulk = _Bulk(source, Message(kind, name, form, None), *rest)
                        self._bulk.setdefault((source, kind, name), collections.deque()).append(bulk)
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
