"""Checks of random programs: processes with random shards, frozen layers and sync groups train as one device does.

``GLUON_PARALLEL_TESTS_PROGRAMS=100:200`` chooses seeds, here and in the tests that run these checks: many by hand.
"""

import contextlib
import functools
import hashlib
import os
import queue
import threading
from pathlib import Path

import numpy as np
import pytest
import trainings_compare
import trainings_draw
from random_programs import EPSILON, Program, wanted

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.kvstore.mpi import plan
from gluon_parallel.kvstore.mpi.store import MPI
from gluon_parallel.mxnet import engine
from gluon_parallel.mxnet.compat.array_types import as_tuple
from mxnet import gluon, nd

VARIABLE = "GLUON_PARALLEL_TESTS_PROGRAMS"
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}  # relative to what is larger: a value, or 1


def sync_groups_of(store):
    """{kind of sync group: the ranks of each group}."""
    num = store.num_workers
    found = {
        k: [tuple(range(first, first + k)) for first in range(0, num, k)] for k in range(1, num + 1) if num % k == 0
    }
    mine = np.zeros(num)
    mine[list(getattr(gp.kvstore.sync_group(store, "host"), "ranks", range(num)))] = 1
    hosts = {tuple(np.flatnonzero(row).tolist()) for row in gp.metrics.gather_rows(mine[None], store)}
    return {**found, None: found[num], "host": sorted(hosts)}


def trained(program, seed, store, sums, **options):
    """This process's net after its part of the program; ``sums()`` is called between the steps.

    `options` are those of ``DataParallel``.
    """
    devices = [mx.cpu(number) for number in range(program.num_devices)]
    net = program.net(
        seed + store.rank,  # the first process's weights count
        lambda channels, kind: gp.nn.SyncBatchNorm(in_channels=channels, epsilon=EPSILON, kvstore=store, group=kind),
        devices, program.dtype,
    )  # fmt: skip
    if program.hybridize:
        net.hybridize()
    parameters = list(net.collect_params().values())
    np.random.default_rng(seed).shuffle(parameters)
    trainer = gluon.Trainer(parameters, "sgd", program.optimizer, kvstore=store)
    options |= {"accumulate": program.accumulate, "shard_optimizer": program.shard_optimizer}
    step = gp.DataParallel(net, gluon.loss.L2Loss(), trainer, devices, **options)
    for sizes, batch in zip(program.sizes, program.batches(seed)):
        begin = sum(sizes[: store.rank])
        mine = [nd.array(part[begin : begin + sizes[store.rank]], dtype=program.dtype) for part in batch]
        step(*(mine if len(mine[0]) else (None,)))
        sums()
    return net


@contextlib.contextmanager
def ready_in_any_order(rng):
    """Let arrays that are handed to a store become ready later, in random orders."""
    held: queue.Queue = queue.Queue()
    pushpull, ended = MPI.pushpull, threading.Event()

    def release():
        while not (ended.is_set() and held.empty()):
            ended.wait(0.003 * rng.random())
            waiting = [held.get() for _ in range(held.qsize())]
            rng.shuffle(waiting)
            for done in waiting:
                done()

    def hold_and_pushpull(self, key, value, out=None, priority=0):
        for array in nested(value):
            if generator.random() < 0.5:
                engine.push_async(held.put, write=[array])
        pushpull(self, key, value, out, priority)

    generator = np.random.default_rng(rng.integers(1 << 30))  # of the thread that calls
    thread = threading.Thread(target=release)
    MPI.pushpull = hold_and_pushpull
    thread.start()
    try:
        yield
        mx.nd.waitall()
    finally:
        MPI.pushpull = pushpull
        ended.set()
        thread.join()


@contextlib.contextmanager
def small_buckets():
    """Make several buckets of few arrays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "assign_buckets", functools.partial(plan.assign_buckets, first=200, following=4000))
        yield


def nested(value):
    """The arrays of a key, or of a list of them."""
    return [array for one in as_tuple(value) for array in as_tuple(one)]


class OtherSums:
    """Sums of whole numbers by the store and by a group, whose keys each process hands over in an order of its own."""

    def __init__(self, store, group, rng):
        self._stores = [(store, range(store.num_workers))] + ([] if group is None else [(group, group.ranks)])
        self._rng, self._turn, self._expected = rng, 0, []

    def __call__(self):
        self._turn += 1
        for store, ranks in self._stores:
            for key in self._rng.permutation(4).tolist():
                array = nd.full(((1, 7, 3000, 70_000)[key],), self.value(key, store.rank))
                store.pushpull(f"other {key}", array, priority=int(self._rng.integers(9)))
                self._expected.append((array, sum(self.value(key, place) for place in range(len(ranks)))))
            rows = store.gather("vector", np.array([self.value(9, store.rank), 1.0]))
            assert rows.tolist() == [[self.value(9, place), 1.0] for place in range(len(ranks))]

    def value(self, key, place):
        """What a process hands over: its place in the group, and more."""
        return float(100 * self._turn + 10 * place + key)

    def check(self):
        """Compare all sums."""
        for array, value in self._expected:
            assert (array.asnumpy() == value).all(), (array, value)


def problems(seed, store, **options):
    """What differs from one device in the program of this seed, in words; `options` are those of ``DataParallel``."""
    program = Program.draw(np.random.default_rng(seed), store.num_workers)
    store = gp.kvstore.create(store.type)
    groups = sync_groups_of(store)
    member = store.rank in program.members
    rng = np.random.default_rng([seed, store.rank])
    # Those outside of the group make one of their own, or none.
    others = [rank for rank in range(store.num_workers) if rank not in program.members]
    group = gp.kvstore.group(store, program.members if member or len(others) % 2 else others)
    sums = OtherSums(store, group, rng)
    with ready_in_any_order(rng), small_buckets():
        net = trained(program, seed, store, sums, **options)
    sums.check()
    weights, running = wanted(program, seed, groups)
    found, digest = [], hashlib.sha256()
    for name, parameter in net._collect_params_with_prefix().items():
        value = weights[name]
        if name in running:
            [value] = [one for group, one in running[name].items() if store.rank in group]
        else:
            digest.update(parameter.data(mx.cpu(0)).asnumpy().tobytes())
        for copy in parameter.list_data():
            error = np.abs(copy.asnumpy() - value) / np.maximum(np.abs(value), 1)
            if not error.max() <= TOLERANCE[program.dtype]:
                found.append(f"{name} on {copy.ctx}: {error.max():.1e}")
    bits = gp.metrics.gather_rows(np.frombuffer(digest.digest(), np.uint8)[None], store)
    return found + (["other bits on other processes"] if (bits != bits[0]).any() else []), program


def seeds(num=3):
    """The seeds that the variable says; by default the first `num`."""
    first, _, last = os.environ.get(VARIABLE, f"0:{num}").partition(":")
    return range(int(first), int(last))


def check_random_programs_train_as_one_device_does(store):
    """All programs are run, also after one that differs."""
    wrong = {}
    for seed in seeds():
        found, program = problems(seed, store)
        if found:
            wrong[seed] = found, program
    print(f"process {store.rank}: {len(seeds()) - len(wrong)} of {len(seeds())} programs agree", flush=True)
    assert not wrong, wrong


def check_random_trainings_have_the_weights_of_one_device(store, tmp_path):
    """Those of rows, shards, hooks, pipelines and loops of one's own, too; all are run, also after one that differs."""
    wrong, cases = {}, []
    for seed in (seed + 2 for seed in seeds(2)):  # by default a pipeline, and a loop with rows
        trainings_draw.examine(seed, cases.append, shrink=False, processes=(store.num_workers,))
        folder = Path(gp.broadcast_object(str(tmp_path), store), str(seed))
        folder.mkdir(parents=True, exist_ok=True)
        with ready_in_any_order(np.random.default_rng([seed, store.rank])), small_buckets():
            outcome = trainings_compare.run(cases[-1], store.rank, folder)
        if outcome.kind not in ("equal", "refused"):
            wrong[seed] = outcome, str(cases[-1])
    assert not wrong, wrong
