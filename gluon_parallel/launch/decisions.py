"""Decisions of the launcher: who goes on without whom, and which loss or failure ends the group.

They follow from what the agents say and from a clock that is handed in. Nothing here starts, reads or ends a process.
"""

import json
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from .. import launcher
from ..environment import PATIENCE, SILENT
from .ending import Ending
from .joins import Joins
from .logs import Logs
from .member import Failure, Member, describe, status

_STOPPED = 0.5  # seconds between two looks after which this process was stopped itself
_SECOND_THOUGHT = 1.5  # seconds in which a better explanation than "somebody ended it" may arrive
_ENDED_EARLY = "ended its program with status 0 without leaving the group, as os._exit(0) does"
_LEAVE = 10.0  # seconds that servers and mpirun get for leaving by themselves when all workers are done


class Decisions:
    """What is known of a group's members, and what follows from it.

    Args:
        names: of all members, such as ``scheduler`` and ``rank 0``.
        send: a function of a member's name and keywords, which sends them to its agent.
        timeout: seconds within which a process that never started, was stopped or fell silent ends the group.
        min_processes: how many workers must be left for the others to go on without one that was lost; None: all.
        advice: what the terminal says after a lost worker has ended the group.
        clock: the time at the beginning, as of ``time.monotonic``.
    """

    def __init__(
        self, names: Sequence[str], send: Callable[..., None], logs: Logs, timeout: float,
        min_processes: Optional[int] = None, advice: str = "", clock: float = 0.0,
    ) -> None:  # fmt: skip
        self.members = {name: Member(name) for name in names}
        self.workers = [member for member in self.members.values() if member.is_worker]
        self.logs, self.timeout, self.advice = logs, timeout, advice
        self.min_processes = len(self.workers) if min_processes is None else min_processes
        self.outlives = min_processes is not None  # whether processes outlive others, and what has started them
        self.ending = Ending(self.members, send, logs, timeout)
        self.raised: list[str] = []  # the errors that processes have ended by, but for those that follow from others
        self.silence = SILENT * timeout
        self._clock, self._now = clock, 0.0  # seconds in which the launcher could look; see `look`
        self._interrupts_passed_on = 0
        self._workers_done: Optional[float] = None
        self._programs_done: Optional[float] = None  # when a process said first that the programs of all have ended
        self._losses: list[tuple[float, Member, Failure]] = []  # before all others are known to go on without them
        self._starters: Mapping[str, Optional[int]] = {}
        self.joins: Optional[Joins] = None  # of processes that come while others train
        self._waited: Optional[float] = None  # when a process said first that it waits for others in vain

    @property
    def failure(self) -> Optional[Failure]:
        """What the group ends by."""
        return self.ending.failure

    # what agents say ------------------------------------------------------------------------------------------------

    def greet(self, name: str, host: str, address: str, is_one_host: Callable[[str, str], bool]) -> bool:
        """An agent has come; whether its process may start. `is_one_host`: see :meth:`LaunchEngine.takes_for_one`."""
        member = self.members[name]
        member.has_come, member.host, member.address, member.heard = True, host, address, self._now
        for other in self.members.values():
            if other.address and other.address != address and is_one_host(other.host, host):
                message = (
                    f"{other.name} and {name} are on two hosts, {other.address} and {address}, that call themselves "
                    f"{other.host} and {host}; Open MPI takes them for one. Name the hosts by their addresses; where "
                    "the whole names are equal, give each host a name of its own"
                )
                self.ending.fail(member.name, message, 1)  # MPI would wait for ever
        if self.ending.kill_at is not None:
            self.ending.send(member, end=0, ask=True)
        return self.ending.kill_at is None

    def disconnect(self, name: str) -> None:
        """The connection to a member's agent has ended."""
        member = self.members[name]
        if not member.gone:
            member.gone = True
            member.is_cut_off = member.return_code is None
            if member.return_code != 0 and not member.is_new:
                self._lose(member, f"{member} was lost: the agent that watches it is gone, or its whole host", 1)

    def disconnect_stub(self, name: str) -> None:
        """A member's stub under mpirun has ended: to mpirun, and so to MPI, the member is lost."""
        member = self.members[name]
        member.stub_is_gone = True
        if member.return_code is None and not member.is_new:
            ended = [
                f" ({one} {describe(code)})" for one, code in self._commands_for_many().items() if code is not None
            ]
            self._lose(member, f"{member} was lost: its stub under mpirun has ended{''.join(ended)}", 1)

    def hear(self, name: str, message: Mapping[str, Any]) -> None:
        """A message of a member's agent."""
        member = self.members[name]
        member.hear(message, self._now)
        text = message.get("report", "")
        if self.joins is not None and text:
            self.joins.hear(member, text, self._now, self._rest)
        if "lines" in message:
            # After a failure, which is named already, the terminal shows no flight recorder; after Ctrl-C it does.
            unseen = launcher.SAID if self.failure is not None and self.failure.member else None
            self.logs.write(name, message["lines"], message["stream"], unseen)
        elif text.startswith(launcher.RAISED):
            self.raised.append(f"{name}: {text.removeprefix(launcher.RAISED)}")
        elif text.startswith(launcher.BAR):
            self.logs.show_bar(name, text.removeprefix(launcher.BAR))
        elif text == launcher.WRITTEN:
            self.ending.note_written(member)
        elif text == launcher.ENDS:
            self._programs_done = self._programs_done or self._now
        elif text.startswith(launcher.WAITS_FOR):
            self._waited = self._waited or self._now
        elif text.startswith(launcher.LEFT_OUT):
            self._note_left_out(*json.loads(text.removeprefix(launcher.LEFT_OUT)))
        elif text.startswith(launcher.SAYS):
            self.logs.say(text.removeprefix(launcher.SAYS), [other.name for other in self.workers])
        elif "refused" in message and member.is_new:
            member.return_code = 127
        elif "refused" in message:
            self.ending.fail(name, f"{name} could not be started on {member.host}: {message['refused']}", 127)
        elif "exited" in message:
            self.ending.note_written(member)
            if not member.is_lost and not member.is_new:
                self._exited(member)

    def _note_left_out(self, gone: Sequence[int], step: int, in_step: bool, num_left: int, seconds: float) -> None:
        """The others go on without these for good; see :func:`.launcher.left_out`."""
        members = {number: self.members[f"rank {number}"] for number in gone}
        leaving = [] if self.joins is None else self.joins.leaving
        asked = [number for number in gone if members[number] in leaving]
        text = launcher.left_out(gone, step, in_step, num_left, seconds, asked)
        self.logs.say(text, [worker.name for worker in self.workers])
        for member in members.values():
            member.left_out = True
            self._lose_if_left_out(member)

    def _exited(self, member: Member) -> None:
        code = member.return_code or 0
        self.ending.end_if_stopped(self._first)
        if code == 0:
            if self.outlives or not member.is_worker:  # else mpirun would end the others
                self.ending.send(member, end=self.ending.grace, ask=False)
            self._lose_if_left_out(member)
        elif self.ending.kill_at is None:  # else it was asked to end
            if code > 0 and not member.goes_on:  # one that is killed is another loss
                self._fail_by_loss()
            if member.lost_another or member.waits_for or any(other.signalled is not None for other in self.workers):
                member.failed_at = self._now + (self.silence if member.was_done else 0)  # the other one is to blame
            else:
                self._fail_by_status(member)

    def _lose_if_left_out(self, member: Member) -> None:
        """Lose a process that has ended well, as it seemed, and that the others have missed."""
        if self.joins is not None and member in self.joins.leaving and member.return_code == 0 and not member.is_lost:
            member.is_lost = True
            for other in self._rest:
                self.ending.send(other, say=launcher.LOST + member.name.partition(" ")[2])
        elif member.left_out and member.return_code == 0 and not member.is_lost:
            self._lose(member, f"{member} {_ENDED_EARLY}", 1)

    def _fail_by_waiting(self, member: Member) -> None:
        """The group ends by a process that others have waited for in vain; if there is none, by the end of `member`."""
        for other, waiting in self._waited_for():
            late = f"made no step within the limit of {self.timeout:g} s (--timeout)"
            what = late if other.return_code is None else _ENDED_EARLY
            self.ending.fail(other.name, f"{other} {what}: {waiting} waited for it", 1)
        self._fail_by_status(member)

    def _waited_for(self) -> list[tuple[Member, str]]:
        """Those that others wait for in vain and that wait for nobody, each with the name of one that waits."""
        waiting = [member for member in self.workers if member.waits_for and not member.is_lost]
        found = []
        for member in self.workers:
            names = [other.name for other in waiting if member.name in other.waits_for]
            if names and member not in waiting and not member.is_lost and not member.return_code:
                found.append((member, names[0]))
        return found

    def _fail_by_status(self, member: Member) -> None:
        code = member.return_code or 1
        words = self.logs.tail(member.name) if not self.logs.live else ""
        log = f"; its log is {self.logs.path(member.name)}" if self.logs.announces else ""
        message = f"{member} {describe(code)}{log}{words}"
        if code < 0:
            self._lose(member, message, status(code))
        else:  # an error would end the others as well
            self.ending.fail(member.name, message, status(code))

    # what the clock says --------------------------------------------------------------------------------------------

    def look(self, clock: float, interrupts: Sequence[int]) -> None:
        """Decide what follows at this time, from the numbers of the signals that the launcher got so far."""
        before, self._clock = self._clock, clock
        # While this process is stopped itself, no time passes for the others: they may have said something meanwhile.
        self._now += min(clock - before, max(_STOPPED, self.timeout / 10))
        self.ending.now = self._now
        if len(interrupts) > self._interrupts_passed_on:
            self._interrupt(interrupts)
        self.ending.end_if_written()
        if self.ending.kill_at is None:
            self._look_at_losses()
            self._look_at_the_signalled()
            self._look_for_the_missing()
            self._look_for_the_hung()
            self._look_at_starters()
            self._look_at_joins()
            self._look_for_the_end()
        if self.ending.kill_at is not None and self.joins is not None:
            self.joins.end()

    @property
    def _rest(self) -> list[Member]:
        """The workers that are not lost."""
        return [worker for worker in self.workers if not worker.is_lost]

    def _look_at_joins(self) -> None:
        """Nobody joins before all go on without those that are lost, nor when the first program has ended."""
        if self.joins is not None and not self._losses and self.failure is None:
            rest = self._rest
            ended = [worker for worker in rest if worker.return_code is not None and worker not in self.joins.leaving]
            if any(worker.return_code == 0 for worker in ended) or self._programs_done is not None:
                self.joins.end()
            elif not ended and all(worker.goes_on for worker in rest):
                self.joins.look(self._now, rest)

    def _look_for_the_missing(self) -> None:
        for member in self.members.values():
            if member.failed_at is not None and self._now - member.failed_at > _SECOND_THOUGHT and not member.is_lost:
                self._fail_by_waiting(member)
            if member.gone or member.is_lost or member.is_new or member.return_code is not None:
                continue
            if not (member.has_come and member.has_stub):
                if self._now > self.silence:
                    words = "".join(map(self.logs.tail, self._commands_for_many()))
                    words = words or self.logs.tail(member.name)
                    message = f"{member.name} never started: nothing came from it within {self.silence:g} s{words}"
                    self.ending.fail(member.name, message, 1)
            elif self._now - member.heard > self.silence:
                member.is_cut_off = True
                self._lose(member, f"{member} has been silent for {self.silence:g} s: its host or agent is stopped", 1)
            elif member.stopped_since is not None and self._now - member.stopped_since > self.silence:
                self._lose(member, f"{member} has been stopped (SIGSTOP or the like) for {self.silence:g} s", 1)
        came = [member.arrived for member in self.workers if member.arrived is not None]
        late = [member for member in self.workers if member.arrived is None]
        if came and late and self._now - min(came) > self.silence:
            message = (
                f"{', '.join(map(str, late))} did not create its kvstore within {self.silence:g} s of the first "
                "process. Where the script creates its kvstore, every process must; a longer wait: --timeout SECONDS"
            )
            self.ending.fail(late[0].name, message, 1)

    def _look_at_the_signalled(self) -> None:
        """Lose those that got a signal from outside, if the others can go on without them; else stop all."""
        members = [one for one in self.members.values() if one.return_code != 0 and not one.is_lost and not one.is_new]
        asked = {member: member.signalled for member in members if member.signalled is not None}
        if not asked or self._now - min(asked.values())[0] <= _SECOND_THOUGHT:
            return
        remaining = [worker for worker in self.workers if not worker.is_lost and worker not in asked]
        go_on = len(remaining) >= self.min_processes and self._first in remaining
        go_on = go_on and all(worker.goes_on for worker in remaining)
        for member, (_, number) in asked.items():
            message = f"{member} got {signal.Signals(number).name} from outside the group"
            if go_on and member.is_worker:
                self._lose(member, message, 128 + number)
            else:
                self.ending.stop(member.name, message, number, self._first)

    def _look_for_the_hung(self) -> None:
        """Lose those without which the others can go on, which wait for them in vain: they run, but make no step."""
        if not self.outlives or self._waited is None or self._now - self._waited < _SECOND_THOUGHT:
            return
        self._waited = None
        for member, waiting in self._waited_for():
            late = f"made no step within {self.silence:g} s"
            what = late if member.return_code is None else _ENDED_EARLY
            self._lose(member, f"{member} {what}: {waiting} waits for it", 1)
        for member in self.workers:
            member.waits_for = set()

    def note_starters(self, starters: Mapping[str, Optional[int]]) -> None:
        """The names of the commands that start agents, with the status of those that have ended.

        It is called before what agents say is heard: a process whose mpirun is killed ends for that reason.
        """
        self._starters = starters
        here = [member for member in self.workers if member.return_code is None and not member.is_lost]
        for name, code in starters.items():
            if code is not None and code < 0 and name not in self.members and here and not self.outlives:
                if all(member.has_come for member in here) and self.ending.kill_at is None:
                    message = f"{name}, which has started the processes, {describe(code)}{self.logs.tail(name)}"
                    self.ending.fail(name, message, status(code))

    def _commands_for_many(self) -> dict[str, Optional[int]]:
        """The commands that start more than one agent, as mpirun does, with the status of those that have ended."""
        return {name: code for name, code in self._starters.items() if name not in self.members}

    def _look_at_starters(self) -> None:
        """Fail where a command has ended without having started its members."""
        for name, code in self._starters.items():
            mine = [self.members[name]] if name in self.members else self.workers
            if mine[0].is_new:
                mine[0].start_status = code
                continue
            waiting = [member for member in mine if not (member.has_come and member.has_stub) and not member.is_lost]
            if code is not None and waiting and self._now >= 0.5:
                names = ", ".join(member.name for member in waiting)
                self.ending.fail(
                    waiting[0].name, f"{names} never started: {name} {describe(code)}{self.logs.tail(name)}", 1
                )

    def _look_for_the_end(self) -> None:
        here = [member for member in self.workers if member.return_code != 0 and not member.is_lost]
        if here:
            if self._programs_done is not None and self._now - self._programs_done > PATIENCE * self.timeout:
                names = ", ".join(map(str, here))
                message = (
                    f"{names} did not end within {PATIENCE * self.timeout:g} s after the programs of all had ended"
                )
                self.ending.fail(here[0].name, message, 1)
            return
        if self._workers_done is None:
            self._workers_done = self._now
            for member in self.workers:
                self.ending.send(member, end=self.ending.grace, ask=False)
        elif self._now - self._workers_done > min(_LEAVE, self.timeout):
            self.ending.end(self.ending.grace)  # servers that wait for something that will not come

    # the end --------------------------------------------------------------------------------------------------------

    def _interrupt(self, interrupts: Sequence[int]) -> None:
        self._interrupts_passed_on = len(interrupts)
        number = interrupts[-1]
        if number == signal.SIGHUP:  # the terminal is gone
            self.logs.live = self.logs.announces = False
        if self.failure is None:
            self.ending.stop("", signal.Signals(number).name, number, self._first)
        elif self._interrupts_passed_on > 1 and number == signal.SIGINT:
            self.ending.end(0.0)

    @property
    def _first(self) -> Member:
        """The worker that is process 0."""
        return next(iter(self._rest))

    def _lose(self, member: Member, message: str, exit_code: int) -> None:
        """A process is lost: it is ended, and the others go on without it if enough of them are left."""
        others = [other for other in self.workers if other is not member and not other.is_lost]
        stay = [other for other in others if self.joins is None or other not in self.joins.leaving]
        if not member.is_worker or len(stay) < self.min_processes:
            self.ending.fail(member.name, message, exit_code, self.advice if member.is_worker else "")
        elif not member.is_lost and self.failure is None:
            member.is_lost = True
            self.ending.send(member, end=0, ask=False)
            self._losses.append((self._now, member, Failure(member.name, message, exit_code)))
            self._look_at_losses()
            if not (member.goes_on or member.records):  # in MPI's start the others wait for it in vain
                self._fail_by_loss()

    def _look_at_losses(self) -> None:
        """The others go on when all have said so; who has not yet called gp.prepare or gp.survive may come there."""
        others = self._rest
        if all(other.goes_on for other in others):
            while self._losses:
                _, member, loss = self._losses.pop(0)
                self.logs.say(f"{loss.message}\n    {len(others)} of {len(self.workers)} processes go on without it",
                              [other.name for other in (*others, member)])  # fmt: skip
                for other in others:
                    self.ending.send(other, say=launcher.LOST + member.name.partition(" ")[2])
        elif self._losses and self._now - self._losses[0][0] > self.silence:
            self._fail_by_loss()

    def _fail_by_loss(self) -> None:
        """The group ends by a loss, if there is one without which the others are not known to go on."""
        if self._losses:
            _, member, loss = self._losses[0]
            words = "it was lost before every process had called gp.prepare or gp.survive"
            self.ending.fail(member.name, f"{loss.message}\n    {words}", loss.exit_code, self.advice)

    def lost(self) -> list[str]:
        """The workers without which the others went on."""
        left = [] if self.joins is None else self.joins.leaving
        return [member.name for member in self.workers if member.is_lost and member not in left]

    def finish(self) -> None:
        """Once nothing is left: what was to be explained by another member's end ends the group after all."""
        self._fail_by_loss()
        failed = (member for member in self.workers if member.failed_at is not None and not member.is_lost)
        for member in sorted(failed, key=lambda member: member.failed_at or 0.0):
            self._fail_by_waiting(member)
