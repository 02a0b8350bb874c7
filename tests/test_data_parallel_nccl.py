"""Choice between MXNet's store over NCCL and our own sums; NCCL itself needs GPUs."""

import types

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.step import first_step
from mxnet import gluon, nd

GPUS = [mx.gpu(0), mx.gpu(1)]


class Features:
    def is_enabled(self, name):
        return name == "NCCL"


def trainer_on(devices, dtypes=("float32",), compression=None, **options):
    parameters = [gluon.Parameter(f"weight{i}", shape=(3, 2), dtype=dtype, **options) for i, dtype in enumerate(dtypes)]
    return types.SimpleNamespace(_contexts=devices, _compression_params=compression, _params=parameters)


FITS = {
    "float32": (trainer_on(GPUS), True),
    "float64 too": (trainer_on(GPUS, ["float32", np.float64]), True),
    "one GPU": (trainer_on(GPUS[:1]), False),
    "CPUs": (trainer_on([mx.cpu(0), mx.cpu(1)]), False),
    "GPU and CPU": (trainer_on([mx.gpu(0), mx.cpu(0)]), False),
    "float16": (trainer_on(GPUS, ["float32", "float16"]), False),
    "compression": (trainer_on(GPUS, compression={"type": "2bit"}), False),
    "row_sparse": (trainer_on(GPUS, grad_stype="row_sparse"), False),
}


@pytest.mark.parametrize("case", FITS)
def test_nccl_sums_float32_and_float64_between_gpus_where_it_is_built_in_and_allreduce_the_rest(monkeypatch, case):
    trainer, fits = FITS[case]
    assert not first_step.nccl_fits(trainer)  # this MXNet has no NCCL
    monkeypatch.setattr(mx.runtime, "Features", Features)
    assert first_step.nccl_fits(trainer) == fits


def test_training_through_a_store_of_mxnet_gives_the_same_weights(monkeypatch):
    def weights(store="device"):
        devices = [mx.cpu(index) for index in range(3)]
        mx.random.seed(3)
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(5, activation="tanh"), gluon.nn.Dense(2))  # whose shapes the first step finds out
        net.initialize(mx.init.Xavier(), ctx=devices)
        net.cast("float64")
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, store)
        step = gp.DataParallel(net, gluon.loss.L2Loss(), trainer, accumulate=2, clip_global_norm=1.0)
        random = np.random.RandomState(2)
        for _ in range(6):
            step(*(nd.array(random.standard_normal((7, num)), dtype="float64") for num in (4, 2)))
        return trainer, [
            [one.asnumpy() for one in parameter.list_data()] for parameter in net.collect_params().values()
        ]

    _, expected = weights()
    monkeypatch.setattr(first_step, "nccl_fits", lambda trainer: True)
    create = first_step.kvstore.create
    monkeypatch.setattr(first_step.kvstore, "create", lambda name: create("device" if name == "nccl" else name))
    trainer, _ = weights(None)
    assert trainer._kvstore is None  # nor is there any NCCL then
    trainer, found = weights()
    assert trainer._kvstore.type == "device"
    for copies, (wanted, *_) in zip(found, expected):
        for copy in copies:
            np.testing.assert_allclose(copy, wanted, rtol=1e-9, atol=1e-12)  # sums in another order
