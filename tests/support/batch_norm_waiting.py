"""Devices that wait in SyncBatchNorm layers: a test waits until they have come, and ends their time when it chooses."""

import time

from gluon_parallel.nn.sync_batch_norm.participants import groups_of


def wait_for(condition, seconds=60):
    """Wait until ``condition()`` holds, however busy the machine is."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.002)


def let_time_run_out(net, *devices):
    """Once exactly these devices wait in layers of `net`, in Python, end their time, and nobody else's."""
    barriers, names = [group.barrier for group in groups_of(net)], set(map(str, devices))

    def waiting():
        return {name for barrier in barriers for one in list(barrier._rendezvous.values()) for name in list(one.values)}

    wait_for(lambda: waiting() == names)
    limits = [barrier.timeout for barrier in barriers]
    for barrier in barriers:
        barrier.timeout = 0
        with barrier._lock:
            for one in barrier._rendezvous.values():
                one.changed.notify_all()
    wait_for(lambda: not waiting())
    for barrier, limit in zip(barriers, limits):
        barrier.timeout = limit
