"""Choice between MXNet's store over NCCL and our own sums; NCCL itself needs GPUs."""

import types

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.data_parallel import first_step
from mxnet import gluon, nd

GPUS = [mx.gpu(0), mx.gpu(1)]


class Features:
    def is_enabled(self, name):
        return name == "NCCL"


def trainer_on(devices, dtypes=("float32",), compression=None, **options):
    parameters = [gluon.Parameter(f"weight{i}", shape=(3, 2), dtype=dtype, **options) for i, dtype in enumerate(dtypes)]
    return types.SimpleNamespace(_contexts=devices, _compression_params=compression, _params=parameters)


@pytest.mark.parametrize("dtypes", [["float32"], ["float32", np.float64]])
def test_nccl_sums_float32_and_float64_between_gpus_where_it_is_built_in(monkeypatch, dtypes):
    assert not first_step.nccl_fits(trainer_on(GPUS, dtypes))  # this MXNet has no NCCL
    monkeypatch.setattr(mx.runtime, "Features", Features)
    assert first_step.nccl_fits(trainer_on(GPUS, dtypes))


@pytest.mark.parametrize(
    "trainer",
    [
        trainer_on(GPUS[:1]),
        trainer_on([mx.cpu(0), mx.cpu(1)]),
        trainer_on([mx.gpu(0), mx.cpu(0)]),
        trainer_on(GPUS, ["float32", "float16"]),
        trainer_on(GPUS, compression={"type": "2bit"}),
        trainer_on(GPUS, grad_stype="row_sparse"),
    ],
    ids=["one GPU", "CPUs", "GPU and CPU", "float16", "compression", "row_sparse"],
)
def test_what_nccl_cannot_sum_as_well_is_left_to_allreduce(monkeypatch, trainer):
    monkeypatch.setattr(mx.runtime, "Features", Features)
    assert not first_step.nccl_fits(trainer)


def test_without_a_store_there_is_no_nccl_either(monkeypatch):
    monkeypatch.setattr(first_step, "nccl_fits", lambda trainer: pytest.fail("asked for"))
    net = gluon.nn.Dense(2, in_units=3)
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=None)
    gp.DataParallel(net, gluon.loss.L2Loss(), trainer).step(nd.ones((4, 3)), nd.ones((4, 2)))
    assert trainer._kvstore is None


def test_training_through_a_store_of_mxnet_gives_the_same_weights(monkeypatch):
    def weights():
        devices = [mx.cpu(index) for index in range(3)]
        mx.random.seed(3)
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(5, activation="tanh"), gluon.nn.Dense(2))  # whose shapes the first step finds out
        net.initialize(mx.init.Xavier(), ctx=devices)
        net.cast("float64")
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
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
    trainer, found = weights()
    assert trainer._kvstore.type == "device"
    for copies, (wanted, *_) in zip(found, expected):
        for copy in copies:
            np.testing.assert_allclose(copy, wanted, rtol=1e-9, atol=1e-12)  # sums in another order
