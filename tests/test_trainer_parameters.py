"""A trainer's parameters, which the caller writes or moves between steps, are trained as on one device.

The weights of one device are the obvious comparison: there MXNet's Trainer has one copy of everything.
"""

import itertools

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.errors import GradientUnavailable
from mxnet import autograd, gluon, nd

OPTIMIZERS = {"sgd": {"momentum": 0.9}, "nadam": {}, "adam": {}}
SIZES = [6, 1, 5, 2, 6]  # of the batches; one is smaller than the devices are many


def layers(devices, prefix="net_"):
    net = gluon.nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(gluon.nn.Dense(2, in_units=3, activation="sigmoid"), gluon.nn.Dense(1, in_units=2, use_bias=False))
    net.initialize(mx.init.One(), ctx=devices)
    return net


def trainer_of(net, optimizer="sgd", store="device", on_store=None):
    options = {"learning_rate": 0.1, **OPTIMIZERS[optimizer]}
    return gluon.Trainer(net.collect_params(), optimizer, options, kvstore=store, update_on_kvstore=on_store)


def loss_of(output):
    return (output - 1) ** 2


def step(net, trainer, number, way="step"):
    x = nd.array(np.random.RandomState(number).normal(size=(SIZES[number % len(SIZES)], 3)))
    devices = trainer._params[0].list_ctx()
    if isinstance(way, gp.DataParallel):
        way.step(x)
        return
    with autograd.record():
        losses = [loss_of(net(part)) for part in gp.split_and_load(x, devices)]
    autograd.backward(losses)
    if way == "update":
        trainer.allreduce_grads()
        trainer.update(len(x))
    else:
        trainer.step(len(x))


def weights(net):
    return [[array.asnumpy() for array in parameter.list_data()] for parameter in net.collect_params().values()]


def assert_same(net, one):
    for copies, [wanted] in zip(weights(net), weights(one)):
        for copy in copies:
            np.testing.assert_allclose(copy, wanted, rtol=1e-5, atol=1e-6)  # float32, sums in another order


def write_in_place(net, _):
    for parameter in net.collect_params().values():
        for copy in parameter.list_data():
            copy[:] = copy.clip(-0.9, 0.9)


def set_data(net, _):
    for parameter in net.collect_params().values():
        parameter.set_data(parameter.list_data()[0] * 0.5)


def load_parameters(net, file):
    net.save_parameters(file)
    for copy in net[0].weight.list_data():
        copy[:] = 7
    net.load_parameters(file)


def force_reinit(net, _):
    net.initialize(mx.init.Constant(0.3), ctx=net[0].weight.list_ctx(), force_reinit=True)


WRITES = [write_in_place, set_data, load_parameters, force_reinit]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("write", WRITES)
def test_what_the_caller_writes_between_steps_is_trained_on_as_on_one_device(write, optimizer, tmp_path):
    def train(devices, store):
        net = layers(devices)
        trainer = trainer_of(net, optimizer, store)
        for number in range(5):
            step(net, trainer, number)
            if number in (1, 2):
                write(net, str(tmp_path / "parameters"))
        return net

    one = train(gp.devices("cpu:1"), "device")
    for num_devices, store in ((2, "device"), (3, "local"), (2, mx.kv.create("device"))):
        assert_same(train(gp.devices(f"cpu:{num_devices}"), store), one)


@pytest.mark.parametrize("make_store", [lambda: "device", lambda: mx.kv.create("local")], ids=["name", "store"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_set_data_keeps_the_optimizers_state_where_the_caller_has_the_store_update(optimizer, make_store):
    def train(devices, on_store, store):
        net = layers(devices)
        trainer = trainer_of(net, optimizer, store, on_store)
        for number in range(5):
            step(net, trainer, number)
            if number == 2:
                set_data(net, None)
        assert bool(trainer._update_on_kvstore) == on_store
        return net

    assert_same(train(gp.devices("cpu:3"), True, make_store()), train(gp.devices("cpu:1"), False, "device"))


def test_the_environment_may_have_the_store_update(monkeypatch):
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "1")
    trainer = trainer_of(layers(gp.devices("cpu:2")))
    trainer._init_kvstore()
    assert trainer._update_on_kvstore
    assert trainer_of(layers(gp.devices("cpu:2")), on_store=False)._update_on_kvstore is None


@pytest.mark.parametrize("num_devices", [2, 3])
def test_two_trainers_of_the_same_parameters_build_on_each_others_updates(num_devices):
    def train(devices):
        net = layers(devices)
        trainers = [trainer_of(net), trainer_of(net, "adam")]
        for number in range(5):
            step(net, trainers[number % 2], number)
        return net

    assert_same(train(gp.devices(f"cpu:{num_devices}")), train(gp.devices("cpu:1")))


MOVES = {  # before which step -> from which devices to which
    0: [([0], [0, 1]), ([0], [1]), ([0, 1], [2, 3])],
    2: [([0, 1], [0, 1, 2]), ([0, 1, 2], [1, 0]), ([0, 1], [2])],
}


# Without a store, only DataParallel sums over devices. Each two of these occur together; all do in the rare ones.
WAYS = [*itertools.product(["step", "update", "DataParallel"], ["device", "of the caller"]), ("DataParallel", None)]
FOLLOWS = [
    pytest.param(optimizer, *way, before, marks=[pytest.mark.slow, pytest.mark.exhaustive] if sum(numbers) % 2 else [])
    for numbers, (optimizer, way, before) in zip(
        itertools.product(*map(range, (len(OPTIMIZERS), len(WAYS), len(MOVES)))),
        itertools.product(OPTIMIZERS, WAYS, MOVES),
    )
]


@pytest.mark.parametrize(("optimizer", "way", "store", "before"), FOLLOWS)
def test_a_trainer_follows_its_parameters_to_other_devices(optimizer, way, store, before):
    one = layers(gp.devices("cpu:1"))
    wanted = trainer_of(one, optimizer)
    for number in range(5):
        step(one, wanted, number)
    for first, then in MOVES[before]:
        net = layers([mx.cpu(number) for number in first])
        trainer = trainer_of(net, optimizer, mx.kv.create("device") if store == "of the caller" else store)
        made = way
        for number in range(5):
            if number == before:
                net.collect_params().reset_ctx([mx.cpu(number) for number in then])
            if way == "DataParallel" and number in (0, before):
                made = gp.DataParallel(net, loss_of, trainer)
            step(net, trainer, number, made)
        assert_same(net, one)
        assert trainer._contexts == [mx.cpu(number) for number in then] and len(trainer._updaters) == len(then)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_store_that_updates_goes_on_with_its_state_on_other_devices(optimizer):
    one, net = layers(gp.devices("cpu:1")), layers(gp.devices("cpu:2"))
    wanted, trainer = trainer_of(one, optimizer), trainer_of(net, optimizer, on_store=True)
    for number in range(5):
        step(one, wanted, number)
        if number == 2:
            net.collect_params().reset_ctx([mx.cpu(2), mx.cpu(1), mx.cpu(0)])
        step(net, trainer, number)
    assert_same(net, one)
    net.collect_params().reset_ctx(mx.cpu(0))
    with pytest.raises(GradientUnavailable, match="update_on_kvstore"):
        step(net, trainer, 0)


def test_states_are_saved_and_loaded_after_a_move(tmp_path):
    one, net, again = (layers(gp.devices(f"cpu:{num}")) for num in (1, 2, 1))
    trainers = [trainer_of(each, "adam") for each in (one, net, again)]
    for number in range(2):
        step(one, trainers[0], number)
        step(net, trainers[1], number)
    net.collect_params().reset_ctx(gp.devices("cpu:3"))
    again.collect_params().reset_ctx([mx.cpu(2), mx.cpu(1)])
    for parameter, [wanted] in zip(again.collect_params().values(), weights(one)):
        parameter.set_data(nd.array(wanted))
    trainers[1].save_states(str(tmp_path / "states"))
    trainers[2].load_states(str(tmp_path / "states"))
    gp.checkpoint.save(tmp_path / "checkpoint", net, trainers[1])
    for number in range(2, 5):
        for each, trainer in zip((one, net, again), trainers):
            step(each, trainer, number)
    assert_same(net, one)
    assert_same(again, one)
    gp.checkpoint.load(tmp_path / "checkpoint", again, trainers[2])
    again.collect_params().reset_ctx(mx.cpu(3))
    for number in range(2, 5):
        step(again, trainers[2], number)
    assert_same(again, one)


def test_parameters_on_different_numbers_of_devices_and_a_divided_state_are_refused():
    net = layers(gp.devices("cpu:1"))
    trainer = trainer_of(net)
    step(net, trainer, 0)
    net[1].collect_params().reset_ctx(gp.devices("cpu:2"))
    before = weights(net)
    with pytest.raises(GradientUnavailable, match=r"dense0_bias is on \[cpu\(0\)\], and net_dense1_weight on "):
        trainer.step(1)
    np.testing.assert_array_equal(weights(net)[0], before[0])
    net = layers(gp.devices("cpu:2"))
    parallel = gp.DataParallel(net, loss_of, trainer_of(net), shard_optimizer=True)
    step(net, parallel.trainer, 0, parallel)
    net.collect_params().reset_ctx(gp.devices("cpu:3"))
    with pytest.raises(
        GradientUnavailable, match=r"are on \[cpu\(0\), cpu\(1\), cpu\(2\)\] now.* shard_optimizer=True"
    ):
        step(net, parallel.trainer, 1, parallel)


def test_a_step_refuses_devices_that_its_parameters_have_left_and_trains_on_those_that_are_left():
    net = layers(gp.devices("cpu:2"))
    trainer = trainer_of(net)
    parallel = gp.DataParallel(net, loss_of, trainer)
    step(net, trainer, 0, parallel)
    net.collect_params().reset_ctx(gp.devices("cpu:1"))
    with pytest.raises(GradientUnavailable, match=r"is on \[cpu\(0\)\] but not on \[cpu\(1\)\]"):
        step(net, trainer, 1, parallel)
    net.collect_params().reset_ctx(gp.devices("cpu:3"))  # one of which the step does not use, but updates
    step(net, trainer, 1, parallel)
    one = layers(gp.devices("cpu:1"))
    alone = trainer_of(one)
    for number in range(2):
        step(one, alone, number)
    assert_same(net, one)


class Weight(gluon.Block):
    """A float16 layer, which MXNet's layers on CPUs cannot be."""

    def __init__(self):
        super().__init__()
        self.weight = self.params.get("weight", shape=(1, 3), init=mx.init.One(), dtype="float16")

    def forward(self, x):
        return (x.astype(self.weight.dtype) * self.weight.data(x.ctx)).sum(axis=1)


def halves(devices, optimizer, multi_precision=True):
    net = Weight()
    net.initialize(ctx=devices)
    options = {"learning_rate": 0.1, "multi_precision": multi_precision, **OPTIMIZERS[optimizer]}
    return net, gluon.Trainer(net.collect_params(), optimizer, options)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_float16_weight_that_is_set_is_not_overwritten_by_the_optimizers_float32_copy(optimizer, num_devices):
    net, trainer = halves(gp.devices(f"cpu:{num_devices}"), optimizer)
    alone = mx.optimizer.create(optimizer, learning_rate=0.1, **OPTIMIZERS[optimizer])
    update, wanted = mx.optimizer.get_updater(alone), nd.ones((1, 3))  # float32 all along
    alone.rescale_grad = 1 / num_devices
    for number in range(4):
        if number == 2:
            net.weight.set_data(nd.array([[4, 0.5, 2]], dtype="float16"))
            net.weight.set_data(nd.array([[4, 0.5, wanted[0, 2].asscalar()]], dtype="float16"))  # the last one stays
            wanted[0, :2] = nd.array([4, 0.5])
        with autograd.record():
            losses = [net(nd.ones((1, 3), device)) * 2 for device in net.weight.list_ctx()]
        autograd.backward(losses)
        trainer.step(num_devices)
        update(0, nd.ones((1, 3)) * 2 * num_devices, wanted)
    for copy in net.weight.list_data():
        np.testing.assert_array_equal(copy.asnumpy(), wanted.astype("float16").asnumpy())


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_cast_is_followed_before_the_first_update_and_refused_after_it(num_devices):
    def train(cast_at, **options):
        net, trainer = halves(gp.devices(f"cpu:{num_devices}"), **options)
        trainer._init_kvstore()
        for number in range(3):
            if number == cast_at:
                net.cast("float32")
            step(net, trainer, number)
        return net

    [wanted, *_] = weights(train(0, optimizer="adam", multi_precision=False))[0]
    for copy in weights(train(0, optimizer="adam"))[0]:
        np.testing.assert_array_equal(copy, wanted)
    with pytest.raises(GradientUnavailable, match="weight was cast from float16 to float32, and the optimizer's state"):
        train(1, optimizer="sgd")


@pytest.mark.parametrize("way", ["step", "update"])
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_parameters_of_equal_names_are_trained_as_those_of_different_names(num_devices, way):
    def train(devices, *prefixes):
        net = gluon.nn.Sequential(prefix="")
        net.add(*(layers(devices, prefix) for prefix in prefixes))
        first = gluon.nn.Dense(3, in_units=1, prefix="between_")
        first.initialize(mx.init.One(), ctx=devices)
        net._children = type(net._children)(zip("012", (net[0], first, net[1])))
        parameters = [one for block in net for one in block.collect_params().values()]
        trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        for number in range(4):
            step(net, trainer, number, way)
        return [[copy.asnumpy() for copy in parameter.list_data()] for parameter in parameters]

    one = train(gp.devices("cpu:1"), "first_", "second_")
    for copies, [wanted] in zip(train(gp.devices(f"cpu:{num_devices}"), "same_", "same_"), one):
        for copy in copies:
            np.testing.assert_allclose(copy, wanted, rtol=1e-5, atol=1e-6)  # float32, sums in another order
