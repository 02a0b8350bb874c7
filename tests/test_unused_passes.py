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


@pytest.mark.parametrize(
    ("store", "update_on_kvstore", "first"),
    [(*WAYS[0], "loop"), (*WAYS[1], "loop"), (*WAYS[2], "loop"), (*WAYS[0], "gp.DataParallel")],
)
def test_the_pass_of_a_generator_leaves_no_gradient_on_devices_that_are_idle_later(store, update_on_kvstore, first):
    def train(num_devices):
        generator, discriminator = make(num_devices, (2, 2), (2, 1))
        trainers = [make_trainer(one, store=store, update_on_kvstore=update_on_kvstore)
                    for one in (generator, discriminator)]  # fmt: skip
        devices = discriminator.weight.list_ctx()
        if first == "gp.DataParallel":
            parallel = gp.DataParallel(discriminator, lambda output: (output**2).sum(axis=1), trainers[1])
        for number, size in enumerate((4, 1, 4, 2)):
            real, noise = nd.ones((size, 2), dtype="float64"), nd.ones((4, 2), dtype="float64") / 2
            if first == "gp.DataParallel" and number % 2 == 0:
                parallel.step(real)
            else:
                with autograd.record():
                    losses = [(discriminator(x) ** 2).sum() for x in gp.split_and_load(real, devices)]
                autograd.backward(losses)
                trainers[1].step(size)
            with autograd.record():
                losses = [loss_of(discriminator, generator(x)) for x in gp.split_and_load(noise, devices)]
            autograd.backward(losses)
            trainers[0].step(4)
        return weights(generator), weights(discriminator)

    for many, one in zip(train(3), train(1)):
        assert_as_one_device(many, one)


@pytest.mark.parametrize("first", ["no trainer", "another trainer", "this trainer", "gp.allreduce"])
@pytest.mark.parametrize("num_devices", [2, 3])
def test_the_first_step_leaves_out_gradients_of_earlier_passes_whoever_makes_it(num_devices, first):
    def train(num_devices):
        [layer] = make(num_devices, (2, 1))
        trainers = [] if first == "no trainer" else [make_trainer(layer)]
        if first == "another trainer":
            trainers.append(make_trainer(layer))
        for size in (4, 1):
            with autograd.record():
                losses = [loss_of(layer, x.astype("float64"))
                          for x in gp.split_and_load(nd.ones((size, 2)), layer.weight.list_ctx())]  # fmt: skip
            autograd.backward(losses)
        [trainer, *_] = trainers or [make_trainer(layer)]
        if first == "gp.allreduce" and num_devices > 1:
            gp.allreduce(layer.weight.list_grad())
            trainer.update(1)
        else:
            trainer.step(1)
        return weights(layer)

    assert_as_one_device(train(num_devices), train(1))


@pytest.mark.parametrize("num_devices", [2, 3])
def test_gradients_that_are_added_count_from_every_pass_since_they_were_zero(num_devices):
    def train(num_devices):
        [layer] = make(num_devices, (2, 1))
        layer.weight.grad_req = "add"
        trainer = make_trainer(layer, update_on_kvstore=False)
        for sizes in ((4, 1), (3, 2, 1), (1,)):
            for size in sizes:
                with autograd.record():
                    losses = [loss_of(layer, nd.ones(x.shape, x.ctx, "float64"))
                              for x in gp.split_and_load(nd.ones((size, 2)), layer.weight.list_ctx())]  # fmt: skip
                autograd.backward(losses)
            trainer.step(sum(sizes))
            layer.weight.zero_grad()
        return weights(layer)

    assert_as_one_device(train(num_devices), train(1))


def test_a_device_in_the_middle_may_be_idle_and_a_layer_may_be_used_on_one_device_alone():
    first, other = make(3, (1, 1), (1, 1))
    trainer = make_trainer(first, other)
    devices = first.weight.list_ctx()

    def backward(*used):
        with autograd.record():
            losses = [sum(layer(nd.ones((1, 1), device, "float64")) for layer in layers).sum() * scale
                      for device, scale, layers in used]  # fmt: skip
        autograd.backward(losses)

    backward((devices[0], 1, [first]), (devices[1], 1, [first, other]), (devices[2], 1, [first]))
    backward((devices[0], 10, [first, other]), (devices[2], 10, [first]))
    trainer.step(1)
    # 1 - 0.05 x 20, 1 - 0.05 x 10; the learning rate is a float32
    np.testing.assert_allclose(weights(first, other).ravel(), [0] * 3 + [0.5] * 3, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("update_on_kvstore", [None, True, False])
def test_a_second_trainer_leaves_out_what_the_first_has_updated_as_on_one_device(update_on_kvstore):
    def train(num_devices):
        encoder, *heads = make(num_devices, (2, 2), (2, 1), (2, 1))
        trainers = [make_trainer(encoder, head, update_on_kvstore=update_on_kvstore) for head in heads]
        for size in (4, 1, 3):
            with autograd.record():
                losses = [sum(loss_of(head, encoder(x.astype("float64"))) for head in heads)
                          for x in gp.split_and_load(nd.ones((size, 2)), encoder.weight.list_ctx())]  # fmt: skip
            autograd.backward(losses)
            trainers[0].step(size)
            trainers[1].step(size, ignore_stale_grad=True)
        return weights(encoder), weights(*heads)

    for many, one in zip(train(2), train(1)):
        assert_as_one_device(many, one)


def test_two_trainers_take_turns_also_where_a_layer_is_frozen_before_passes_that_no_step_uses():
    def train_in_turns(num_devices):
        layers = make(num_devices, (2, 3), (3, 1))
        trainers = [make_trainer(*layers), make_trainer(*layers)]
        rng = np.random.default_rng(0)
        for number, sizes in enumerate([[4], [4, 1], [3], [4, 1], [2, 1]]):
            if number == 2:
                layers[1].weight.grad_req = "null"
            for size in sizes:
                x = nd.array(rng.normal(size=(size, 2)), dtype="float64")
                with autograd.record():
                    losses = [loss_of(lambda x: layers[1](layers[0](x)), shard)
                              for shard in gp.split_and_load(x, layers[0].weight.list_ctx())]  # fmt: skip
                autograd.backward(losses)
            step(trainers[number % 2])
        return weights(*layers[:1]), weights(*layers[1:])

    one = train_in_turns(1)
    for num_devices in (2, 3):
        for many, wanted in zip(train_in_turns(num_devices), one):
            assert_as_one_device(many, wanted)


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


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("flags", [{}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}])
def test_a_parameter_that_is_frozen_while_a_device_is_idle_is_trained_on_it_again(num_devices, flags):
    def train(num_devices, kinds, **flags):
        net = gluon.nn.Dense(3, in_units=4)
        net.initialize(mx.init.One(), ctx=gp.devices(f"cpu:{num_devices}"))
        if flags:
            net.hybridize(**flags)
        parallel = gp.DataParallel(net, gluon.loss.L2Loss(), make_trainer(net))
        for size, kind in kinds:
            for one in kind.split(", "):
                net.bias.grad_req = one
            parallel.step(nd.ones((size, 4)), nd.zeros((size, 3)))
        return [array.asnumpy() for array in net.bias.list_data()]

    for kinds in (
        [(8, "write"), (1, "null"), (8, "write"), (8, "write")],
        [(8, "write"), (8, "null, write"), (8, "write")],
        [(8, "null"), (1, "write"), (8, "write"), (8, "null"), (1, "null, write"), (8, "write")],
    ):
        many, one = train(num_devices, kinds, **flags), train(1, kinds)
        np.testing.assert_allclose(many, one * num_devices, rtol=1e-6, atol=1e-6)  # float32
