"""A store between threads, for tests of what goes on after a loss: threads are processes, each of which may be lost."""

import threading

import numpy as np

import gluon_parallel as gp
from gluon_parallel.kvstore.contract import Contract
from gluon_parallel.kvstore.state import forget

LIMIT = 60  # seconds


class Lost(BaseException):
    """Ends the thread that is lost."""


class World:
    """What the threads of one training share."""

    def __init__(self, size):
        self.condition, self.lost, self.size = threading.Condition(), set(), size
        self.rows = {}  # (members, key, number of the call) -> {number of a thread: its vector}
        self.left = {}  # members -> {numbers of those that regroup}

    def run(self, train):
        """What ``train(store)`` returns in each thread that is not lost; raises what one of them has raised."""
        results, errors = {}, []

        def run(number):
            try:
                results[number] = train(Store(self, number))
            except Lost:
                pass  # the others go on
            except BaseException as error:
                errors.append(error)
                self.lose(number)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def lose(self, number):
        """Have the others miss that thread."""
        with self.condition:
            self.lost.add(number)
            self.condition.notify_all()


class Store(Contract):
    """One thread's end of a world, with the methods of `Vectors` and `Regrouping`."""

    type = "threads"

    def __init__(self, world, number):
        self.world, self.number = world, number
        self._go_on_with(tuple(range(world.size)))

    def _go_on_with(self, ranks):
        self.ranks, self.rank, self.num_workers = ranks, ranks.index(self.number), len(ranks)
        self._calls, self.failure = {}, None
        forget(self)

    def lose(self):
        """End this thread."""
        self.world.lose(self.number)
        raise Lost

    def wait_for(self, condition):
        """Wait until ``condition()`` of what another thread does."""
        with self.world.condition:
            assert self.world.condition.wait_for(condition, LIMIT)

    def check(self):
        if self.failure is None and self.world.lost & {*self.ranks}:
            self.failure = gp.errors.WorkerLost(f"lost {self.world.lost}")
        if self.failure is not None:
            raise self.failure

    def gather(self, key, vector):
        call = self._calls[key] = self._calls.get(key, 0) + 1
        with self.world.condition:
            self.check()
            rows = self.world.rows.setdefault((self.ranks, key, call), {})
            rows[self.number] = np.array(vector)
            self.world.condition.notify_all()
            assert self.world.condition.wait_for(
                lambda: len(rows) == self.num_workers or self.world.lost & ({*self.ranks} - {*rows}), LIMIT
            )
            if len(rows) < self.num_workers:
                self.check()
        return np.stack([rows[number] for number in self.ranks])

    def end_exchanges(self):
        """Nothing: they end at once."""

    def regroup(self):
        lost = sorted(self.world.lost & {*self.ranks})
        with self.world.condition:
            left = self.world.left.setdefault(self.ranks, set())
            left.add(self.number)
            self.world.condition.notify_all()
            assert self.world.condition.wait_for(lambda: left == {*self.ranks} - self.world.lost, LIMIT)
        self._go_on_with(tuple(number for number in self.ranks if number in left))
        return lost

    def take_part_in(self, progress):
        raise NotImplementedError

    def reduce(self, key, message, direction):
        raise NotImplementedError

    def shared_gather(self, key, vector):
        return None

    def end_of_gather(self, key):
        return lambda: None
