"""Loops with backward passes whose gradients no step uses give the weights of one device, also with idle devices."""

import threading

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.errors import GradientUnavailable, InexactUpdate
from mxnet import autograd, gluon, nd

WAYS = [("device", None), ("device", False), ("local", True), (None, None)]


def make(num_devices, *shapes):
    """Layers without bias, of ones in float64, on so many devices."""
    layers = [gluon.nn.Dense(out, in_units=size, use_bias=False, prefix=f"layer{number}_")
              for number, (size, out) in enumerate(shapes)]  # fmt: skip
    for layer in layers:
        layer.cast("float64")
        layer.initialize(mx.init.One(), ctx=gp.devices(f"cpu:{num_devices}"))
    return layers


def make_trainer(*layers, store="device", update_on_kvstore=None):
    if len(layers[0].weight.list_ctx()) == 1:  # for which MXNet opens no store
        store, update_on_kvstore = "device", None
    parameters = gluon.ParameterDict()
    for layer in layers:
        parameters.update(layer.collect_params())
    return gluon.Trainer(parameters, "sgd", {"learning_rate": 0.05}, kvstore=store, update_on_kvstore=update_on_kvstore)


def step(trainer):
    if trainer._kvstore_params["kvstore"] is None:
        for parameter in trainer._params:
            if parameter.grad_req != "null":
                gp.allreduce(parameter.list_grad())
        trainer.update(4, ignore_stale_grad=True)
    else:
        trainer.step(4, ignore_stale_grad=True)


def weights(*layers):
    return np.array([[array.asnumpy().ravel() for array in layer.weight.list_data()] for layer in layers])


def assert_as_one_device(many, one):
    """The weights of every device are those of one device, in float64: sums differ in their order alone."""
    np.testing.assert_allclose(many, np.broadcast_to(one, many.shape), rtol=1e-12, atol=1e-12)


def go_backward(losses, how):
    if how == "joint":
        autograd.backward(losses)
    for loss in losses if how == "each" else ():
        loss.backward()


def loss_of(net, x):
    return ((net(x) - 1) ** 2).sum()


def train(num_devices, loop, how, store="device", update_on_kvstore=None):
    """The weights of an encoder and two heads after `loop`: (what, number of samples, number of the head)."""
    encoder, *heads = make(num_devices, (2, 3), (3, 1), (3, 1))
    trainer = make_trainer(encoder, *heads, store=store, update_on_kvstore=update_on_kvstore)
    rng = np.random.default_rng(0)
    for what, size, number in loop:
        if what == "step":
            step(trainer)
            continue
        if what == "freeze":
            heads[number].weight.grad_req = "null"
            continue
        shards = gp.split_and_load(nd.array(rng.normal(size=(size, 2)), dtype="float64"), encoder.weight.list_ctx())

        def net(x, head=heads[number]):
            return head(encoder(x))

        if what == "attack":  # on each device a pass for the gradient of the input, then one with another input
            for x in shards:
                x.attach_grad()
                for used in (lambda x: x, lambda x: x + x.grad.sign() * 0.1):
                    with autograd.record():
                        loss = loss_of(net, used(x))
                    loss.backward()
            continue
        with autograd.record():
            losses = [loss_of(net, x) for x in shards]
        go_backward(losses, how)
    return weights(encoder), weights(*heads)


def batch(size, head=0):
    return "batch", size, head


def attack(size):
    return "attack", size, 0


STEP, FREEZE = ("step", 0, 0), ("freeze", 0, 0)
LOOPS = {
    "a step left out": [batch(4), STEP, batch(4), batch(1), STEP, batch(3), STEP],
    "the first step left out": [batch(4), batch(1), STEP],
    "two steps left out": [batch(4), STEP, batch(5), batch(3), batch(2), STEP],
    "adversarial": [batch(4), STEP, attack(4), STEP, attack(1), STEP, attack(4), attack(1), STEP, attack(3), STEP],
    "one adversarial pass": [attack(1), STEP, batch(4), attack(1), STEP],
    "two losses": [batch(4), STEP, batch(4), batch(1, 1), STEP, batch(1), batch(4, 1), STEP, batch(1), STEP],
    "a head frozen before a step left out": [batch(4), STEP, FREEZE, batch(4), batch(1), STEP, batch(3), STEP],
    "three losses": [batch(4), batch(4, 1), STEP, batch(4), batch(1, 1), batch(2), STEP, batch(2, 1), STEP],
}


@pytest.mark.parametrize("how", ["joint", "each"])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_gradient_is_that_of_the_last_pass_over_the_devices_that_reached_it(loop, how):
    one = train(1, loop, "joint")
    for num_devices in (2, 3, 4):
        for way in WAYS:
            for many, wanted in zip(train(num_devices, loop, how, *way), one):
                assert_as_one_device(many, wanted)


@pytest.mark.parametrize("order", [(0, 1, 0, 2, 1, 2), (0, 1, 2, 2, 0, 1), (2, 1, 0, 2, 1, 0)])
@pytest.mark.parametrize("at_once", [False, True])
def test_passes_of_several_threads_count_whatever_their_order(at_once, order):
    [layer] = make(3, (1, 1))
    trainer = make_trainer(layer)
    devices = layer.weight.list_ctx()

    def go_backward(device, barrier=None):
        with autograd.record():
            loss = layer(nd.ones((1, 1), device, "float64")).sum()
        if barrier is not None:
            barrier.wait()
        loss.backward()

    for _ in range(20 if at_once else 1):
        threads = [threading.Thread(target=go_backward, args=(devices[number],)) for number in order]
        if at_once:
            barrier = threading.Barrier(3)
            threads = [threading.Thread(target=go_backward, args=(device, barrier)) for device in devices]
        for thread in threads:
            thread.start()
            if not at_once:
                thread.join()
        for thread in threads:
            thread.join()
        before = weights(layer)
        trainer.step(3)
        # A gradient of 1 from each device; the factors 0.05 and 1 / 3 are float32.
        np.testing.assert_allclose(weights(layer), before - 0.05, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chosen", [slice(None), slice(-1, None)])
@pytest.mark.parametrize("num_devices", [2, 3])
def test_clipping_on_one_device_alone_is_refused_at_the_sum_unless_the_others_are_idle(num_devices, chosen):
    def clipped_step(layer, trainer, size, chosen):
        with autograd.record():
            losses = [loss_of(layer, x) for x in gp.split_and_load(nd.ones((size, 2)) * 3, layer.weight.list_ctx())]
        autograd.backward(losses)
        for gradient in layer.weight.list_grad()[chosen]:
            gluon.utils.clip_global_norm([gradient], 0.5)
        trainer.step(size)

    [many], [one] = make(num_devices, (2, 1)), make(1, (2, 1))
    for layer in (many, one):
        layer.cast("float32")  # MXNet's clipping takes no other
    trainer, trainer_of_one = make_trainer(many), make_trainer(one)
    with pytest.raises(GradientUnavailable, match=r"before they were summed, by the norm of those of one device.*Clip"):
        clipped_step(many, trainer, 5, chosen)
    clipped_step(many, trainer, 1, slice(1))
    clipped_step(one, trainer_of_one, 1, slice(1))
    np.testing.assert_array_equal(weights(many), np.broadcast_to(weights(one), weights(many).shape))


@pytest.mark.parametrize("num_devices", [2, 3])
def test_a_step_within_the_loop_over_devices_is_refused_or_warned_of(num_devices):
    [layer] = make(num_devices, (1, 1))
    trainer = make_trainer(layer)

    def step_on(device, **options):
        with autograd.record():
            loss = loss_of(layer, nd.ones((1, 1), device, "float64") * 2)
        loss.backward()
        trainer.step(1, **options)

    first, second, *_ = layer.weight.list_ctx()
    for _ in range(2):  # batches of one sample
        step_on(first)
    before = weights(layer)
    with pytest.raises(GradientUnavailable, match=r"only cpu\(1\) has new gradients.*once for all devices"):
        step_on(second)
    np.testing.assert_array_equal(weights(layer), before)
    for _ in range(2):  # the first of them uses the second device's gradient too
        step_on(first)
    with pytest.warns(InexactUpdate, match="once for all devices"):
        step_on(second, ignore_stale_grad=True)
