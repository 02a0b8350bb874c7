"""Checks of what processes on several hosts share, and of what goes over the cable between them."""

import os
import re
from pathlib import Path

import numpy as np

from mxnet import nd

SENT = Path("/sys/class/net/cable/statistics/tx_bytes")  # as tests/support/hosts.py lays it


def bytes_sent(store):
    """Bytes that this process's host has sent, when all processes have come here."""
    store.gather("all have come", np.zeros(1))
    return int(SENT.read_text())


def check_no_memory_is_shared_between_hosts(store):
    """Processes of two hosts map no memory in common, nor can one find the other by its number."""
    host = os.stat("/proc/self/ns/pid").st_ino
    maps = re.findall(r"(\d+) +/memfd:gluon_parallel", Path("/proc/self/maps").read_text())
    mine = np.zeros(64, np.int64)
    mine[: 1 + len({*maps})] = [host, *map(int, {*maps})]
    rows = store.gather("mapped", mine)
    assert len({*rows[:, 0].tolist()}) == 2
    for row in rows[rows[:, 0] != host]:
        assert not {*row[1:].tolist()} & {*mine[1:].tolist()} - {0}


def check_sums_between_hosts_go_over_the_cable(store):
    """What a host does not know yet has to come over the cable, once at least."""
    array = nd.full((1_000_000,), store.rank)
    store.pushpull("over the cable", array)
    array.wait_to_read()
    before = bytes_sent(store)
    for _ in range(3):
        store.pushpull("over the cable", array)
        array.wait_to_read()
    assert bytes_sent(store) - before >= 3 * 4_000_000


def check_gathered_vectors_go_over_the_cable(store):
    """The same of layers' statistics."""
    vector = np.full(129, float(store.rank))
    store.gather("statistics", vector)
    before = bytes_sent(store)
    for _ in range(300):
        assert store.gather("statistics", vector)[:, 0].tolist() == list(range(store.num_workers))
    assert bytes_sent(store) - before >= 300 * vector.nbytes
