"""Agent beside each process of a group: starts it, watches it from outside, and ends all that it started.

It is started as a file of its own and uses the standard library alone, so that it stands within a tenth of a second.
Agent and launcher speak in lines of JSON over one connection. When it ends, whatever the reason, the agent ends its
process: nothing outlives the launcher, not even one that was killed.
"""

import base64
import contextlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time

ADDRESS, TOKEN, MEMBER = (f"GLUON_PARALLEL_AGENT_{name}" for name in ("ADDRESS", "TOKEN", "MEMBER"))
IGNORED = "GLUON_PARALLEL_AGENT_IGNORED"  # numbers of the signals that the launcher was started to ignore
# The socket into which the process reports: its number and inode, and the number of the agent's process
REPORTS = "GLUON_PARALLEL_REPORTS"
BLOCKED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # signals that what starts the agents does not get
APART = "apart"  # argument of an agent that outlives what has started it
STUB = "stub"  # argument of what mpirun starts in the place of a process that runs beside it, see `Stub`

LINE = 1 << 24  # bytes of a message at most

_PDEATHSIG, _CHILD_SUBREAPER = 1, 36  # prctl(2)
_CHUNK = 1 << 16  # bytes of a line without an end that are sent on as if it had one
_BEAT = 0.5  # seconds between two looks at the process
_GRACE = 30.0  # seconds after a signal from outside, unless the launcher says less
_TAKES_NOTE = 60.0  # seconds in which mpirun takes note of the end of a connection; it may be stopped for a while
_LAST_WORDS = 2.0  # seconds for what is still in the pipes when everyone who could write to them is gone
_MPIRUN = "PMIX_SERVER_URI"  # begins the variables that say at which address of this machine mpirun listens
_BY_MPIRUN = ("PMIX_", "OMPI_", "PRTE_", "OPAL_")  # begin the variables by which mpirun gives a process its place
_PATHS = ("PATH", "LD_LIBRARY_PATH")  # those of the launcher's host, as by mpirun


def status(process):
    """State (as ``ps`` shows it), parent, process group, session and more, as proc(5) says; "" if it is gone."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["", "", "", ""]


def all_processes():
    """Numbers of the processes of this machine, as text."""
    return [name for name in os.listdir("/proc") if name.isdigit()]


def descendants(root):
    """The processes below `root`.

    Example:
        >>> os.getpid() in descendants(os.getppid())
        True
    """
    parents = {name: status(name)[1] for name in all_processes()}
    below: set = set()
    more = {str(root)}
    while more:
        more = {name for name, parent in parents.items() if parent in more} - below
        below |= more
    return set(map(int, below))


def send_signal(process, number):
    """Send a signal to a process that may just have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


class Connection:
    """Messages in both directions through a socket, each a line of JSON of `limit` bytes at most."""

    def __init__(self, connected, limit=LINE):
        self.socket, self.limit, self._rest = connected, limit, b""

    def fileno(self):
        """For selectors."""
        return self.socket.fileno()

    def send(self, message):
        """Send a dictionary."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self):
        """The messages that have come; None at the end of the connection; ValueError: something else has come."""
        try:
            data = self.socket.recv(1 << 18)
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        come = [*lines, self._rest]  # all but the first from one that has said who it is
        if len(come[0]) > self.limit or any(len(line) > LINE for line in come[1:]):
            raise ValueError(f"a message is longer than {self.limit} bytes")
        try:
            return [json.loads(line) for line in lines] if data else None
        except RecursionError as error:
            raise ValueError("a message is nested too deeply") from error


class Relay:
    """This end of a connection of a process to mpirun, whose bytes travel in the messages of this agent.

    PMIx, by which they speak, lets in whoever says the right numbers; so it listens at the loopback interface alone.
    """

    def __init__(self, selector, tell):
        self._selector, self._tell = selector, tell
        self._socket = self._listener = None

    def listen(self):
        """Wait for the process; returns the address at which."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._selector.register(self._listener, selectors.EVENT_READ, "relay")
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def connect(self, address):
        """Connect to mpirun."""
        host, _, port = address.rpartition(":")
        connected = socket.create_connection((host, int(port)), timeout=30)
        connected.settimeout(None)
        self._take(connected)

    def _take(self, connected):
        self._socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(connected, selectors.EVENT_READ, "relay")

    def read(self):
        """Send on what has come; the first connection to the listener is the only one."""
        if self._listener is not None:
            connected, address = self._listener.accept()
            if owner(address) != os.geteuid():
                connected.close()
                return
            self.close()
            self._take(connected)
            return
        if self._socket is None:  # it has just been closed
            return
        try:
            data = self._socket.recv(_CHUNK)
        except OSError:
            data = b""
        self._tell(relay=base64.b64encode(data).decode())
        if not data:
            self.close()

    def write(self, text):
        """Hand on what the other end has sent; "" at its end."""
        if text and self._socket is not None:
            with contextlib.suppress(OSError):  # its end is noticed where it is read
                self._socket.sendall(base64.b64decode(text))
        elif not text:
            self.close()

    @property
    def is_connected(self):
        return self._socket is not None

    def end(self):
        """Say that nothing comes any more; the other end closes when it has taken note."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def close(self):
        for one in (self._listener, self._socket):
            if one is not None:
                self._selector.unregister(one)
                one.close()
        self._listener = self._socket = None


def owner(address):
    """The user whose connected socket of this machine has that IPv4 address; None if there is none any more."""
    host, port = address
    local = f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
    with open("/proc/net/tcp", encoding="ascii") as file:
        rows = [line.split() for line in file]
    return next((int(row[7]) for row in rows if row[1] == local and row[3] == "01"), None)


class Agent:
    """One process, its output, and the connection to the launcher."""

    def __init__(self, connection):
        self.connection = connection
        self.process = None
        self.return_code = None
        self.kill_at = None  # when what is left will be killed; None: nobody asked for an end
        self._asked = False
        self._signal = None  # one that came to the agent, and not from the launcher
        self._reports = None  # socket by which the process reports, and is told who is lost
        self._buffers = {}  # stream -> bytes of a line that has no end yet
        self._selector = selectors.DefaultSelector()
        self._last_beat = 0.0
        self._connected = True
        self._may_leave = False  # the launcher has asked for the end, or is lost
        self._relay = Relay(self._selector, self.tell)

    def tell(self, **message):
        """Send one message; an agent that cannot reach its launcher ends its process."""
        if self._connected:
            try:
                self.connection.send(message)
            except OSError:
                self.lose()

    def lose(self):
        self._connected, self._may_leave = False, True
        self.end(grace=2.0)

    def start(self, argv, env, cwd):
        """Start the process in a session of its own, where no Ctrl-C of a terminal reaches it."""
        import ctypes  # here, since the doctor imports this file also where Python has none

        addresses = [name for name in env if name.startswith(_MPIRUN)]
        if addresses:  # mpirun runs on the launcher's host
            here = self._relay.listen()
            env = {**env, **{name: re.sub(r"//.*", f"//{here}", env[name]) for name in addresses}}

        self._reports, theirs = socket.socketpair()
        libc, me = ctypes.CDLL(None), os.getpid()
        # With the inode, so that no other file of that number is taken for it; and for a child of this process alone
        name = f"{theirs.fileno()}:{os.fstat(theirs.fileno()).st_ino}:{me}"

        def die_with_the_agent():
            libc.prctl(_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != me:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            self.process = subprocess.Popen(
                argv, cwd=cwd, env={**os.environ, **env, REPORTS: name}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, pass_fds=[theirs.fileno()],
                preexec_fn=die_with_the_agent,  # safe: this process has one thread
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            self.tell(refused=f"{type(error).__name__}: {error}")
            self.return_code = 127
            return
        finally:
            theirs.close()
        files: list = [self._reports, self.process.stdout, self.process.stderr]
        for stream, file in enumerate(files):
            self._buffers[stream] = b""
            self._selector.register(file, selectors.EVENT_READ, stream)
        self.tell(started=self.process.pid)

    def end(self, grace, ask=True):
        """Ask the process to end, and set the time when it and everything below it is killed."""
        at = time.monotonic() + grace
        self.kill_at = at if self.kill_at is None else min(at, self.kill_at)
        if self.process is None:
            self.return_code = 0  # there is nothing to end
        elif ask and not self._asked and self.return_code is None:
            self._asked = True
            send_signal(self.process.pid, signal.SIGCONT)  # a stopped process would not see the other one
            send_signal(self.process.pid, signal.SIGTERM)

    def run(self):
        """Until the process and all that it started are gone."""
        wakeup, signalled = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(signalled)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in BLOCKED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
        self._selector.register(wakeup, selectors.EVENT_READ, "signal")
        self._selector.register(self.connection, selectors.EVENT_READ, "launcher")
        while not self._all_gone():
            for key, _ in self._selector.select(_BEAT if self.kill_at is None else 0.05):
                self._read(key.fd, key.data)
            self._look()
        self._drain()
        self.tell(ended=self.return_code)

    def _on_signal(self, number, _frame):
        self._signal = number  # no more than that: it may have come in the middle of a message

    def _look(self):
        now = time.monotonic()
        if self._signal is not None:
            self.tell(signalled=self._signal)  # mpirun does so when another process failed: it is not the first cause
            self._signal = None
            self.end(grace=_GRACE)
        if self.process is not None and self.return_code is None:
            self.return_code = self.process.poll()
            if self.return_code is not None:
                for key, _ in self._selector.select(0):
                    if isinstance(key.data, int):  # what it said comes before its end
                        self._read(key.fd, key.data)
                self.tell(exited=self.return_code)
                self.end(grace=1.0)
                for process in descendants(os.getpid()):
                    send_signal(process, signal.SIGTERM)
        if self.kill_at is not None and now >= self.kill_at:
            for process in descendants(os.getpid()):
                send_signal(process, signal.SIGKILL)
        if now - self._last_beat >= _BEAT:
            self._last_beat = now
            self.tell(beat=status(self.process.pid)[0] if self.process is not None else "")

    def _all_gone(self):
        """Whether the process and its orphans, which become this one's children, have ended.

        This agent stays until the launcher has asked all to end: else mpirun would do so at once, after a failure and
        after the end of a process that has not left its group.
        """
        if self.return_code is None or (self.process is not None and not self._may_leave):
            return False
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    return False
            except ChildProcessError:
                return True

    def _read(self, file, name):
        if name == "launcher":
            self._obey()
            return
        if name == "relay":
            self._relay.read()
            return
        try:
            data = os.read(file, _CHUNK)
        except BlockingIOError:
            return
        except ConnectionResetError:  # it has ended without having read who was lost
            data = b""
        if name == "signal":
            return
        if not data:
            self._selector.unregister(file)
        *lines, rest = (self._buffers[name] + data).split(b"\n")
        if rest and (not data or len(rest) >= _CHUNK):
            lines, rest = [*lines, rest], b""
        self._buffers[name] = rest
        if lines:
            text = [line.decode("utf-8", "surrogateescape") for line in lines]
            if name == 0:
                for line in text:
                    self.tell(report=line)
            else:
                self.tell(stream=name, lines=text)

    def _obey(self):
        orders = self.connection.receive()
        if orders is None:
            self._selector.unregister(self.connection)
            self.lose()
            return
        for order in orders:
            if "argv" in order:
                self.start(order["argv"], order["env"], order["cwd"])
            elif "signal" in order and self.process is not None and self.return_code is None:
                send_signal(self.process.pid, order["signal"])
            elif "say" in order and self._reports is not None:
                with contextlib.suppress(OSError):  # it does not listen, or has ended
                    self._reports.send(order["say"].encode() + b"\n", socket.MSG_DONTWAIT)
            elif "relay" in order:
                self._relay.write(order["relay"])
            elif "end" in order:
                self._may_leave = True
                self.end(order["end"], order["ask"])

    def _drain(self):
        """Send what the process said last."""
        until = time.monotonic() + _LAST_WORDS
        while any(isinstance(key.data, int) for key in self._selector.get_map().values()):
            ready = [key for key, _ in self._selector.select(0.05) if isinstance(key.data, int)]
            for key in ready:
                self._read(key.fd, key.data)
            late = time.monotonic() - until
            if not ready and late >= 0 or late >= 5 * _LAST_WORDS:  # what is there is read, also by a late agent
                break


class Stub:
    """What mpirun starts in the place of a process that an agent starts, perhaps on another host.

    So no daemon of mpirun runs on hosts that may be lost, at which it would end all. The process gets the variables of
    this one, and with them its place among the others, and its connection to mpirun ends here. This stub ends when the
    launcher closes the connection, and mpirun learns by that that the process has ended. First it has to take note of
    the end of the connection to it: in the other order, as on a busy machine, it uses memory that it has freed.
    """

    def __init__(self, connection):
        self.connection = connection
        self._selector = selectors.DefaultSelector()
        self._relay = Relay(self._selector, self.tell)
        self._has_connected = False

    def tell(self, **message):
        """Send one message to the launcher; that it is gone is noticed where it is read."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def run(self):
        """Until the launcher has closed the connection."""
        variables = {name: value for name, value in os.environ.items() if name.startswith(_BY_MPIRUN) or name in _PATHS}
        self.tell(variables=variables)
        self._selector.register(self.connection, selectors.EVENT_READ, "launcher")
        while True:
            for key, _ in self._selector.select():
                if key.data == "relay":
                    self._relay.read()
                    continue
                messages = self.connection.receive()
                if messages is None:
                    self._leave()
                    return
                for message in messages:
                    self._pass_on(message["relay"])

    def _leave(self):
        self._selector.unregister(self.connection)
        self._relay.end()
        until = time.monotonic() + _TAKES_NOTE
        while self._relay.is_connected and time.monotonic() < until:
            if self._selector.select(_BEAT):
                self._relay.read()

    def _pass_on(self, text):
        if not text:
            self._relay.end()
            return
        if not self._has_connected:
            self._has_connected = True
            uri = next(value for name, value in os.environ.items() if name.startswith(_MPIRUN))
            try:
                self._relay.connect(uri.rpartition("/")[2])
            except OSError:  # mpirun is gone
                self.tell(relay="")
        self._relay.write(text)


def stand_apart():
    """Go on in a child with a session of its own: mpirun's daemon kills what it has started when it loses a host."""
    if child := os.fork():
        os.waitpid(child, 0)
        os._exit(0)
    os.setsid()


def main():
    """Connect to the launcher that the environment, or one line on standard input, names; obey; leave nothing."""
    import ctypes

    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)  # mpirun has unblocked them; until they are handled
    is_stub = sys.argv[1:] == [STUB]
    if is_stub or sys.argv[1:] == [APART]:
        stand_apart()
    ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1)  # orphans of the process become this one's children
    settings = json.loads(sys.stdin.readline()) if sys.argv[1:] == ["-"] else os.environ
    for number in settings.get(IGNORED, "").split():  # so does the process then; mpirun has reset them
        signal.signal(int(number), signal.SIG_IGN)
    host, _, port = settings[ADDRESS].rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanished does not say goodbye
    keeping = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20000))
    for option, value in (*keeping, ("TCP_NODELAY", 1)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    one = Stub(Connection(connection)) if is_stub else Agent(Connection(connection))
    member = settings.get(MEMBER)
    if member is None:  # started by mpirun or horovodrun, which number their processes
        ranks = (os.environ.get(name) for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "HOROVOD_RANK"))
        member = f"rank {next(rank for rank in ranks if rank is not None)}"
    secret = settings[TOKEN]
    for name in (ADDRESS, TOKEN, MEMBER, IGNORED):  # not the script's business
        os.environ.pop(name, None)
    cores = len(os.sched_getaffinity(0))
    own = connection.getsockname()[0]
    one.tell(hello=secret, member=member, host=socket.gethostname(), address=own, cores=cores, stands=is_stub)
    one.run()


if __name__ == "__main__":
    main()
