"""What is attached to objects of MXNet keeps none of them alive, and copies have it only where they should."""

import copy
import gc
import pickle
import weakref

import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.mxnet.attached import Attached
from mxnet import gluon

NOTES, COPIED = Attached("test_note"), Attached("test_copied", is_copied=True)


def test_a_value_that_refers_to_its_object_goes_with_it():
    layer = gluon.nn.Dense(1)
    NOTES.set(layer, [layer])
    alive = weakref.ref(layer)
    del layer
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_and_pickles_have_the_values_of_copied_kinds_alone(copied):
    layer = gluon.nn.Dense(1)
    assert NOTES.of(layer) is None
    NOTES.set(layer, lambda: "cannot be pickled")
    COPIED.set(layer, 3)
    other = copied(layer)
    assert (NOTES.of(other), COPIED.of(other)) == (None, 3)
    assert NOTES.set(other, 4) == NOTES.pop(other) == 4
    assert NOTES.of(layer)() == "cannot be pickled"


def by_hand(net, devices):
    trainer = gluon.Trainer(net.collect_params(), "adam")
    for _ in range(3):
        with mx.autograd.record():
            losses = [(net(mx.nd.ones((2, 3), ctx=device)) ** 2).sum() for device in devices]
        mx.autograd.backward(losses)
        trainer.step(4)
    return trainer


def with_data_parallel(net, devices, **options):
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.5})
    parallel = gp.DataParallel(net, gluon.loss.L2Loss(), trainer, devices, **options)
    for _ in range(3):
        parallel.step(mx.nd.random.uniform(shape=(4, 3)), mx.nd.zeros((4, 2)))
    return trainer


def with_shards(net, devices):
    return with_data_parallel(net, devices, shard_optimizer=True)


def with_a_hook(net, devices):
    return with_data_parallel(net, devices, communication_hook=lambda bucket, store: bucket.gradients)


WAYS = [by_hand, with_data_parallel, with_shards]


@pytest.mark.parametrize("train", WAYS)
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_trainer_and_its_net_are_gone_when_nobody_has_them(train, num_devices):
    devices = gp.devices(f"cpu:{num_devices}")
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(2, in_units=3), gp.nn.SyncBatchNorm(in_channels=2))
    net.initialize(ctx=devices)
    net.hybridize()
    trainer = train(net, devices)
    mx.nd.waitall()
    alive = [weakref.ref(one) for one in (trainer, net, net[0].weight, net[1].running_mean)]
    del net, trainer
    gc.collect()
    assert [one() for one in alive] == [None] * 4


def _trainer():
    parameter = gluon.Parameter("only", shape=(1,))
    parameter.initialize()
    return gluon.Trainer([parameter], "sgd")


# What MXNet gives these objects; all else on them is attached.
PLAIN = {
    "trainer": {*vars(_trainer())},
    "parameter": {*vars(gluon.Parameter("plain", shape=(1,)))},
}


@pytest.mark.parametrize("train", WAYS)
def test_a_training_sets_no_attribute_of_its_own_on_trainers_and_parameters(train):
    devices = gp.devices("cpu:2")
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(2, in_units=3), gp.nn.SyncBatchNorm(in_channels=2))
    net.initialize(ctx=devices)
    trainer = train(net, devices)
    methods = {"save_states", "load_states"} if train is with_shards else set()
    found = {*vars(trainer)} - PLAIN["trainer"] - methods
    for parameter in net.collect_params().values():
        found |= {*vars(parameter)} - PLAIN["parameter"] - {"_ctx_list", "_ctx_map"}
    assert found
    assert all(name.startswith("_gluon_parallel_") for name in found), found
