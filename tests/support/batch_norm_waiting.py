"""Devices that wait in SyncBatchNorm layers or at a rendezvous alone; a test ends their time when it chooses."""

import time
import types

import numpy as np

from gluon_parallel import native
from gluon_parallel.native.records import C, address_of
from gluon_parallel.nn.sync_batch_norm import operator
from gluon_parallel.nn.sync_batch_norm.participants import sync_groups_of
from gluon_parallel.nn.sync_batch_norm.rendezvous import Rendezvous

CHANNELS = 3


def wait_for(condition, seconds=60):
    """Wait until ``condition()`` holds, however busy the machine is."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.002)


def waiting_at(rendezvous):
    """Names of the devices that wait there for others."""
    waits = native.function("gp_waits_at", 2)
    return {name for number, name in enumerate(rendezvous.names) if waits(rendezvous.address, number) >= 0}


def let_time_run_out(net, *devices):
    """Once exactly these devices wait in layers of `net`, end their time, and nobody else's."""
    meetings, names = [group.rendezvous for group in sync_groups_of(net)], set(map(str, devices))

    def waiting():
        return set().union(*map(waiting_at, meetings))

    wait_for(lambda: waiting() == names)
    limits = [rendezvous.timeout for rendezvous in meetings]
    for rendezvous in meetings:
        rendezvous.timeout = 0
    wait_for(lambda: not waiting())
    for rendezvous, limit in zip(meetings, limits):
        rendezvous.timeout = limit


def rendezvous_of(names, timeout=60, only=None, name="layer", explain=lambda *_: None):
    """A rendezvous of devices of these names; a device that waits asks Python after 2 ms."""
    operator.callbacks()
    made = Rendezvous(name, timeout, explain)
    made.record.patience = 2_000_000
    made.prepare(frozenset(names), only, CHANNELS)
    return made


def allreduce(rendezvous, key, device, vector, exchange=None, number=None):
    """What the device leaves the exchange of that key with, by the C library.

    Args:
        key: 2 * call + direction.
        exchange: function of (key, values, has_begun) that returns those of all processes, if there are others.
        number: the device's, if it is not what the rendezvous says now.

    Raises:
        Exception: the failure of the rendezvous.
    """
    state = operator.OperatorState.__new__(operator.OperatorState)
    state.device = device
    state.group = types.SimpleNamespace(rendezvous=rendezvous, allreduce_processes=exchange)
    message = np.array(vector, np.float64)
    number = rendezvous.number(device) if number is None else number
    state.record = C.State(layer=rendezvous.address, device=number, channels=CHANNELS)
    state.record.message, state.record.arrived_at = address_of(message), time.monotonic_ns()
    address = address_of(state.record)
    operator._states[address] = state
    try:
        if not native.function("gp_allreduce", 2)(address, key):
            raise rendezvous.failure
    finally:
        del operator._states[address]
    return message
