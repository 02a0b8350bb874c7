"""Timeouts of the progress engine: find processes that ended, or that have been silent for too long."""

import time

from ...errors import WorkerLost
from .. import flight_recorder
from .pending import key_of

_MOST_LIMITS = 10  # an exchange whose partners are alive but silent about it ends after so many limits


class LostWorkers:
    """When each process was heard last, and which have ended their program."""

    def __init__(self, progress):
        self._progress = progress
        self.left: dict = {}  # rank -> why, of processes whose program has ended
        self.last: dict = {}  # rank -> the name of the exchange of its last message, and when that came
        self._heard = dict.fromkeys(progress.others, 0.0)
        self._next_look = 0.0

    def heard(self, rank, now, name=b""):
        """Note a sign of life of the process `rank`; a message has the name of its exchange."""
        if name:
            self.last[rank] = name, int(now * 1e9)
        if rank in self._heard:
            self._heard[rank] = now

    def look(self):
        """End all exchanges if one of them waits for a process that ended or was silent for the timeout."""
        now, progress = time.monotonic(), self._progress
        if now < self._next_look:
            return
        self._next_look = now + min(0.05, progress.timeout / 4)
        waiting = progress.pending.active()
        if progress.shared is not None:
            waiting += progress.shared.waiting()
            for rank in progress.shared.heard():
                self.heard(rank, now)
        for exchange in waiting:
            missing = exchange.ranks_missing()
            progress.pending.compare_elsewhere(exchange, missing)
            if progress.failure is not None:
                return
            gone = [rank for rank in missing if rank in self.left and not progress.messages.expects_from(rank)]
            if gone:
                self._fail(f"{self._where(exchange)}: {self._ended(gone)}")
                return
            heard = max([exchange.since, *(self._heard[rank] for rank in missing)])
            if now - heard > progress.timeout or now - exchange.since > _MOST_LIMITS * progress.timeout:
                ranks = ", ".join(map(str, sorted(missing))) or "nobody known"
                self._fail(
                    f"{self._where(exchange)}: waited {now - exchange.since:.3g} s for process {ranks}. It was killed "
                    "or stopped, or it runs fewer steps or other layers; look at its output. A longer limit: "
                    "GLUON_PARALLEL_TIMEOUT=seconds"
                )
                return

    def _fail(self, problem):
        self._progress.fail(WorkerLost(f"{problem}. {flight_recorder.write(f'WorkerLost: {problem}')}"))

    def _ended(self, ranks):
        failed = [f"process {rank} has ended its program with {self.left[rank]}" for rank in ranks if self.left[rank]]
        if failed:
            return "; ".join(failed)
        names = ", ".join(map(str, sorted(ranks)))
        return f"process {names} has ended its program. Every process must take the same number of steps"

    def _where(self, exchange):
        progress = self._progress
        return f"store 'mpi', key {key_of(exchange.name)}, process {progress.rank} of {progress.size}"
