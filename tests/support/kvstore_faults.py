"""Programs of a group in which the last process differs or fails: ``python kvstore_faults.py store fault...``."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.environment import LIMIT, default_timeout
from gluon_parallel.reduce.shards import owner_bounds
from mxnet import gluon, nd

DEVICES = gp.devices("cpu:2")


def per_device(values, dtype="float32"):
    return [nd.array(value, ctx=device, dtype=dtype) for device, value in zip(DEVICES, values)]


def is_last(store):
    """Whether this process is the one that differs or fails."""
    return store.rank == store.num_workers - 1


def noticed(store, words, start):
    """What `start` does is refused within the limit, with these words, and this process leaves."""
    began = time.monotonic()
    try:
        start()
    except (gp.errors.WorkersDiffer, gp.errors.WorkerLost) as error:
        assert all(word in str(error) for word in words), error
        assert time.monotonic() - began < default_timeout() / 2  # nobody waited for the limit
        leave("refused")
    raise AssertionError("nobody noticed")


def step_of(net, store):
    net.initialize(ctx=DEVICES)
    made = gluon.Trainer(net.collect_params(), "sgd", kvstore=store, update_on_kvstore=False)
    return gp.DataParallel(net, gluon.loss.L2Loss(), made, DEVICES)


def models(store):
    """The last process trains another model; nobody takes a step."""
    units = 5 if is_last(store) else 4
    step = step_of(gluon.nn.Dense(units, in_units=3), store)

    def steps():
        for _ in range(3):
            step(nd.ones((4, 3)), nd.ones((4, units)))
            mx.nd.waitall()

    noticed(store, ("key", "(4,", "(5,"), steps)


def opening(store):
    """The last process opens a key with another shape."""
    shape = (3, 4) if is_last(store) else (4, 3)
    store.broadcast(0, nd.ones(3), per_device([np.zeros(3)] * 2))
    refused(store, lambda: store.broadcast(7, nd.ones(shape), per_device([np.ones(shape)] * 2)))


def rows(store):
    """The last process's gradients are row_sparse, those of the others are not."""
    step = step_of(gluon.nn.Embedding(5, 3, sparse_grad=is_last(store)), store)
    refused(store, lambda: step(nd.ones(4), nd.ones((4, 3))))


def divided(store):
    """The last process's second array is longer, where each process gets a part of the sums."""
    sizes = [6, 7 if is_last(store) else 6]
    refused(
        store,
        lambda: store.reduce_scatter(
            [0, 1], [[nd.ones(size)] for size in sizes], owner_bounds(sizes, store.num_workers)
        ),
    )


def layers(store):
    """The last process's model has a layer less."""
    net = gluon.nn.HybridSequential()
    for _ in range(2 if is_last(store) else 3):
        net.add(gluon.nn.Dense(3, in_units=3))
    step = step_of(net, store)
    refused(store, lambda: step(nd.ones((4, 3)), nd.ones((4, 3))))


def alone(store):
    """The last process trains another model with gluon.Trainer alone, for which the servers update the weights."""
    units = 5 if is_last(store) else 3
    net = gluon.nn.Dense(2, in_units=units)
    net.initialize(ctx=DEVICES)
    made = gluon.Trainer(net.collect_params(), "sgd", kvstore=store.type)
    x = nd.ones((4, units), ctx=DEVICES[0])
    with mx.autograd.record():
        loss = net(x).sum()
    loss.backward()
    refused(store, lambda: made.step(4 * store.num_workers, ignore_stale_grad=True))


def refused(store, start):
    """What `start` does is refused at once, on every process with the key and all ranks."""
    began = time.monotonic()
    try:
        start()
    except gp.errors.WorkersDiffer as error:
        first = "process 0 sends" if store.num_workers == 2 else "processes 0, 1 send"
        for words in (f"{first} float32 (", f"process {store.num_workers - 1} sends ", "under key "):
            assert words in str(error), error
        assert time.monotonic() - began < default_timeout() / 2  # nobody waited for the limit
        raise  # a plain end of the program must not wait for anybody either


def missing(store):
    """The last process does not open a key that the others open, and lives on."""
    store.broadcast(0, nd.ones(3), nd.ones(3))
    os.environ[LIMIT] = "3"  # which is waited for; what came before may take longer
    if is_last(store):
        time.sleep(20)
        leave("was missing")
    store.broadcast(1, nd.ones((3, 2)), nd.ones((3, 2)))


def later(store):
    """The last process sends another shape under a key that has worked before."""
    array, other = nd.ones((3, 4)), nd.ones((4, 3))

    def push(array):
        for _ in range(3):
            store.pushpull("weight", array)
            array.wait_to_read()

    push(array)
    noticed(store, ("key weight", "(3, 4)", "(4, 3)"), lambda: push(other if is_last(store) else array))


def raising(store):
    """The last process fails; the others are told why, within the limit."""
    survivor(store, lambda: (_ for _ in ()).throw(RuntimeError("no data")), "RuntimeError: no data")


def refusing(store):
    """The last process ends with a status, and has said what that stands for."""

    def refuse():
        gp.kvstore.leave_because("ConfigError: no such net")
        sys.exit(2)

    survivor(store, refuse, "ConfigError: no such net")


def stopping(store):
    """The last process stops without a word."""
    processes = gp.metrics.gather_rows(nd.array([os.getpid()], dtype="int32"), store).tolist()

    def stopped():
        while Path(f"/proc/{processes[-1]}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        store._progress.timeout = 3  # what came before may take longer

    survivor(store, lambda: os.kill(os.getpid(), signal.SIGSTOP), f"process {store.num_workers - 1}", stopped)


def leaving(store):
    """The last process takes fewer steps."""
    survivor(store, lambda: sys.exit(0), "has ended its program")


def shapes(store):
    """The last process sends another shape."""
    array = nd.zeros((3, 4) if is_last(store) else (4, 3))
    store.pushpull("weight", array)

    def read():
        try:
            array.wait_to_read()
            mx.nd.waitall()
            store.pushpull("weight", array)
            mx.nd.waitall()
            store.pushpull("weight", array)
        finally:
            assert np.isnan(array.asnumpy()).all()  # nobody may train on with half a sum

    noticed(store, ("key weight", "(3, 4)", "(4, 3)"), read)


def integers(store):
    """The last process sends another shape: integers have no NaN, so reading them must raise, on both devices."""
    shape = (3, 4) if is_last(store) else (4, 3)
    arrays = [nd.ones(shape, dtype="int32", ctx=mx.cpu(index)) for index in range(2)]
    store.pushpull("weight", arrays)
    for array in (arrays[0] + 1, arrays[1]):
        try:
            found = array.asnumpy()
        except (gp.errors.WorkersDiffer, gp.errors.WorkerLost) as error:
            assert "key weight" in str(error), error
        else:
            raise AssertionError(f"{found} was read")


def unread(store):
    """The same, and nobody reads it."""
    store.pushpull("weight", nd.ones((3, 4) if is_last(store) else (4, 3), dtype="int32"))


def ending(store):
    """The program ends while a function in the engine is about to use the store, and nobody reads what has failed."""
    array, failed = nd.zeros(3), nd.zeros(1)
    store.broadcast(0, array, array)
    mx.nd.waitall()

    def use_late():
        time.sleep(0.5)  # the program has ended
        store.pushpull(0, array)

    gp.mxnet.engine.push(use_late, write=[nd.zeros(1)])
    gp.mxnet.engine.fail([failed], ValueError("lost"))


def closing(store):
    """The same, and the program closes the store itself, and uses it again."""
    ending(store)
    for function, error in [(store.close, ValueError), (lambda: store.rank, gp.errors.StoreUnavailable)]:
        try:
            function()
        except error as raised:
            print(f"told: {raised}", flush=True)
        else:
            raise AssertionError(f"{error} was not raised")
    sys.exit(0)


def unconnected(store):
    """The last process has closed all files that it does not know, and with them MPI's connections."""
    array = nd.ones(4)
    store.pushpull("common", array)
    array.wait_to_read()
    if is_last(store):
        os.closerange(3, 1024)
    store._progress.timeout = 3  # what came before may take longer


def survivor(store, fail, words, failed=lambda: None):
    array = nd.ones(4)
    store.pushpull("common", array)
    array.wait_to_read()
    if is_last(store):
        fail()
    failed()
    began = time.monotonic()
    store.pushpull("alone", array)
    try:
        array.wait_to_read()
        store.pushpull("after", array)
    except gp.errors.WorkerLost as error:
        assert words in str(error), error
        assert time.monotonic() - began < 30
        assert np.isnan(array.asnumpy()).all()
        leave(f"told: {error}")
    raise AssertionError("nobody noticed")


def leave(text):
    print(text, flush=True)
    os._exit(3)


def prepare(name):
    """Something that happens before the store is made; whether the last process makes one at all."""
    [group] = [name for name in ("OMPI_COMM_WORLD_", "HOROVOD_", "WORKER_") if f"{name}RANK" in os.environ]
    last = int(os.environ[f"{group}RANK"]) == int(os.environ[f"{group}SIZE"]) - 1
    if name == "version" and last:
        gp.__version__ = "0.0.1"
    if name == "silent":
        from mpi4py import MPI  # without our settings: its own end would wait for everyone

        MPI.COMM_WORLD.Barrier()
        os.environ[LIMIT] = "2"  # which is waited for; MPI's start may take longer
        if last:  # it opens no store
            time.sleep(1000)
    if name == "not_started" and last:  # it does not even start MPI
        time.sleep(1000)


if __name__ == "__main__":
    if sys.argv[2] in ("version", "silent", "not_started"):
        prepare(sys.argv.pop(2))
    made = gp.kvstore.create(sys.argv[1])
    for name in sys.argv[2:]:
        globals()[name](made)
        print(f"passed {name} on {made.rank}", flush=True)
