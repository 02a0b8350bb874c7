"""A communicator between threads, for tests of the progress engine: what the engine uses of mpi4py's."""

import collections
import functools
import threading

import numpy as np


class World:
    """What the communicators of one group share."""

    def __init__(self, size):
        self.size, self.lock = size, threading.Lock()
        self.inboxes = [collections.deque() for _ in range(size)]
        self.taking_part = {}  # (number of the operation, call) -> {rank: what it hands in}
        self.results = {}


class Request:
    """Under way until `test` returns True; a persistent one is started anew."""

    def __init__(self, start):
        self._begin, self.calls, self._test = start, 0, None

    def Start(self):
        self._test = self._begin(self.calls)
        self.calls += 1
        return self

    def Test(self):
        return self._test()

    @staticmethod
    def Testsome(requests):
        return [index for index, request in enumerate(requests) if request.Test()]


class Comm:
    """One thread's end. Collective operations match by the order in which they are made, as MPI's do."""

    def __init__(self, world, rank):
        self.world, self.rank, self.size = world, rank, world.size
        self._made = 0

    def Isend(self, data, rank, tag):
        self.world.inboxes[rank].append((self.rank, bytes(data[0])))
        return Request(lambda call: lambda: True).Start()

    def Improbe(self, _source, _tag, status):
        inbox = self.world.inboxes[self.rank]
        if not inbox:
            return None
        source, packet = inbox.popleft()
        status.Get_source, status.Get_count = (lambda: source), (lambda kind: len(packet))

        def receive(into):
            into[0][:] = np.frombuffer(packet, np.uint8)
            return Request(lambda call: lambda: True).Start()

        return type("Coming", (), {"Irecv": staticmethod(receive)})

    def _make(self, combine, out):
        """A persistent operation: `out`, as handed in by all, is replaced by what `combine` makes of the rows."""
        number, self._made = self._made, self._made + 1
        return Request(functools.partial(self._start, number, combine, out))

    def _start(self, number, combine, out, call):
        world, key = self.world, (number, call)
        with world.lock:
            rows = world.taking_part.setdefault(key, {})
            rows[self.rank] = out.copy()
            assert len({(row.shape, str(row.dtype)) for row in rows.values()}) == 1, "the order differs"

        def test():
            if len(rows) < self.size:
                return False
            out[...] = combine([rows[rank] for rank in range(self.size)])
            return True

        return test

    def Allreduce_init(self, _in_place, array, _operation):
        return self._make(lambda rows: np.sum(rows, axis=0), array)

    def Allgather_init(self, _in_place, memory):
        size = memory[1]
        return self._make(
            lambda rows: np.concatenate([row[rank * size :][:size] for rank, row in enumerate(rows)]), memory[0]
        )

    def Iallreduce(self, *arguments):
        return self.Allreduce_init(*arguments).Start()

    def Iallgather(self, *arguments):
        return self.Allgather_init(*arguments).Start()
