"""Timeouts of the progress engine: asks processes that are late, and finds those that ended or have been silent."""

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ... import launcher
from ...environment import MIN_PROCESSES, PATIENCE, SILENT
from ...native.records import C
from .. import flight_recorder
from ..flight_recorder.stack import of_this_process
from ..work import gave_up
from .agreement import key_in_words
from .processor_time import ProcessorTime, time_so_far
from .transport import ANSWERED, ASKED, FAILED, LEFT, Message

_FIRST_ASKED = 2.0  # seconds after which one who waits asks the others


class Account(NamedTuple):
    """What a process says of itself when it is asked."""

    num_exchanges: int  # how often it has come to any exchange
    counts: dict  # name -> {signature: how often it has come there}, of those that it was asked for
    missing: dict  # name -> {signature: the ranks for which it waits there}
    last: tuple  # the name of the exchange to which it came last, and how many nanoseconds ago
    stack: str  # where its main thread is
    elsewhere: list  # the processes, by their numbers in the whole run, for which it waits in other groups
    processor_time: tuple  # the fields of :class:`.ProcessorTime`


BETWEEN = b" between hosts"  # ends the signature of what the hosts' first processes exchange for all
_NOTHING = Account(-1, {}, {}, (b"", 0), "", [], (0.0, 0.0))


def _works(before: Account, now: Account) -> bool:
    """Whether a process works between its steps, as one that draws curves for all; to wait for others is no work."""
    waits = before.missing or before.elsewhere or now.missing or now.elsewhere
    return not waits and ProcessorTime(*now.processor_time).is_busy_since(ProcessorTime(*before.processor_time))


class LostWorkers:
    """What is known of the other processes: which have ended, and how far those have come that were asked."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self.left: dict = {}  # rank -> why, of processes whose program has ended
        self.waited_for: set[int] = set()  # those for which this process has given up
        self.last: dict = {}  # rank -> the name of the exchange to which it came last, and when
        self._accounts: dict[int, Account] = {}
        self._heard = dict.fromkeys(progress.others, 0.0)
        self._late: list = []  # the exchanges that wait so long that the others are asked
        self._next_look = self._next_asked = self._pause = self._reported = 0.0

    def account(self, names: Iterable[bytes]) -> Account:
        """What this process says of itself."""
        progress = self._progress
        counts = {name: self._count(name) for name in names if name in progress.counts}
        missing: dict = {}
        for exchange in progress.active():
            missing.setdefault(exchange.name, {})[exchange.signature] = exchange.ranks_missing()
        name, when = progress.last
        # A list: pushes add keys meanwhile.
        num_exchanges = sum(sum(self._count(name).values()) for name in list(progress.counts))
        elsewhere = {
            other.ranks[rank]
            for other in progress.progress_engines
            if other is not progress
            for rank in other.lost.waited_for.union(*(exchange.ranks_missing() for exchange in other.active()))
        }
        age = time.monotonic_ns() - when
        return Account(
            num_exchanges, counts, missing, (name, age), of_this_process(), sorted(elsewhere), (*time_so_far(),)
        )

    def take(self, rank: int, account: Account) -> None:
        """Note what the process `rank` says of itself."""
        account = Account(*account)
        before, self._accounts[rank] = self._accounts.get(rank), account
        if before is not None and (account.num_exchanges != before.num_exchanges or _works(before, account)):
            self.heard(rank)
        name, age = account.last
        if name:
            when = time.monotonic_ns() - age
            self.last[rank] = name, when
            self._heard[rank] = max(self._heard.get(rank, 0.0), when / 1e9)  # the first answer says it by this alone

    def deliver(self, source: int, message: Message) -> None:
        """Take a message in which another process speaks of itself."""
        progress = self._progress
        if message.kind == FAILED:
            if progress.failure is None:
                why = message.payload.removeprefix("WorkerLost: ").partition(flight_recorder.WHERE)[0]
                verb = "gave up" if message.payload.startswith("WorkerLost: ") else "failed"
                problem = f"store 'mpi': process {progress.ranks[source]} {verb}: {why}".rstrip(" .")
                progress.fail(flight_recorder.gave_up(problem), tell=False)
        elif message.kind == LEFT:
            reason, account = message.payload
            self.take(source, account)
            self.left[source] = reason
        elif message.kind == ASKED:
            names, account = message.payload
            self.take(source, account)
            progress.messages.post(source, Message(ANSWERED, b"", b"", self.account(names)))
        elif message.kind == ANSWERED:
            self.take(source, message.payload)

    def _count(self, name: bytes) -> dict[bytes, int]:
        """How often this process has come to the exchanges of that name, by their signatures."""
        signatures = self._progress.counts.get(name, {})
        return {
            signature: max(1, n.pushed) if isinstance(n, C.HostKey) else n for signature, n in list(signatures.items())
        }

    def heard(self, rank: int) -> None:
        """Note that the process `rank` goes on."""
        if rank in self._heard:
            self._heard[rank] = time.monotonic()

    def ranks_behind(self, exchange: Any, ranks: Iterable[int], number: float) -> set[int]:
        """The processes that keep an exchange waiting: those of `ranks` that have not yet begun it `number` times.

        Where the first process of a host has not, because it waits for others of its host, these are returned instead.
        """
        progress, found = self._progress, set[int]()
        for rank in ranks:
            account = self._accounts.get(rank, _NOTHING)
            if rank != progress.rank and account.counts.get(exchange.name, {}).get(exchange.signature, 0) < number:
                waits_for = [
                    missing for signature, missing in account.missing.get(exchange.name, {}).items()
                    if exchange.signature.startswith(signature)
                ]  # fmt: skip
                found |= set().union(*waits_for) or {rank}
        return found - {progress.rank}

    def _causes_of(self, ranks: Iterable[int]) -> set[int]:
        """The processes that these wait for in other groups; one that waits for none stands for itself."""
        progress, found = self._progress, set[int]()
        for rank in ranks:
            elsewhere = self._accounts.get(rank, _NOTHING).elsewhere
            found |= {rank for rank in progress.others if progress.ranks[rank] in elsewhere} or {rank}
        return found

    def ahead(self, rank: int) -> list[bytes]:
        """The names of exchanges at which that rank waits, and to which this process has not come."""
        counts, account = self._progress.counts, self._accounts.get(rank, _NOTHING)
        return [
            name for name, signatures in account.missing.items()
            if any(self._progress.rank in missing for missing in signatures.values())
            or not set(signatures).intersection(counts.get(name, ()))
        ]  # fmt: skip

    def stack(self, rank: int) -> str:
        """Where the main thread of that rank was when it was asked last; "" if it has not answered."""
        return self._accounts.get(rank, _NOTHING).stack

    def look(self) -> None:
        """End all exchanges if one of them waits for a process that ended or was silent for the timeout."""
        now = time.monotonic()
        if now >= self._next_look:
            began = time.thread_time()
            self._look_at_all(now)
            work = time.thread_time() - began  # it grows with the keys and with the processes
            self._next_look = now + max(min(0.05, self._progress.timeout / 4), 20 * work)

    def _look_at_all(self, now: float) -> None:
        progress = self._progress
        if progress.shared is not None:
            for rank in progress.shared.heard():
                self.heard(rank)
        waiting = progress.active()
        self._ask(waiting, now)
        if progress.failure is not None:
            return
        for exchange in waiting if self.left else self._late:  # the others cannot have anything to tell yet
            missing = exchange.ranks_missing()
            self._compare(exchange, missing)
            if progress.failure is not None:
                return
            missing = self._causes_of(missing)
            gone = [rank for rank in missing if rank in self.left]
            if gone:
                self.waited_for = {*gone}
                progress.fail(flight_recorder.gave_up(f"{self._where(exchange)}: {self._ended(gone)}"))
                return
            # Where all have come, the last one may have come just now.
            heard = max([exchange.since, *(self._heard[rank] for rank in missing or self._heard)])
            if MIN_PROCESSES in os.environ and self._reported < heard < now - SILENT * progress.timeout:
                self._reported = now
                self._report(missing)
            # Those that compute, or exchange elsewhere, are heard of, but not for ever.
            if now - heard > progress.timeout or now - exchange.since > PATIENCE * progress.timeout:
                self.waited_for = {*missing}
                self._report(missing)
                where, waited = f"store 'mpi', {key_in_words(exchange.name)}", now - exchange.since
                advice = "It was killed or stopped, or it runs fewer steps or other layers; look at its output"
                progress.fail(gave_up(where, progress.name, waited, advice, self._names(missing)))
                return

    def _report(self, missing: Iterable[int]) -> None:
        """Tell the launcher for which processes this one waits in vain."""
        launcher.send(launcher.WAITS_FOR + " ".join(map(str, self._names(missing))))

    def _ask(self, waiting: Sequence[Any], now: float) -> None:
        """Ask those for which somebody waits here how far they have come: soon at first, then less often."""
        first = min(_FIRST_ASKED, self._progress.timeout / 8)
        self._late = late = [exchange for exchange in waiting if now - exchange.since > first]
        if not late:
            self._next_asked, self._pause = 0.0, first
        elif now >= self._next_asked:
            self._next_asked = now + self._pause
            self._pause = min(2 * self._pause, self._progress.timeout / 4)
            # MPI says nothing of a process whose end it knew before the operation, or the communicator, was made.
            if MIN_PROCESSES in os.environ and self._progress.comm.Get_failed().size:
                self._progress.fail(self.from_mpi_error(RuntimeError("a process that is waited for has ended")))
                return
            names = [exchange.name for exchange in late]
            question = Message(ASKED, b"", b"", (names, self.account(names)))
            for rank in set().union(*(exchange.ranks_missing() for exchange in late)) - set(self.left):
                self._progress.messages.post(rank, question)
            self._progress.messages.flush()

    def _compare(self, exchange: Any, missing: Iterable[int]) -> None:
        """Refuse the exchange if one that is missing waits at the same key with another shape."""
        mine = self._count(exchange.name)
        for rank in missing:
            account = self._accounts.get(rank, _NOTHING)
            theirs = account.counts.get(exchange.name, {})
            signatures = account.missing.get(exchange.name, ())
            others = [
                signature
                for signature in signatures
                if signature in theirs and mine.get(signature, 0) < theirs[signature]
            ]
            if others and BETWEEN not in others[0] and not exchange.signature.startswith(others[0]):
                signatures = {self._progress.rank: exchange.signature, rank: others[0]}
                self._progress.everyone.refuse(exchange.name, signatures)
                return

    def from_mpi_error(self, error: Exception) -> Exception:
        """What ends all exchanges after an error of MPI: names the lost processes, and those that were waited for."""
        lost, ranks, comm = "", [], self._progress.comm
        with contextlib.suppress(Exception):  # this MPI cannot tell
            failed = comm.Get_failed()
            if failed.size:
                ranks = self._progress.mpi.Group.Translate_ranks(failed, None, comm.Get_group())
                lost = f"lost the connection to process {self._listed(ranks)}: it ended or was killed, or its host or "
                lost += "network failed. "
        # A process that gave up its own wait is lost too, and perhaps the message in which it said so.
        for exchange in self._late:
            missing = exchange.ranks_missing()
            if not {*missing} <= {*ranks}:
                waited = time.monotonic() - exchange.since
                lost += f"Until then, this process waited {waited:.3g} s for process {self._listed(missing)}. "
                break
        text = f"store 'mpi', {self._progress.name}: {lost}MPI failed: {type(error).__name__}: {error}"
        return flight_recorder.gave_up(text)

    def _ended(self, ranks: Iterable[int]) -> str:
        failed = {self._progress.ranks[rank]: self.left[rank] for rank in ranks if self.left[rank]}
        if failed:
            return "; ".join(f"process {rank} has ended its program with {why}" for rank, why in failed.items())
        names = self._names(ranks)
        advice = flight_recorder.advice("Every process must take the same number of steps", waited_for=names)
        return f"process {', '.join(map(str, names))} has ended its program. {advice}"

    def _where(self, exchange: Any) -> str:
        return f"store 'mpi', {key_in_words(exchange.name)}, {self._progress.name}"

    def _names(self, ranks: Iterable[int]) -> list[int]:
        """The numbers among all processes."""
        return sorted(self._progress.ranks[rank] for rank in ranks)

    def _listed(self, ranks: Iterable[int]) -> str:
        return ", ".join(map(str, self._names(ranks)))
