"""A state that is put back is the state that was taken: bit for bit, on any number of devices, or refused by name."""

import functools

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import archive
from gluon_parallel.errors import CheckpointError
from gluon_parallel.training.checkpoint import restore, state
from mxnet import gluon
from mxnet.gluon import nn

# A checkpoint keeps every device's own statistics; that plain BatchNorm has such is meant here.
pytestmark = pytest.mark.filterwarnings("ignore::gluon_parallel.errors.StatisticsPerDevice")

OPTIMIZERS = [
    ("sgd", {"learning_rate": 0.1}),
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}),
    ("nag", {"learning_rate": 0.1, "momentum": 0.9}),
    ("adam", {"learning_rate": 0.01}),
    ("adamw", {"learning_rate": 0.01}),
    ("nadam", {"learning_rate": 0.01}),
    ("rmsprop", {"learning_rate": 0.01, "centered": True}),
    ("adagrad", {"learning_rate": 0.1}),
    ("adadelta", {}),
    ("adamax", {"learning_rate": 0.01, "wd": 0.01}),  # MXNet's makes NaN of gradients that are exactly 0
    ("ftrl", {"learning_rate": 0.1}),
    ("signum", {"learning_rate": 0.01, "momentum": 0.9}),
    ("lamb", {"learning_rate": 0.01}),
    ("lars", {"learning_rate": 0.1, "momentum": 0.9}),
]


def cpus(num_devices):
    return [mx.cpu(i) for i in range(num_devices)]


def small_net(num_devices, units=6):
    """A net with everything that a state may hold: weights, running statistics, random numbers."""
    net = nn.HybridSequential()
    with net.name_scope():  # in every net the same order of names, which is the trainer's order of parameters
        net.add(
            nn.Conv2D(4, kernel_size=3, in_channels=1, use_bias=False),
            nn.BatchNorm(in_channels=4),
            nn.Activation("relu"),
            nn.Dropout(0.3),
            nn.Dense(units, in_units=4 * 36, activation="tanh"),
            nn.Dense(3, in_units=units),
        )
    net.initialize(mx.init.Xavier(), ctx=cpus(num_devices))
    net.hybridize()
    return net


def make(num_devices, optimizer="sgd", arguments=None, **options):
    net = small_net(num_devices)
    arguments = {"learning_rate": 0.1, "momentum": 0.9} if arguments is None else dict(arguments)
    trainer = gluon.Trainer(net.collect_params(), optimizer, arguments, **options)
    return net, trainer, gp.DataParallel(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer)


def data(rng, num_steps=6):
    return [(rng.normal(size=(7, 1, 8, 8)).astype("float32"), rng.integers(3, size=7)) for _ in range(num_steps)]


def train(step, batches, first=0):
    for number, (images, labels) in enumerate(batches, start=first):
        gp.reseed(5, 0, number)
        step(images, labels)


def assert_same(a, b):
    assert a.facts == b.facts
    assert list(a.arrays) == list(b.arrays)
    for name, array in a.arrays.items():
        assert array.dtype == b.arrays[name].dtype, name
        np.testing.assert_array_equal(array, b.arrays[name], err_msg=name)


class Fading(mx.lr_scheduler.LRScheduler):
    """Smaller at every call, whatever the number of updates."""

    def __call__(self, num_update):
        self.base_lr *= 0.99
        return self.base_lr


def scheduled(schedule, scale=1, **options):
    """A net and a trainer with a schedule, which is scaled and warmed up if `scale` is not 1."""

    def build():
        made = schedule(base_lr=0.4 / scale, **options)
        made = made if scale == 1 else gp.LinearScalingScheduler(made, 8 * scale, 8, warmup_steps=7)
        return make(2, "sgd", {"learning_rate": 0.4, "lr_scheduler": made})

    return build


def by_hand(update_on_kvstore):
    """A loop of one's own, of a trainer with a key-value store."""

    def step(images, labels):
        shards = gp.split_and_load((images, labels), cpus(2))
        with mx.autograd.record():
            losses = [loss(net(x), y) for x, y in shards]
        mx.autograd.backward(losses)
        trainer.step(len(labels))

    net, loss = small_net(2), gluon.loss.SoftmaxCrossEntropyLoss()
    arguments = {"learning_rate": 0.01}
    trainer = gluon.Trainer(net.collect_params(), "adam", arguments, "device", update_on_kvstore=update_on_kvstore)
    return net, trainer, step


def in_half_precision():
    """Weights of float16, whose master weights are float32."""

    def step(images, labels):
        gradient = np.random.RandomState(labels[0]).normal(size=(3, 1, 2, 2))
        net.weight.grad()[:] = mx.nd.array(gradient, dtype="float16")
        net.weight.data()._fresh_grad = True
        trainer.update(1)

    net = nn.Conv2D(3, kernel_size=2, in_channels=1, use_bias=False)
    net.cast("float16")
    net.initialize(mx.init.Xavier(), ctx=cpus(1))
    arguments = {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", arguments, kvstore=None)
    return net, trainer, step


@pytest.mark.parametrize(
    "build",
    [
        *(functools.partial(make, num, *optimizer) for num in (1, 3) for optimizer in OPTIMIZERS),
        *(scheduled(Fading, scale) for scale in (1, 4)),
        scheduled(mx.lr_scheduler.FactorScheduler, 4, step=2, factor=0.5),
        scheduled(mx.lr_scheduler.FactorScheduler, step=2, factor=0.5),
        scheduled(mx.lr_scheduler.CosineScheduler, max_update=8, warmup_steps=2),
        *(functools.partial(by_hand, update_on_kvstore) for update_on_kvstore in (True, False)),
        in_half_precision,
    ],
)
def test_stopping_and_continuing_in_another_net_changes_no_bit(tmp_path, rng, build):
    batches = data(rng, 9)
    net, trainer, step = build()
    train(step, batches[:5])
    archive.write(tmp_path / "a.npz", *state(net, trainer))
    train(step, batches[5:], first=5)

    other, other_trainer, other_step = build()
    train(other_step, batches[:1])  # its store is in use already, with other weights
    restore(archive.read(tmp_path / "a.npz"), other, other_trainer)
    train(other_step, batches[5:], first=5)
    assert_same(state(net, trainer), state(other, other_trainer))


def test_a_state_is_a_copy_of_each_devices_own_which_further_training_does_not_change(rng):
    net, trainer, step = make(2)
    train(step, data(rng, 2))
    taken = state(net, trainer)
    copy = gp.archive.Archive({name: array.copy() for name, array in taken.arrays.items()}, dict(taken.facts))
    train(step, data(rng, 2))
    assert_same(taken, copy)
    assert not np.array_equal(taken.arrays["parameters/5.weight"], state(net).arrays["parameters/5.weight"])
    means = [copy.asnumpy() for copy in net[1].running_mean.list_data()]
    assert not np.array_equal(*means)
    other, other_trainer, _ = make(2)
    restore(state(net, trainer), other, other_trainer)
    for mean, copy in zip(means, other[1].running_mean.list_data()):
        np.testing.assert_array_equal(copy.asnumpy(), mean)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3)])
def test_a_state_loads_on_another_number_of_devices_and_trains_like_there(rng, before, after):
    batches = data(rng)
    net, trainer, step = make(before, "adam", {"learning_rate": 0.01})
    train(step, batches[:3])
    taken = state(net, trainer)
    other, other_trainer, other_step = make(after, "adam", {"learning_rate": 0.01})
    restore(taken, other, other_trainer)

    for name, parameter in net._collect_params_with_prefix().items():
        copies = [copy.asnumpy() for copy in parameter.list_data()]
        for here in other._collect_params_with_prefix()[name].list_data():
            # equal weights are taken over as they are; of unequal running statistics the mean, rounded once
            mean = np.mean(copies, axis=0, dtype=np.float64)
            np.testing.assert_allclose(here.asnumpy(), mean, rtol=1e-7, atol=1e-9)
    again = state(other, other_trainer)
    assert again.facts == taken.facts
    optimizer = {name for name in taken.arrays if name.startswith("optimizer/")}
    assert optimizer and all(np.array_equal(taken.arrays[name], again.arrays[name]) for name in optimizer)
    train(other_step, batches[3:], first=3)
    copies = [copy.asnumpy() for copy in other[5].weight.list_data()]
    assert all(np.array_equal(copies[0], copy) and np.isfinite(copy).all() for copy in copies)


def test_a_learning_rate_that_was_set_by_hand_comes_back_and_hyperparameters_are_the_new_trainers(rng):
    net, trainer, step = make(2)
    train(step, data(rng, 1))
    trainer.set_learning_rate(0.0125)
    other, other_trainer, _ = make(2, "sgd", {"learning_rate": 0.3, "momentum": 0.5, "wd": 0.25})
    restore(state(net, trainer), other, other_trainer)
    assert other_trainer.learning_rate == 0.0125
    assert (other_trainer.optimizer.momentum, other_trainer.optimizer.wd) == (0.5, 0.25)


def assert_refused_and_unchanged(taken, net, trainer, match):
    before = state(net, trainer)
    with pytest.raises(CheckpointError, match=match):
        restore(taken, net, trainer, source="here.npz")
    assert_same(before, state(net, trainer))


def test_another_architecture_is_refused_with_the_first_parameters_that_differ(rng):
    net, trainer, step = make(2)
    train(step, data(rng, 1))
    taken = state(net, trainer)

    wider = small_net(2, units=8)
    wider_trainer = gluon.Trainer(wider.collect_params(), "sgd")
    wanted = r"here\.npz is of another architecture.*4\.weight is float32 \(6, 144\) in the checkpoint and .*\(8, 144\)"
    assert_refused_and_unchanged(taken, wider, wider_trainer, wanted)

    deeper = small_net(2)
    deeper.add(nn.Dense(2, in_units=3))
    deeper[6].initialize(ctx=cpus(2))
    deeper_trainer = gluon.Trainer(deeper.collect_params(), "sgd")
    assert_refused_and_unchanged(taken, deeper, deeper_trainer, r"6\.weight is not in the checkpoint")
    restored = state(deeper, deeper_trainer)
    assert_refused_and_unchanged(restored, net, trainer, r"6\.weight is only in the checkpoint; 6\.bias")


def test_another_optimizer_or_none_is_refused_and_nothing_changed(rng):
    net, trainer, step = make(2)
    train(step, data(rng, 1))
    cosine = mx.lr_scheduler.CosineScheduler(40, 0.1)
    for schedule in (cosine, gp.LinearScalingScheduler(cosine, 64, 64)):
        _, scheduled_trainer, _ = trained = scheduled(mx.lr_scheduler.FactorScheduler, step=2, factor=0.5)()
        train(trained[2], data(rng, 1))
        taken, scheduled_trainer.optimizer.lr_scheduler = state(*trained[:2]), schedule
        assert_refused_and_unchanged(taken, *trained[:2], "another kind of learning rate schedule than")
    for optimizer, match in (
        ("adam", r"here\.npz was trained by SGD, not by Adam"),
        ("sgd", r"another kind of optimizer state: optimizer/.* is only in the checkpoint"),
    ):
        other, other_trainer, _ = make(2, optimizer, {"learning_rate": 0.1})
        assert_refused_and_unchanged(state(net, trainer), other, other_trainer, match)
    assert_refused_and_unchanged(state(net), net, trainer, "holds parameters alone")
    other = small_net(3)
    restore(state(net, trainer), other)  # the parameters alone
    np.testing.assert_array_equal(other[5].weight.data(mx.cpu(2)).asnumpy(), net[5].weight.data(mx.cpu(0)).asnumpy())


def test_a_net_without_values_is_refused_by_the_name_of_its_parameter():
    with pytest.raises(CheckpointError, match="parameter weight of Dense has no values yet: call net.initialize"):
        state(nn.Dense(3))
    known = nn.Dense(3, in_units=2)
    known.initialize()
    with pytest.raises(CheckpointError, match=r"call net.initialize\(...\) before loading"):
        restore(state(known), nn.Dense(3, in_units=2))


def deferred_net(num_outputs=4):
    net = nn.HybridSequential()
    net.add(nn.Dense(num_outputs), nn.BatchNorm(), nn.Dense(3))
    net.initialize(mx.init.Xavier(), ctx=gp.devices("cpu:2"))
    return net, gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1})


def test_a_deferred_net_of_another_architecture_is_refused_and_takes_no_shapes(tmp_path):
    net, _ = deferred_net()
    net(mx.nd.ones((2, 5)))
    gp.checkpoint.save(tmp_path / "a.npz", net)
    other, trainer = deferred_net(6)
    with pytest.raises(CheckpointError, match=r"0.weight is float32 \(4, 5\) in the checkpoint and float32 \(6, 0\)"):
        gp.checkpoint.load(tmp_path / "a.npz", other, trainer)
    assert other[2].weight.shape == (3, 0)


@pytest.mark.parametrize("kept", [[0], mx.nd.zeros(1), "cumgrads"])
def test_an_optimizer_that_keeps_what_is_not_saved_is_refused(rng, kept):
    name, options, attribute = "sgd", {}, "seen"
    if isinstance(kept, str):  # where an optimizer of MXNet's keeps arrays
        name, options, attribute = "lbsgd", {"batch_scale": 2}, kept
    net, trainer, step = make(1, name, {"learning_rate": 0.1, **options})
    train(step, data(rng, 1))
    trainer.optimizer.seen = kept
    with pytest.raises(CheckpointError, match=f"SGD keeps arrays or a list of numbers in its attribute '{attribute}'"):
        state(net, trainer)
