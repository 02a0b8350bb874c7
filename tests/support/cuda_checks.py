"""Checks of sums that MPI takes from the arrays' own memory, as every process of a group runs them."""

import ctypes
import functools
import hashlib
import threading

import kvstore_sums
import numpy as np
from kvstore_sums import DEVICES

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.kvstore.mpi.agreement import key_of
from gluon_parallel.kvstore.mpi.cuda import cuda_allreduce, cuda_aware, device_memory
from mxnet import nd

SHAPES = [(7,), (3, 5), (1,), (40, 3, 3, 3), (70001,), (300, 257), (2,), (5, 1, 4)]


def check_bits_are_those_that_host_memory_gives(store):
    """Keys in another order on every process and two devices: the bits are those that host memory gives, everywhere."""
    staged = gp.kvstore.create("mpi")
    staged._cuda_allreduce = None
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


def check_only_arrays_of_that_size_take_this_way(store):
    """It is this way that the sums take, and only arrays of that size."""
    seen, allreduce = [], cuda_allreduce.allreduce
    cuda_allreduce.allreduce = lambda circle, name, *rest: seen.append(key_of(name)) or allreduce(circle, name, *rest)
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
    cuda_allreduce.allreduce = allreduce
    assert seen == ["large"], seen


def check_nobody_takes_this_way(store):
    """No process takes it where one cannot."""
    assert store.direct_from is None
    array = nd.ones(1_000_000)
    store.pushpull("staged", array)
    assert (array.asnumpy() == store.num_workers).all()


def check_what_mpi_says_is_done(store):
    """What MPI says about itself is what is done."""
    assert (store.direct_from is not None) == cuda_aware.mpi_is_cuda_aware()
    if store.direct_from is None:
        check_nobody_takes_this_way(store)


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


def check_layouts_of_a_convolution(store):
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


def check_every_thread_has_the_right_gpu(store):
    """Every thread that calls MPI has the right GPU, and afterwards the one that it had."""
    progress, cuda = store._progress, Cuda()
    comm = progress.messages._comm
    with progress._lock:  # no thread is in MPI, so all enter it with what is set here
        progress.around = functools.partial(device_memory.on_gpu, 3, cuda)
        progress.messages._comm = progress.everyone.comm = watched = Watched(comm, cuda)
    restored = []
    submit = progress.submit
    progress.submit = lambda exchange: (submit(exchange), restored.append(cuda.current))
    kvstore_sums.check_keys_meet_in_any_order(store)
    for number in range(50):
        assert (store.gather("rows", np.array([number])) == number).all()
    progress.submit, progress.messages._comm, progress.everyone.comm = submit, comm, comm
    assert not watched.wrong and len(watched.threads) > 1 and cuda.calls, watched.wrong[:5]
    assert restored and set(restored) == {7}
