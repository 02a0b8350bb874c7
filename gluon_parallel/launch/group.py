"""Group of processes: starts an engine's agents, passes messages between them and the decisions, and leaves nothing."""

import contextlib
import hmac
import os
import secrets
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any, Callable, Optional

from ..launch_engines import LaunchEngine, Start, agent, start_one
from ..leftovers import remove_leftovers, temporary_folder
from .decisions import Decisions
from .host_list import HostList
from .joins import Joins, start_message
from .logs import Logs
from .member import Failure, Member

_TICK = 0.1  # seconds between two looks at the clock
_KILLED = 10.0  # seconds in which a killed process is gone, on a busy machine too
_SAYS_WHO = 10.0  # seconds within which a new connection has said whose agent it is, on a busy machine too
_NEW = 32  # connections beside those of all agents that have not said so yet; one more closes the oldest
_HELLO = 4096  # bytes in which it says so


class Launcher:
    """Start all processes of an engine, pass on what they say, and see to it that they end together.

    Args:
        program_of: a function of a member's name, its host's number of cores and its address; returns what its agent
            runs.
        interrupts: the numbers of the signals that asked for an end so far.
        timeout, min_processes, advice: see :class:`Decisions`.
        wants: see :class:`Joins`.
    """

    def __init__(
        self, engine: LaunchEngine, program_of: Callable[[str, int, str], dict[str, Any]], logs: Logs, timeout: float,
        interrupts: Sequence[int] = (), min_processes: Optional[int] = None, advice: str = "",
        wants: Optional[HostList] = None,
    ) -> None:  # fmt: skip
        self.engine, self.program_of, self.logs, self.interrupts = engine, program_of, logs, interrupts
        names = [*engine.roles(), *(f"rank {rank}" for rank in range(engine.num_workers))]
        self.decisions = Decisions(names, self._send, logs, timeout, min_processes, advice, time.monotonic())
        self._token = secrets.token_hex(16)
        self._tokens: dict[str, str] = {}  # of new members, which are given by processes that train
        self._stubs: dict[str, agent.Connection] = {}  # by the names of the members for which they stand
        self._variables: dict[str, dict[str, str]] = {}  # which they have given
        self._cores: dict[str, int] = {}  # of the hosts of members that may start
        if engine.max_processes is not None:  # others may join while processes train
            workers = self.decisions.workers
            for worker in workers:
                worker.has_stub = False
            self.decisions.joins = Joins(
                workers, engine.hosts, self._add_member, self._start_stub, self._send_if, logs, timeout,
                self.decisions.min_processes,
                engine.max_processes, wants,
            )  # fmt: skip
        self._selector = selectors.DefaultSelector()
        self._connections: dict[str, agent.Connection] = {}  # by their members' names
        self._new: dict[agent.Connection, float] = {}  # those that have not said whose they are, and since when
        self._starters: dict[str, subprocess.Popen] = {}

    def run(self) -> Optional[Failure]:
        """Until nothing of the group is left; returns what ended it, None if every worker ended with status 0."""
        for name in self.decisions.members:
            self.logs.open(name)
        address = self.engine.address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=128)
        remove_leftovers()
        with listener, self._selector, self.engine.kept, temporary_folder() as self.engine.folder:
            listener.setblocking(False)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # of all that connect, as Linux has it
            self._selector.register(listener, selectors.EVENT_READ)
            try:
                self._address = f"{address}:{listener.getsockname()[1]}"
                for start in self.engine.starts(self._contact(self._token)):
                    self._start(start)
                while not self.decisions.ending.is_over():
                    ready = [key.fileobj for key, _ in self._selector.select(_TICK)]
                    self.decisions.note_starters({name: one.poll() for name, one in self._starters.items()})
                    for connection in ready:
                        if isinstance(connection, agent.Connection):
                            self._receive(connection)
                    if listener in ready:  # after what the others have said, since one more may close the oldest
                        self._accept(listener)
                    self._close_the_silent()
                    self.decisions.look(time.monotonic(), self.interrupts)
                    self._let_go()
                self.decisions.finish()
            finally:
                self._leave_nothing()
        return self.decisions.failure

    def _contact(self, token: str) -> dict[str, str]:
        ignored = (number for number in agent.BLOCKED if signal.getsignal(number) is signal.SIG_IGN)
        return {
            agent.ADDRESS: self._address,
            agent.TOKEN: token,
            agent.IGNORED: " ".join(map(str, map(int, ignored))),
        }

    def _start(self, start: Start) -> None:
        # A scheduler sends SIGTERM to mpirun too, which would kill all processes half a second later.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, agent.BLOCKED)
        try:
            log = self.logs.open(start.name)
            self._starters[start.name] = starter = subprocess.Popen(
                start.argv, env={**os.environ, **start.env}, stdout=log, stderr=log, start_new_session=True,
                stdin=subprocess.PIPE if start.stdin else subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if starter.stdin is not None:
            with contextlib.suppress(BrokenPipeError), starter.stdin:  # it failed at once; it will be looked at
                starter.stdin.write(start.stdin.encode())

    def _accept(self, listener: socket.socket) -> None:
        while len(self._new) >= _NEW + len(self.decisions.members):
            self._close(next(iter(self._new)))
        with contextlib.suppress(OSError):  # the other side has gone again, or too many files are open
            self._add(listener.accept()[0])

    def _add(self, connected: socket.socket) -> None:
        connection = agent.Connection(connected, _HELLO)
        self._new[connection] = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ)

    def _close_the_silent(self) -> None:
        for connection, since in list(self._new.items()):
            if time.monotonic() - since > _SAYS_WHO:
                self._close(connection)

    def _receive(self, connection: agent.Connection) -> None:
        member = _key(self._connections, connection)
        try:
            messages = connection.receive()
        except ValueError:  # a stranger's
            messages = None
        if messages is None:
            self._close(connection)
            if member is not None:
                self.decisions.disconnect(member)
            elif (of := _key(self._stubs, connection)) is not None:
                del self._stubs[of]
                self.decisions.disconnect_stub(of)
            return
        for message in messages:
            if (of := _key(self._stubs, connection)) is not None:
                self._hear_stub(of, message)
            elif member is None:
                member = self._greet(connection, message)
                if member is None:
                    self._close(connection)
                    return
            elif "relay" not in message:
                self.decisions.hear(member, message)
            elif member in self._stubs:
                with contextlib.suppress(OSError):  # its end is noticed where it is read
                    self._stubs[member].send(message)

    def _hear_stub(self, member: str, message: dict[str, Any]) -> None:
        """What stands for a member under mpirun gives its variables, or what mpirun says to the member."""
        if "relay" in message:
            self._send(member, **message)
        else:
            self._variables[member] = message["variables"]
            self.decisions.members[member].has_stub = True
            self._start_program(member)

    def _start_program(self, name: str) -> None:
        """Have a member's agent start its process, once all is there that it needs."""
        member = self.decisions.members[name]
        if member.has_stub and name in self._cores:
            program = self.program_of(name, self._cores[name], member.address)
            if name in self._variables:
                program["env"].update(self.engine.adopted(self._variables[name], member.host))
            self._send(name, **program)

    def _let_go(self) -> None:
        """End what stands for members that have ended, and commands whose members nobody waits for any more."""
        for name, member in self.decisions.members.items():
            if name in self._stubs and (member.is_lost or member.gone):
                self._close(self._stubs.pop(name))
            starter = self._starters.get(name)
            if member.is_lost and (member.is_cut_off or not member.has_come) and starter and starter.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(starter.pid, signal.SIGKILL)  # what --rsh names may have started another one

    def _greet(self, connection: agent.Connection, message: Any) -> Optional[str]:
        """The member whose agent connected; None for a stranger, who does not know the token."""
        try:
            name = message["member"]
            known = hmac.compare_digest(str(message["hello"]), self._tokens.get(name, self._token))
            come = self._stubs if message.get("stands") else self._connections
            member = self.decisions.members.get(name)
            if not known or name in come or member is None or member.is_lost:
                return None
        except (KeyError, TypeError):
            return None
        del self._new[connection]
        come[name], connection.limit = connection, agent.LINE
        if come is self._connections:
            if self.decisions.greet(name, message["host"], message["address"], self.engine.takes_for_one):
                self._cores[name] = message["cores"]
                self._start_program(name)
        return name

    def _add_member(self, number: int, host: str, slot: int, slots: int) -> Member:
        """Make a new process known, and start its agent in a place of a host that takes so many."""
        name = f"rank {number}"
        self.engine.new_places[number] = host, slot, slots
        self._tokens[name] = secrets.token_hex(16)
        member = self.decisions.members[name] = Member(name)
        member.is_new, member.has_stub = True, False
        try:
            self._start(start_one(self.engine, self._contact(self._tokens[name]), name, host))
        except OSError as error:
            member.not_started = f"no process on {host} can be started: {error}"
        return member

    def _start_stub(self, starter: Member, new: Member) -> None:
        contact = {**self._contact(self._tokens[new.name]), agent.MEMBER: new.name}
        number = int(new.name.partition(" ")[2])
        self._send(starter.name, say=start_message(number, self.engine.stub, contact, os.getcwd()))

    def _send_if(self, member: Member, **message: Any) -> None:
        if member.has_come and not member.gone:
            self._send(member.name, **message)

    def _send(self, name: str, **message: Any) -> None:
        with contextlib.suppress(OSError):  # its end is noticed where it is read
            self._connections[name].send(message)

    def _close(self, connection: agent.Connection) -> None:
        self._new.pop(connection, None)
        self._selector.unregister(connection)
        connection.socket.close()

    def _leave_nothing(self) -> None:
        """End what started the agents, close every connection, and sweep this machine's share of the group."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, agent.Connection):
                self._close(key.fileobj)
        hurry = self.decisions.ending.hurry
        until = time.monotonic() + (3.0 if self.decisions.failure is None else max(1.0, hurry)) + hurry  # it tidies up
        for starter in self._starters.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                starter.wait(max(0.0, until - time.monotonic()))
        stuck = [starter for starter in self._starters.values() if starter.poll() is None]
        for starter in stuck:  # it has blocked all that asks it to end
            os.killpg(starter.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                starter.wait(_KILLED)
        here = socket.gethostname()
        for member in self.decisions.members.values():
            if member.process and member.host == here:
                for process in agent.all_processes():
                    if agent.status(process)[3] == str(member.process):  # it belongs to the session
                        agent.send_signal(int(process), signal.SIGKILL)
        remove_leftovers()  # of processes that were killed, and of an mpirun that was


def _key(connections: dict[str, agent.Connection], connection: agent.Connection) -> Optional[str]:
    return next((name for name, known in connections.items() if known is connection), None)
