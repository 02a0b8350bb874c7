"""Checks of row_sparse gradients: sums of rows, what travels, and overflows; random trainings compare the weights."""

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.kvstore.mpi import python_sums
from mxnet import gluon, nd
from mxnet.contrib.amp.loss_scaler import LossScaler

WORDS, DEVICES = 30, gp.devices("cpu:2")


def check_sums_of_rows_have_the_bits_of_dense_sums(store):
    """Row by row the devices of a process are added up first, then the processes in their order."""
    rng = np.random.default_rng(3)
    full = rng.normal(size=(store.num_workers, 2, 20, 3)).astype("float32")
    full *= rng.random((store.num_workers, 2, 20, 1)) < 0.4
    full[0] = 0  # this process has no rows
    mine = [nd.array(values, ctx=mx.cpu(number)) for number, values in enumerate(full[store.rank])]
    rows = [array.tostype("row_sparse") for array in mine]
    for _ in range(2):
        outs = [array.copy() for array in rows]
        store.pushpull("rows", outs)
        for out in outs:
            reached = np.flatnonzero(full.any(axis=(0, 1, 3)))
            assert out.indices.asnumpy().tolist() == reached.tolist()
            wanted = np.add.reduce([devices[0] + devices[1] for devices in full])
            assert out.asnumpy().tobytes() == (wanted + 0).tobytes()
    nothing = nd.zeros((20, 3)).tostype("row_sparse")
    store.pushpull("rows", nothing)
    assert nothing.indices.shape == (0,)


def check_an_overflow_of_rows_on_one_process_skips_the_update_on_all(store):
    """Mixed precision's loss scaling looks at rows as well."""
    net = gluon.nn.Embedding(WORDS, 2, sparse_grad=True)
    net.initialize(mx.init.One(), ctx=gp.devices("cpu:1"))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    trainer._amp_loss_scaler, trainer._amp_original_scale = LossScaler(), trainer._scale  # as amp.init_trainer does
    step = gp.DataParallel(net, lambda out, factor: (out * factor).sum(axis=(1,)), trainer)
    scale = step.loss_scaling.scale
    for factor, skipped in ((1.0, 0), (np.inf if store.rank == 0 else 1.0, 1), (1.0, 1)):
        step(nd.array([store.rank, 5]), nd.full((2, 1), factor))
        assert step.loss_scaling.num_skipped == skipped, (factor, step.loss_scaling.num_skipped)
    assert step.loss_scaling.scale == scale / 2
    wanted = np.ones((WORDS, 2), "float32")
    wanted[: store.num_workers] -= 2 * 0.1 / (2 * store.num_workers)
    wanted[5] -= 2 * 0.1 / 2
    np.testing.assert_allclose(net.weight.data().asnumpy(), wanted, rtol=1e-6)


def check_few_words_of_many_travel_in_a_tenth_of_the_dense_bytes(store):
    """An embedding of 50,000 x 256, and 2,000 words per process."""
    num, width, sent = 50_000, 256, []

    class Operation(python_sums.Operation):
        def __init__(self, group, name, signature, stages, size, once=False):
            sent.append(size)
            super().__init__(group, name, signature, stages, size, once)

    net = gluon.nn.Embedding(num, width, sparse_grad=True)
    net.initialize(mx.init.Zero(), ctx=gp.devices("cpu:1"))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore=store)
    step = gp.DataParallel(net, lambda out: out.sum(axis=(1,)), trainer)
    words = np.arange(2000) * 7 + store.rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(python_sums, "Operation", Operation)
        step(nd.array(words))
    assert len(sent) == 1 and 0 < sent[0] <= num * width * 4 / 10  # each process sends them to each other one
    reached = {word * 7 + rank for word in range(2000) for rank in range(store.num_workers)}
    assert np.flatnonzero(net.weight.data().asnumpy().any(axis=1)).tolist() == sorted(reached)
