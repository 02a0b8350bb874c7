"""One process of several is lost in a chosen state of an operation.

``python kvstore_lost.py KIND MOMENT FAULT RANK FOLDER`` is one process of them, and RANK the one that is lost.
Every other one leaves ``RANK.json`` in the folder: the error that has ended its operation, or null.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import simulated_hosts

import gluon_parallel as gp
from gluon_parallel.kvstore.mpi import python_sums, startup
from gluon_parallel.kvstore.mpi.transport import MPI_LOCK
from gluon_parallel.mxnet.engine import push_async
from gluon_parallel.native.records import C
from mxnet import nd

LIMIT = 4.0  # seconds, from when all have come that will come
KINDS = {}  # name -> function of (store, key) that exchanges, and waits for it


def kind(function):
    KINDS[function.__name__] = function
    return function


@kind
def small_sum(store, key):
    array = nd.ones(4)
    store.pushpull(key, array)
    assert array.asnumpy().tolist() == [store.num_workers] * 4


@kind
def large_sum(store, key):
    array = nd.ones(1_000_000)
    store.pushpull(key, array)
    assert (array.asnumpy() == store.num_workers).all()


@kind
def compressed_sum(store, key):
    store.set_gradient_compression({"type": "fp16"})
    large_sum(store, key)


@kind
def bucket(store, key, late=lambda array: None):
    """One gradient of several is not ready before `late` has it."""
    arrays = [nd.full((100,), number) for number in range(3)]
    late(arrays[1])
    store.pushpull([f"{key} {number}" for number in range(3)], arrays)
    assert [array[0].asscalar() for array in arrays] == [number * store.num_workers for number in range(3)]


@kind
def gather(store, key):
    assert store.gather(key, np.full(9, float(store.rank)))[:, 8].tolist() == list(range(store.num_workers))


@kind
def group(store, key, made={}):  # noqa: B006 - it is made once
    """The last two processes are a group that sums; then all do."""
    if not made:
        made["group"] = gp.kvstore.group(store, [store.num_workers - 2, store.num_workers - 1])
    if made["group"] is not None:
        small_sum(made["group"], key)
    small_sum(store, key)


class Scene:
    """Where the processes tell each other how far they are: files of one folder."""

    def __init__(self, folder, store, fault, lost):
        self.folder, self.rank, self.fault, self.lost = Path(folder), store.rank, fault, lost
        self.signal = {"unread": signal.SIGSTOP}.get(fault, getattr(signal, fault, None))
        self.survivors = [rank for rank in range(store.num_workers) if rank != lost]
        self.processes = store.gather("process", np.array([os.getpid()]))[:, 0].tolist()

    def write(self, name, text=""):
        unfinished = self.folder / f"{name}.{self.rank}.tmp"
        unfinished.write_text(text)
        unfinished.rename(self.folder / name)

    def wait(self, *names):
        wait_until(lambda: all((self.folder / name).exists() for name in names))

    def lose(self):
        """Lose this process."""
        self.write("lost")
        if self.fault == "late":
            self.wait(*(f"{rank}.json" for rank in self.survivors))
        elif self.fault == "slow":
            time.sleep(3)  # the others have asked meanwhile
        elif self.fault == "busy":
            work(2 * LIMIT)
        else:
            os.kill(os.getpid(), self.signal)

    def wait_until_lost(self):
        """Until the process has been killed or stopped, or is about to sleep."""
        self.wait("lost")
        wait_until(lambda: self.signal is None or self.state(self.lost) in {"T", "Z", ""})

    def state(self, rank):
        try:
            return Path(f"/proc/{self.processes[rank]}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return ""

    def report(self, error):
        """Say what has ended this process's operation; the first one that is left ends a process that was stopped."""
        told = error and f"{type(error).__name__}: {error}"
        self.write(f"{self.rank}.json", json.dumps(told))
        if self.signal == signal.SIGSTOP and self.rank == self.survivors[0]:
            self.wait(*(f"{rank}.json" for rank in self.survivors))
            os.kill(self.processes[self.lost], signal.SIGKILL)


def wait_until(condition, seconds=60):
    """End with an error where it takes longer."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s"
        time.sleep(0.01)


def work(seconds):
    """Compute for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def main(name, moment, fault, lost, folder):
    simulated_hosts.simulate()
    store = gp.kvstore.create("mpi")
    scene = Scene(folder, store, fault, int(lost))
    exchange = KINDS[name]
    if moment not in ("new", "half"):  # an operation keeps the function that "half" replaces
        exchange(store, "key")
    if store.rank == scene.lost:
        exchange = lose_in(scene, store, exchange, moment)
    elif moment == "started" and store.rank == scene.survivors[-1]:
        scene.wait_until_lost()  # so that the operation cannot be completed before
    errors = []
    thread = threading.Thread(target=until_it_fails, args=(exchange, store, fault, errors), daemon=True)
    thread.start()
    if store.rank != scene.lost:
        scene.write(f"{store.rank} came")
        scene.wait("lost", *(f"{rank} came" for rank in scene.survivors))
        if fault == "unread" and store.rank == scene.survivors[0]:
            time.sleep(2.5)  # it has asked the others
            with MPI_LOCK:  # it reads nothing until the other one has given up and ended, and MPI knows that
                wait_until(lambda: scene.state(scene.survivors[1]) in {"Z", ""})
                time.sleep(1)
        elif fault != "slow":
            for progress in startup.progress_engines:
                progress.timeout = LIMIT
    thread.join(60 if store.rank != scene.lost else 120)
    if thread.is_alive():
        errors = [AssertionError("it hangs")]
    scene.report(errors[0] if errors else None)
    sys.exit(1 if errors else 0)


def until_it_fails(exchange, store, fault, errors):
    """Exchange until another process is found to be missing."""
    try:
        for _ in range({"slow": 3, "busy": 1}.get(fault, 100)):
            exchange(store, "key")
    except BaseException as error:
        errors.append(error)


def lose_in(scene, store, exchange, moment):
    """The exchange of the process that is lost, in which that happens."""
    if moment in ("new", "known"):  # before its key is agreed upon; agreed, but not begun
        return lambda *arguments: (scene.lose(), exchange(*arguments))
    if moment == "filling":  # a gradient in the bucket is not there yet

        def hold(array):
            push_async(lambda done: threading.Thread(target=lambda: (scene.lose(), done())).start(), write=[array])

        return lambda *arguments: bucket(*arguments, late=hold)
    if moment == "started":
        threading.Thread(target=lambda: (wait_until(is_under_way), scene.lose()), daemon=True).start()
        return exchange
    add_up = python_sums.CompressedSum._add_up  # between the two stages

    def lose_and_add_up(operation):
        scene.lose()
        add_up(operation)

    python_sums.CompressedSum._add_up = lose_and_add_up
    return exchange


def is_under_way():
    """Whether this process has handed over what the others need, to MPI or to the memory of its host."""
    for progress in startup.progress_engines:
        shared = progress.shared
        sums = [] if shared is None else [exchange.record.state for exchange in shared._sums]
        if progress.started or {C.WAITING, C.SUMMING}.intersection(sums) or (shared and shared.late):
            return True
    return False


if __name__ == "__main__":
    main(*sys.argv[1:])
