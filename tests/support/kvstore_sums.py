"""Checks of broadcasts and sums over devices and processes, as every process of a group runs them."""

import functools
import hashlib
import itertools
import os
import time

import numpy as np
import pytest
from simulated_hosts import NONBLOCKING

import gluon_parallel as gp
from gluon_parallel.kvstore.contract import contract
from gluon_parallel.kvstore.mpi.shared_memory import sums
from gluon_parallel.kvstore.mpi.transport import ANSWERED, ASKED
from gluon_parallel.mxnet.compat.array_types import BFLOAT16
from mxnet import nd

DEVICES = gp.devices("cpu:2")


def per_device(values, dtype="float32"):
    return [nd.array(value, ctx=device, dtype=dtype) for device, value in zip(DEVICES, values)]


def check_sums_over_devices_and_processes(store, store_name):
    """The same for every store that sums over processes: names, broadcast, sums over devices and processes."""
    rank, num = store.rank, store.num_workers
    assert rank in range(num)
    assert store.type == store_name
    everyone = num * (num - 1) / 2  # the sum of all ranks
    for key, shape in enumerate([(3,), (2, 3), (5, 1, 4), (70001,), (1,)]):
        value = nd.full(shape, rank + 7)
        outs = per_device([np.zeros(shape)] * 2)
        store.broadcast(key, value, outs)
        assert all((out.asnumpy() == 7).all() for out in outs), key
        grads = per_device([np.full(shape, rank), np.full(shape, 10.0 + key)])
        for turn in range(3):
            expected = everyone * 2**turn * num**turn + num * (10.0 + key) * (2 * num) ** turn
            store.pushpull(key, grads)
            for grad in grads:
                assert np.allclose(grad.asnumpy(), expected), (key, turn, grad.asnumpy().ravel()[0], expected)
        kept = nd.full(shape, 2)
        store.pushpull(key, kept, out=outs)
        # MXNet's stores overwrite a single value of one device with the result.
        assert store.type.startswith("dist") or (kept.asnumpy() == 2).all()
        assert all((out.asnumpy() == 2 * num).all() for out in outs)


def check_keys_meet_in_any_order(store):
    """Keys of all sizes, in another order on every process, meet by key."""
    random = np.random.default_rng(store.rank)
    sizes = [1, 7, 300, 20000, 70001]
    for turn in range(8):
        keys = random.permutation(30)
        arrays = {key: nd.full((sizes[key % 5],), 1000 * turn + key + store.rank) for key in keys.tolist()}
        for key, array in arrays.items():
            store.pushpull(f"k{key}", array, priority=int(random.integers(9)))
        for key, array in arrays.items():
            wanted = sum(1000 * turn + key + rank for rank in range(store.num_workers))
            assert (array.asnumpy() == wanted).all(), (turn, key)


def check_keys_that_wait_for_each_other(store):
    """A key that one process reaches only with the result of another key holds nothing up."""
    for size in (100, 100_000):
        x, y = nd.full(size, 2.0), nd.full(size, 3.0)
        if store.rank == 0:
            store.pushpull(f"x {size}", x)
            store.pushpull(f"y {size}", y)
        else:
            store.pushpull(f"y {size}", y)
            y.wait_to_read()
            store.pushpull(f"x {size}", x)
        assert (x.asnumpy() == 2 * store.num_workers).all() and (y.asnumpy() == 3 * store.num_workers).all()


def check_rows_summed_in_parts_have_the_same_bits(store):
    """Many processes sum a part of a long row each; the sums are those of one process that adds up in rank order."""
    many = sums.MANY
    for dtype, size in (("float32", 100_003), ("float64", 20_001), ("float16", 70_001), ("int32", 40_007)):
        values = [nd.random.uniform(-99, 99, shape=size).astype(dtype) for _ in range(store.num_workers * 2)]
        store.broadcast(f"values {dtype}", values, values)
        found = []
        try:
            for sums.MANY in (2, many):
                own = [values[2 * store.rank + place].as_in_context(device) for place, device in enumerate(DEVICES)]
                outs = per_device([np.zeros(size)] * 2, dtype)
                for _ in range(3):
                    store.pushpull(f"{sums.MANY} {dtype}", own, out=outs)
                found.append([out.asnumpy() for out in outs])
        finally:
            sums.MANY = many
        assert (np.array(found) == found[1][0]).all(), dtype
        wanted = sum(value.astype("float64").asnumpy() for value in values)
        assert np.allclose(found[0][0], wanted, rtol=2e-2 if dtype == "float16" else 1e-5, atol=1), dtype


def check_exchanges_of_one_key_keep_their_order(store):
    """One array after another at one key, all under way at once, keep their order on every process."""
    for turn, dtype in itertools.product(range(3), ("float32", "float16")):
        late = nd.ones((500, 500))
        for _ in range(3):
            late = nd.dot(late, late) / 500  # what the last process pushes first becomes ready last
        arrays = [nd.full((7,), 10 * turn + number + store.rank) for number in range(6)]
        if store.rank == store.num_workers - 1:
            arrays[0] = arrays[0] + late[0, :7] - 1
        arrays = [array.astype(dtype) for array in arrays]
        for array in arrays:
            store.pushpull(f"again {dtype}", array)
        for number, array in enumerate(arrays):
            wanted = sum(10 * turn + number + rank for rank in range(store.num_workers))
            assert np.allclose(array.asnumpy(), wanted), (turn, number, array, wanted)


def check_every_process_gets_the_same_bits(store):
    """Every process gets the same bits, whoever comes first; on one host those of the sum in rank order."""
    shared = store._progress.shared
    in_rank_order = shared is not None and shared.num_hosts == 1
    for size in (5, 300, 100_000):
        rows = [np.random.default_rng(size + rank).standard_normal(size).astype("float32") for rank in range(9)]
        wanted = np.sum(rows[: store.num_workers], axis=0, dtype="float64")
        by_rank = functools.reduce(np.add, rows[: store.num_workers])
        bits = set()
        for turn in range(4):
            if store.rank == turn % store.num_workers:
                time.sleep(0.01)
            array = nd.array(rows[store.rank])
            store.pushpull(f"bits {size}", array)
            found = array.asnumpy()
            assert np.allclose(found, wanted, rtol=1e-5, atol=1e-5), size
            if in_rank_order:
                assert (found == by_rank).all(), size
            digest = np.frombuffer(hashlib.sha256(found.tobytes()).digest(), np.uint8)
            bits.update(row.tobytes() for row in gp.metrics.gather_rows(digest[None], store))
        assert len(bits) == 1, size


def check_lists_of_keys_meet_whatever_is_ready_first(store):
    """Lists of keys, some of which are left out at times, whose arrays become ready in another order everywhere."""
    alike, own = np.random.default_rng(3), np.random.default_rng(100 + store.rank)
    shapes = [tuple(alike.integers(1, 40, alike.integers(1, 4))) for _ in range(40)] + [(300_000,), (700, 30)]
    dtypes = alike.choice(["float32", "float64", "int32", "float16"], len(shapes), p=[0.6, 0.2, 0.1, 0.1]).tolist()
    late = nd.ones((300, 300))
    kept = [per_device([np.zeros(shape)] * 2, dtype) for shape, dtype in zip(shapes, dtypes)]
    for turn in range(4):
        chosen = [key for key in range(len(shapes)) if alike.random() < 0.8]
        values = {key: [turn + key + rank for rank in range(store.num_workers)] for key in chosen}
        for key in own.permutation(chosen).tolist():
            busy = nd.dot(late, late)[0, 0] * 0 if own.random() < 0.2 else nd.zeros(1)
            for number, array in enumerate(kept[key]):
                ready = busy.as_in_context(array.context).astype(array.dtype)
                array[:] = nd.broadcast_add(nd.full(array.shape, values[key][store.rank] + number, array.context,
                                                    array.dtype), ready.reshape((1,) * array.ndim))  # fmt: skip
        grads = [kept[key] for key in chosen]
        outs = grads if turn % 3 else [[nd.zeros_like(array) for array in arrays] for arrays in grads]
        store.pushpull(chosen, grads, out=None if turn % 3 else outs)
        for key, arrays in zip(chosen, outs):
            wanted = 2 * sum(values[key]) + store.num_workers
            assert all((array.asnumpy() == wanted).all() for array in arrays), (turn, key, arrays, wanted)


def check_a_plan_sums_its_arrays_at_each_push(store):
    """Arrays of every kind, pushed again before the last sums have ended, and after a change of compression."""
    mine, num = gp.kvstore.create("mpi"), store.num_workers
    kinds = [(5, "float32"), (70_000, "float32"), (300, "float64"), (4, "int32"), (9, "float16"), (9, "uint8")]
    values = [per_device([np.full(size, 1), np.full(size, store.rank)], dtype) for size, dtype in kinds]
    values.append([nd.array([[1, 1], [0, 0], [2, 0]]).tostype("row_sparse")])
    outs = [[nd.zeros_like(array) for array in arrays] for arrays in values]
    plan = contract(mine).plan([f"planned {number}" for number in range(len(values))], values, outs)
    assert plan.store is mine
    wanted = num + num * (num - 1) // 2
    for turn in range(8):
        if turn == 5:
            mine.set_gradient_compression({"type": "bf16"})  # which has these numbers
        for out in outs[:-1]:
            for array in out:
                array[:] = 77
        for _ in range(3):
            plan.push()
        for arrays in outs[:-1]:
            assert all((array.asnumpy() == wanted).all() for array in arrays), (turn, arrays)
        assert (outs[-1][0].asnumpy() == num * np.array([[1, 1], [0, 0], [2, 0]])).all()


def check_many_large_arrays_at_once(store):
    """100 large pieces under way at once."""
    arrays = [nd.full((40000 + key,), store.rank + key) for key in range(100)]
    for turn in range(2):
        for key, array in enumerate(arrays):
            array[:] = store.rank + key + turn
            store.pushpull(f"piece {key}", array, priority=-key)
        for key, array in enumerate(arrays):
            wanted = sum(rank + key + turn for rank in range(store.num_workers))
            assert (array.asnumpy() == wanted).all(), (turn, key)


def check_three_thousand_small_exchanges(store):
    """3,000 small exchanges, half of them through the engine."""
    for number in range(1500):
        rows = store.gather("vector", np.array([number, store.rank], np.float64))
        assert rows[:, 0].tolist() == [number] * store.num_workers
        assert rows[:, 1].tolist() == list(range(store.num_workers))
    arrays = [nd.zeros(4) for _ in range(8)]
    for number in range(188):
        for key, array in enumerate(arrays):
            array[:] = number
            store.pushpull(key, array)
    assert all((array.asnumpy() == 187 * store.num_workers).all() for array in arrays)


def check_a_known_key_needs_no_message(store):
    """MPI's persistent operations are started again without any agreement; the wheel of Open MPI 5 has them."""
    if NONBLOCKING in os.environ:
        assert not store._progress.persistent
        return
    array, posted = nd.ones(3), []
    with pytest.MonkeyPatch.context() as patch:
        for turn in range(20):
            if turn == 2:
                messages = store._progress.messages
                patch.setattr(messages, "post", lambda *said, post=messages.post: posted.append(said) or post(*said))
            store.pushpull("known", array)
            array.wait_to_read()
    assert not [said for said in posted if said[1].kind not in (ASKED, ANSWERED)], posted


def check_sums_in_every_dtype(store):
    """float16 is added in float32; whole numbers and float64 are exact."""
    for dtype, value in (("float64", 1 + 2**-40), ("int32", 2**30 // 4), ("uint8", 3), ("float16", 1.0)):
        arrays = per_device([np.full(5, value, dtype)] * 2, dtype)
        store.pushpull(f"type {dtype}", arrays)
        for array in arrays:
            assert (array.asnumpy() == np.asarray(value, dtype) * (2 * store.num_workers)).all(), dtype
    for size, dtype in itertools.product((5, 50000), ("float16", BFLOAT16)):  # whole numbers up to 256 are exact
        arrays = [nd.amp_cast(nd.full((size,), store.rank + 1, ctx=device), dtype=dtype) for device in DEVICES]
        store.pushpull(f"half {size} {dtype}", arrays)
        wanted = store.num_workers * (store.num_workers + 1)
        assert all((nd.amp_cast(array, dtype="float32").asnumpy() == wanted).all() for array in arrays)
    array = nd.array([2048.0, 1, 1] if store.rank == 0 else [1.0, 1, 2048], dtype="float16")
    store.pushpull("small beside large", array)  # in float16, each addition of 1 to 2048 would be lost
    others = store.num_workers - 1
    wanted = np.array([2048.0 + others, 1 + others, 1 + 2048 * others])
    assert np.allclose(array.asnumpy(), wanted, rtol=2**-11, atol=0), (array.asnumpy(), wanted)
    store.set_gradient_compression({"type": "fp16"})
    for size in (10, 50000):
        array = nd.full((size,), 1 + 2**-9)
        store.pushpull(f"half {size}", array)
        assert np.allclose(array.asnumpy(), (1 + 2**-9) * store.num_workers, rtol=2**-10, atol=2**-10)
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    array, total = nd.zeros(50000), 0.0
    for _ in range(4):
        array[:] = 0.2
        store.pushpull("two bits", array)
        total += array.asnumpy()
    assert (total == 0.5 * store.num_workers).all()  # 0.8 in all: 0.5 was sent, the rest is kept, wherever it runs
    store.set_gradient_compression({"type": "none"})
