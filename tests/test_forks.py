"""Forks and children of a process: handlers of signals, exits, and its place in a group stay with itself."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from processes import PYTHONPATH

import gluon_parallel as gp
from gluon_parallel import environment, forks
from gluon_parallel.store_table import STORES
from gluon_parallel.training import stopping

FORK = multiprocessing.get_context("fork")


def in_fork(function):
    """What a function returns in a fork of this process."""
    receiving, sending = FORK.Pipe(duplex=False)
    child = FORK.Process(target=lambda: sending.send(function()))
    child.start()
    result = receiving.recv()
    child.join()
    return result


def dispositions():
    """How this process reacts to stop signals, and which signals it blocks."""
    handlers = [str(signal.getsignal(number)) for number in stopping.SIGNALS]
    return handlers, signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_fork_has_the_handlers_that_there_were_before_a_training():
    before = dispositions()
    with stopping.postponed(lambda: True), forks.signals_handled({signal.SIGTERM: print}):
        assert dispositions() != before
        assert in_fork(dispositions) == before
        assert in_fork(lambda: in_fork(dispositions)) == before
    assert dispositions() == before


def test_terminate_ends_a_child_of_a_training_and_is_no_signal_to_the_training():
    with stopping.postponed(lambda: True):
        child = FORK.Process(target=time.sleep, args=(1000,))
        child.start()
        child.terminate()
        child.join(60)
        assert child.exitcode == -signal.SIGTERM
        assert stopping.requested() is None


def train_until_sigterm():
    with stopping.postponed(lambda: True):
        signal.raise_signal(signal.SIGTERM)
        return stopping.requested()


def test_a_fork_can_train_and_stop_by_itself():
    with stopping.postponed(lambda: True):
        assert in_fork(train_until_sigterm) == signal.SIGTERM
        assert stopping.requested() is None


@pytest.mark.parametrize("number", stopping.SIGNALS, ids=lambda number: signal.Signals(number).name)
def test_a_signal_that_was_ignored_at_the_start_of_a_training_stays_so(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with stopping.postponed(lambda: True):
            signal.raise_signal(number)
            assert stopping.requested() is None
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def printed(script, status=0, **variables):
    """What a program prints that ends with this status."""
    argv, variables = [sys.executable, "-c", textwrap.dedent(script)], {"PYTHONPATH": PYTHONPATH, **variables}
    done = subprocess.run(argv, env={**os.environ, **variables}, capture_output=True, text=True, timeout=280)
    assert done.returncode == status, done.stderr
    return done.stdout


def test_a_signal_that_comes_to_a_fork_before_it_has_undone_the_handlers_is_not_the_trainings():
    script = """
        import os, signal
        os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
        from gluon_parallel import forks
        process = os.getpid()
        def handle(*_):
            print("ours" if os.getpid() == process else "not ours", flush=True)
        with forks.signals_handled({signal.SIGTERM: handle}):
            child = os.fork()
            print("ended by", os.waitpid(child, 0)[1])
            os.kill(os.getpid(), signal.SIGTERM)
    """
    assert printed(script) == f"ended by {int(signal.SIGTERM)}\nours\n"


def test_a_fork_can_leave_the_block_in_which_signals_are_handled():
    script = """
        import os, signal
        from gluon_parallel import forks
        with forks.signals_handled({signal.SIGTERM: print}):
            child = os.fork()
            if not child:
                raise SystemExit(5)
            print(os.waitpid(child, 0)[1] >> 8)
    """
    assert printed(script) == "5\n"


@pytest.mark.parametrize("waits", [False, True])
def test_where_no_thread_starts_any_more_a_process_ends_at_once_too(waits):
    """As in functions of atexit since Python 3.12; also where another library's finalizer waits."""
    script = f"""
        import os, threading, time
        from multiprocessing import util
        from gluon_parallel import forks

        def start(_thread):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        forks._END = 0.1 if {waits} else 60.0
        util.Finalize(None, time.sleep if {waits} else lambda _: os.write(1, b"ended"), args=(250,), exitpriority=1)
        threading.Thread.start = start
        forks.at_exit(lambda: forks.end_at_once(7))
    """
    assert printed(script, status=7) == ("" if waits else "ended")


@pytest.mark.parametrize("loses", ["sys.stdout.close()", "sys.stdout = sys.stderr = None"])
def test_a_process_without_output_ends_at_once_too(loses):
    script = f"""
        import sys
        from gluon_parallel import forks
        forks.at_exit(lambda: forks.end_at_once(7))
        {loses}
    """
    assert printed(script, status=7) == ""


def test_what_runs_at_the_exit_does_so_in_the_process_that_registered_it():
    script = """
        import os, sys
        from gluon_parallel.forks import at_exit
        at_exit(lambda: print("exit of", "the fork" if os.getpid() != parent else "the process", flush=True))
        parent = os.getpid()
        if os.fork():
            os.wait()
    """
    assert printed(script) == "exit of the process\n"


@pytest.mark.parametrize("waits", ["", "multiprocessing.util.Finalize(None, time.sleep, (1000,), exitpriority=20)"])
def test_what_ends_at_once_leaves_neither_workers_nor_a_temporary_folder_and_waits_for_nobody(tmp_path, waits):
    script = f"""
        import multiprocessing, os, sys, time
        from gluon_parallel import forks
        if __name__ == "__main__":
            pool = multiprocessing.Pool(1)
            print(pool._pool[0].pid, multiprocessing.util.get_temp_dir())
            {waits or "pass"}
            forks.end_at_once(7)
    """
    worker, folder = printed(script, status=7, TMPDIR=str(tmp_path)).split()
    assert waits or not (os.path.exists(f"/proc/{worker}") or os.path.exists(folder))


@pytest.fixture
def place(monkeypatch):
    """The variables of process 1 of 2 under mpirun; nothing is taken yet."""
    for name, value in {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_NAMESPACE": "a"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(environment._TAKEN, "")


@pytest.mark.usefixtures("place")
@pytest.mark.filterwarnings("ignore::gluon_parallel.errors.SeparateTraining")
def test_a_child_of_a_process_that_has_opened_a_store_of_its_group_is_alone(monkeypatch):
    assert in_fork(environment.launched_rank) == 1  # a wrapper's child may take its place
    with environment.taking_rank():
        assert environment.launched_rank() == 1 and environment.taken_by() is None
        assert in_fork(environment.taken_by) == os.getpid()
        assert in_fork(environment.launched_group) is None
        assert in_fork(lambda: gp.kvstore.create("auto").type) == "device"
        monkeypatch.setenv("PMIX_NAMESPACE", "b")  # it is started anew, by an mpirun of its own
        assert in_fork(environment.launched_rank) == 1


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", [*STORES])
def test_a_child_of_a_process_of_a_group_is_told_at_once_that_it_cannot_open_its_store(monkeypatch, name):
    with environment.taking_rank():
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(
            gp.errors.StoreUnavailable, match="has taken its rank in the group.*create the store 'device'"
        ):
            gp.kvstore.create(name)
        with pytest.warns(gp.errors.SeparateTraining, match="this one is alone"):
            assert gp.kvstore.create("auto").type == "device"


@pytest.mark.usefixtures("place")
def test_a_store_that_cannot_be_opened_takes_no_place():
    with pytest.raises(RuntimeError), environment.taking_rank():
        raise RuntimeError
    assert os.environ[environment._TAKEN] == ""
