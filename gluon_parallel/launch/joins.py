"""Processes that join or leave: which place is free, who starts a new process, and what has become of it.

They follow from what :class:`Decisions` knows and from its clock. Nothing here starts or ends a process.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Callable, Optional

from .. import launcher
from ..environment import SILENT
from ..launch_engines.hosts import Host, place
from .host_list import HostList
from .logs import Logs
from .member import Member, describe

_SOON = 60.0  # seconds; a loss so soon after joining may have a cause that lasts
_SO_OFTEN = 3  # losses so soon, after which a place stays empty for a pause
_MEETS = 3.0  # seconds in which a meeting ends; after a loss in the middle, MPI may wait for ever
_PAUSE = 60.0  # seconds of the first pause; each further one is twice as long
_ANSWERS = 0.5  # part of the limit in which an agent on a host answers
_ASKED_AGAIN = 5.0  # seconds after which a host that has not answered is asked again; then twice as long, and so on
_ASKED_LAST = 600.0  # at most
_BROKEN_OFF = "another process was lost while it was met"


class Place:
    """A place for one process on a host, and what has become of those that had it."""

    def __init__(self, host: str, slot: int) -> None:
        self.host, self.slot = host, slot
        self.member: Optional[Member] = None  # None: nobody has had it
        self.joined = -math.inf  # when its process did, or did not; those that begin have been there always
        self.noted: Optional[Member] = None  # the process whose end was noted last
        self.num_early = 0  # processes in a row that did not join, or were lost soon after it
        self.closed_until, self.pause = 0.0, _PAUSE

    @property
    def is_free(self) -> bool:
        return self.member is None or self.member.is_lost

    def note_end(self, now: float) -> bool:
        """Its process is gone; returns whether the place stays empty for a pause from now on."""
        self.noted = self.member
        self.num_early = self.num_early + 1 if now - self.joined < _SOON else 0
        if self.num_early < _SO_OFTEN:
            return False
        self.num_early, self.closed_until, self.pause = 0, now + self.pause, 2 * self.pause
        return True


class Silence:
    """A host from which nothing came: when it is asked again. One that is lost is asked after the others."""

    def __init__(self) -> None:
        self.until, self.pause = 0.0, _ASKED_AGAIN

    def note(self, now: float) -> bool:
        """It has not answered; returns whether that was the first time."""
        is_first = self.until == 0.0
        self.until, self.pause = now + self.pause, min(2 * self.pause, _ASKED_LAST)
        return is_first


class Joiner:
    """A new process that is to join: its place, and how far it has come."""

    def __init__(self, member: Member, place: Place, replaced: Optional[Member], now: float) -> None:
        self.member, self.place = member, place
        self.replaced = replaced  # the lost process in whose place it comes
        self.since = now  # when its agent was asked for; then when another process was told to start it
        self.starter: Optional[Member] = None  # that one
        self.is_ready = False  # it waits to be met
        self.met_at = math.inf  # when the first of the others began to meet it
        self.num_rest, self.lost_at = 0, -math.inf  # how many the others are; when one of them was lost last

    @property
    def is_broken_off(self) -> bool:
        """Whether another process was lost in the meeting, or so shortly before that those that meet do not know it."""
        return self.lost_at > self.met_at - _MEETS


class Joins:
    """The new processes of a group, one after the other, and those that are to leave it.

    Args:
        workers: those that begin; a new one is appended when it has joined.
        hosts: where they begin, and how many each takes; empty: all on this machine.
        add: makes the member of a number known and has its agent started, given its host, its number on that and
            how many that takes; returns it.
        start: has a member start what stands under mpirun for a new one.
        send: a function of a member and keywords, which sends them to its agent.
        limit: seconds within which a new process must have come to ``gp.prepare``.
        least, most: how many processes there may be.
        wants: the list of hosts that is watched; None: as many as begin, on their hosts.

    Attributes:
        joined: names of those that have joined.
        leaving: processes that were asked to leave.
    """

    def __init__(
        self, workers: list[Member], hosts: Sequence[Host], add: Callable[[int, str, int, int], Member],
        start: Callable[[Member, Member], None], send: Callable[..., None], logs: Logs, limit: float, least: int,
        most: int, wants: Optional[HostList] = None,
    ) -> None:  # fmt: skip
        self._workers, self._add, self._start, self._send = workers, add, start, send
        self._logs, self.limit = logs, limit
        self._hosts, self._wants, self._num_first = hosts or [Host("localhost", len(workers))], wants, len(workers)
        self._least, self._most = least, most
        self._places: dict[tuple[str, int], Place] = {}
        for worker, (host, slot) in zip(workers, place(len(workers), self._hosts)):
            self._at(host, slot).member = worker
        self._silent: dict[str, Silence] = {}
        self._vacant: list[Member] = []  # lost ones whose place nobody has taken
        self._next_number = len(workers)
        self._joiner: Optional[Joiner] = None  # of the process that is to join
        self.joined: list[str] = []
        self.leaving: list[Member] = []

    def _at(self, host: str, slot: int) -> Place:
        return self._places.setdefault((host, slot), Place(host, slot))

    def look(self, now: float, rest: Sequence[Member]) -> None:
        """Decide what follows at this time; `rest` are the processes that train, all of which go on after a loss."""
        if self._wants is not None:
            self._wants.look(now)
        if self._joiner is not None:
            self._look_at(self._joiner, now, rest)
            return
        self._note_ends(now, rest)
        hosts = self._hosts
        if self._wants is not None and self._wants.hosts is not None:
            hosts = self._wants.hosts
        listed = [self._at(host.name, slot) for host in hosts for slot in range(host.slots)]
        here = [one.member for one in listed if one.member in rest and one.member not in self.leaving]
        num = self._num_first
        if self._wants is not None and self._wants.hosts is not None:
            num = max(self._least, min(len(listed), self._most))
        others = [member for member in rest if member not in here and member not in self.leaving]
        for member in others[max(0, self._least - len(here)) :]:  # so many stay until others have come
            self._leave(member, hosts, rest)
        free = [one for one in listed if one.is_free and now >= max(one.closed_until, self._silence_of(one))]
        if len(here) < num and free:
            self._begin(min(free, key=lambda one: (one.host in self._silent, one.member is None)), hosts, now)

    def _silence_of(self, one: Place) -> float:
        return self._silent[one.host].until if one.host in self._silent else 0.0

    def _note_ends(self, now: float, rest: Sequence[Member]) -> None:
        for one in self._places.values():
            member = one.member
            if member is None or not member.is_lost or one.noted is member:
                continue
            if member.is_cut_off:
                self._silent.setdefault(one.host, Silence())
            if member in self.leaving:
                one.noted = member
                continue
            if member in self._workers:
                self._vacant.append(member)
            if one.note_end(now):
                pause = f"{one.closed_until - now:g} s"
                text = f"{member.name} was the third in a row that was lost soon; its place stays empty for {pause}"
                self._say(text, rest)

    def _leave(self, member: Member, hosts: Sequence[Host], rest: Sequence[Member]) -> None:
        self.leaving.append(member)
        host = next(one.host for one in self._places.values() if one.member is member)
        slots = sum(one.slots for one in hosts if one.name == host)
        has = f"has {slots} processes on {host}" if slots else f"does not name {host} any more"
        self._say(f"{member.name} leaves after its step: the list {has}", rest)
        self._send(member, say=launcher.LEAVES)

    def _begin(self, free: Place, hosts: Sequence[Host], now: float) -> None:
        slots = next(host.slots for host in hosts if host.name == free.host)
        replaced = None
        if self._vacant:
            replaced = free.member if free.member in self._vacant else self._vacant[0]
            self._vacant.remove(replaced)
        self._joiner = Joiner(self._add(self._next_number, free.host, free.slot, slots), free, replaced, now)
        self._next_number += 1

    def _note_answer(self, joiner: Joiner, now: float, rest: Sequence[Member]) -> None:
        """Its agent has come, so mpirun may hear of it."""
        host, replaced = joiner.place.host, joiner.replaced
        self._silent.pop(host, None)
        comes = "comes to the others" if replaced is None else f"takes the place of {replaced.name}"
        where = f" on {host}" if host != "localhost" else ""
        self._say(f"{joiner.member.name}{where} {comes}; it joins when its script has come to gp.prepare", rest)
        self._have_started(joiner, now, rest)

    def _have_started(self, joiner: Joiner, now: float, rest: Sequence[Member]) -> None:
        joiner.since = now
        joiner.starter = next((member for member in rest if member not in self.leaving), rest[0])
        self._start(joiner.starter, joiner.member)

    def _note_silence(self, joiner: Joiner, now: float, rest: Sequence[Member]) -> None:
        """Its agent has not come: nobody has heard of the new process, so the next one gets its number."""
        new, host = joiner.member, joiner.place.host
        self._joiner, self._next_number, new.is_lost = None, self._next_number - 1, True
        if joiner.replaced is not None:
            self._vacant.insert(0, joiner.replaced)
        if self._silent.setdefault(host, Silence()).note(now):
            said = self._logs.tail(new.name)
            status = new.start_status
            how = f"(status {status})" if status is not None else f"within {_ANSWERS * self.limit:g} s"
            what = f"host {host} does not answer {how}, so no process joins there; it is asked again now and then"
            self._say(f"{new.not_started}; it is tried again later" if new.not_started else what + said, rest)

    def _look_at(self, joiner: Joiner, now: float, rest: Sequence[Member]) -> None:
        new, limit = joiner.member, self.limit
        if joiner.is_ready and len(rest) < joiner.num_rest:
            joiner.num_rest, joiner.lost_at = len(rest), now
        if not new.has_come:
            if new.start_status is not None or new.not_started or now - joiner.since > _ANSWERS * limit:
                self._note_silence(joiner, now, rest)
        elif joiner.starter is None:
            self._note_answer(joiner, now, rest)
        elif not new.has_stub and joiner.starter.is_lost:
            self._have_started(joiner, now, rest)  # it may have been lost before it did so; else one of two is refused
        elif new.gone and new.return_code is None:
            self.fail("its agent is gone", now, rest)
        elif new.stub_is_gone:
            self.fail("its stub under mpirun has ended", now, rest)
        elif new.return_code is not None:
            follows = joiner.is_broken_off and new.return_code > 0
            self.fail(_BROKEN_OFF if follows else f"it {describe(new.return_code)}", now, rest)
        elif new.stopped_since is not None:
            self.fail("it was stopped (SIGSTOP or the like)", now, rest)
        elif joiner.is_broken_off and now - max(joiner.lost_at, joiner.met_at) > _MEETS:
            self.fail(_BROKEN_OFF, now, rest)
        elif now - max(new.heard, joiner.since) > SILENT * limit:
            new.is_cut_off = True
            self.fail("nothing comes from its host any more", now, rest)
        elif not joiner.is_ready and now - joiner.since > limit:
            what = "its script did not come to gp.prepare" if new.has_stub else "mpirun did not start it"
            self.fail(f"{what} within {limit:g} s (--timeout)", now, rest)

    def hear(self, member: Member, text: str, now: float, rest: Sequence[Member]) -> None:
        """What a process has said of a new one."""
        joiner = self._joiner
        if joiner is None:
            return
        new = joiner.member
        if member is new and text.startswith(launcher.READY) and not joiner.is_ready:
            joiner.is_ready, joiner.num_rest = True, len(rest)
            for other in rest:
                self._send(other, say=launcher.JOINS + text[len(launcher.READY) :])
        elif member is new and text == launcher.JOINED:
            self._joiner, joiner.place.member, joiner.place.joined = None, new, now
            new.is_new = False
            self._workers.append(new)
            self.joined.append(new.name)
        elif text == f"{launcher.MEETS}{new.name.removeprefix('rank ')}":
            joiner.met_at = min(joiner.met_at, now)
        elif text.startswith(launcher.REFUSED):
            number, _, why = text[len(launcher.REFUSED) :].partition(" ")
            if new.name == f"rank {number}":
                self.fail(why, now, rest)

    def fail(self, why: str, now: float, rest: Sequence[Member]) -> None:
        """The new process does not join: it is ended, and its place is free again."""
        joiner, self._joiner = self._joiner, None
        if joiner is None:
            return
        new = joiner.member
        self._send(new, end=0, ask=False)
        new.is_lost = True
        if joiner.replaced is not None:
            self._vacant.insert(0, new)
        self._say(f"{new.name} did not join: {why}; {len(rest)} go on", [*rest, new])
        for other in rest:  # those that are about to meet it
            self._send(other, say=launcher.LOST + new.name.partition(" ")[2])
        joiner.place.member, joiner.place.joined = new, now

    def end(self) -> None:
        """All others end: so does the new one."""
        if self._joiner is not None:
            new, self._joiner = self._joiner.member, None
            self._send(new, end=0, ask=False)
            new.is_lost = True

    def _say(self, text: str, members: Sequence[Member]) -> None:
        self._logs.say(text, [member.name for member in members])


def start_message(number: int, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> str:
    """What a process is told that shall start a new one."""
    return launcher.STARTS + json.dumps({"number": number, "argv": [*argv], "env": dict(env), "cwd": cwd})
