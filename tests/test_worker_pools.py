"""Worker processes leave stop signals to a training that stops by itself, and the end of a pool of them has a limit."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing import util

import pytest

from gluon_parallel.training import stopping, worker_pools
from mxnet import gluon, nd


def send(number, processes):
    """Send a signal from another process, as a shell, ``timeout`` or a scheduler does."""
    subprocess.run(["kill", f"-{int(number)}", *map(str, processes)], check=True)


def process_numbers(pool):
    return sorted(worker.pid for worker in pool._pool)


@pytest.fixture
def pool():
    with multiprocessing.Pool(2) as made:
        made.map(abs, [1, 2])  # until both have begun
        yield made


@pytest.mark.parametrize("number", stopping.SIGNALS, ids=lambda number: signal.Signals(number).name)
def test_workers_outlive_a_stop_signal_to_all_while_the_training_stops_by_itself(pool, number):
    before = process_numbers(pool)
    with stopping.postponed(lambda: True):
        with multiprocessing.Pool(2) as later:
            later.map(abs, [1, 2])
            workers = process_numbers(later)
            send(number, [*before, *workers])
            assert later.map(abs, range(-100, 0)) == [*range(100, 0, -1)]
            assert process_numbers(later) == workers
        assert pool.map(abs, range(-100, 0)) == [*range(100, 0, -1)]
        assert process_numbers(pool) == before


def work(begun):
    begun.set()
    time.sleep(1000)


def start(daemon):
    """A process that is at work for long."""
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    process = context.Process(target=work, args=(begun,), daemon=daemon)
    process.start()
    assert begun.wait(60)
    return process


def ended_by(process):
    process.join(60)
    return process.exitcode and signal.Signals(-process.exitcode)


@pytest.mark.parametrize("daemon", [False, True])
def test_a_worker_of_a_program_that_sigterm_ends_ends_by_it_too(daemon):
    worker = start(daemon)
    send(signal.SIGTERM, [worker.pid])
    assert ended_by(worker) == signal.SIGTERM


def test_a_worker_that_is_at_work_ends_when_the_training_ends_it_and_not_by_others():
    with stopping.postponed(lambda: True):
        worker = start(daemon=True)
        for number in stopping.SIGNALS:
            send(number, [worker.pid])
        worker.join(0.2)
        assert worker.exitcode is None
        worker.terminate()
        assert ended_by(worker) == signal.SIGTERM


def test_a_process_that_the_training_does_not_end_ends_by_a_stop_signal_to_all():
    with stopping.postponed(lambda: True):
        worker = start(daemon=False)
        send(signal.SIGTERM, [worker.pid])
        assert ended_by(worker) == signal.SIGTERM


def test_the_training_itself_ends_its_workers():
    with stopping.postponed(lambda: True):
        loader = gluon.data.DataLoader(gluon.data.ArrayDataset(nd.arange(8)), 2, num_workers=2)
        workers = [*loader._worker_pool._pool]
        assert sum(len(batch) for batch in loader) == 8
        del loader
        for worker in workers:
            worker.join(60)
            assert worker.exitcode in (0, -signal.SIGTERM)  # 0: it has found out first that there is no more work


def test_workers_have_the_temporary_folder_of_the_training_which_removes_it(pool):
    assert pool.apply(util.get_temp_dir) == util.get_temp_dir()


def test_a_pool_that_begins_after_the_temporary_folder_is_gone_has_another_one(tmp_path):
    script = """
        import multiprocessing, os
        from multiprocessing import util
        import gluon_parallel
        multiprocessing.Pool(1)
        util._run_finalizers()  # as at the end of a program
        assert not os.listdir(os.environ["TMPDIR"])
        with multiprocessing.Pool(1) as pool:
            assert pool.apply(os.path.isdir, [util.get_temp_dir()])
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, timeout=120).returncode == 0
    assert not [*tmp_path.iterdir()]


def test_the_temporary_folder_of_a_killed_training_is_removed_by_the_next_and_that_of_a_living_one_stays(tmp_path):
    script = """
        import multiprocessing, os, signal, sys
        import gluon_parallel
        pool = multiprocessing.Pool(1)
        pool.map(abs, [1])
        if sys.argv[1] == "killed":
            pool.terminate()
            os.kill(os.getpid(), signal.SIGKILL)
        gluon_parallel.leftovers.remove_leftovers()
        assert pool.apply(os.path.isdir, [multiprocessing.util.get_temp_dir()])
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for fate, status, num_left in (("killed", -signal.SIGKILL, 1), ("killed", -signal.SIGKILL, 1), ("ends", 0, 0)):
        command = [sys.executable, "-c", textwrap.dedent(script), fate]
        assert subprocess.run(command, env=environment, timeout=120).returncode == status
        assert len([*tmp_path.iterdir()]) == num_left


def test_a_pool_ends_though_a_worker_was_killed_while_it_held_the_lock_of_the_queue(monkeypatch):
    monkeypatch.setattr(worker_pools, "_LIMIT", 1.0)
    pool = multiprocessing.Pool(2)
    pool.map(abs, [1, 2])
    workers = [*pool._pool]
    while pool._inqueue._rlock.acquire(block=False):  # until one of them holds it, to wait for work
        pool._inqueue._rlock.release()
        time.sleep(0.01)
    with pool._outqueue._wlock:  # which a worker may hold still after its result has come
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
            worker.join(60)
    pool.terminate()
    for worker in [*workers, *pool._pool]:
        worker.join(60)  # a killed process needs a core to end
        assert not worker.is_alive()
    pool._inqueue._rlock.release()  # so that the pool's threads end too


@pytest.mark.parametrize("at_work", [0, 0.3], ids=["the pool waits", "the pool looks for workers that have ended"])
def test_workers_end_with_a_program_whose_python_starts_no_thread_at_its_end(at_work):
    """As Python 3.12.1, where a loader's pool is ended at the program's end."""
    script = """
        import atexit, sys, threading, time
        at_work = float(sys.argv[1])
        atexit.register(time.sleep, 2 * at_work)  # runs last: before multiprocessing and gluon_parallel are imported
        import multiprocessing.pool
        import gluon_parallel
        look = multiprocessing.pool.Pool._join_exited_workers
        def look_later(pool):
            time.sleep(at_work)
            return look(pool)
        multiprocessing.pool.Pool._join_exited_workers = staticmethod(look_later)
        pool = multiprocessing.Pool(2)
        pool.map(abs, [1, 2])
        print(*(worker.pid for worker in pool._pool))
        def refuse(thread):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        threading.Thread.start = refuse
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(at_work)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)  # also ended by all workers
    assert done.stderr == ""
    assert not [number for number in done.stdout.split() if os.path.exists(f"/proc/{number}")]
