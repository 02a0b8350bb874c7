"""Checks of groups of processes: their stores, and batch norm over each of them."""

import os

import numpy as np
from batch_norm_reference import reference
from simulated_hosts import NONBLOCKING, VARIABLE

import gluon_parallel as gp
from mxnet import autograd, gluon, init, nd

C = 3


def raises(kind, words, function, *arguments, **options):
    """Call it, which must raise `kind` with `words`."""
    try:
        function(*arguments, **options)
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__} with {words!r}")


def check_persistent_operations_are_used_unless_the_test_takes_them_away(store):
    """The MPI that the tests install has them."""
    made = gp.kvstore.group(store, range(1, store.num_workers))
    assert all(one._progress.persistent == (NONBLOCKING not in os.environ) for one in (store, made) if one is not None)


def check_what_makes_no_group_is_refused(store):
    """Ranks that are none, or named twice, and kinds of groups."""
    num = store.num_workers
    raises(ValueError, f"there is no process {num}", gp.kvstore.group, store, [0, num])
    raises(ValueError, "there is no process '0'", gp.kvstore.group, store, "0")
    raises(ValueError, "process 0 is named twice", gp.kvstore.group, store, [0, 0])
    raises(ValueError, "no process is named", gp.kvstore.group, store, [])
    for kind in ("hosts", 0, 1.5, True):
        raises(ValueError, f"group={kind!r}", gp.nn.SyncBatchNorm, kvstore=store, group=kind)
    wrong = num + 1
    raises(ValueError, f"groups of {wrong} cannot be made", gp.nn.SyncBatchNorm, kvstore=store, group=wrong)


def check_groups_of_all_kinds_sum_and_gather(store):
    """A group with a process left out, groups side by side, and a group of a group."""
    rank, num = store.rank, store.num_workers
    assert gp.kvstore.group(store, range(num)) is store
    some, alike = list(range(1, num)), list(range(rank % 2, num, 2))
    members, pairs = gp.kvstore.group(store, some), gp.kvstore.group(store, alike)
    assert (members is None) == (rank == 0)
    for turn in range(3):
        whole, sums = nd.full((70001,), rank + turn), []
        store.pushpull("whole", whole)
        for made, ranks in ((members, some), (pairs, alike)):
            for size in (5, 70001) if made is not None else ():
                sums.append((nd.full((size,), rank + turn), sum(ranks) + turn * len(ranks)))
                made.pushpull(size, sums[-1][0])
        assert all((array.asnumpy() == wanted).all() for array, wanted in sums)
        assert (whole.asnumpy() == num * (num - 1) / 2 + turn * num).all()
    for made, ranks in ((members, some), (pairs, alike)):
        if made is None:
            continue
        assert (made.rank, made.num_workers, list(made.ranks)) == (ranks.index(rank), len(ranks), ranks)
        assert made.gather("vector", np.array([rank, 7])).tolist() == [[each, 7] for each in ranks]
        value = nd.full((4,), rank)
        made.broadcast("first", value, [value])
        assert (value.asnumpy() == ranks[0]).all()
        assert gp.broadcast_object({"first": rank}, made) == {"first": ranks[0]}
    if members is not None:
        inner = gp.kvstore.group(members, [members.num_workers - 1])
        assert (inner is None) == (rank != num - 1)
        assert inner is None or list(inner.ranks) == [num - 1]


def check_processes_of_a_group_that_hold_other_weights_are_named_by_their_numbers_among_all(store):
    """As in every other error."""
    members = gp.kvstore.group(store, range(1, store.num_workers))
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize(init.Constant(store.rank))
    if members is not None and members.num_workers > 1:
        wanted = " | ".join(map(str, members.ranks))
        raises(gp.errors.ReplicasDiffer, f"differs between the processes {wanted}", gp.check_replicas, net, members)


def check_groups_that_differ_are_refused_everywhere(store):
    """Processes of one group that name others."""
    ranks = [0, 1] if store.rank == 0 else range(store.num_workers) if store.num_workers > 2 else [1, 0][:1]
    raises(gp.errors.WorkersDiffer, "names [0, 1]", gp.kvstore.group, store, ranks)
    assert gp.broadcast_object(store.rank, store) == 0  # and all can go on


def shard(rank, step, of):
    """A process's samples of a step: (count, C), as many as `of` says."""
    return np.random.default_rng([rank, step]).standard_normal((of[rank % len(of)], C)) * 2 + 10


def close(got, wanted, tolerance=1e-12):
    assert np.abs(got - wanted).max() <= tolerance * np.abs(wanted).max(), np.abs(got - wanted).max()


def check_statistics_of_a_group_are_those_of_its_batch(store):
    """Outputs, gradients and running statistics in float64, over groups of 1, 2 and all processes."""
    rank, num = store.rank, store.num_workers
    for size in (k for k in (1, 2, num) if num % k == 0):
        layer = gp.nn.SyncBatchNorm(in_channels=C, kvstore=store, group=size, epsilon=1e-5)
        layer.cast("float64")
        layer.initialize()
        mine = range(rank // size * size, rank // size * size + size)
        running = np.zeros(C)
        for step in range(4):
            of = (5, 3, 6, 4)
            xs, heads = ([shard(each, seed, of) for each in mine] for seed in (step, 100 + step))
            x = nd.array(xs[mine.index(rank)], dtype="float64")
            x.attach_grad()
            with autograd.record():
                y = layer(x)
            y.backward(nd.array(heads[mine.index(rank)], dtype="float64"))
            wanted, gradients = reference(xs, heads, np.ones(C), np.zeros(C))[:2]
            close(y.asnumpy(), wanted[mine.index(rank)], 1e-9)
            close(x.grad.asnumpy(), gradients[mine.index(rank)], 1e-9)
            running = 0.9 * running + 0.1 * np.concatenate(xs).mean(axis=0)
            close(layer.running_mean.data().asnumpy(), running)


def check_a_group_without_samples_keeps_its_running_statistics(store):
    """The last batch has samples for the first process alone, so other groups have none at all."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(C, in_units=C), gluon.nn.BatchNorm(in_channels=C), gluon.nn.Dense(1, in_units=C))
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    training = gp.prepare(net, gluon.loss.L2Loss(), trainer, sync_batch_norm=True, sync_group=1)
    for step in range(3):
        training.step(nd.array(shard(store.rank, step, (2, 3))), nd.ones((2 + store.rank % 2, 1)))
    before = net[1].running_mean.data().asnumpy()
    training.step(*((nd.ones((2, C)), nd.ones((2, 1))) if store.rank == 0 else (None,)))
    after = net[1].running_mean.data().asnumpy()
    assert np.isfinite(after).all() and (after == before).all() == (store.rank != 0)
    same = gp.metrics.gather_rows(net[0].weight.data().asnumpy(), store).reshape(store.num_workers, -1)
    assert np.isfinite(same).all() and (same == same[0]).all()


def check_processes_of_a_host_are_a_group(store):
    """`group="host"`, and nets that share one group's store."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.BatchNorm(in_channels=C), gluon.nn.BatchNorm(in_channels=C))
    gp.nn.convert_sync_batchnorm(net, kvstore=store, group="host")
    first, second = (layer.sync_group.store for layer in net)
    assert first is second and store.rank in first.ranks
    sizes = gp.metrics.gather_rows(np.array([[first.num_workers]]), store).ravel()
    if VARIABLE in os.environ:
        simulated = list(map(int, os.environ[VARIABLE].split("+")))
        hosts = np.repeat(range(len(simulated)), simulated)
    else:
        hosts = gp.metrics.gather_rows(np.array([[os.stat("/proc/self/ns/pid").st_ino]]), store).ravel()
    assert sizes.tolist() == [(hosts == host).sum() for host in hosts]
