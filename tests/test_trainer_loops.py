"""Hand-written loops of ``gluon.Trainer`` give the weights of one device, also where devices have no samples."""

import argparse
import contextlib
import warnings
from pathlib import Path

import numpy as np
import pytest
from processes import run_servers

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.errors import CompressionFault, GradientUnavailable, InexactUpdate
from gluon_parallel.kvstore.servers import Servers
from gluon_parallel.mxnet.device_threads import thread as device_thread
from gluon_parallel.nn.sync_batch_norm.participants import drain
from gluon_parallel.reduce import step_header
from mxnet import autograd, gluon, nd


def make(num_devices, store="device", update_on_kvstore=None, **options):
    """A layer of one weight, 0, on so many devices, and its trainer."""
    net = gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Zero(), ctx=gp.devices(f"cpu:{num_devices}"))
    options = {"learning_rate": 0.5, "momentum": 0.5, **options}
    return net, gluon.Trainer(net.collect_params(), "sgd", options, kvstore=store, update_on_kvstore=update_on_kvstore)


def backward(net, size):
    shards = gp.split_and_load(nd.ones((size, 1)), net.weight.list_ctx())
    with autograd.record():
        losses = [gluon.loss.L2Loss()(net(x), x) for x in shards]
    autograd.backward(losses)


def weights(net):
    return [array.asnumpy().item() for array in net.weight.list_data()]


def train(net, trainer, sizes, ignore_stale_grad=False):
    for size in sizes:
        backward(net, size)
        trainer.step(size, ignore_stale_grad)


def assert_trained(net, sizes):
    """All copies of the weight are the one after these batches, in float32."""
    np.testing.assert_allclose(weights(net), [wanted(sizes)] * len(net.weight.list_ctx()), rtol=1e-6, atol=1e-6)


def wanted(sizes):
    """The weight after these batches: the gradient of the mean loss is weight - 1, whatever the size."""
    weight = momentum = 0.0
    for _ in sizes:
        momentum = 0.5 * momentum - 0.5 * (weight - 1)
        weight += momentum
    return weight


def sums(net, trainer):
    """Ways to sum the gradients of the net's weight over its devices."""
    gradients = net.weight.list_grad()
    return {
        "allreduce_grads": trainer.allreduce_grads,
        "gp.allreduce": lambda: gp.allreduce(gradients),
        "gp.average_gradients": lambda: gp.average_gradients([[gradient] for gradient in gradients]),
    }


@pytest.mark.parametrize("way", ["allreduce_grads", "gp.allreduce", "gp.average_gradients"])
def test_a_sum_to_which_a_backward_pass_has_added_is_not_summed_again(way):
    net, trainer = make(2, update_on_kvstore=False)
    net.weight.grad_req = "add"
    backward(net, 4)
    sums(net, trainer)[way]()
    backward(net, 6)
    before = [gradient.asnumpy().item() for gradient in net.weight.list_grad()]
    with pytest.raises(GradientUnavailable, match=r"weight hold a sum, .*trainer.update.*zero_grad\(\)"):
        sums(net, trainer)[way]()
    assert [gradient.asnumpy().item() for gradient in net.weight.list_grad()] == before


@pytest.mark.parametrize(
    "zero_grad", [lambda net: net.collect_params().zero_grad(), lambda net: net.weight.zero_grad()]
)
def test_gradients_that_were_set_to_zero_hold_no_sum(zero_grad):
    net, trainer = make(2, update_on_kvstore=False)
    net.weight.grad_req = "add"
    for size, updates in [(4, True), (6, False), (2, True), (3, True), (1, True)]:
        backward(net, size)
        trainer.allreduce_grads()
        if updates:
            trainer.update(size)
        zero_grad(net)
    assert_trained(net, [4, 2, 3, 1])


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_gradients_that_accumulate_over_updates_count_once(num_devices):
    net, trainer = make(num_devices, update_on_kvstore=False)
    net.weight.grad_req = "add"
    weight = momentum = total = 0.0
    for _ in range(4):
        backward(net, 6)
        trainer.allreduce_grads()
        trainer.update(6)
        total += weight - 1
        momentum = 0.5 * momentum - 0.5 * total
        weight += momentum
        np.testing.assert_allclose(weights(net), weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", ["allreduce_grads", "gp.allreduce"])
@pytest.mark.parametrize("change", ["clip_global_norm", "in place"])
def test_a_sum_of_which_one_copy_was_changed_is_refused(way, change):
    net, trainer = make(2, None if way == "gp.allreduce" else "device", False)
    backward(net, 4)
    sums(net, trainer)[way]()
    if change == "in place":
        net.weight.list_grad()[1][:] *= 0.5
    else:
        gluon.utils.clip_global_norm([net.weight.list_grad()[0]], 0.1, check_isfinite=False)
    trainer.step(4) if way == "gp.allreduce" else trainer.update(4)
    with pytest.raises(GradientUnavailable, match="one of them was changed.*Change all copies alike"):
        weights(net)
    drain()


def test_a_trainer_that_data_parallel_has_used_sums_over_its_devices_by_itself():
    net, trainer = make(2)
    gp.DataParallel(net, gluon.loss.L2Loss(), trainer).step(nd.ones((4, 1)), nd.ones((4, 1)))
    train(net, trainer, [4])
    assert_trained(net, [4, 4])


@pytest.mark.parametrize("store", ["device", "local"])
def test_row_sparse_weights_are_updated_as_before(store):
    devices = gp.devices("cpu:2")
    parameter = gluon.Parameter("w", shape=(4, 1), stype="row_sparse", grad_stype="row_sparse")
    parameter.initialize(mx.init.One(), ctx=devices)
    trainer = gluon.Trainer([parameter], "sgd", {"learning_rate": 1.0}, kvstore=store)
    rows = nd.array([0, 2])
    with autograd.record():
        losses = [parameter.row_sparse_data(rows.as_in_context(device)).sum() for device in devices]
    autograd.backward(losses)
    trainer.step(1)
    every = parameter.row_sparse_data(nd.arange(4)).asnumpy().ravel()
    np.testing.assert_array_equal(every, -1)  # both devices' gradients of the sum are 1


def test_parameters_on_unequal_numbers_of_devices_are_refused():
    net, trainer = make(2, update_on_kvstore=False)
    other = gluon.Parameter("other", shape=(1,))
    other.initialize(ctx=gp.devices("cpu:2"))
    trainer = gluon.Trainer([net.weight, other], "sgd", kvstore=None)
    gp.allreduce(net.weight.list_grad())
    trainer.update(1, ignore_stale_grad=True)
    other.reset_ctx(gp.devices("cpu:1"))
    with pytest.raises(GradientUnavailable, match="other on .cpu.0.*reset_ctx"):
        trainer.update(1, ignore_stale_grad=True)


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_a_backward_pass_between_the_sum_and_the_update_is_refused(grad_req):
    net, trainer = make(2, update_on_kvstore=False)
    net.weight.grad_req = grad_req
    backward(net, 3)
    trainer.allreduce_grads()
    backward(net, 3)
    with pytest.raises(GradientUnavailable, match=r"weight after they were summed.*after the last backward pass"):
        trainer.update(6)
    assert weights(net) == [0, 0]


def test_clipping_copies_that_are_not_summed_is_refused():
    net, trainer = make(2, update_on_kvstore=False)
    backward(net, 3)
    gradients = net.weight.list_grad()
    with pytest.raises(GradientUnavailable, match=r"weight on cpu\(0\) and cpu\(1\).*trainer.allreduce_grads\(\)"):
        gluon.utils.clip_global_norm(gradients, 0.5)
    gluon.utils.clip_global_norm(gradients[:1], 10)  # one device's own
    with pytest.raises(GradientUnavailable, match=r"weight before they were summed, by the norm of"):
        trainer.allreduce_grads()
    gluon.utils.clip_global_norm(gradients[:1], 10)
    with pytest.raises(GradientUnavailable, match=r"weight before they were summed, by the norm of"):
        gp.allreduce(gradients)
    gradients[0][:] += gradients[1].as_in_context(gradients[0].context)
    gradients[0].copyto(gradients[1])
    assert gluon.utils.clip_global_norm(gradients, 10) == 3  # summed by hand


def test_after_an_overflow_an_idle_devices_gradient_does_not_count():
    class Scaler:
        answers = iter([False, True, False])

        def has_overflow(self, parameters):
            return next(self.answers)

    net, trainer = make(3, update_on_kvstore=False)
    trainer._amp_loss_scaler = Scaler()
    train(net, trainer, [5, 6, 1])
    assert_trained(net, [5, 1])


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_a_parameter_that_no_device_reached_is_refused_before_anything_changes_or_left_out(update_on_kvstore):
    net, trainer = make(2, "device", update_on_kvstore)
    train(net, trainer, [4, 4])
    with pytest.raises(UserWarning, match=f"`{net.weight.name}` has not been updated by backward"):
        trainer.step(4)
    trainer.step(4, ignore_stale_grad=True)
    assert_trained(net, [4, 4])
    train(net, trainer, [1])
    assert_trained(net, [4, 4, 1])


def test_gradients_that_the_caller_wrote_are_used_when_marked_and_refused_otherwise():
    net, trainer = make(2, update_on_kvstore=True)
    for gradient in net.weight.list_grad():
        gradient[:] = -1
    with pytest.raises(GradientUnavailable, match="array._fresh_grad = True"):
        trainer.step(2, ignore_stale_grad=True)
    assert weights(net) == [0, 0]
    for array in net.weight.list_data():
        array._fresh_grad = True
    trainer.step(2, ignore_stale_grad=True)
    assert weights(net) == [0.5, 0.5]


@pytest.mark.parametrize("ignore_stale_grad", [False, True])
def test_copies_of_which_nobody_knows_whether_they_hold_the_sum_are_refused(ignore_stale_grad):
    net, trainer = make(3, update_on_kvstore=False)
    backward(net, 2)
    gp.allreduce(net.weight.list_grad()[:2])
    with pytest.raises(GradientUnavailable, match=r"on \[cpu\(2\)\].* trainer.allreduce_grads\(\)"):
        trainer.update(2, ignore_stale_grad)
    gp.broadcast(net.weight.list_grad())
    trainer.update(2, ignore_stale_grad)
    assert_trained(net, [2])


def test_sums_take_what_they_are_given_where_no_backward_pass_was_and_an_idle_towers_gradient_as_zero():
    net, _ = make(2)
    gradients = net.weight.list_grad()
    for turn in (1, 2):
        for number, gradient in enumerate(gradients):
            gradient[:] = turn * (number + 1)
        gp.allreduce(gradients)
        assert [gradient.asnumpy().item() for gradient in gradients] == [3 * turn] * 2
    backward(net, 1)
    before = gradients[0].asnumpy().item()
    [[first], [second]] = gp.average_gradients([[gradient] for gradient in gradients])
    assert first.asnumpy().item() == second.asnumpy().item() == before / 2


@pytest.mark.parametrize("way", ["nothing", "allreduce", "by hand", "gp.DataParallel", "one device"])
def test_a_trainer_without_a_store_says_once_that_it_sums_nothing_unless_gradients_are_summed(way):
    net, trainer = make(1 if way == "one device" else 2, None)
    if way == "gp.DataParallel":
        gp.DataParallel(net, gluon.loss.L2Loss(), trainer).step(nd.ones((3, 1)), nd.ones((3, 1)))
        return
    backward(net, 3)
    gradients = net.weight.list_grad()
    if way == "nothing":
        with pytest.warns(InexactUpdate, match="sums no gradients"):
            trainer.step(3)
        train(net, trainer, [3, 1], ignore_stale_grad=True)  # an idle device keeps its own weight, as in MXNet
        return
    if way == "allreduce":
        gp.allreduce(gradients)
    if way == "by hand":
        gradients[0][:] += gradients[1].as_in_context(gradients[0].context)
        gradients[0].copyto(gradients[1])
    trainer.step(3)
    assert_trained(net, [3])


@pytest.mark.parametrize("store", ["dist_sync", pytest.param("dist_async", marks=pytest.mark.slow)])
def test_a_process_that_does_not_reach_a_layer_adds_nothing_to_the_servers_update_of_it(store):
    status, output = run_servers(2, Path(__file__).with_name("support") / "trainer_on_servers.py", store)
    assert status == 0 and output.count("passed on ") == 2, output


@pytest.mark.parametrize(("num_devices", "store"), [(1, "device"), (2, None), (1, "mpi"), (2, "device")])
def test_compression_that_a_process_alone_leaves_out_is_said(num_devices, store):
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize(ctx=gp.devices(f"cpu:{num_devices}"))
    kvstore = pytest.importorskip("mpi4py") and gp.kvstore.create(store) if store == "mpi" else store
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=kvstore, compression_params={"type": "2bit"})
    if (num_devices, store) == (2, "device"):  # MXNet compresses between devices
        trainer._init_kvstore()  # without a warning, which would be an error
        return
    with pytest.warns(CompressionFault, match="this process is alone"):
        trainer._init_kvstore()


def test_two_bits_over_mxnets_servers_are_warned_of(monkeypatch):
    monkeypatch.setattr(mx.kvstore.KVStore, "set_gradient_compression", lambda *_: None)
    monkeypatch.setattr(mx.kvstore.KVStore, "type", "dist_sync")
    store = object.__new__(Servers)
    store.handle = None
    try:
        with pytest.warns(CompressionFault, match="values of an earlier exchange"):
            store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store.set_gradient_compression({"type": "none"})
    finally:
        del store.handle


@pytest.mark.parametrize("has_begun", [True, False])
def test_ctrl_c_where_a_pass_over_all_devices_begins_hides_no_mark_for_ever(monkeypatch, has_begun):
    devices = gp.devices("cpu:2")
    net = gluon.nn.Dense(1, in_units=3)
    net.initialize(ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    parallel = gp.DataParallel(net, gluon.loss.L2Loss(), trainer)
    batch = mx.nd.ones((4, 3)), mx.nd.ones((4, 1))
    parallel.step(*batch)
    with mx.autograd.record():
        losses = [net(mx.nd.ones((2, 3), ctx=device)) for device in devices]
    mx.autograd.backward(losses)
    begin = device_thread._begin_pass

    def interrupted():
        if has_begun:
            begin()
        raise KeyboardInterrupt

    monkeypatch.setattr(device_thread, "_begin_pass", interrupted)
    with pytest.raises(KeyboardInterrupt), device_thread.joint_pass():
        raise AssertionError("the pass has begun")
    monkeypatch.undo()
    assert device_thread._num_passes() == 0
    assert all(array._fresh_grad for array in net.weight.list_data())
    parallel.step(*batch)


@pytest.mark.parametrize(("rates", "differ"), [((0.0, 0.1), True), ((0.0, 0.0), False), ((None, 0.1), False)])
def test_a_learning_rate_of_0_is_one_that_is_compared(rates, differ):
    header = step_header.StepHeader(None)
    header._store, header._ranks, values = argparse.Namespace(type="mpi"), (0, 1), []
    for rate in rates:
        header.own["rates"] = 0
        if rate is not None:  # else that process says nothing
            header.own["rates"][header.rank] = rate or step_header.ZERO_RATE
        values.append(header.own["rates"][0])
    sums = {"passes": np.zeros(2), "divisors": np.zeros(2), "rates": np.array(values)}
    words = "process 0 .*learning rate 0[,;] .*learning rate 0.1"
    with pytest.raises(gp.errors.WorkersDiffer, match=words) if differ else contextlib.nullcontext():
        header._compare(sums)
