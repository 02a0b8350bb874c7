"""Sums that MPI takes from the arrays' own memory, run by every process: ``direct_checks.py mpi check...``."""

import ctypes
import functools
import hashlib
import os
import signal
import sys
import threading

import kvstore_checks
import numpy as np
from kvstore_checks import DEVICES, leave

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.kvstore import aware, direct, memory, wire
from mxnet import nd

SHAPES = [(7,), (3, 5), (1,), (40, 3, 3, 3), (70001,), (300, 257), (2,), (5, 1, 4)]


def equal(store):
    """Keys in another order on every process and two devices: the bits are those that host memory gives, everywhere."""
    staged = gp.kvstore.create("mpi")
    staged._direct = None
    for dtype in ("float32", "float64", "float16"):
        order = np.random.default_rng(store.rank).permutation(len(SHAPES)).tolist()
        ways = {}
        for way in (store, staged):
            random = np.random.default_rng(store.rank)
            shares = [[random.standard_normal(shape).astype(dtype) for _ in DEVICES] for shape in SHAPES]
            grads = [[nd.array(one, c, dtype) for one, c in zip(share, DEVICES)] for share in shares]
            apart = [[nd.zeros(shape, device, dtype) for device in DEVICES] for shape in SHAPES]
            for _ in range(3):  # the sum of a turn is what the next one begins with
                for key in order:
                    way.pushpull(f"{dtype} {key}", grads[key], priority=-key)
                    way.pushpull(f"{dtype} {key} apart", grads[key], out=apart[key])
            ways[way] = [[array.asnumpy() for array in arrays] for arrays in (*grads, *apart)]
        for one, other in zip(ways[store], ways[staged]):
            assert len({array.tobytes() for array in (*one, *other)}) == 1, (dtype, one[0].shape)
        everything = b"".join(one[0].tobytes() for one in ways[store])
        assert np.isfinite(np.concatenate([one[0].ravel() for one in ways[store]])).all()
        rows = store.gather(dtype, np.frombuffer(hashlib.sha256(everything).digest(), np.uint8))
        assert (rows == rows[0]).all(), dtype


def taken(store):
    """It is this way that the sums take, and only arrays of that size."""
    seen, swap = [], direct.Swap
    direct.Swap = lambda name, *rest: seen.append(name.decode().partition(":")[2]) or swap(name, *rest)
    least = store.direct_from
    assert least % 4 == 0 and least // 4 > store.num_workers
    for key, size in {"large": least // 4, "small": least // 4 - 1}.items():
        array = nd.ones(size)
        store.pushpull(key, [array])
        assert (array.asnumpy() == store.num_workers).all()
    store.pushpull("whole numbers", nd.ones(least, dtype="int32"))
    store.set_gradient_compression({"type": "fp16"})
    store.pushpull("compressed", nd.ones(least))
    store.set_gradient_compression({"type": "none"})
    mx.nd.waitall()
    direct.Swap = swap
    assert seen == ["large", "large"], seen  # parts, then results


def staged(store):
    """No process takes it where one cannot."""
    assert store.direct_from is None
    array = nd.ones(1_000_000)
    store.pushpull("staged", array)
    assert (array.asnumpy() == store.num_workers).all()


def asked(store):
    """What MPI says about itself is what is done."""
    assert (store.direct_from is not None) == aware.mpi_is_cuda_aware()
    if store.direct_from is None:
        staged(store)


def crossed(store):
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


def pieces(store):
    """Arrays of more bytes than MPI counts travel in pieces; here they are small."""
    size, wire._PIECE = wire._PIECE, 1000
    kvstore_checks.bits(store)
    wire._PIECE = size


def layouts(store):
    """What a convolution returns lies in oneDNN's layout."""
    random = np.random.default_rng(5)
    x, weight = nd.array(random.standard_normal((4, 16, 20, 20))), nd.array(random.standard_normal((32, 16, 3, 3)))
    wanted, y, z = (nd.Convolution(x, weight, kernel=(3, 3), num_filter=32, no_bias=True) for _ in range(3))
    store.pushpull("y", y, out=z)
    assert np.allclose(y.asnumpy(), wanted.asnumpy(), rtol=1e-5, atol=1e-4)
    assert np.allclose(z.asnumpy(), store.num_workers * wanted.asnumpy(), rtol=1e-5, atol=1e-3)


class Cuda:
    """The part of CUDA's runtime that is used, where every thread has a GPU of its own to begin with."""

    def __init__(self):
        self.threads, self.calls = threading.local(), 0

    @property
    def current(self):
        return getattr(self.threads, "current", 7)

    def cudaGetDevice(self, pointer):
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = self.current
        return 0

    def cudaSetDevice(self, number):
        self.threads.current = number
        self.calls += 1
        return 0


class Watched:
    """A communicator that asks, whenever it is used, which GPU is current on that thread."""

    def __init__(self, comm, cuda):
        self.comm, self.cuda, self.wrong, self.threads = comm, cuda, [], set()

    def __getattr__(self, name):
        if self.cuda.current != 3:
            self.wrong.append((name, threading.current_thread().name, self.cuda.current))
        self.threads.add(threading.get_ident())
        return getattr(self.comm, name)


def threads(store):
    """Every thread that calls MPI has the right GPU, and afterwards the one that it had."""
    hub, cuda = store._hub, Cuda()
    comm = hub.wire._comm
    hub.around = functools.partial(memory.on_gpu, 3, cuda)
    hub.wire._comm = watched = Watched(comm, cuda)
    restored = []
    submit = hub.submit
    hub.submit = lambda exchange: (submit(exchange), restored.append(cuda.current))
    kvstore_checks.order(store)
    for number in range(50):
        assert (store.gather("rows", np.array([number])) == number).all()
    hub.submit, hub.wire._comm = submit, comm
    assert not watched.wrong and len(watched.threads) > 1 and cuda.calls, watched.wrong[:5]
    assert restored and set(restored) == {7}


def refused(store):
    """CUDA does not let a thread use the GPU: everybody is told, and nobody waits."""
    array = nd.ones(1000)
    store.pushpull("first", array)
    array.wait_to_read()
    if store.rank == 0:
        cuda = Cuda()
        cuda.cudaSetDevice = lambda number: 101
        store._hub.around = functools.partial(memory.on_gpu, 3, cuda)
    told(store, array, "cudaSetDevice returned 101")


def across(store):
    """The last process sends an array that is so small that it takes another way."""
    array = nd.ones(1000 if store.rank < store.num_workers - 1 else 10)
    if os.environ.get("KNOWN"):  # the small one has worked before
        array, before = nd.ones(10), array
        store.pushpull("second", array)
        array.wait_to_read()
        array = before
    told(store, array, "float32 (10,)", "float32 (1000,)")


def killed(store):
    """The last process is killed while the others wait for its part."""
    array = nd.ones(100_000)
    store.pushpull("first", array)
    array.wait_to_read()
    if store.rank == store.num_workers - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    store.pushpull("second", array)
    array.wait_to_read()


def told(store, array, *words):
    try:
        store.pushpull("second", array)
        array.wait_to_read()
        for _ in range(2):
            store.pushpull("third", nd.ones(1))
            mx.nd.waitall()
    except (gp.errors.WorkersDiffer, gp.errors.WorkerLost) as error:
        assert all(word in str(error) for word in ("second", *words[1:])) or words[0] in str(error), error
        assert np.isnan(array.asnumpy()).all()
        leave("refused")
    raise AssertionError("nobody noticed")


if __name__ == "__main__":
    made = gp.kvstore.create(sys.argv[1])
    for check in sys.argv[2:]:
        (globals().get(check) or getattr(kvstore_checks, check))(made)
        print(f"passed {check} on {made.rank}", flush=True)
