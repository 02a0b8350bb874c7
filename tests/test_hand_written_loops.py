"""Loops of one thread that know nothing of this package but its layers, with MXNet's defaults, in fresh processes."""

import functools
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

HYBRIDIZE = ["no", "plain", "static_alloc", "static_shape"]
BACKWARD = ["joint", "one by one", "of a sum"]

# Written as somebody would who has read MXNet's documentation alone: no gp.devices, no gp.parallel_apply.
LOOP = """
import json, sys, threading
import gluon_parallel as gp, mxnet as mx
from mxnet import autograd, gluon, nd

threads, forms = sys.argv[1].split(","), json.loads(sys.argv[2])
devices = [mx.cpu(0), mx.cpu(1)]
loss = gluon.loss.L2Loss()

def make_net(norm):
    net = gluon.nn.HybridSequential(prefix="")
    for number in range(6):
        net.add(gluon.nn.Conv2D(4, 3, padding=1, in_channels=4 if number else 3))
        net.add(norm(in_channels=4, prefix=f"bn{number}_"))
        net.add(gluon.nn.Activation("softrelu"))
    net.add(gluon.nn.Conv2D(4, 3, in_channels=4), gluon.nn.Dropout(0.5), gluon.nn.Dense(2, in_units=4 * 36))
    return net

def train(net, hybridize, backward, shards, steps=3):
    if hybridize != "no":
        net.hybridize(static_alloc=hybridize.startswith("static"), static_shape=hybridize == "static_shape")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9}, kvstore="device")
    values = []
    for step in range(steps):
        mx.random.seed(step)
        with autograd.record():
            losses = [loss(net(x), y) for x, y in shards]
            if backward == "of a sum":
                total = sum(l.sum().as_in_context(devices[0]) for l in losses)
        if backward == "joint":
            autograd.backward(losses)
        elif backward == "of a sum":
            total.backward()
        else:
            for l in losses:
                l.backward()
        trainer.step(sum(len(x) for x, _ in shards))
        values.append(sum(l.sum().asscalar() for l in losses))
    weights = [p.data(devices[0]).abs().sum().asscalar() for p in net.collect_params().values()]
    return [float(value) for value in (*values, *weights)]

def train_in_this_thread(used_before):
    if used_before:  # the thread has its buffers, and the layers come later
        for number in range(12):
            nd.softmax(nd.ones((8, 8), ctx=devices[number % 2])).wait_to_read()
    mx.random.seed(1)
    start = make_net(gluon.nn.BatchNorm)
    start.initialize(mx.init.Xavier())
    start(nd.ones((1, 3, 8, 8)))
    x, y = nd.random.normal(shape=(7, 3, 8, 8)), nd.random.normal(shape=(7, 2))
    shards = [(x[:4].as_in_context(devices[0]), y[:4].as_in_context(devices[0])),
              (x[4:].as_in_context(devices[1]), y[4:].as_in_context(devices[1]))]
    found, nets = [], []
    for hybridize, backward in forms:
        net = make_net(gp.nn.SyncBatchNorm)
        net.initialize(ctx=devices)
        for one, other in zip(net.collect_params().values(), start.collect_params().values()):
            one.set_data(other.data())
        nets.append(net)  # several nets live in one process
        found.append(train(net, hybridize, backward, shards))
    results[used_before] = found

results = {}
train_in_this_thread(threads[0] == "used")
for other in threads[1:]:
    thread = threading.Thread(target=train_in_this_thread, args=[other == "used"])
    thread.start()
    thread.join()
results = [results[one == "used"] for one in threads]
print("result" + json.dumps(results))
"""


@functools.cache
def train_in_a_new_process(threads, buffers, forms, seconds=240):
    """Losses and weights after each form of the loop, for each thread: the main one, and others after it.

    MXNet's buffers belong to a thread, so each of `threads` is "fresh", or "used" before the first layer is made.
    """
    environment = {key: value for key, value in os.environ.items() if key != "MXNET_CPU_TEMP_COPY"}
    if buffers is not None:
        environment["MXNET_CPU_TEMP_COPY"] = str(buffers)
    done = subprocess.run(
        [sys.executable, "-c", LOOP, ",".join(threads), json.dumps(forms)],
        env={**environment, "GLUON_PARALLEL_TIMEOUT": "60"}, capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("result"))[6:])


@pytest.mark.parametrize("thread", ["used", "fresh"])
@pytest.mark.parametrize("buffers", [1, pytest.param(None, marks=pytest.mark.slow)])  # None: MXNet's own 4
def test_every_form_of_the_loop_runs_and_gives_the_same_weights(buffers, thread):
    forms, threads = tuple(itertools.product(HYBRIDIZE, BACKWARD)), ("used", "fresh")
    results = train_in_a_new_process(threads, buffers, forms)[threads.index(thread)]
    assert len(results) == len(forms)
    for form, result in zip(forms, results):
        assert np.isfinite(result).all()
        # float32 in another order of operations; the sums of the weights have up to 288 terms
        np.testing.assert_allclose(result, results[0], rtol=2e-4, atol=2e-4, err_msg=str(form))


# One loss is made of the losses of all devices, so one backward pass goes through operators of several.
CONNECTED = """
import json
import gluon_parallel as gp, mxnet as mx, numpy as np
from gluon_parallel.mxnet.device_threads import hand_written_loops
from gluon_parallel.nn.sync_batch_norm.participants import sync_groups_of
from mxnet import autograd, gluon, nd

devices, x = [mx.cpu(0), mx.cpu(1), mx.cpu(2)], nd.array(np.random.RandomState(0).normal(size=(7, 4)))
shards = [x[:2].as_in_context(devices[0]), x[2:5].as_in_context(devices[1]), x[5:].as_in_context(devices[2])]

def make(norm, devices):
    net = gluon.nn.HybridSequential(prefix="")
    for number in range(3):
        net.add(gluon.nn.Dense(4, in_units=4), norm(in_channels=4), gluon.nn.Activation("softrelu"))
    net.initialize(ctx=devices)
    return net

start = make(gluon.nn.BatchNorm, devices[:1])
start.initialize(mx.init.Xavier(), force_reinit=True)

def loss(net, x, device=devices[0]):
    return (net(x) ** 2).sum().copyto(device)

def inputs(net):
    whole = nd.concat(*(shard.as_in_context(devices[0]) for shard in shards), dim=0)
    whole.attach_grad()
    rows = (whole[:2], whole[2:5], whole[5:])
    return nd.add_n(*[loss(net, row.as_in_context(shard.ctx)) / 6 for row, shard in zip(rows, shards)])

def on_last(value):
    return value.as_in_context(devices[-1])

HEADS = {
    "on the last device": lambda net: sum(on_last(net(x) ** 2).sum() / 6 for x in shards),
    "of views": lambda net: sum(sum(on_last(net(x) ** 2).reshape((-1, 4)))[0:].sum() / 6 for x in shards),
    "add_n": lambda net: nd.add_n(*[loss(net, x) for x in shards]) / 6,
    "divided": lambda net: sum([loss(net, x) / 6 for x in shards]),
    "on another device": lambda net: sum([loss(net, x, mx.cpu(3)) / 6 for x in shards]),
    "in parallel_apply": lambda net: sum([one / 6 for one in gp.parallel_apply(lambda x: loss(net, x), shards)]),
    "of the outputs": lambda net: (nd.concat(*[net(x).copyto(devices[0]) for x in shards], dim=0) ** 2).sum() / 6,
    "of several": lambda net: [loss(net, x) / 6 for x in shards],
    "of copied inputs": inputs,
}

def gradients(net, head, again=False, chosen=False):
    with autograd.record():
        heads = head(net)
    parameters = [one for one in net.collect_params().values() if one.grad_req != "null"]
    if chosen:
        arrays = [array for one in parameters for array in one.list_data()]
        grads = iter(autograd.grad(heads, arrays))
        return [sum(next(grads).asnumpy() for _ in one.list_data()) for one in parameters]
    if again:
        autograd.backward(heads, retain_graph=True)
    autograd.backward(heads)
    return [sum(grad.asnumpy() for grad in one.list_grad()) for one in parameters]

def synchronised(hybridize):
    net = make(lambda **options: gp.nn.SyncBatchNorm(timeout=60, **options), devices)
    for one, other in zip(net.collect_params().values(), start.collect_params().values()):
        one.set_data(other.data())
    if hybridize:
        net.hybridize()
    return net

def with_a_short_backward_pass(net):  # its forward pass may take long on a busy machine
    head = HEADS["divided"](net)
    head.wait_to_read()
    for group in sync_groups_of(net):
        group.rendezvous.timeout = 2
    return head

wanted = gradients(start, lambda net: (net(x) ** 2).sum() / 6)
push_one_by_one, hand_written_loops._push_one_by_one = hand_written_loops._push_one_by_one, lambda: None
try:
    gradients(synchronised(False), with_a_short_backward_pass)
except gp.errors.GluonParallelError as error:
    print("as one:", type(error).__name__)
hand_written_loops._push_one_by_one, hand_written_loops._connected = push_one_by_one, False  # as at the first one
for hybridize in (False, True):
    for name, head in HEADS.items():
        options = {"again": name == "divided", "chosen": name == "add_n"}
        found = gradients(synchronised(hybridize), head, **options)
        for one, other in zip(found, wanted):  # float32
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=name)
print("all equal")
"""


def test_a_loss_of_all_devices_has_the_gradients_of_one_device_with_the_whole_batch():
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MXNET_")}
    command = [sys.executable, "-c", CONNECTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    # What MXNet pushes as one waits for ever; all devices are launched, so it is not the loop's fault.
    assert done.stdout.splitlines() == ["as one: BarrierTimeout", "all equal"]
