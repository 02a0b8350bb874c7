import pickle
from copy import deepcopy

import numpy as np
import pytest
from step_checks import Loss

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd


class First(gluon.nn.Sequential):
    """Layers of which it uses the first one alone."""

    def forward(self, x):
        return self[0](x)


def reduced(loss, reduction):
    """The mean or the sum of a loss over the samples."""
    return lambda *arrays: getattr(loss(*arrays), reduction)()


def returning(value):
    """A loss of two parts that returns a value."""
    loss = lambda *_: value  # noqa: E731
    loss.parts = "square", "above"
    return loss


def cpus(number):
    return gp.devices(f"cpu:{number}")  # GPUs with --devices gpu


def parallel_of(net, num_devices, loss=None, init=None, optimizer=("sgd", {"learning_rate": 0.1}), **options):
    """A step of this net on so many devices."""
    net.initialize(init or mx.init.Xavier(), ctx=cpus(num_devices))
    trainer = gluon.Trainer(net.collect_params(), *optimizer)
    return gp.DataParallel(net, loss or gluon.loss.L2Loss(), trainer, **options)


# With momentum, a lazy update moves the rows of the gradient alone: what no sample reached stays.
LAZY = "sgd", {"learning_rate": 0.1, "momentum": 0.9}
OPTIMIZERS = [(name, {"learning_rate": 0.1, "lazy_update": False}) for name in ("sgd", "adam")]


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"clip_global_norm": 0.1}], ids=str)
@pytest.mark.parametrize("how", [*OPTIMIZERS, LAZY], ids=["sgd", "adam", "lazy"])
def test_sparse_gradients_train_like_dense_ones(options, how):
    results = []
    for sparse, number in [(how is LAZY, 1), (True, 3)]:
        net = gluon.nn.Embedding(10, 4, sparse_grad=sparse, dtype="float64")
        parallel = parallel_of(net, number, lambda out: (out**2).sum(axis=1), mx.init.One(), how, **options)
        for words in ([1, 2, 2, 7, 1], [3, 1], [0, 1, 2, 3], [4], [5, 6, 8]) * 2:  # some devices have none
            parallel.step(nd.array(words))
        parallel.update()
        results.append(net.weight.list_data()[-1].asnumpy())
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6, atol=1e-9)  # of clipping, norms are float32


def test_nothing_to_train_is_refused_with_its_cause():
    net = gluon.nn.Dense(1, in_units=1)
    parallel = parallel_of(net, 2)
    data = nd.ones((2, 1))
    loss = parallel.step(data, data)
    with pytest.raises(mx.base.MXNetError, match="parallel.step have made the backward pass already"):
        loss.backward()
    net.collect_params().setattr("grad_req", "null")
    with pytest.raises(gp.errors.GradientUnavailable, match="all parameters of the net are frozen .*grad_req of some"):
        parallel.step(data, data)
    net.collect_params().setattr("grad_req", "write")
    parallel.step(data, data)
    parallel = gp.DataParallel(net, lambda out, y: (y * 2).mean(axis=1), parallel.trainer)
    with pytest.raises(gp.errors.GradientUnavailable, match="the loss depends on no parameter that is trained"):
        parallel.step(data, data)


def test_sparse_parameters_that_cannot_be_trained_are_refused_by_name():
    net = gluon.nn.Embedding(10, 4, sparse_grad=True, prefix="words_")
    net.initialize(ctx=cpus(2))

    class Other(mx.kv.KVStoreBase):
        type, rank, num_workers = "other", 0, 1

    for store in ("horovod", Other(), "dist_sync"):
        trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=store)
        with pytest.raises(gp.errors.GradientUnavailable, match="words_weight: the store .* does not sum row_sparse"):
            gp.DataParallel(net, gluon.loss.L2Loss(), trainer)
    net = gluon.contrib.nn.SparseEmbedding(10, 4, prefix="words_")
    net.initialize(ctx=cpus(2))
    with pytest.raises(gp.errors.GradientUnavailable, match="words_weight: row_sparse weights"):
        gp.DataParallel(net, gluon.loss.L2Loss(), gluon.Trainer(net.collect_params(), "sgd"))


def made(net=None, num_devices=2, store="device", **options):
    """A step of a net that needs float32 inputs (n, 4)."""
    net = net or gluon.nn.Dense(2, in_units=4)
    net.initialize(ctx=cpus(num_devices))
    compression = {"compression_params": options.pop("compression")} if "compression" in options else {}
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", kvstore=store, update_on_kvstore=options.pop("on_store", None), **compression
    )
    return gp.DataParallel(**{"net": net, "loss": gluon.loss.L2Loss(), "trainer": trainer, **options})


X, Y, TWO_BITS = np.ones((4, 4), "float32"), np.zeros((4, 2), "float32"), {"type": "2bit", "threshold": 0.5}
PAIR = nd.ones(1), nd.ones(1)
SOFTMAX = {"loss": gluon.loss.SoftmaxCrossEntropyLoss()}
REFUSED = [
    (r"expected a gluon.Trainer", {"trainer": "sgd"}),
    (r"loss: expected a function of \(output, label\).*got 'softmax'", {"loss": "softmax"}),
    (r"loss: got the class L2Loss; write L2Loss\(\)", {"loss": gluon.loss.L2Loss}),
    ("accumulate", {"accumulate": 0}),
    ("clip_global_norm", {"clip_global_norm": -1}),
    (r"not on \[cpu\(4\)\].*reset_ctx", {"devices": 1, "to": [mx.cpu(0), mx.cpu(4)]}),
    ("update_on_kvstore=False", {"on_store": True}),
    *(
        (f"'threshold': 0.5.*{store}.*take the store mpi", {"store": store, "compression": TWO_BITS})
        for store in ("dist_sync", "dist_device_sync", "horovod")
    ),
    ("no samples", {"batch": (X[:0], Y[:0])}),
    *(
        (r'\w+ samples .*.pu\(0\)|two samples.*reduction="sum"',
         {"loss": reduced(gluon.loss.L2Loss(), how), "devices": 3, "batch": (X[:size], Y[:size])})
        for how in ("mean", "sum") for size in (3, 4)
    ),
    (r"data\['inputs'\]\[0\] has 3, data\['labels'\]\[0\] has 2", {"batch": (X[:3], Y[:2])}),
    (r"shape \(3,\) for 2 samples on .pu\(\d+\)", {"loss": lambda output, _: nd.ones((3,), ctx=output.context)}),
    (r"shape \(2,\) for 2 samples.*reduction='mean'.*leave it out", {"reduction": "mean"}),
    ("reduction: expected 'mean' or 'sum'.*got 'average'", {"reduction": "average"}),
    (r"reduction='sum': the loss has parts \(square, above\)", {"reduction": "sum", "loss": Loss()}),
    ("accumulate=2: .*square, above.*take a larger batch", {"accumulate": 2, "loss": Loss()}),
    *(
        (r"returns 2 pairs \(sum, count\)", {"devices": 1, "loss": returning(value)})
        for value in ([PAIR], [(nd.ones(2), nd.ones(1))] * 2, nd.ones(2))
    ),
    (r"1 label \(4, 2\).*labels are numbers of classes", {**SOFTMAX, "devices": 1}),
    (r"is 2, .* the net has 2 outputs", {**SOFTMAX, "batch": (X, np.array([0, 1, 2, 0]))}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "wrong"), REFUSED)
def test_what_cannot_be_trained_is_refused_and_nothing_is_updated(message, wrong):
    wrong, net = dict(wrong), gluon.nn.Dense(2, in_units=4)
    batch, to, num = wrong.pop("batch", (X, Y)), wrong.pop("to", None), wrong.pop("devices", 2)
    kinds = ValueError, gp.errors.GradientUnavailable, mx.base.MXNetError
    with pytest.raises(kinds, match=message):
        made(net, num, **wrong, **({"devices": to} if to else {})).step(*batch)
    np.testing.assert_array_equal(net.bias.list_data()[0].asnumpy(), 0)


@pytest.mark.parametrize("copied", [deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"])
def test_a_copy_of_a_net_trains_on_the_same_devices_and_its_original_stays(copied):
    net = gluon.nn.Dense(2, in_units=4)
    net.initialize(mx.init.One(), ctx=cpus(2))
    gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0})._init_kvstore()  # as its first step does
    other = copied(net)
    trainer = gluon.Trainer(other.collect_params(), "sgd", {"learning_rate": 1.0})
    step = gp.DataParallel(other, gluon.loss.L2Loss(), trainer)
    assert step.devices == cpus(2)
    step(X, Y)  # outputs of 4, halved by the mean over two of them
    assert [array.asnumpy().tolist() for array in other.weight.list_data()] == [[[-1.0] * 4] * 2] * 2
    assert [array.ctx for array in other.weight.list_data()] == cpus(2)
    assert (net.weight.data().asnumpy() == 1).all()


def test_weights_of_grouped_convolutions_are_trained_and_compared_whatever_their_memory_layout():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(32, 3), gluon.nn.Conv2D(32, 3, groups=32), gluon.nn.Flatten(), gluon.nn.Dense(2))
    step = parallel_of(net, 2)
    x, y = np.ones((4, 3, 12, 12), "float32"), np.zeros((4, 2), "float32")
    first = step(x, y).asscalar()  # makes the parameters by an inference, for which oneDNN lays weights out anew
    net(nd.array(x, ctx=cpus(1)[0])).wait_to_read()
    gp.check_replicas(net)
    assert step(x, y).asscalar() < first


def test_running_statistics_of_each_device_are_no_difference_between_replicas():
    net = gluon.nn.BatchNorm(in_channels=2)
    net.initialize(ctx=cpus(2))
    net.running_mean.data(mx.cpu(1))[:] = 7
    gp.check_replicas(net)
    net.gamma.data(mx.cpu(1))[:] = 7
    with pytest.raises(gp.errors.ReplicasDiffer, match="gamma differs"):
        gp.check_replicas(net)


def test_what_the_net_returned_on_each_device_is_there_after_the_step():
    step = made(num_devices=3)
    for num in (4, 2, 3):
        wanted = step.net(nd.array(X[:num], ctx=cpus(1)[0])).asnumpy()
        step(X[:num], Y[:num])
        assert len(step.outputs) == min(num, 3)
        np.testing.assert_allclose(
            np.concatenate([one.asnumpy() for one in step.outputs]), wanted, rtol=1e-5, atol=1e-6
        )


def test_a_step_that_breaks_off_leaves_nothing_behind():
    step, clean = (made(gluon.nn.Dense(2, in_units=4), number, accumulate=2) for number in (2, 1))
    clean.net.weight.set_data(step.net.weight.data(cpus(1)[0]))
    step(X, Y)
    loss, step.loss = step.loss, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        step(X, Y)
    step.loss = loss
    for one in (step, clean):
        one(2 * X, Y)
        one(3 * X[:3], Y[:3])
    for ours, [wanted] in zip(step.net.weight.list_data(), [clean.net.weight.list_data()] * 2):
        np.testing.assert_allclose(ours.asnumpy(), wanted.asnumpy(), rtol=1e-5, atol=1e-6)


def test_a_parameter_that_the_loss_does_not_reach_is_named_or_left_out_and_a_frozen_one_stays():
    net = First()
    net.add(gluon.nn.Dense(2, in_units=4), gluon.nn.Dense(2, in_units=4))
    step = made(net)
    with pytest.raises(gp.errors.GradientUnavailable, match="dense"):
        step(X, Y)
    step = gp.DataParallel(net, step.loss, step.trainer, ignore_stale_grad=True)
    net[0].bias.grad_req = "null"
    before = [one.list_data()[1].asnumpy() for one in net.collect_params().values()]
    step(X, Y)
    after = [one.list_data()[1].asnumpy() for one in net.collect_params().values()]
    assert [not np.array_equal(a, b) for a, b in zip(before, after)] == [True, False, False, False]
