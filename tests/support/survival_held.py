"""One of twelve processes after the other is lost until two are left; prints what process 0 holds after each loss.

Where the first six and the others are hosts, it is the one that speaks for the second host, then one of the first.
"""

import gc
import os
import signal
import threading
from pathlib import Path

import simulated_hosts

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import launcher
from gluon_parallel.mxnet.engine.failures import drop_tracebacks
from gluon_parallel.nn.sync_batch_norm.participants import drain
from gluon_parallel.survive.regrouping import has_failed


def held():
    """Open files, threads, mappings of the store's shared memory, and resident memory in MB.

    The thread of the progress engine is not counted: each group of processes has an engine of its own, whose thread
    starts when it is first needed. There may be one, and not more.
    """
    gc.collect()
    threads = len(os.listdir("/proc/self/task"))
    driving = sum(thread.name == "gluon_parallel.mpi" for thread in threading.enumerate())
    assert driving <= 1, threading.enumerate()
    mappings = Path("/proc/self/maps").read_text().count("memfd:gluon_parallel")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20
    return len(os.listdir("/proc/self/fd")), threads - driving, mappings, resident


def lose(store, keys, last):
    """Sum until a process is lost, this one if it is the `last`, and go on with those that are left."""
    values = [mx.nd.ones(100_000) for _ in keys]
    try:
        for number in range(10_000):
            store.pushpull(keys, values)
            mx.nd.waitall()
            if last and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("no process was lost")
    except Exception:
        if not has_failed(store):
            raise
    drain()
    drop_tracebacks()
    store.regroup()


def main():
    simulated_hosts.simulate()
    store, keys = gp.kvstore.create("mpi"), list(range(5))
    store.broadcast(keys, [mx.nd.zeros(100_000)] * 5, [mx.nd.zeros(100_000) for _ in keys])
    launcher.send(launcher.GOES_ON)
    number = store.rank
    for last in (6, 1, 7, 2, 8, 3, 9, 4, 10, 5):
        lose(store, keys, number == last)
        if number == 0:
            print("held", *held())


if __name__ == "__main__":
    main()
