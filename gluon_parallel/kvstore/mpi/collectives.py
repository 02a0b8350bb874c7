"""Collective operations at one key, made of messages: sum, gather, broadcast, swap."""

from __future__ import annotations

import numpy as np

from ...allreduce import sum_rows
from ...split import share
from .messages import Message

# What a message holds.
VECTOR, PART, RESULT, VALUE, FAILED, LEFT, OFFERED, FILLED = range(1, 9)

INSIDE = 64 * 1024  # bytes up to which a payload is copied into the packet, with its neighbours


def _bytes(array):
    return array.reshape(-1).view(np.uint8)


class Collective:
    """Collective operation of all processes at one key; the progress engine drives it and calls `finish(error)` once.

    Args:
        name, form: the key, and shape and dtype in words; both as bytes.
        finish: called with None, or with the error that ended it.
    """

    def __init__(self, name, form, finish):
        self.name = name
        self.form = form
        self.finish = finish
        self.since = 0.0
        self.missing: set = set()  # ranks from whom something is still to come
        self.unsent = 0
        self.touched = lambda exchange: None  # set by the progress engine, which looks again at those that say so

    def _post(self, progress, rank, kind, payload, inside):
        sent = None
        if not inside:
            self.unsent += 1
            sent = self._one_sent
        progress.messages.post(rank, Message(kind, self.name, self.form, payload), sent)

    def _one_sent(self):
        self.unsent -= 1
        self.touched(self)

    def begin(self, progress):
        """Send what the others need first."""
        raise NotImplementedError

    def receive(self, progress, source, message):
        """Take a message for this key; each arrives once."""
        raise NotImplementedError

    def memory_for(self, source, message):
        """The memory for bulk from `source`: an array, None for "not yet", or False for any."""
        return False

    def ranks_missing(self):
        """From whom something is still to come."""
        return set(self.missing)

    def complete(self):
        """Whether nothing is missing and nothing has to be sent."""
        return not self.missing and not self.unsent


class Gather(Collective):
    """Everyone gets everybody's vector: `rows` afterwards, by rank.

    `vector` is a contiguous NumPy array. With `decode`, a function of (row as bytes, rank), rows are what it returns.
    """

    def __init__(self, name, form, finish, vector):
        super().__init__(name, form, finish)
        self.vector = vector
        self.rows = []

    def begin(self, progress):
        self.rows = [None] * progress.size
        self.rows[progress.rank] = _bytes(self.vector)
        self.missing = set(progress.others)
        for rank in progress.others:
            self._post(progress, rank, VECTOR, self.rows[progress.rank], inside=True)

    def receive(self, progress, source, message):
        self.rows[source] = message.payload
        self.missing.discard(source)


class Sum(Collective):
    """Everyone's `vector` becomes the sum, in place. Each process adds up one part, and sends the result to all."""

    def __init__(self, name, form, finish, vector):
        super().__init__(name, form, finish)
        self.vector = vector
        self._rows = []
        self._parts = {}  # rank -> its slice of the vector
        self._going = set()  # to whom a part is on its way

    def begin(self, progress):
        self._progress = progress
        shares = {rank: share(self.vector.size, rank, progress.size) for rank in range(progress.size)}
        self._parts = {rank: self.vector[begin:end] for rank, (begin, end) in shares.items()}
        self._rows = [None] * progress.size
        self._rows[progress.rank] = self._parts[progress.rank]
        self.missing = {(kind, rank) for kind in (PART, RESULT) for rank in progress.others}
        for rank in progress.others:
            self._going.add(rank)
            self.unsent += 1
            message = Message(PART, self.name, self.form, _bytes(self._parts[rank]))
            progress.messages.post(rank, message, lambda rank=rank: self._part_sent(rank))

    def _part_sent(self, rank):
        self._going.discard(rank)
        self._one_sent()

    def memory_for(self, source, message):
        if message.kind != RESULT:
            return False
        return None if source in self._going else _bytes(self._parts[source])

    def receive(self, progress, source, message):
        self.missing.discard((message.kind, source))
        if message.kind != PART:
            return
        self._rows[source] = message.payload.view(self.vector.dtype)
        if any(row is None for row in self._rows):
            return
        mine = self._parts[progress.rank]
        sum_rows(self._rows, [mine])
        for rank, row in enumerate(self._rows):
            if rank != progress.rank:
                progress.pending.give_back(row)
        self._rows = []
        for rank in progress.others:
            self._post(progress, rank, RESULT, _bytes(mine), inside=False)

    def ranks_missing(self):
        # Who has sent its part and not its result waits for a part itself: it is not the one to be named.
        parts = {rank for kind, rank in self.missing if kind == PART}
        return parts or {rank for _, rank in self.missing}


class Broadcast(Collective):
    """Everyone's `vector` becomes that of rank 0, in place."""

    def __init__(self, name, form, finish, vector):
        super().__init__(name, form, finish)
        self.vector = vector

    def begin(self, progress):
        if progress.rank:
            self.missing = {0}
            return
        for rank in progress.others:
            self._post(progress, rank, VALUE, _bytes(self.vector), inside=self.vector.nbytes <= INSIDE)

    def memory_for(self, source, message):
        return _bytes(self.vector)

    def receive(self, progress, source, message):
        if message.payload.ctypes.data != self.vector.ctypes.data:
            _bytes(self.vector)[:] = message.payload
        self.missing.discard(source)


class Swap(Collective):
    """Everyone hands every other one a piece of its memory, which nobody but MPI touches.

    Args:
        outgoing, incoming: by rank, what goes there and where to put what comes from there, as :meth:`.Messages.offer`
            takes it; that of this process itself is not looked at.
        elsewhere: names of this key under which a process may wait that takes it for another kind of exchange.
    """

    def __init__(self, name, form, finish, outgoing, incoming, elsewhere=()):
        super().__init__(name, form, finish)
        self.outgoing, self.incoming, self.elsewhere = outgoing, incoming, elsewhere

    def begin(self, progress):
        self.missing = {(kind, rank) for kind in (OFFERED, FILLED) for rank in progress.others}
        for rank in progress.others:
            self.unsent += 1
            progress.messages.offer(
                rank, Message(OFFERED, self.name, self.form, b""), self.outgoing[rank], self._one_sent
            )

    def receive(self, progress, source, message):
        self.missing.discard((message.kind, source))
        if message.kind == OFFERED:
            full = Message(FILLED, self.name, self.form, b"")
            progress.messages.fill(source, message.payload, self.incoming[source], full)

    def ranks_missing(self):
        return {rank for _, rank in self.missing}
