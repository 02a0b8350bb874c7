"""Processes that join or leave: which place is free, who starts a new process, and what has become of it.

They follow from what :class:`Decisions` knows and from its clock. Nothing here starts or ends a process.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Callable, Optional

from ..kvstore import heartbeat
from .host_list import HostList
from .logs import Logs
from .member import Member, describe

_SOON = 60.0  # seconds; a process that is lost so soon after it has joined may be lost for a reason that stays
_SO_OFTEN = 3  # losses so soon, after which a place stays empty for a while
_MEETS = 3.0  # seconds after a loss in which the others have met a new process, or never will
_WHILE = 60.0  # seconds of the first while; each further one is twice as long
_BROKEN_OFF = "another process was lost while it was met"


class Place:
    """What one process at a time has: its number in the beginning, and how those that had it fared."""

    def __init__(self, number: int, member: Optional[Member] = None) -> None:
        self.number, self.member = number, member  # None: nobody has had it
        self.joined = -math.inf  # when its process did, or did not; those that begin have been there always
        self.noted: Optional[Member] = None  # the process whose end was noted last
        self.num_early = 0  # processes in a row that did not join, or were lost soon after it
        self.closed_until, self.pause = 0.0, _WHILE

    def note_end(self, now: float) -> bool:
        """Its process is gone; returns whether the place stays empty for a while from now on."""
        self.noted = self.member
        self.num_early = self.num_early + 1 if now - self.joined < _SOON else 0
        if self.num_early < _SO_OFTEN:
            return False
        self.num_early, self.closed_until, self.pause = 0, now + self.pause, 2 * self.pause
        return True


class Joins:
    """The new processes of a group, one after the other, and those that are to leave it.

    Args:
        workers: those that begin; a new one is appended when it has joined.
        add: makes the member of a number at a place known, and returns it.
        start: has a member start a new one.
        send: a function of a member and keywords, which sends them to its agent.
        limit: seconds within which a new process must have come to ``gp.prepare``.
        least, most: how many processes there may be.
        wants: the list that says how many there shall be; None: as many as begin.

    Attributes:
        joined: names of those that have joined.
        leaving: processes that were asked to leave.
    """

    def __init__(
        self, workers: list[Member], add: Callable[[int, int], Member], start: Callable[[Member, Member], None],
        send: Callable[..., None], logs: Logs, limit: float, least: int, most: int, wants: Optional[HostList] = None,
    ) -> None:  # fmt: skip
        self._workers, self._add, self._start, self._send = workers, add, start, send
        self._logs, self.limit = logs, limit
        self._wants, self._num_first, self._least = wants, len(workers), least
        self._places = [Place(number, member) for number, member in enumerate(workers)]
        self._places += map(Place, range(len(workers), most))
        self._next_number = len(workers)
        self._new: Optional[Member] = None  # the one that is to join
        self._place = self._places[0]  # which it takes
        self._asked = 0.0  # when it was asked for
        self._starter: Optional[Member] = None
        self._is_ready = False
        self._num_rest, self._lost_since = 0, math.inf  # how many shall meet it; since when they are fewer
        self.joined: list[str] = []
        self.leaving: list[Member] = []

    def look(self, now: float, rest: Sequence[Member]) -> None:
        """Decide what follows at this time; `rest` are the processes that train, all of which go on after a loss."""
        if self._wants is not None:
            self._wants.look(now)
        if self._new is not None:
            self._look_at_new(self._new, now, rest)
            return
        num = self._num_first
        if self._wants is not None and self._wants.num_wanted is not None:
            num = max(self._least, min(self._wants.num_wanted, len(self._places)))
        for place in self._places[num:]:
            if (member := place.member) is not None and not member.is_lost and member not in self.leaving:
                self.leaving.append(member)
                self._say(f"{member.name} leaves after its step: the list has {num} processes", rest)
                others = [other for other in rest if other is not member]
                for one in [*others, member]:  # the others first: then none takes it for lost
                    self._send(one, say=heartbeat.LEAVES + member.name.partition(" ")[2])
        for place in self._places[:num]:
            member = place.member
            if member is None:
                self._begin(place, now, rest)
                return
            if member in self.leaving:
                if member.is_lost:
                    self._begin(place, now, rest)
                    return
                continue
            if member.is_lost and place.noted is not member and place.note_end(now):
                pause = f"{place.closed_until - now:g} s"
                text = f"{member.name} was the third in a row that was lost soon; its place stays empty for {pause}"
                self._say(text, rest)
            if member.is_lost and now >= place.closed_until:
                self._begin(place, now, rest)
                return

    def _begin(self, place: Place, now: float, rest: Sequence[Member]) -> None:
        new = self._add(self._next_number, place.number)
        self._next_number += 1
        self._new, self._place, self._asked, self._is_ready = new, place, now, False
        old = f"takes the place of {place.member.name}" if place.member is not None else "comes to the others"
        self._say(f"{new.name} {old}; it joins when its script has come to gp.prepare", rest)
        self._have_started(rest)

    def _have_started(self, rest: Sequence[Member]) -> None:
        assert self._new is not None
        self._starter = rest[0]
        self._start(rest[0], self._new)

    def _look_at_new(self, new: Member, now: float, rest: Sequence[Member]) -> None:
        if not new.has_come and self._starter is not None and self._starter.is_lost:
            self._have_started(rest)  # perhaps it was lost before it had done so; one of the two agents is refused then
        elif new.gone and new.return_code is None:
            self.fail("its agent is gone", now, rest)
        elif new.return_code is not None:
            are_fewer = self._is_ready and (len(rest) < self._num_rest or self._lost_since < math.inf)
            follows = are_fewer and new.return_code > 0
            self.fail(_BROKEN_OFF if follows else f"it {describe(new.return_code)}", now, rest)
        elif new.stopped_since is not None:
            self.fail("it was stopped (SIGSTOP or the like)", now, rest)
        elif self._is_ready and len(rest) < self._num_rest:
            self._num_rest, self._lost_since = len(rest), now
        elif self._is_ready and now - self._lost_since > _MEETS:  # MPI may wait for ever in the middle of the meeting
            self.fail(_BROKEN_OFF, now, rest)
        elif not self._is_ready and now - self._asked > self.limit:
            what = "its script did not come to gp.prepare" if new.has_come else "it did not start"
            self.fail(f"{what} within {self.limit:g} s (--timeout)", now, rest)

    def hear(self, member: Member, text: str, now: float, rest: Sequence[Member]) -> None:
        """What a process has said of a new one."""
        new = self._new
        if new is None:
            return
        if member is new and text.startswith(heartbeat.READY) and not self._is_ready:
            self._is_ready, self._num_rest, self._lost_since = True, len(rest), math.inf
            for other in rest:
                self._send(other, say=heartbeat.JOINS + text[len(heartbeat.READY) :])
        elif member is new and text == heartbeat.JOINED:
            self._new, self._place.member, self._place.joined = None, new, now
            new.is_new = False
            self._workers.append(new)
            self.joined.append(new.name)
        elif text.startswith(heartbeat.REFUSED):
            number, _, why = text[len(heartbeat.REFUSED) :].partition(" ")
            if new.name == f"rank {number}":
                self.fail(why, now, rest)

    def fail(self, why: str, now: float, rest: Sequence[Member]) -> None:
        """The new process does not join: it is ended, and its place is free again."""
        new, self._new = self._new, None
        if new is None:
            return
        self._send(new, end=0, ask=False)
        new.is_lost = True
        self._say(f"{new.name} did not join: {why}; {len(rest)} go on", [*rest, new])
        for other in rest:  # those that are about to meet it
            self._send(other, say=heartbeat.LOST + new.name.partition(" ")[2])
        self._place.member, self._place.joined = new, now

    def end(self) -> None:
        """All others end: so does the new one."""
        if self._new is not None:
            self._send(self._new, end=0, ask=False)
            self._new.is_lost, self._new = True, None

    def _say(self, text: str, members: Sequence[Member]) -> None:
        self._logs.say(text, [member.name for member in members])


def order(number: int, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> str:
    """What a process is told that shall start a new one."""
    return heartbeat.STARTS + json.dumps({"number": number, "argv": [*argv], "env": dict(env), "cwd": cwd})
