"""Losses over the whole batch: any devices and processes train the weights of a plain loop on one device."""

import contrastive
import numpy as np
import pytest
from checks_group import Group, checks, each_check
from processes import needs_mpi, run_mpi, run_servers

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.mxnet.compat.array_types import BFLOAT16
from gluon_parallel.nn.sync_batch_norm.participants import drain
from mxnet import gluon

SIZES = 6, 7, 2, 5, 1, 6  # uneven shards, fewer samples than devices, one sample


@pytest.mark.parametrize("name", contrastive.CASES)
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_any_devices_train_as_a_plain_loop_on_one(name, num_devices):
    steps = list(contrastive.batches(name, SIZES))
    losses, wanted = contrastive.train_alone(name, steps)
    devices = [mx.cpu(number) for number in range(num_devices)]
    net, loss, trainer, parameters = contrastive.make(name, devices, hybridize=num_devices == 2)
    step = gp.DataParallel(net, loss, trainer, loss_over="batch")
    values = [step(inputs, labels).asscalar() for inputs, labels in steps]
    np.testing.assert_allclose(values, losses, rtol=1e-4, atol=1e-5)
    contrastive.assert_equal_weights(parameters, wanted)


CHECKS = checks("loss_over_batch_checks")
GROUPS = [
    Group("mpi, 2 processes", run_mpi, 2, "mpi", CHECKS, marks=(needs_mpi,)),
    Group("mpi, 3 processes", run_mpi, 3, "mpi", CHECKS[:1], marks=(needs_mpi, pytest.mark.slow)),
    Group("dist_sync", run_servers, 2, "dist_sync", CHECKS[-1:]),
]


@each_check(GROUPS)
def test_every_process_trains_as_one_device(groups, group, check):
    groups[group].assert_passed(check)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_a_loop_of_ones_own_gathers_with_gradients(num_devices):
    devices = [mx.cpu(number) for number in range(num_devices)]
    for name in ("simclr", "clip", "triplet"):
        steps = list(contrastive.batches(name, (7, 6, 5, 3) * 5))
        _, wanted = contrastive.train_alone(name, steps)
        net, loss, trainer, parameters = contrastive.make(name, devices)
        for inputs, labels in steps:
            shards = gp.split_and_load((inputs, labels), devices)
            with gp.nn.participants(net, devices[: len(shards)]):
                with mx.autograd.record():
                    outputs, classes = gp.gather([(net(*x), y) for x, y in shards])
                    value = loss(*(outputs if isinstance(outputs, (list, tuple)) else [outputs]), *classes)
                value.backward()
            trainer.step(1)
        contrastive.assert_equal_weights(parameters, wanted)


class Extra(gluon.nn.Block):
    """A net that also returns what the loss does not use, its input, and classes, in a dict."""

    def __init__(self):
        super().__init__(prefix="extra_")
        with self.name_scope():
            self.main, self.unused = gluon.nn.Dense(2, in_units=3), gluon.nn.Dense(2, in_units=3)

    def forward(self, x):
        z = self.main(x)
        return {"z": z, "unused": self.unused(x), "x": x, "classes": z.argmax(axis=1)}


def product(output):
    return (mx.nd.dot(output["z"], output["x"][:, :2], transpose_b=True) ** 2).mean()


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_what_the_loss_does_not_use_has_no_gradient(rng, grad_req):
    batches, weights = [rng.standard_normal((5, 3)).astype("float32") for _ in range(3)], []
    for devices in ([mx.cpu(0)], [mx.cpu(1), mx.cpu(2)]):
        net = Extra()
        net.initialize(mx.init.Constant(0.5), ctx=devices)
        net.collect_params().setattr("grad_req", grad_req)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "wd": 0.1})
        step = gp.DataParallel(net, product, trainer, ignore_stale_grad=True, loss_over="batch", clip_global_norm=0.5)
        for x in batches:
            if len(devices) > 1:
                step(x)
                continue
            with mx.autograd.record():
                value = product(net(mx.nd.array(x)))
            value.backward()
            trained = net.main.collect_params().values()
            gluon.utils.clip_global_norm([one.grad() for one in trained], 0.5)
            trainer.step(1, ignore_stale_grad=True)
            net.collect_params().zero_grad()
        weights.append([one.data(devices[-1]).asnumpy() for one in net.collect_params().values()])
    for one, other in zip(*weights):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert (weights[0][2] == 0.5).all()  # no weight decay of what was not reached


def test_a_net_that_is_frozen_leaves_the_losss_parameters_to_train():
    net, loss, trainer, parameters = contrastive.make("clip", [mx.cpu(0), mx.cpu(1)])
    net.collect_params().setattr("grad_req", "null")
    step = gp.DataParallel(net, loss, trainer, loss_over="batch")
    [(inputs, _)] = contrastive.batches("clip", [5])
    step(inputs)
    assert abs(loss.scale.data(mx.cpu(1)).asscalar() - 0.7) > 1e-4
    loss.scale.grad_req = "null"
    with pytest.raises(gp.errors.GradientUnavailable, match="all parameters of the net are frozen"):
        step(inputs)
    drain()  # its layers were left in the middle


def test_a_split_of_the_users_gives_the_order_of_its_shards(rng):
    x = rng.standard_normal((5, 1)).astype("float32")
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    seen = []

    def loss(z, x):
        seen.append(x.asnumpy().copy())
        return (z * mx.nd.arange(5).reshape((5, 1))).sum()

    def split(data, devices):
        return [gp.split.shard(data, 2, 5, 0, devices[1]), gp.split.shard(data, 0, 2, 0, devices[0])]

    step = gp.DataParallel(net, loss, gluon.Trainer(net.collect_params(), "sgd"), split=split, loss_over="batch")
    step(x, x)
    np.testing.assert_array_equal(seen[0], np.concatenate([x[2:], x[:2]]))


def pairs_of(z):
    return mx.nd.dot(z, z, transpose_b=True).sum()


def make_dense():
    net = gluon.nn.Dense(2, in_units=3)
    net.initialize(mx.init.Constant(0.1), ctx=[mx.cpu(0), mx.cpu(1)])
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})


class WithNorm(gluon.loss.Loss):
    def __init__(self):
        super().__init__(weight=None, batch_axis=0)
        self.norm = gp.nn.SyncBatchNorm(in_channels=2)


class WithParts:
    parts = ("one",)

    def __call__(self, z):
        return [(z.sum().reshape((1,)), mx.nd.ones(1, z.ctx))]


@pytest.mark.parametrize(
    ("loss", "options", "words"),
    [
        (pairs_of, {"accumulate": 2}, "accumulate=2: the loss is over the whole batch"),
        (pairs_of, {"loss_over": "batches"}, "expected 'shard'.* or 'batch'.*got 'batches'"),
        (WithParts(), {}, r"the loss has parts \(one\)"),
        (WithNorm(), {}, "of the loss is a batch norm"),
    ],
)
def test_what_cannot_be_trained_over_the_batch_is_refused(loss, options, words):
    net, trainer = make_dense()
    if isinstance(loss, gluon.Block):
        loss.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    with pytest.raises(ValueError, match=words):
        gp.DataParallel(net, loss, trainer, **{"loss_over": "batch", **options})


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda z: mx.nd.concat(z, z, dim=0).sum(axis=1), r"shape \(10,\) for the 5 samples of the whole batch"),
        (lambda z: 1.0, "returned a float"),
        (lambda z, scale: z, r"whole batch: outputs \(5, 2\); labels none"),
    ],
)
def test_a_loss_of_another_form_is_refused_and_the_next_step_is_right(loss, words):
    net, trainer = make_dense()
    step, before = gp.DataParallel(net, loss, trainer, loss_over="batch"), net.weight.data(mx.cpu(0)).asnumpy()
    with pytest.raises((gp.errors.BatchMismatch, TypeError), match=words):
        step(np.ones((5, 3)))
    assert (net.weight.data(mx.cpu(0)).asnumpy() == before).all()
    step.loss = pairs_of
    step(np.ones((5, 3)))
    assert (net.weight.data(mx.cpu(1)).asnumpy() != before).all()


def test_outputs_without_a_row_per_sample_are_refused():
    net, trainer = make_dense()

    class WithScale(gluon.nn.Block):
        def forward(self, x):
            return net(x), mx.nd.ones(1, x.ctx)

    both = WithScale()
    both.net = net
    step = gp.DataParallel(both, lambda z, scale: (z * scale).sum(), trainer, loss_over="batch")
    with pytest.raises(
        gp.errors.BatchMismatch, match=r"output\[1\] has shape \(1,\) for 3 samples.*parameter of the loss"
    ):
        step(np.ones((5, 3)))


def test_a_loss_that_is_the_sum_over_samples_is_divided():
    weights = []
    for reduction, loss in (("sum", pairs_of), (None, lambda z: pairs_of(z) / 5), ("mean", lambda z: pairs_of(z) / 5)):
        net, trainer = make_dense()
        step = gp.DataParallel(net, loss, trainer, reduction=reduction, loss_over="batch")
        value = step(np.ones((5, 3))).asscalar()
        assert abs(value - 25 * 2 * 0.3**2 / 5) < 1e-5
        weights.append(net.weight.data(mx.cpu(1)).asnumpy())
    np.testing.assert_allclose(weights[1:], [weights[0]] * 2, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("outputs", "store", "error", "words"),
    [
        ([], None, gp.errors.BatchMismatch, "there are no outputs"),
        ([{}], None, gp.errors.BatchMismatch, "there are no outputs"),
        ([mx.nd.ones((2, 3)), "z"], None, gp.errors.BatchMismatch, r"outputs\[1\] is a str"),
        ([(mx.nd.ones(2), mx.nd.ones(1))], None, gp.errors.BatchMismatch, r"outputs\[0\]\[1\] has shape \(1,\)"),
        ([mx.nd.ones(2), (mx.nd.ones(2),)], None, gp.errors.BatchMismatch, "nested differently"),
        ([mx.nd.ones((2, 3)), mx.nd.ones((2, 4), mx.cpu(1))], None, gp.errors.BatchMismatch, r"\(2, 4\) on cpu\(1\)"),
        ([mx.nd.ones(2)], "mpi", TypeError, "expected a KVStore"),
    ],
)
def test_gather_refuses_what_is_no_batch(outputs, store, error, words):
    with pytest.raises(error, match=words):
        gp.gather(outputs, store)


def test_arrays_of_numpy_mode_stay_such(numpy_mode, rng):
    x, weights = rng.standard_normal((5, 3)).astype("float32"), []
    for devices in ([mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]):
        net = gluon.nn.Dense(2, in_units=3)
        net.initialize(mx.init.Constant(0.5), ctx=devices)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        step = gp.DataParallel(net, lambda z, y: mx.np.mean(mx.np.matmul(z, z.T) * y), trainer, loss_over="batch")
        value = step(x, x[:, :1])
        assert type(value) is mx.np.ndarray
        weights.append(net.weight.data(devices[-1]).asnumpy())
        with mx.autograd.record():
            whole = gp.gather([net(shard) for shard in gp.split_and_load(x, devices)])
        assert type(whole) is mx.np.ndarray and whole.shape == (5, 2)
    np.testing.assert_allclose(*weights, rtol=1e-5, atol=1e-6)


def test_bfloat16_is_gathered_as_float32():
    shards = [mx.nd.amp_cast(mx.nd.full((2, 1), 1.5, device), dtype=BFLOAT16) for device in (mx.cpu(0), mx.cpu(1))]
    assert gp.gather(shards).asnumpy().tolist() == [[1.5]] * 4
