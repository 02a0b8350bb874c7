"""Pending exchanges of the progress engine: matches messages with exchanges by key."""

import collections
import time

import numpy as np

from ..flight_recorder import RECORDER
from ..handshake import SAME_MODEL, differ
from .collectives import PART, VALUE


def key_of(name):
    """The key in the name of an exchange, for errors.

    Example:
        >>> key_of(b"0s:weight")
        'weight'
    """
    return name.decode().partition(":")[2]


class PendingExchanges:
    """Exchanges by name: one is active, others with its name wait behind it, and messages may come before it."""

    def __init__(self, progress):
        self._progress = progress
        self._active: dict = {}  # name -> the exchange that is under way
        self.touched: dict = {}  # exchanges that may be complete, in order
        self._queued: dict = {}  # name -> deque of those that follow
        self._early: dict = {}  # name -> deque of (source, message) that came before their exchange here
        self._spare: dict = {}  # size -> list of buffers for bulk
        self._kept: list = []  # memory that MPI may still write to after a failure

    def __bool__(self):
        return bool(self._active)

    def active(self):
        """The exchanges that are under way."""
        return list(self._active.values())

    def take(self, exchange):
        """Begin an exchange, or let it wait for the one with its name."""
        if self._progress.failure is not None:
            exchange.finish(self._progress.failure)
        elif exchange.name in self._active:
            self._queued.setdefault(exchange.name, collections.deque()).append(exchange)
        else:
            self._begin(exchange)

    def _begin(self, exchange):
        exchange.since = time.monotonic()
        exchange.record = RECORDER.begin(exchange.name, exchange.size)
        self._active[exchange.name] = exchange
        exchange.begin(self._progress)
        for source, message in self._early.pop(exchange.name, ()):
            if self._progress.failure is None:
                self.deliver(source, message)  # what this exchange does not want is put back, for the one after it
        if self._progress.failure is None and exchange.complete():
            self._end(exchange)

    def _end(self, exchange):
        del self._active[exchange.name]
        RECORDER.end(exchange.record)
        exchange.finish(None)
        queue = self._queued.get(exchange.name)
        if queue:
            following = queue.popleft()
            if not queue:
                del self._queued[exchange.name]
            self._begin(following)

    def end_complete(self):
        """End those that have got or sent something since the last call, and now have all."""
        touched, self.touched = self.touched, {}
        for exchange in touched:
            if exchange.complete() and self._active.get(exchange.name) is exchange:
                self._end(exchange)

    def deliver(self, source, message):
        """Hand a message to its exchange, or keep it until that has begun."""
        exchange = self._active.get(message.name)
        if exchange is None or (message.kind, source) not in exchange.missing:
            self._early.setdefault(message.name, collections.deque()).append((source, message))
            return
        self._compare(exchange, source, message)
        if self._progress.failure is None:
            exchange.missing.discard((message.kind, source))
            exchange.receive(self._progress, source, message)
            self.touched[exchange] = None

    def early_from(self, rank):
        """The names of exchanges to which that rank has come, and this process has not."""
        return [name for name, queue in list(self._early.items()) if any(source == rank for source, _ in list(queue))]

    def compare_elsewhere(self, exchange, missing):
        """Compare `exchange` with early messages of the `missing` ranks for its key.

        Who has another shape as a rule does the exchange in another way, under another name.
        """
        for name in exchange.elsewhere:
            for source, message in self._early.get(name, ()):
                if source in missing and self._progress.failure is None:
                    self._compare(exchange, source, message)

    def _compare(self, exchange, source, message):
        if exchange.form != message.form:
            progress = self._progress
            said = {progress.rank: exchange.form.decode(), source: message.form.decode()}
            progress.fail(differ(f"store 'mpi', key {key_of(exchange.name)}", "send", said, SAME_MODEL))

    def memory_for(self, source, message, size):
        """The memory to receive bulk into, see :meth:`.Messages.poll`."""
        exchange = self._active.get(message.name)
        if exchange is not None and (message.kind, source) in exchange.missing:
            self._compare(exchange, source, message)
            memory = False if self._progress.failure is not None else exchange.memory_for(source, message)
            if memory is not False:
                return memory
        elif message.kind not in (PART, VALUE):
            return None
        spare = self._spare.get(size)
        return spare.pop() if spare else np.empty(size, np.uint8)

    def give_back(self, row):
        """Take back memory that bulk was received into, for the next time."""
        memory = row.view(np.uint8)
        self._spare.setdefault(memory.size, []).append(memory)

    def abandon(self, error):
        """End all exchanges with `error`."""
        waiting = [*self._active.values(), *(one for queue in self._queued.values() for one in queue)]
        self._kept += waiting
        self._active, self._queued = {}, {}
        for exchange in waiting:
            exchange.finish(error)
