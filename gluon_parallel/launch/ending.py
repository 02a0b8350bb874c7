"""End of a launched group: its cause, the time to write reports and checkpoints, and the final kill."""

import signal
from collections.abc import Mapping
from typing import Any, Callable, Optional

from .logs import Logs
from .member import Failure, Member

_STOP = 0.4  # part of the limit in which processes that are asked to stop may save: 24 s, of Slurm's and Kubernetes' 30


class Ending:
    """How a group ends, once it is decided that it does.

    Args:
        members: by name; others may come.
        send: a function of a member's name and keywords, which sends them to its agent.
        timeout: as of :class:`.Decisions`.

    Attributes:
        now: the time, which :class:`.Decisions` sets.
        failure: what the group ends by; None: nothing.
        kill_at: when what is left is killed; None: nobody was asked to end.
        grace: seconds for a flight recorder's file, a last checkpoint, 2 seconds of last words, and the end of a
            loader's workers; `hurry`: for what does not even answer.
    """

    def __init__(self, members: Mapping[str, Member], send: Callable[..., None], logs: Logs, timeout: float) -> None:
        self._members, self._send_to, self._logs = members, send, logs
        self.now = 0.0
        self.failure: Optional[Failure] = None
        self.kill_at: Optional[float] = None
        self.grace, self.hurry = min(5.0, max(3.0, timeout / 10)), min(2.0, timeout / 20)
        self._stop_grace, self._stops = _STOP * timeout, False
        self._writing: set[Member] = set()  # after a failure, who writes its flight recorder
        self._end_at: Optional[float] = None

    def fail(self, name: str, message: str, exit_code: int, advice: str = "") -> None:
        """The group ends by the member, or the command that has started members, of that name."""
        if self.failure is not None:
            return
        self.failure = Failure(name, message, exit_code)
        alive = [other for other in self._members.values() if other.name != name and other.return_code is None]
        names = ", ".join(other.name for other in alive)
        # Also into the logs of those that have ended: an error that follows from this one may have ended them first.
        self._logs.say(f"error: {message}" + (f"\n    {names} cannot go on and will be ended" if names else ""),
                       [*(other for other in self._members if other != name), name])  # fmt: skip
        if advice:
            self._logs.say(advice)
        self._writing = {other for other in alive if other.records and other.stopped_since is None}
        for other in self._writing:
            self.send(other, signal=signal.SIGUSR1)
        self._end_at = self.now + self.grace
        self.end_if_written()

    def stop(self, name: str, message: str, number: int, first: Member) -> None:
        """Ask every process to stop because of the signal `number`, and give it the time to save; `first` saves."""
        if self.failure is not None:
            return
        self.failure, self._stops = Failure(name, message, 128 + number), True
        hint = "; Ctrl-C once more ends them at once" if number == signal.SIGINT else ""
        limit = f"{self._stop_grace:g} s"
        self._logs.say(f"{message}: every process is asked to stop, and killed if it has not after {limit}{hint}")
        for member in self._members.values():  # one that has had SIGTERM itself would end at once by SIGINT, unsaved
            if member.is_worker and not member.is_new:
                self.send(member, signal=signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        self.end(self._stop_grace, ask=False)
        self.end_if_stopped(first)

    def end_if_stopped(self, first: Member) -> None:
        """After a request to stop: once process 0, which saves, has ended, the others cannot go on without it."""
        if self._stops and first.return_code is not None:
            self.end(self.grace, ask=False)

    def note_written(self, member: Member) -> None:
        """That member has written its flight recorder, or has ended."""
        self._writing.discard(member)

    def end_if_written(self) -> None:
        """Once a process has failed: end the group as soon as the others have written their flight recorders."""
        if self._end_at is not None and (self.now >= self._end_at or not self._writing):
            self._end_at = None
            self.end(self.grace)

    def end(self, grace: float, ask: bool = True) -> None:
        """Ask all processes to end, and kill those that have not after `grace` seconds."""
        at = self.now + grace
        self.kill_at = at if self.kill_at is None else min(at, self.kill_at)
        for member in self._members.values():
            self.send(member, end=grace, ask=ask)

    def send(self, member: Member, **message: Any) -> None:
        """Send a message to a member's agent, if it is there."""
        if member.has_come and not member.gone:
            self._send_to(member.name, **message)

    def is_over(self) -> bool:
        """Whether nothing of the group is left, as far as the agents say."""
        if self.kill_at is not None and self.now > self.kill_at + self.hurry:
            return True  # what is left sees the end of its connection, if it sees anything
        ending = self.kill_at is not None  # an agent that comes now is refused, and leaves
        return all(
            member.gone or member.is_lost or (ending and not member.has_come) for member in self._members.values()
        )
