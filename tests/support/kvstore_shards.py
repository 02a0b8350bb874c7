"""Checks of sharded optimizer state: the same bits as without, and checkpoints for any number of processes."""

import functools
import sys

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.kvstore.mpi.shared_memory import shards as shared_shards
from gluon_parallel.mxnet.compat.array_types import leaves
from gluon_parallel.reduce import shards
from gluon_parallel.reduce.shards import owner_bounds
from mxnet import gluon, nd
from mxnet.contrib.amp.loss_scaler import LossScaler

IN, OUT = 7, 3
# (optimizer, its options, options of the step)
CASES = [
    ("adam", {"wd": 0.01, "lr_scheduler": "falling"}, {}),
    ("adam", {"multi_precision": True}, {"dtype": "float16", "accumulate": 2}),
    ("adamw", {"clip_gradient": 0.1}, {"clip_global_norm": 0.3}),
    ("sgd", {"momentum": 0.9}, {"ignore_stale_grad": True}),
    ("lamb", {}, {}),  # by the norms of whole parameters
]


class Net(gluon.nn.HybridBlock):
    """Two layers, of which the second one is left out for batches that begin with a negative number; of any dtype."""

    def __init__(self, units=29):
        super().__init__()
        with self.name_scope():
            self.first = self.params.get("first", shape=(IN, units))
            self.second = self.params.get("second", shape=(units,), lr_mult=0.5, wd_mult=2.0)
            self.last = self.params.get("last", shape=(1, OUT))

    def forward(self, x):
        """Products and sums alone: MXNet has no matrix product in float16 on CPUs."""
        first, second, last = (one.data(x.ctx) for one in (self.first, self.second, self.last))
        y = (x.expand_dims(2) * first.expand_dims(0)).sum(axis=1).tanh()
        if x[0, 0].asscalar() >= 0:
            y = y * second.expand_dims(0)
        return y.sum(axis=1, keepdims=True) * last


def make(store, devices, optimizer, options, shard, dtype="float32", **step):
    """(net, trainer, step), the same weights on all processes."""
    net = Net()
    net.cast(dtype)
    net.initialize(ctx=devices)
    random = np.random.default_rng(0)
    for parameter in net.collect_params().values():
        parameter.set_data(nd.array(random.normal(size=parameter.shape), dtype=dtype))
    options = {"learning_rate": 0.01, **options}
    if "lr_scheduler" in options:
        del options["learning_rate"]
        options["lr_scheduler"] = mx.lr_scheduler.FactorScheduler(1, 0.8, base_lr=0.01)
    trainer = gluon.Trainer(net.collect_params(), optimizer, options, kvstore=store)
    return net, trainer, gp.DataParallel(net, gluon.loss.L2Loss(), trainer, devices, shard_optimizer=shard, **step)


def train(parallel, store, first, num, dtype="float32"):
    """Steps of these numbers, in which processes have shares of several sizes, or no samples."""
    rank, num_workers = (0, 1) if store is None else (store.rank, store.num_workers)
    for number in range(first, first + num):
        random = np.random.default_rng([5, number])
        x, y = random.normal(size=(6, IN)), random.normal(size=(6, OUT))
        x[:, 0] = abs(x[:, 0]) * (-1 if number % 4 == 1 and parallel._step._options.ignore_stale_grad else 1)
        bounds = [0, *np.sort(random.integers(0, 7, num_workers - 1)).tolist(), 6]
        mine = slice(bounds[rank], bounds[rank + 1])
        parallel.step(*(nd.array(part[mine], dtype=dtype) for part in (x, y)) if mine.start < mine.stop else (None,))
    parallel.update()


def train_by_hand(net, trainer, store, devices, num=2):
    """Steps of ``trainer.step`` alone, each device of each process with samples of its own."""
    rank, num_workers = (0, 1) if store is None else (store.rank, store.num_workers)
    for number in range(num):
        x = abs(np.random.default_rng([6, number, rank]).normal(size=(len(devices), IN)))
        with mx.autograd.record():
            losses = [(net(part) ** 2).sum() for part in gp.split_and_load(nd.array(x, dtype="float32"), devices)]
        mx.autograd.backward(losses)
        trainer.step(num_workers * len(devices))


def held(trainer):
    """How many values this process keeps as the optimizer's state."""
    states = [state for updater in trainer._updaters for state in updater.states.values()]
    return sum(array.size for _, array in leaves(states) if isinstance(array, nd.NDArray))


def bits(net):
    return {name: [copy.asnumpy().tobytes() for copy in one.list_data()] for name, one in
            net._collect_params_with_prefix().items()}  # fmt: skip


def check_sharded_updates_have_the_bits_of_plain_ones(store):
    """Every optimizer, devices that differ in number between processes, and what a step may do with its gradients."""
    for number, (optimizer, options, step) in enumerate(CASES):
        devices = [mx.cpu(place) for place in range(1 + (store.rank + number) % 2)]
        dtype = step.get("dtype", "float32")
        plain, sharded = (make(store, devices, optimizer, options, shard, **step) for shard in (False, True))
        with pytest.MonkeyPatch.context() as patch:
            if number % 2:  # two groups of parameters
                patch.setattr(shards, "_TURN", 40)
            for *_, parallel in (plain, sharded):
                train(parallel, store, 0, 7, dtype)
        assert bits(plain[0]) == bits(sharded[0]), (optimizer, options, step)
        [whole, total] = gp.metrics.gather_rows(
            np.array([[held(plain[1]) / len(devices), held(sharded[1])]]), store
        ).T.tolist()
        assert sum(total) == whole[0], (optimizer, whole, total)  # the state is there once
        counts = [sorted(one.optimizer._index_update_count.items()) for _, one, _ in (plain, sharded)]
        assert counts[0] == counts[1], counts


def check_owners_get_sums_and_all_get_their_values(store):
    """Through rows that are smaller than the arrays, on one host: sums in the order of ranks, and memory given back."""
    rank, num = store.rank, store.num_workers
    sizes = [150_000, 5, 1, 40_000, 20_000]
    bounds, shared = owner_bounds(sizes, num), store._progress.shared
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_shards, "ROW", 128 * 1024)
        store = gp.kvstore.create("mpi")  # no other array has made its rows
        for dtype in ("float32", "float64"):
            arrays = [[nd.zeros(size, mx.cpu(place), dtype) for place in range(2)] for size in sizes]
            for call in range(2):
                own = [np.random.default_rng([rank, call, size]).normal(size=size).astype(dtype) for size in sizes]
                for copies, values in zip(arrays, own):
                    for copy in copies:
                        copy[:] = nd.array(values, dtype=dtype)
                rows = gp.metrics.gather_rows(np.concatenate(own)[None] * 2, store)  # exact in float64
                wanted = np.split(functools.reduce(np.add, rows.astype(dtype)), np.cumsum(sizes)[:-1])
                store.reduce_scatter([*range(5)], arrays, bounds)
                for copies, total, ends in zip(arrays, wanted, bounds):
                    begin, end = ends[rank : rank + 2]
                    for copy in copies:
                        np.testing.assert_array_equal(copy.asnumpy()[begin:end], total[begin:end])
                if call == 0 and shared is not None and shared.num_hosts == 1:  # at least 64 kB of others lie together
                    assert (arrays[0][0].asnumpy() == 0).sum() * np.dtype(dtype).itemsize >= 64 * 1024
                store.gather_shards([*range(5)], arrays, bounds)
                for copies, total in zip(arrays, wanted):
                    for copy in copies:
                        np.testing.assert_array_equal(copy.asnumpy(), total)


def check_sums_of_known_parts_are_compressed_from_then_on(store):
    store, array, [bounds] = gp.kvstore.create("mpi"), nd.zeros(100_000), owner_bounds([100_000], store.num_workers)
    begin, end = bounds[store.rank : store.rank + 2]
    for value in (1 + 2**-12, 1):  # which is what float16 makes of it
        array[:] = 1 + 2**-12
        store.reduce_scatter([0], [[array]], [bounds])
        assert (array.asnumpy()[begin:end] == store.num_workers * value).all()
        store.set_gradient_compression({"type": "fp16"})


def check_arrays_are_not_kept_when_others_have_been_gathered(store):
    """Each one of a checkpoint is gathered by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_shards, "ROW", 64 * 1024)
        store, arrays = gp.kvstore.create("mpi"), [nd.zeros(size) for size in (100_000, 5, 7)]
        before = [sys.getrefcount(array) for array in arrays]
        for number, array in enumerate(arrays):
            store.gather_shards([number], [[array]], owner_bounds([array.size], store.num_workers))
            array.wait_to_read()
        assert [sys.getrefcount(array) for array in arrays][:2] == before[:2]


def check_an_overflow_of_one_process_skips_the_update_on_all(store):
    """Under loss scaling: each process looks at its own gradients and at the sums that it owns, and all agree."""
    after = []
    for shard in (False, True):
        net, trainer, parallel = make(store, [mx.cpu(0)], "adam", {}, shard)
        trainer._amp_loss_scaler, trainer._amp_original_scale = LossScaler(), trainer._scale  # as amp.init_trainer does
        scale = parallel.loss_scaling.scale
        train(parallel, store, 0, 2)
        before, held_before = bits(net), held(trainer)
        random = np.random.default_rng(store.rank)
        x, y = nd.array(abs(random.normal(size=(2, IN)))), nd.array(random.normal(size=(2, OUT)))
        parallel.step(x, y if store.rank else y * np.inf)
        assert (bits(net), held(trainer)) == (before, held_before)
        assert (parallel.loss_scaling.num_skipped, parallel.loss_scaling.scale) == (1, scale / 2)
        train(parallel, store, 2, 3)
        assert parallel.loss_scaling.num_skipped == 1
        after.append(bits(net))
    assert after[0] == after[1] != before


def check_going_on_without_a_lost_process_is_refused(store):
    net, trainer, _ = make(store, [mx.cpu(0)], "adam", {}, False)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="lost with it.*or --min-processes"):
        patch.setenv("GLUON_PARALLEL_MIN_PROCESSES", "1")
        gp.prepare(net, gluon.loss.L2Loss(), trainer, shard_optimizer=True)


def check_sharded_state_loads_into_any_number_of_processes(store):
    """What all processes have saved continues on a part of them, sharded or not, and what one has saved on all."""
    device, folder = [mx.cpu(0)], {}

    def moved(name, source, kvstore, shard, first):
        """Train on from the state of this name, and keep the state after it."""
        net, trainer, parallel = make(kvstore, device, "adam", {"lr_scheduler": "falling"}, shard)
        if source is not None:
            gp.checkpoint.restore(folder[source], net, trainer)
        train(parallel, kvstore, first, 3)
        folder[name] = gp.checkpoint.state(net, trainer)

    moved("sharded", None, store, True, 0)
    moved("alone", None, None, False, 0)
    moved("alone, then alone", "alone", None, False, 3)
    moved("sharded, then alone", "sharded", None, False, 3)
    moved("sharded, then plain", "sharded", store, False, 3)
    moved("sharded, then sharded", "sharded", store, True, 3)
    moved("alone, then sharded", "alone", store, True, 3)
    mine = gp.kvstore.group(store, [0, 1] if store.rank < 2 else [store.rank])
    moved("sharded, then fewer", "sharded", mine if store.rank < 2 else None, store.rank < 2, 3)
    for name, state in folder.items():
        wanted = folder["alone, then alone" if "then" in name else "alone"]
        assert state.facts == wanted.facts, (name, state.facts, wanted.facts)
        assert sorted(state.arrays) == sorted(wanted.arrays)
        for key, array in state.arrays.items():  # float32 sums in another order, and Adam divides by small numbers
            np.testing.assert_allclose(array, wanted.arrays[key], rtol=1e-4, atol=1e-5, err_msg=f"{name}: {key}")
    for key, array in folder["sharded, then plain"].arrays.items():
        assert array.tobytes() == folder["sharded, then sharded"].arrays[key].tobytes(), key
