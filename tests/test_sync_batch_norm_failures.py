"""Failures in SyncBatchNorm: the error names the cause, no device keeps waiting, and the next step works."""

import contextlib
import gc
import os
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from batch_norm_reference import by_operators, hybridized, in_parallel, joint, normalised, on, shards
from batch_norm_waiting import let_time_run_out, wait_for

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import nn
from gluon_parallel.errors import BarrierBroken, BarrierTimeout, DevicesMismatch
from gluon_parallel.nn.sync_batch_norm import join, participants, sync_group
from mxnet import gluon

HYBRIDIZE = [None, {}, {"static_alloc": True, "static_shape": True}]


def net_on(devices, hybridize=None, timeout=60.0, layers=2, **options):
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(layers):
            norm = nn.SyncBatchNorm(in_channels=4, timeout=timeout, **options)
            net.add(gluon.nn.Dense(4, in_units=4, flatten=False), norm)
    net.initialize(mx.init.Xavier(), ctx=devices)
    if hybridize is not None:
        net.hybridize(**hybridize)
    return net


def layers_on(num_devices, num_layers=1):
    """(devices, layers) without a net; a sync group does not keep the parameters of its layer alive."""
    devices, layers = gp.devices(f"cpu:{num_devices}"), [nn.SyncBatchNorm(in_channels=3) for _ in range(num_layers)]
    for layer in layers:
        layer.initialize(ctx=devices)
    return devices, layers


def works(net, devices, rng):
    """A step whose outputs are those of a batch: every channel has mean beta == 0."""
    xs = on(devices, shards(rng, [3] * len(devices), (4,)))
    ys = joint(net, xs, on(devices, shards(rng, [3] * len(devices), (4,)), grad=False))
    normalised(ys, 1e-5)
    for x in xs:
        gradient = x.grad.asnumpy()
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 1e-3
    return True


def fails_unseen(net, devices, rng, layer):
    """A device leaves out a layer of the net; its error stays in arrays that nobody reads."""
    with mx.autograd.record():
        net[2 * layer : 2 * layer + 2](on(devices[:1], shards(rng, (3,), (4,)))[0])
    let_time_run_out(net, devices[0])
    wait_for(lambda: net[2 * layer + 1].sync_group.rendezvous.failure is not None)


@pytest.mark.parametrize("hybridize", [*HYBRIDIZE, {"static_alloc": True}], ids=str)
def test_gradients_are_right_after_a_failed_first_step(rng, hybridize):
    devices = gp.devices("cpu:2")
    nets = [net_on(devices, hybridize, layers=4) for _ in range(2)]
    for layer in nets[1][1::2]:
        by_operators(layer)
    for one, other in zip(*(net.collect_params().values() for net in nets)):
        other.set_data(one.data(devices[0]))
    net = nets[1]
    freed = [mx.nd.full((9, 4), np.nan) for _ in range(100)]  # what memory is likely to hold that nothing is written to
    mx.nd.waitall()
    del freed
    with mx.autograd.record():
        y = net(on(devices[:1], shards(rng, (3,), (4,)))[0])
    let_time_run_out(net, devices[0])
    with pytest.raises(BarrierTimeout, match=r"cpu\(1\) did not"):
        y.wait_to_read()
    mx.nd.waitall()
    del y  # so that later steps take the same operators again; some ways to hybridize do so in every other step
    for _ in range(3):
        arrays, heads = (shards(rng, (3, 5), (4,)) for _ in range(2))
        gradients = []
        for net in nets:
            xs = on(devices, arrays)
            joint(net, xs, on(devices, heads, grad=False))
            of_parameters = [p.list_grad() for p in net.collect_params().values() if p.grad_req != "null"]
            gradients.append([array.asnumpy() for array in sum(of_parameters, [x.grad for x in xs])])
        for right, found in zip(*gradients):
            np.testing.assert_allclose(found, right, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("hybridize", HYBRIDIZE, ids=str)
@pytest.mark.parametrize("layer", [0, 1])
def test_an_error_that_nobody_looked_at_is_raised_by_the_next_step_of_its_own_net_and_not_by_another_one(
    rng, hybridize, layer
):
    devices, unused = gp.devices("cpu:2"), nn.SyncBatchNorm()  # one that is not initialised
    net, other = net_on(devices, hybridize), net_on(devices, hybridize)
    works(net, devices, rng)
    fails_unseen(net, devices, rng, layer)
    for _ in range(2):
        assert works(other, devices, rng)
    with pytest.raises(BarrierTimeout, match=rf"net_batchnorm{layer}, .*cpu\(1\) did not"):
        works(net, devices, rng)
    for each in (other, net, other):
        assert works(each, devices, rng)
    assert not unused.sync_group.has_moved()


@pytest.mark.parametrize("is_seen", [True, False])
def test_the_error_of_an_operator_that_nobody_has_read_outlives_the_wait_for_a_failed_step(rng, is_seen):
    devices = gp.devices("cpu:2")
    net = net_on(devices)
    works(net, devices, rng)

    def fails_beside_the_net():
        array = mx.nd.linalg.potrf(mx.nd.array([[-1.0]]))
        mx.nd.ones(1).wait_to_read()  # of the same worker of the engine, which has come past it then
        return array

    if is_seen:
        fails_unseen(net, devices, rng, 0)
        with pytest.raises(BarrierTimeout):
            mx.nd.waitall()
        _unread = fails_beside_the_net()
    else:  # first: of several errors, MXNet's waitall raises the oldest one and forgets the others
        _unread = fails_beside_the_net()
        fails_unseen(net, devices, rng, 0)
    errors = []
    for _ in range(2 if not is_seen else 1):
        with pytest.raises((mx.base.MXNetError, BarrierTimeout)) as caught:
            works(net, devices, rng)
        errors.append(str(caught.value))
    assert any("potrf" in error or "positive" in error for error in errors), errors
    assert works(net, devices, rng)


def test_devices_that_come_at_once_after_a_failure_wait_for_the_failed_step_once(monkeypatch):
    (devices, [layer]), waits = layers_on(2), []
    group = layer.sync_group
    group.abandon("on purpose")

    def drain():
        waits.append(1)
        time.sleep(0.2)

    monkeypatch.setattr(participants, "drain", drain)
    in_parallel([lambda device=device: participants.begin_call({group: 1}, device) for device in devices])
    assert len(waits) == 1  # the second would wait for the pass of the first, which waits for its own


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_layer_that_fails_while_the_failed_step_ends_begins_again_too(monkeypatch, is_reported):
    _, layers = layers_on(2, num_layers=2)
    first, last = (layer.sync_group for layer in layers)
    first.rendezvous.abandon("on purpose")
    if is_reported:
        participants.failures.mark_reported(first.rendezvous.failure)

    def drain():
        last.rendezvous.abandon("its device waited for the first one")
        participants.failures.mark_reported(last.rendezvous.failure)

    monkeypatch.setattr(participants, "drain", drain)
    with contextlib.nullcontext() if is_reported else pytest.raises(BarrierBroken, match="on purpose"):
        participants.restart_if_needed([first, last])
    assert first.rendezvous.failure is None and last.rendezvous.failure is None


def test_after_a_loss_nothing_raises_what_has_failed_before_it():
    _, layers = layers_on(2, num_layers=3)
    groups = [layer.sync_group for layer in layers]
    groups[0].rendezvous.close(gp.errors.WorkerLost("process 0 is lost"))
    participants.restart_if_needed(groups[1:2])  # the next layer is launched: the first one keeps its failure
    assert groups[0].unreported
    groups[2].callback_failed(gp.errors.WorkerLost("process 0 is lost"), [])  # a layer of this process alone
    participants.failures.remember(gp.errors.WorkerLost("process 0 is lost"))  # of a function that writes no array
    _unread = mx.nd.linalg.potrf(mx.nd.array([[-1.0]]))  # of the user's
    participants.forget_failures()
    with pytest.raises(mx.base.MXNetError, match="potrf|positive"):
        participants.restart_if_needed(groups)
    participants.restart_if_needed(groups)
    assert [group.rendezvous.failure for group in groups] == [None] * 3


def test_devices_whose_time_runs_out_together_fail_one_after_the_other(monkeypatch):
    (devices, [layer]), moments = layers_on(4), []
    group = layer.sync_group
    group.abandon("on purpose")
    monkeypatch.setattr(sync_group.engine, "fail", lambda arrays, error: moments.append(time.monotonic()))
    in_parallel([lambda: group.callback_failed(RuntimeError(), []) for _ in devices])
    assert len(moments) == 4
    # MXNet's list of exceptions has no lock, and its operators' threads add to it right after this.
    assert min(np.diff(moments)) > 0.005


def test_layers_in_another_order_or_called_more_often_on_one_device_are_an_error_that_names_them(rng):
    devices = gp.devices("cpu:2")
    one, other = (nn.SyncBatchNorm(prefix=f"{name}_", in_channels=4, timeout=60) for name in ("one", "other"))
    both = gluon.nn.HybridSequential()
    both.add(one, other)
    both.initialize(ctx=devices)
    xs = on(devices, shards(rng, (3, 3), (4,)))
    for passes, waiting, words in (
        ((lambda x: other(one(x)), lambda x: one(other(x))), devices, "(one|other), forward 0"),
        ((one, lambda x: one(one(x))), devices[1:], r"one, forward 2: cpu\(1\) waited .*cpu\(0\) has come to 2 calls"),
    ):
        with mx.autograd.record():
            ys = [run(x) for run, x in zip(passes, xs)]
        let_time_run_out(both, *waiting)
        errors = []
        for y in ys[-len(waiting) :]:
            with pytest.raises((BarrierTimeout, BarrierBroken)) as caught:
                y.wait_to_read()
            errors.append(str(caught.value))
        assert any(re.search(words, error) for error in errors), errors
        with mx.autograd.record():
            normalised([other(one(x)) for x in xs], 1e-5)


def test_an_operator_that_fails_before_the_layer_on_one_device(rng):
    gc.collect()  # a failed layer of another test, if one lives, has all that was launched waited for, and forgotten
    devices = gp.devices("cpu:2")
    net = net_on(devices)
    xs = on(devices, shards(rng, (3, 3), (4,)))
    with mx.autograd.record():
        bad = xs[1] + mx.nd.random.normal(0, -1, shape=xs[1].shape, ctx=devices[1])  # no such distribution
        ys = [net(xs[0]), net(bad)]
    let_time_run_out(net, devices[0])
    for y in ys:
        with pytest.raises((BarrierTimeout, mx.base.MXNetError)):
            y.wait_to_read()
    mx.nd.waitall()
    assert works(net, devices, rng)


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("hybridize", HYBRIDIZE, ids=str)
def test_another_number_of_devices_than_the_parameters_live_on_is_refused_at_once(rng, num_devices, hybridize):
    devices = gp.devices("cpu:2")
    net = nn.SyncBatchNorm(prefix="layer_", in_channels=4, num_devices=num_devices)
    net.initialize(ctx=devices)
    if hybridize is not None:
        net = hybridized(net, **hybridize)
    (x,) = on(devices[:1], shards(rng, (3,), (4,)))
    net(x).wait_to_read()  # evaluation needs nobody
    words = rf"num_devices={num_devices}, but its parameters live on 2: cpu\(0\), cpu\(1\)"
    with pytest.raises(DevicesMismatch, match=words), mx.autograd.record():
        net(x)


def test_the_limit_is_the_environments_unless_it_is_said_and_a_layer_has_at_least_one_device(monkeypatch):
    with pytest.raises(ValueError, match="num_devices=0"):
        nn.SyncBatchNorm(num_devices=0)
    monkeypatch.delenv("GLUON_PARALLEL_TIMEOUT", raising=False)
    assert nn.SyncBatchNorm().sync_group.rendezvous.timeout == 120
    monkeypatch.setenv("GLUON_PARALLEL_TIMEOUT", "7")
    assert nn.SyncBatchNorm().sync_group.rendezvous.timeout == 7
    assert nn.SyncBatchNorm(timeout=3).sync_group.rendezvous.timeout == 3
    plain = gluon.nn.BatchNorm(in_channels=4)
    plain.initialize()
    assert nn.convert_sync_batchnorm(plain).sync_group.rendezvous.timeout == 7
    monkeypatch.setenv("GLUON_PARALLEL_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="GLUON_PARALLEL_TIMEOUT='soon': expected seconds"):
        nn.SyncBatchNorm()


def test_the_naive_engine_is_refused_with_the_reason():
    code = """
import gluon_parallel as gp
import mxnet as mx
devices = gp.devices("cpu:2")
for hybridize in (False, True):
    net = mx.gluon.nn.HybridSequential()
    net.add(gp.nn.SyncBatchNorm(in_channels=2))
    net.initialize(ctx=devices)
    net.hybridize(hybridize)
    x = mx.nd.ones((2, 2), ctx=devices[0])
    net(x).wait_to_read()
    try:
        with mx.autograd.record():
            net(x)
    except gp.errors.EngineUnsupported as error:
        print(error)
alone = gp.nn.SyncBatchNorm(in_channels=2)
alone.initialize(ctx=devices[0])
with mx.autograd.record():
    print("alone", alone(mx.nd.array([[1, 5], [3, 5]])).asnumpy().round(3).tolist())
"""
    environment = {**os.environ, "MXNET_ENGINE_TYPE": "NaiveEngine"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    lines, refusal = result.stdout.splitlines(), "NaiveEngine, which finishes one operation before it starts the next"
    assert [refusal in line for line in lines] == [True, True, False], result.stderr
    assert lines[2] == "alone [[-1.0, 0.0], [1.0, 0.0]]"


def test_the_rendezvous_end_with_their_net(rng):
    devices = gp.devices("cpu:2")
    net = net_on(devices, {})
    works(net, devices, rng)
    tokens = [child.sync_group.token for child in net if isinstance(child, nn.SyncBatchNorm)]
    groups = sync_group.sync_groups_by_token
    assert all(groups.get(token) is not None for token in tokens)
    del net
    # One of MXNet's threads may still be on its way out of a layer.
    wait_for(lambda: gc.collect() is not None and all(groups.get(token) is None for token in tokens))


def test_a_step_without_samples_has_a_limit_where_the_others_begin_nothing_that_this_process_knows(monkeypatch):
    following = join.Join(gluon.nn.Dense(1), mx.kv.create("local"))
    monkeypatch.setattr(following, "_gather", lambda _: np.array([[1.0], [0.0]]))  # the other one has not ended
    monkeypatch.setattr(join, "default_timeout", lambda: 0.001)
    words = "no exchange of the net's .* has begun, .* waited .* or of a loss that is a block"
    with pytest.raises(BarrierTimeout, match=words):
        following._follow()


def test_the_thread_of_a_step_that_a_loss_has_broken_off_ends_before_the_others_go_on():
    has_failed, order = threading.Event(), []

    def announce(_step):  # what it exchanges has not failed yet
        assert has_failed.wait(60)
        order.append("the step")

    def regroup():
        join.end_abandoned_steps()
        order.append("those that are left")

    broken_off = join._Step(announce, None)
    regrouping = threading.Thread(target=regroup)
    regrouping.start()
    has_failed.set()
    regrouping.join()
    broken_off.thread.join()
    assert order == ["the step", "those that are left"]
