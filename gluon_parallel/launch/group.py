"""Group of processes: starts all, watches them through their agents, and ends all after the first failure."""

import contextlib
import hmac
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Callable, Optional

from ..kvstore import heartbeat
from ..kvstore.flight_recorder import on_signal as flight_recorder
from ..launch_engines import Engine, agent
from .logs import Logs
from .member import Failure, Loss, Member, describe, status

_TICK = 0.1  # seconds between two looks at the clock
_PATIENCE = 0.7  # part of the limit after which a silent process is given up; the rest is for ending the group
_STOPPED = 0.5  # seconds between two looks after which this process was stopped itself
_SECOND_THOUGHT = 1.5  # seconds in which a better explanation than "somebody ended it" may arrive
_STOP = 0.4  # part of the limit in which processes that are asked to stop may save: 24 s, of Slurm's and Kubernetes' 30
_LEAVE = 10.0  # seconds that servers and mpirun get for leaving by themselves when all workers are done
_KILLED = 10.0  # seconds in which a killed process is gone, on a busy machine too


class Group:
    """Start all processes of an engine, pass on what they say, and see to it that they end together.

    Args:
        order: given a member's name, its host's number of cores and its address, returns what its agent runs:
            ``{"argv": ..., "env": ..., "cwd": ...}``.
        timeout: seconds within which a process that never started, was stopped or fell silent ends the group.
        min_processes: how many workers must be left for the others to go on without one that was lost; None: all.
        interrupts: the numbers of the signals that asked for an end so far.
        advice: what the terminal says after a lost worker has ended the group.
    """

    def __init__(
        self,
        engine: Engine,
        order: Callable[[str, int, str], dict[str, Any]],
        logs: Logs,
        timeout: float,
        interrupts: Sequence[int] = (),
        min_processes: Optional[int] = None,
        advice: str = "",
    ) -> None:
        self.min_processes = engine.num_workers if min_processes is None else min_processes
        self.engine, self.order = engine, order
        self.logs, self.timeout, self.interrupts, self.advice = logs, timeout, interrupts, advice
        self.failure: Optional[Failure] = None
        self.patience = _PATIENCE * timeout
        self.grace = min(5.0, timeout / 10)  # for a flight recorder's file, and for a last checkpoint
        self.stop_grace = _STOP * timeout
        self.hurry = min(2.0, timeout / 20)  # for what does not even answer
        names = [*engine.roles(), *(f"rank {rank}" for rank in range(engine.num_workers))]
        self.members = {name: Member(name) for name in names}
        self.workers = [member for member in self.members.values() if member.is_worker]
        self._token = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._starters: dict[str, subprocess.Popen] = {}
        self._clock = time.monotonic()
        self._began = self._now = 0.0  # seconds in which this process could look; see `_look`
        self._writing: set[Member] = set()  # after a failure, who writes its flight recorder
        self._end_at: Optional[float] = None
        self._kill_at: Optional[float] = None
        self._interrupts_passed_on, self._stops = 0, False
        self._workers_done: Optional[float] = None
        self._losses: list[Loss] = []
        self._waited: Optional[float] = None  # when a process said first that it waits for others in vain

    def run(self) -> Optional[Failure]:
        """Until nothing of the group is left; returns what ended it, None if every worker ended with status 0."""
        address = self.engine.address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with (
            socket.create_server((address, 0), family=family, backlog=128) as listener,
            self._selector,
            self.engine.kept,
        ):
            self._selector.register(listener, selectors.EVENT_READ)
            self.engine.folder = tempfile.mkdtemp(prefix="gluon_parallel-")
            try:
                self._start(f"{address}:{listener.getsockname()[1]}")
                while not self._all_gone():
                    for key, _ in self._selector.select(_TICK):
                        if key.fileobj is listener:
                            self._selector.register(agent.Connection(listener.accept()[0]), selectors.EVENT_READ)
                        else:
                            self._receive(key.fileobj)  # type: ignore[arg-type]
                    self._look()
                self._fail_by_loss()
                failed = (member for member in self.workers if member.failed_at is not None)
                for member in sorted(failed, key=lambda member: member.failed_at or 0.0):
                    self._fail_by_status(member)
            finally:
                self._leave_nothing()
                shutil.rmtree(self.engine.folder, ignore_errors=True)
        return self.failure

    def _start(self, address: str) -> None:
        contact = {agent.ADDRESS: address, agent.TOKEN: self._token}
        for start in self.engine.starts(contact):
            # A scheduler sends SIGTERM to mpirun too, which would kill all processes half a second later.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, agent.BLOCKED)
            try:
                with open(self.logs.path(start.name), "ab") as log:
                    self._starters[start.name] = starter = subprocess.Popen(
                        start.argv, env={**os.environ, **start.env}, stdout=log, stderr=log, start_new_session=True,
                        stdin=subprocess.PIPE if start.stdin else subprocess.DEVNULL,
                    )  # fmt: skip
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if starter.stdin is not None:
                with contextlib.suppress(BrokenPipeError), starter.stdin:  # it failed at once; it will be looked at
                    starter.stdin.write(start.stdin.encode())

    # what agents say ------------------------------------------------------------------------------------------------

    def _receive(self, connection: agent.Connection) -> None:
        member = next((member for member in self.members.values() if member.connection is connection), None)
        try:
            messages = connection.receive()
        except ValueError:  # a stranger's
            messages = None
        if messages is None:
            self._close(connection)
            if member is not None and not member.gone:
                member.gone = True
                self._lose(member, f"{member} was lost: the agent that watches it is gone, or its whole host", 1)
            return
        for message in messages:
            if member is not None:
                self._hear(member, message)
                continue
            member = self._greet(connection, message)
            if member is None:
                self._close(connection)
                return

    def _greet(self, connection: agent.Connection, message: Any) -> Optional[Member]:
        """The member whose agent connected; None for a stranger, who does not know the token."""
        try:
            known = hmac.compare_digest(str(message["hello"]), self._token)
            member = self.members[message["member"]]
        except (KeyError, TypeError):
            return None
        if not known or member.connection is not None:
            return None
        member.connection, member.host, member.heard = connection, message["host"], self._now
        member.address = message["address"]
        self._refuse_alike(member)
        if self._kill_at is None:
            self._send(member, **self.order(member.name, message["cores"], message["address"]))
        else:
            self._send(member, end=0, ask=True)
        return member

    def _refuse_alike(self, member: Member) -> None:
        """Fail where the engine would take this member's host for another one, and wait for ever."""
        for other in self.members.values():
            if other.address and other.address != member.address and self.engine.takes_for_one(other.host, member.host):
                message = (
                    f"{other.name} and {member.name} are on two hosts, {other.address} and {member.address}, that call "
                    f"themselves {other.host} and {member.host}; Open MPI takes them for one. Name the hosts by their "
                    "addresses; where the whole names are equal, give each host a name of its own"
                )
                self._fail(member, message, 1)

    def _hear(self, member: Member, message: dict[str, Any]) -> None:
        member.heard = self._now
        if "lines" in message:
            # A lost process says enough; after Ctrl-C, whoever asks by SIGUSR1 gets the answer.
            unseen = flight_recorder.SAID if self.failure is not None and self.failure.member else None
            self.logs.write(member.name, message["lines"], message["stream"], unseen)
        elif "started" in message:
            member.process = message["started"]
        elif "beat" in message:
            stopped = message["beat"] == "T"
            member.stopped_since = (member.stopped_since or self._now) if stopped else None
        elif "heartbeat" in message:
            if message["heartbeat"] == "arrived" and member.arrived is None:
                member.arrived = self._now
            elif message["heartbeat"] == flight_recorder.LISTENS:
                member.records = True
            elif message["heartbeat"] == flight_recorder.WRITTEN:
                self._writing.discard(member)
            elif message["heartbeat"] in (heartbeat.LOST_ANOTHER, heartbeat.WAS_DONE):
                member.lost_another, member.was_done = True, message["heartbeat"] == heartbeat.WAS_DONE
            elif message["heartbeat"] == heartbeat.GOES_ON:
                member.goes_on = True
            elif message["heartbeat"].startswith(heartbeat.WAITS_FOR):
                numbers = message["heartbeat"][len(heartbeat.WAITS_FOR) :].split()
                member.waits_for = {f"rank {number}" for number in numbers}
                self._waited = self._waited or self._now
            elif message["heartbeat"].startswith(heartbeat.ASKED):
                member.signalled = member.signalled or (self._now, int(message["heartbeat"].rpartition(" ")[2]))
            elif message["heartbeat"].startswith(heartbeat.SAYS):
                text = message["heartbeat"].removeprefix(heartbeat.SAYS)
                self.logs.say(text, [other.name for other in self.workers])
        elif "signalled" in message:
            member.signalled = (self._now, message["signalled"])
        elif "refused" in message:
            self._fail(member, f"{member.name} could not be started on {member.host}: {message['refused']}", 127)
        elif "exited" in message:
            member.return_code = message["exited"]
            self._writing.discard(member)
            if not member.is_lost:
                self._exited(member)
        elif "ended" in message:
            member.gone = True

    def _exited(self, member: Member) -> None:
        code = member.return_code or 0
        self._end_if_stopped()
        if code != 0:
            if code > 0 and not member.goes_on:  # one that is killed is another loss
                self._fail_by_loss()
            if member.lost_another or any(other.signalled is not None for other in self.workers):
                member.failed_at = self._now + (self.patience if member.was_done else 0)  # the other one is to blame
            else:
                self._fail_by_status(member)

    def _fail_by_status(self, member: Member) -> None:
        code = member.return_code or 1
        words = self.logs.tail(member.name) if not self.logs.live else ""
        log = f"; its log is {self.logs.path(member.name)}" if self.logs.announces else ""
        end = self._lose if code < 0 else self._fail  # an error would end the others as well
        end(member, f"{member} {describe(code)}{log}{words}", status(code))

    # what the clock says --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        before, self._clock = self._clock, time.monotonic()
        # While this process is stopped itself, no time passes for the others: they may have said something meanwhile.
        self._now += min(self._clock - before, max(_STOPPED, self.timeout / 10))
        if len(self.interrupts) > self._interrupts_passed_on:
            self._interrupt()
        self._end_if_written()
        if self._kill_at is None:
            self._look_at_losses()
            self._look_for_the_missing()
            self._look_for_the_hung()
            self._look_at_starters()
            self._look_for_the_end()

    def _look_for_the_missing(self) -> None:
        self._look_at_the_signalled()
        for member in self.members.values():
            if member.failed_at is not None and self._now - member.failed_at > _SECOND_THOUGHT and not member.is_lost:
                self._fail_by_status(member)
            if member.gone or member.is_lost or member.return_code is not None:
                continue
            if member.connection is None:
                if self._now - self._began > self.patience:
                    words = "".join(self.logs.tail(name) for name in {*self._starters} - {*self.members})
                    words = words or self.logs.tail(member.name)
                    message = f"{member.name} never started: nothing came from it within {self.patience:g} s{words}"
                    self._fail(member, message, 1)
            elif self._now - member.heard > self.patience:
                self._lose(member, f"{member} has been silent for {self.patience:g} s: its host or agent is stopped", 1)
            elif member.stopped_since is not None and self._now - member.stopped_since > self.patience:
                self._lose(member, f"{member} has been stopped (SIGSTOP or the like) for {self.patience:g} s", 1)
        came = [member.arrived for member in self.workers if member.arrived is not None]
        late = [member for member in self.workers if member.arrived is None]
        if came and late and self._now - min(came) > self.patience:
            names = ", ".join(map(str, late))
            self._fail(
                late[0],
                f"{names} did not create its kvstore within {self.patience:g} s of the first process. Where "
                "the script creates its kvstore, every process must; a longer wait: --timeout SECONDS",
                1,
            )

    def _look_at_the_signalled(self) -> None:
        """Lose those that got a signal from outside, if the others can go on without them; else stop all."""
        members = [one for one in self.members.values() if one.return_code != 0 and not one.is_lost]
        asked = {member: member.signalled for member in members if member.signalled is not None}
        if not asked or self._now - min(asked.values())[0] <= _SECOND_THOUGHT:
            return
        left = [worker for worker in self.workers if not worker.is_lost and worker not in asked]
        go_on = len(left) >= self.min_processes and self._first in left and all(worker.goes_on for worker in left)
        for member, (_, number) in asked.items():
            message = f"{member} got {signal.Signals(number).name} from outside the group"
            if go_on and member.is_worker:
                self._lose(member, message, 128 + number)
            else:
                self._stop(member.name, message, number)

    def _look_for_the_hung(self) -> None:
        """Lose those that others wait for in vain and that wait for nobody: they run, but make no step."""
        if self._waited is None or self._now - self._waited < _SECOND_THOUGHT:
            return
        self._waited, waiting = None, [member for member in self.workers if member.waits_for and not member.is_lost]
        for member in self.workers:
            late = [other.name for other in waiting if member.name in other.waits_for]
            if late and member not in waiting and member.return_code is None:
                self._lose(member, f"{member} made no step within {self.patience:g} s: {late[0]} waits for it", 1)
        for member in waiting:
            member.waits_for = set()

    def _look_at_starters(self) -> None:
        for name, starter in self._starters.items():
            code = starter.poll()
            if code is None or self._now - self._began < 0.5:
                continue
            mine = [m for m in self.members.values() if m.name == name or name not in self.members and m.is_worker]
            waiting = [member for member in mine if member.connection is None]
            if waiting:
                names = ", ".join(member.name for member in waiting)
                self._fail(waiting[0], f"{names} never started: {name} {describe(code)}{self.logs.tail(name)}", 1)

    def _look_for_the_end(self) -> None:
        if any(member.return_code != 0 and not member.is_lost for member in self.workers):
            return
        if self._workers_done is None:
            self._workers_done = self._now
        elif self._now - self._workers_done > min(_LEAVE, self.timeout):
            self._end(self.grace)  # servers that wait for something that will not come

    # the end --------------------------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        self._interrupts_passed_on = len(self.interrupts)
        number = self.interrupts[-1]
        if number == signal.SIGHUP:  # the terminal is gone
            self.logs.live = self.logs.announces = False
        if self.failure is None:
            self._stop("", signal.Signals(number).name, number)
        elif self._interrupts_passed_on > 1 and number == signal.SIGINT:
            self._end(0.0)

    def _stop(self, member: str, message: str, number: int) -> None:
        """Ask every process to stop because of the signal `number`, and give it the time to save."""
        if self.failure is not None:
            return
        self.failure, self._stops = Failure(member, message, 128 + number), True
        hint = "; Ctrl-C once more ends them at once" if number == signal.SIGINT else ""
        self.logs.say(f"{message}: every process is asked to stop, and killed if it has not after {self.stop_grace:g} s"
                      + hint)  # fmt: skip
        for worker in self.workers:  # one that has had SIGTERM itself would end at once by SIGINT, and save nothing
            self._send(worker, signal=signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        self._end(self.stop_grace, ask=False)
        self._end_if_stopped()

    def _end_if_stopped(self) -> None:
        """After a request to stop: once process 0, which saves, has ended, the others cannot go on without it."""
        if self._stops and self._first.return_code is not None:
            self._end(self.grace, ask=False)

    @property
    def _first(self) -> Member:
        """The worker that is process 0."""
        return next(member for member in self.workers if not member.is_lost)

    def _lose(self, member: Member, message: str, exit_code: int) -> None:
        """A process is lost: it is ended, and the others go on without it if enough of them are left."""
        others = [other for other in self.workers if other is not member and not other.is_lost]
        if not member.is_worker or len(others) < self.min_processes:
            self._fail(member, message, exit_code, self.advice if member.is_worker else "")
        elif not member.is_lost and self.failure is None:
            member.is_lost = True
            self._send(member, end=0, ask=False)
            self._losses.append(Loss(member, message, exit_code, self._now))
            self._look_at_losses()
            if not (member.goes_on or member.records):  # in MPI's start the others wait for it in vain
                self._fail_by_loss()

    def _look_at_losses(self) -> None:
        """The others go on when all have said so; who has not yet called gp.prepare or gp.survive may come there."""
        others = [other for other in self.workers if not other.is_lost]
        if all(other.goes_on for other in others):
            while self._losses:
                member, message, *_ = self._losses.pop(0)
                self.logs.say(f"{message}\n    {len(others)} of {len(self.workers)} processes go on without it",
                              [other.name for other in (*others, member)])  # fmt: skip
                for other in others:
                    self._send(other, say=heartbeat.LOST + member.name.partition(" ")[2])
        elif self._losses and self._now - self._losses[0].since > self.patience:
            self._fail_by_loss()

    def _fail_by_loss(self) -> None:
        """The group ends by a loss, if there is one without which the others are not known to go on."""
        if self._losses:
            member, message, exit_code, _ = self._losses[0]
            words = "it was lost before every process had called gp.prepare or gp.survive"
            self._fail(member, f"{message}\n    {words}", exit_code, self.advice)

    def lost(self) -> list[str]:
        """The workers that were lost while the others went on."""
        return [member.name for member in self.workers if member.is_lost]

    def _fail(self, member: Member, message: str, exit_code: int, advice: str = "") -> None:
        if self.failure is not None:
            return
        self.failure = Failure(member.name, message, exit_code)
        alive = [other for other in self.members.values() if other is not member and other.return_code is None]
        names = ", ".join(other.name for other in alive)
        self.logs.say(f"error: {message}" + (f"\n    {names} cannot go on and will be ended" if names else ""),
                         [*(other.name for other in alive), member.name])  # fmt: skip
        if advice:
            self.logs.say(advice)
        self._writing = {other for other in alive if other.records and other.stopped_since is None}
        for other in self._writing:
            self._send(other, signal=signal.SIGUSR1)
        self._end_at = self._now + self.grace
        self._end_if_written()

    def _end_if_written(self) -> None:
        """Once a process has failed: end the group as soon as the others have written their flight recorders."""
        if self._end_at is not None and (self._now >= self._end_at or not self._writing):
            self._end_at = None
            self._end(self.grace)

    def _end(self, grace: float, ask: bool = True) -> None:
        """Ask all processes to end, and kill those that have not after `grace` seconds."""
        at = self._now + grace
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)
        for member in self.members.values():
            self._send(member, end=grace, ask=ask)

    def _send(self, member: Member, **message: Any) -> None:
        if member.connection is not None and not member.gone:
            with contextlib.suppress(OSError):  # its end is noticed where it is read
                member.connection.send(message)

    def _close(self, connection: agent.Connection) -> None:
        self._selector.unregister(connection)
        connection.socket.close()

    def _all_gone(self) -> bool:
        if self._kill_at is not None and self._now > self._kill_at + self.hurry:
            return True  # what is left sees the end of its connection, if it sees anything
        ending = self._kill_at is not None  # an agent that connects now is refused, and leaves
        return all(
            member.gone or member.is_lost or (ending and member.connection is None) for member in self.members.values()
        )

    def _leave_nothing(self) -> None:
        """End what started the agents, close every connection, and sweep this machine's share of the group."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, agent.Connection):
                self._close(key.fileobj)
        until = time.monotonic() + (3.0 if self.failure is None else max(1.0, self.hurry))  # mpirun tidies up first
        for starter in self._starters.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                starter.wait(max(0.0, until - time.monotonic()))
        for number in (signal.SIGINT, signal.SIGKILL):  # they have blocked SIGTERM
            for starter in self._starters.values():
                if starter.poll() is None:
                    os.killpg(starter.pid, number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        starter.wait(self.hurry if number == signal.SIGINT else _KILLED)
        here = socket.gethostname()
        for member in self.members.values():
            if member.process and member.host == here:
                for process in agent.all_processes():
                    if agent.status(process)[3] == str(member.process):  # it belongs to the session
                        agent.send_signal(int(process), signal.SIGKILL)
