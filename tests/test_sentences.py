"""Common mistakes of new users raise an error whose message says what to write instead."""

import subprocess
import sys

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

DEVICES = [mx.cpu(0), mx.cpu(1)]
X, Y = nd.ones((4, 3)), nd.zeros(4)


def make_net(net=None):
    net = net or gluon.nn.Dense(2, in_units=3)
    net.initialize(ctx=DEVICES)
    return net


def normalised(**options):
    layer = gp.nn.SyncBatchNorm(in_channels=3, **options)
    layer.initialize(ctx=DEVICES)
    return layer(X)


def make_step(net=None, **options):
    net = net or make_net()
    trainer = gluon.Trainer(net.collect_params(), "sgd", **options)
    return gp.DataParallel(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer)


def evaluate(metric="acc", store=None):
    return gp.evaluate(make_net(), [(X, Y)], metric, DEVICES, store)


def plain_trainer(kvstore):
    gluon.Trainer(make_net().collect_params(), "sgd", kvstore=kvstore).step(1)


LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
NO_STORE = r"no store 'mpii'; did you mean 'mpi'\? expected auto or one of"
REFUSED = {
    # MXNet takes every name that it does not know for "local": processes would train apart.
    "trainer, store misspelt": (lambda: make_step(kvstore="mpii")(X, Y), ValueError, NO_STORE),
    "own loop, store misspelt": (lambda: plain_trainer("mpii"), ValueError, NO_STORE),
    "mx.kv.create, store misspelt": (lambda: mx.kv.create("mpii"), ValueError, NO_STORE),
    "layer, store misspelt": (lambda: gp.nn.SyncBatchNorm(kvstore="mpii"), ValueError, NO_STORE),
    "own loop, no servers": (lambda: plain_trainer("dist_sync"), gp.errors.StoreUnavailable, "launch --engine ps"),
    "evaluate, store's name": (lambda: evaluate(store="mpi"), TypeError, r"evaluate: store is 'mpi'.*create\('mpi'\)"),
    "merge, store's name": (
        lambda: gp.metrics.merge(mx.metric.Accuracy(), "mpi"), TypeError, r"store is 'mpi', expected a KVStore",
    ),
    "gather, store's name": (lambda: gp.metrics.gather_rows(np.ones(2), "mpi"), TypeError, r"store is 'mpi', expected"),
    "join, no store": (lambda: list(gp.sampler.join([X], None)), TypeError, "join: store is None, expected a KVStore"),
    "check_replicas, store's name": (lambda: gp.check_replicas(make_net(), "mpi"), TypeError, "store is 'mpi'"),
    "step without samples, alone": (lambda: make_step()(None), gp.errors.BatchMismatch, r"step\(None\).*meets none"),
    "step without anything": (lambda: make_step()(None, None), gp.errors.BatchMismatch, r"step\(None\).*meets none"),
    "step of a pair": (lambda: make_step()([X, Y]), TypeError, r"net with 2 inputs.*0 labels.*: .*step\(\*batch\)"),
    "step without labels": (lambda: make_step()(X), TypeError, r"'label' \(the step called the net with 1 input "),
    "step, float64": (
        lambda: make_step()(X.astype("float64"), Y), mx.base.MXNetError, r"float64, and the loss.*x\.astype\(",
    ),
    "step, uint8 images": (
        lambda: make_step(make_net(gluon.nn.Conv2D(2, 1, in_channels=1)))(nd.ones((2, 1, 4, 4), dtype="uint8"), Y[:2]),
        mx.base.MXNetError, r"'uint8' v\.s\. given 'float32'.*x\.astype\(",
    ),
    "step, class 2 of 2": (
        lambda: make_step()(X, Y + 2), gp.errors.BatchMismatch, "is 2, .* 2 outputs, for the classes 0 to 1",
    ),
    "step, class nan": (lambda: make_step()(X, Y * np.nan), gp.errors.BatchMismatch, "is nan, which is no class"),
    "evaluate, a mean": (
        lambda: evaluate(lambda outputs, labels: LOSS(outputs, labels).mean()),
        gp.errors.BatchMismatch,
        r"metric <lambda>: it returned shape \(1,\) for 2 samples; expected an array with one value per sample",
    ),
    "evaluate, MXNet's function": (
        lambda: evaluate(["acc", lambda labels, outputs: 0.5]),
        gp.errors.BatchMismatch,
        r"it returned a float for 2 samples.*is passed as mx\.metric\.CustomMetric\(function\)",
    ),
    "evaluate, nothing": (lambda: evaluate(None), ValueError, r"got NoneType; expected a name such as 'acc'"),
    "evaluate, swapped": (
        lambda: gp.evaluate(make_net(), "acc", [(X, Y)], DEVICES), ValueError, r"order is evaluate\(net, loader",
    ),
    "sampler, a data set": (lambda: gp.sampler.BatchSampler([1, 2], 1), gp.errors.BatchMismatch, r"write len\(data\)"),
    "sampler, a store": (
        lambda: gp.sampler.BatchSampler(9, 2, gp.kvstore.create("local")), gp.errors.BatchMismatch, "write store.rank",
    ),
    "trainer and loss swapped": (
        lambda: gp.DataParallel(make_net(), gluon.Trainer(make_net().collect_params(), "sgd"), LOSS),
        ValueError, r"got SoftmaxCrossEntropyLoss; the order is \(net, loss, trainer\)",
    ),
    "evaluate, another device": (
        lambda: gp.evaluate(make_net(), [(X, Y)], "acc", [mx.cpu(0), mx.cpu(2)]),
        gp.errors.DeviceUnavailable, r"is on \[cpu\(0\), cpu\(1\)\] but not on \[cpu\(2\)\].*reset_ctx\(devices\)",
    ),
    "batch norm, axis": (
        lambda: normalised(axis=2), gp.errors.BatchMismatch, r"axis=2 must be .*the input has shape \(4, 3\)",
    ),
    "another net's trainer": (
        lambda: gp.DataParallel(make_net(), LOSS, gluon.Trainer(make_net().collect_params(), "sgd")),
        gp.errors.GradientUnavailable, r"none of the parameters of this Dense.*net.collect_params\(\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_with_what_to_write(what):
    call, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        call()


def test_auto_is_a_stores_name_everywhere(monkeypatch):
    monkeypatch.delenv("GLUON_PARALLEL_KVSTORE", raising=False)
    assert mx.kv.create("auto").type == "device"
    step = make_step(kvstore="auto")
    assert np.isfinite(step(X, Y).asscalar())


def test_a_metrics_class_is_as_good_as_its_name():
    assert evaluate(mx.metric.Accuracy) == evaluate("acc")


def test_labels_that_are_no_class_are_left_out_by_a_weight_of_zero():
    assert np.isfinite(make_step()(X, (Y - 1, nd.zeros((4, 1)))).asscalar())


SCRIPT = """
import sys
import gluon_parallel as gp
from mxnet import autograd, nd

layer = gp.nn.SyncBatchNorm(in_channels=2, timeout=1)
layer.initialize(ctx=gp.devices("cpu:2"))
with autograd.record():
    y = layer(nd.ones((4, 2)))  # the other device is forgotten
if "read" in sys.argv:
    try:
        y.asnumpy()
    except gp.errors.BarrierTimeout as error:
        print("error:", error, file=sys.stderr)
        sys.exit(2)
"""


@pytest.mark.parametrize(
    ("words", "status", "beginning"), [([], 0, "gluon_parallel: an operation failed"), (["read"], 2, "error:")]
)
def test_an_error_is_told_once_whether_somebody_read_it_or_the_program_ended(tmp_path, words, status, beginning):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(path), *words], capture_output=True, text=True, timeout=100)
    lines = done.stderr.splitlines()
    assert done.returncode == status and len(lines) == 1, done.stderr
    assert lines[0].startswith(beginning) and "cpu(1) did not" in lines[0], done.stderr
