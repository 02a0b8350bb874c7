"""Nothing in a training step waits for a device: it returns while all devices are busy with something else."""

import contextlib
import ctypes
import functools
import threading

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import split
from gluon_parallel.allreduce import copy_sums
from gluon_parallel.mxnet import engine
from mxnet import gluon, nd

# MXNet's own waiting runs on cpu(0), which stands for the host here; these stand for GPUs.
DEVICES = [mx.cpu(1), mx.cpu(2)]
LIMIT = 60.0  # seconds, after which a step counts as waiting

WAITING = ["MXNDArrayWaitToRead", "MXNDArrayWaitToWrite", "MXNDArrayWaitAll", "MXNDArraySyncCopyToCPU",
           "MXNDArraySyncCopyFromCPU", "MXNDArraySyncCopyFromNDArray", "MXNDArraySyncCheckFormat", "MXNDArraySave",
           "MXNDArraySaveRawBytes", "MXNDArrayGetSharedMemHandle", "MXNDArrayToDLPack"]  # fmt: skip


@pytest.fixture(autouse=True)
def as_on_gpus(monkeypatch):
    """Sums by MXNet's store, and host data copied on the host first."""
    monkeypatch.setattr(copy_sums, "_is_memory", lambda arrays: False)
    monkeypatch.setattr(copy_sums, "_are_of_gpus", lambda arrays: True)
    monkeypatch.setattr(split, "_is_gpu", DEVICES.__contains__)


@contextlib.contextmanager
def calls_that_wait():
    """The calls within this block of MXNet's functions that wait for an array; copies into host memory do not."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for name in WAITING:
            patch.setattr(mx.base._LIB, name, functools.partial(_noted, calls, name, getattr(mx.base._LIB, name)))
        yield calls


def _noted(calls, name, function, *arguments):
    kind, number = ctypes.c_int(), ctypes.c_int()
    if name == "MXNDArraySyncCopyFromCPU":
        mx.base._LIB.MXNDArrayGetContext(arguments[0], ctypes.byref(kind), ctypes.byref(number))
    if name != "MXNDArraySyncCopyFromCPU" or mx.Context(mx.Context.devtype2str[kind.value], number.value) in DEVICES:
        calls.append(name)
    return function(*arguments)


@contextlib.contextmanager
def busy_devices():
    """Within this block no device executes anything."""
    free = threading.Event()
    for device in DEVICES:
        engine.push(lambda: free.wait(LIMIT), device=device, name="busy")
    try:
        yield
        assert not free.is_set()
    finally:
        free.set()
        nd.waitall()


def batches(num):
    random = np.random.RandomState(0)
    for _ in range(num):
        yield random.rand(8, 2, 6, 6).astype("float32"), random.randint(0, 3, 8)


def parts_loss(output, label):
    loss = gluon.loss.SoftmaxCrossEntropyLoss()(output, label)
    return [(loss.sum(), nd.ones(1, loss.ctx) * loss.size)]


parts_loss.parts = ("all",)

CASES = {
    "plain": {},
    "clipped and stale": {"clip_global_norm": 0.1, "ignore_stale_grad": True, "optimizer": "adam"},
    "accumulated": {"accumulate": 2},
    "parts": {"loss": parts_loss},
    "sync": {"sync": True},
    "hybridized": {"hybridize": {"static_alloc": True}},
    "one update for all": {"optimizer": "nadam"},
}


def make_step(loss=None, optimizer="sgd", sync=False, hybridize=None, make=gp.DataParallel, **options):
    norm = gp.nn.SyncBatchNorm if sync else gluon.nn.BatchNorm
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(4, 3, in_channels=2), norm(in_channels=4), gluon.nn.Dense(3, in_units=64))
    net.initialize(mx.init.Xavier(), ctx=DEVICES)
    if hybridize:
        net.hybridize(**hybridize)
    trainer = gluon.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.01})
    return make(net, loss or gluon.loss.SoftmaxCrossEntropyLoss(), trainer, **options)


@pytest.mark.filterwarnings("ignore::gluon_parallel.errors.StatisticsPerDevice")
@pytest.mark.parametrize("case", CASES)
def test_a_step_returns_while_the_devices_are_busy_and_calls_nothing_that_waits(case):
    step = make_step(**CASES[case])
    for batch in batches(4):  # the first one may wait, for what is made once
        step(*batch)
    nd.waitall()
    computed = threading.Event()
    with busy_devices(), calls_that_wait() as calls:
        for batch in batches(2):  # with two, `accumulate` updates
            loss = step(*batch)
        engine.push(computed.set, read=[loss])
        assert calls == []
        assert not computed.wait(0.1)
    assert np.isfinite(loss.asnumpy()).all()
    assert computed.is_set()


@pytest.mark.filterwarnings("ignore::gluon_parallel.errors.StatisticsPerDevice")
def test_a_step_of_prepare_waits_for_no_device_either():
    training = make_step(make=gp.prepare, clip_global_norm=1.0)
    for batch in batches(2):
        training.step(*batch)
    training.mean_loss()
    with busy_devices(), calls_that_wait() as calls:
        for batch in batches(8):  # losses are read eight steps later
            training.step(*batch)
        assert calls == []
    assert np.isfinite(training.mean_loss())


def test_what_waits_is_counted():
    array = nd.ones(3, ctx=DEVICES[0])
    with calls_that_wait() as calls:
        array.asnumpy()
        array[:] = np.ones(3)
        nd.array(np.ones(3), ctx=mx.cpu())
    assert calls == ["MXNDArraySyncCopyToCPU", "MXNDArraySyncCopyFromCPU"]
