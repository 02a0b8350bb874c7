"""Collective operations at one key, made of messages: sum, gather, broadcast, swap."""

import functools

import numpy as np

from ...allreduce import sum_rows
from ...split import share
from .messages import Message

# What a message holds.
VECTOR, PART, RESULT, VALUE, FAILED, LEFT, OFFERED, PIECE = range(1, 9)

INSIDE = 64 * 1024  # bytes up to which a payload is copied into the packet, with its neighbours


def _bytes(array):
    return array.reshape(-1).view(np.uint8)


class Collective:
    """Collective operation of all processes at one key; the progress engine drives it and calls `finish(error)` once.

    Args:
        name, form: the key, and shape and dtype in words; both as bytes.
        finish: called with None, or with the error that ended it.
        vector: a contiguous NumPy array.
    """

    elsewhere: tuple = ()  # names of this key under which a process may wait that takes another kind of exchange

    def __init__(self, name, form, finish, vector):
        self.name, self.form, self.finish, self.vector = name, form, finish, vector
        self.since, self.record = 0.0, 0  # when it began, and its number in the flight recorder
        self.missing: set = set()  # (kind, rank) of each message that is still to come
        self.unsent = 0

    def _post(self, progress, rank, kind, payload, bulk=False, sent=lambda: None):
        def one_sent():
            sent()
            self.unsent -= 1
            progress.pending.touched[self] = None

        self.unsent += bulk
        progress.messages.post(rank, Message(kind, self.name, self.form, payload), one_sent if bulk else None)

    def begin(self, progress):
        """Send what the others need first."""
        raise NotImplementedError

    def receive(self, progress, source, message):
        """Take a message that was missing."""

    def memory_for(self, source, message):
        """The memory for bulk from `source`: an array, None for "not yet", or False for any."""
        return False

    @property
    def size(self):
        """Bytes, for the flight recorder."""
        return self.vector.nbytes

    def ranks_missing(self):
        """From whom something is still to come."""
        return {rank for _, rank in list(self.missing)}  # a flight recorder asks from other threads

    def complete(self):
        """Whether nothing is missing and nothing has to be sent."""
        return not self.missing and not self.unsent


class Gather(Collective):
    """Everyone gets everybody's vector: `rows` afterwards, by rank, as bytes."""

    def begin(self, progress):
        self.rows: list = [None] * progress.size
        self.rows[progress.rank] = _bytes(self.vector)
        self.missing = {(VECTOR, rank) for rank in progress.others}
        for rank in progress.others:
            self._post(progress, rank, VECTOR, self.rows[progress.rank])

    def receive(self, progress, source, message):
        self.rows[source] = message.payload


class Sum(Collective):
    """Everyone's `vector` becomes the sum, in place. Each process adds up one part, and sends the result to all."""

    def begin(self, progress):
        shares = [share(self.vector.size, rank, progress.size) for rank in range(progress.size)]
        self._parts = [self.vector[begin:end] for begin, end in shares]
        self._rows: list = [None] * progress.size
        self._rows[progress.rank] = self._parts[progress.rank]
        self._going = set(progress.others)  # to whom a part is on its way
        self.missing = {(kind, rank) for kind in (PART, RESULT) for rank in progress.others}
        for rank in progress.others:
            gone = functools.partial(self._going.discard, rank)
            self._post(progress, rank, PART, _bytes(self._parts[rank]), bulk=True, sent=gone)

    def memory_for(self, source, message):
        if message.kind != RESULT:
            return False
        return None if source in self._going else _bytes(self._parts[source])

    def receive(self, progress, source, message):
        if message.kind != PART:
            return
        self._rows[source] = message.payload.view(self.vector.dtype)
        if any(row is None for row in self._rows):
            return
        mine = self._parts[progress.rank]
        sum_rows(self._rows, [mine])
        for rank in progress.others:
            progress.pending.give_back(self._rows[rank])
            self._post(progress, rank, RESULT, _bytes(mine), bulk=True)
        self._rows = []

    def ranks_missing(self):
        # Who has sent its part and not its result waits for a part itself: it is not the one to be named.
        return {rank for kind, rank in list(self.missing) if kind == PART} or super().ranks_missing()


class Broadcast(Collective):
    """Everyone's `vector` becomes that of rank 0, in place."""

    def begin(self, progress):
        if progress.rank:
            self.missing = {(VALUE, 0)}
            return
        for rank in progress.others:
            self._post(progress, rank, VALUE, _bytes(self.vector), bulk=self.vector.nbytes > INSIDE)

    def memory_for(self, source, message):
        return _bytes(self.vector)

    def receive(self, progress, source, message):
        if message.payload.ctypes.data != self.vector.ctypes.data:
            _bytes(self.vector)[:] = message.payload


class Swap(Collective):
    """Everyone hands every other one a piece of its memory, which nobody but MPI touches.

    Args:
        outgoing, incoming: by rank, what goes there and where to put what comes from there; that of this process itself
            is not looked at.
        elsewhere: see :class:`Collective`.
    """

    def __init__(self, name, form, finish, outgoing, incoming, elsewhere=()):
        super().__init__(name, form, finish, None)
        self.outgoing, self.incoming, self.elsewhere = outgoing, incoming, elsewhere

    def begin(self, progress):
        self.missing = {(kind, rank) for kind in (OFFERED, PIECE) for rank in progress.others}
        for rank in progress.others:
            self._post(progress, rank, OFFERED, b"")  # seen at once, also by whoever has no place for the piece
            self._post(progress, rank, PIECE, self.outgoing[rank], bulk=True)

    @property
    def size(self):
        return sum(memoryview(piece).nbytes for piece in self.outgoing)

    def memory_for(self, source, message):
        return self.incoming[source]
