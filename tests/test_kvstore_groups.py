"""Groups of processes: stores of a part of them, and SyncBatchNorm over each; where there are none, a refusal."""

from pathlib import Path

import pytest
from checks_group import Group, checks, each_check
from processes import MPIRUN, run_mpi
from simulated_hosts import VARIABLE

import gluon_parallel as gp
import mxnet as mx

CHECKS, MPI = checks("kvstore_groups"), (pytest.mark.skipif(MPIRUN is None, reason="no mpirun"),)
GROUPS = [
    Group("groups of 2 processes", run_mpi, 2, "mpi", CHECKS, marks=MPI),
    Group("groups of 3 processes", run_mpi, 3, "mpi", CHECKS, marks=(*MPI, pytest.mark.slow)),
    Group("groups of 4 processes", run_mpi, 4, "mpi", CHECKS, marks=(*MPI, pytest.mark.slow)),
    # Groups in a part of a host, and across hosts.
    Group("groups of hosts of 3+1 processes", run_mpi, 4, "mpi", CHECKS, {VARIABLE: "3+1"}, MPI),
]


@each_check(GROUPS)
def test_every_process_of_groups_passes(groups, group, check):
    groups[group].assert_passed(check)


@MPI[0]
@pytest.mark.parametrize("shared", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_a_process_that_leaves_is_named_to_its_group_by_its_number_in_the_run(monkeypatch, shared):
    monkeypatch.setenv("GLUON_PARALLEL_SHARED_MEMORY", shared)
    status, output = run_mpi(4, Path(__file__).with_name("support") / "kvstore_group_left.py", together=True)
    lines = [line for line in output.splitlines() if line.startswith("gluon_parallel.errors.WorkerLost")]
    words = "process 2 of 4: process 3 has ended its program with RuntimeError: no more today"
    # One of the other pair that is late fails too.
    assert status != 0 and any(words in line for line in lines), output


class Several:
    """As much as is asked of a store of several processes that has no groups."""

    type, rank, num_workers = "dist_sync", 1, 4
    pushpull = broadcast = None


def test_a_store_without_groups_refuses_them():
    for function, which in ((gp.kvstore.group, [0, 1]), (gp.kvstore.sync_group, 2), (gp.kvstore.sync_group, "host")):
        with pytest.raises(gp.errors.StoreUnavailable, match="'dist_sync' .* no groups; take the store mpi"):
            function(Several(), which)
    with pytest.raises(ValueError, match=r"of 3 .*made of 4 processes; 4 can be divided by 1, 2, 4"):
        gp.kvstore.sync_group(Several(), 3)
    with pytest.raises(TypeError, match=r"gp\.kvstore\.group: store is 'mpi', expected a KVStore"):
        gp.kvstore.group("mpi", [0])


def test_one_process_is_its_own_group():
    store = mx.kv.create("device")
    assert gp.kvstore.group(store, [0]) is store
    assert all(gp.kvstore.sync_group(store, kind) is store for kind in (None, "host", 2))


def test_a_sync_group_without_layers_to_convert_is_refused():
    net = mx.gluon.nn.BatchNorm(in_channels=2)
    net.initialize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd")
    with pytest.raises(ValueError, match="sync_group=2 belongs to the layers that prepare converts"):
        gp.prepare(net, mx.gluon.loss.L2Loss(), trainer, sync_group=2)
