"""Checks of training with a store: trainers, accumulated and compressed gradients, shapes that are known late."""

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.kvstore import work
from mxnet import gluon, nd

DEVICES = gp.devices("cpu:2")


def check_gluons_trainer_takes_the_store_by_name(store):
    """gluon.Trainer takes the store by name, also for one device, and rank 0's weights."""
    net = gluon.nn.Dense(2, in_units=3)
    mx.random.seed(store.rank)
    net.initialize(mx.init.Normal(1), ctx=DEVICES[:1])
    by_name = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=store.type)
    x = nd.full((4, 3), store.rank + 1)
    with mx.autograd.record():
        loss = net(x).sum()
    loss.backward()
    by_name.step(4 * store.num_workers)
    assert by_name._kvstore.num_workers == store.num_workers
    weights = gp.metrics.gather_rows(net.weight.data().asnumpy().reshape(1, -1), store)
    assert (weights == weights[0]).all()


def check_processes_that_divide_by_different_numbers_are_refused(store):
    """Every process hears both numbers; with the number of all samples, the weights are those of one process."""
    net = gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Zero(), ctx=DEVICES)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=store, update_on_kvstore=False)
    size, ranks = store.rank + 1, range(store.num_workers)
    num = gp.metrics.gather_rows([size], store).sum()

    def train(divisor, way):
        with mx.autograd.record():
            losses = [gluon.loss.L2Loss()(net(x), x) for x in gp.split_and_load(nd.ones((size, 1)), DEVICES)]
        mx.autograd.backward(losses)
        if way == "step":
            trainer.step(divisor)
        else:
            trainer.allreduce_grads()
            trainer.update(divisor)

    for way in ("step", "update"):
        net.weight.set_data(nd.zeros((1, 1)))
        for _ in range(3):
            train(num, way)
        weight = net.weight.data(DEVICES[1]).asscalar()
        assert abs(weight - (1 - 0.5**3)) < 1e-6  # the gradient of the mean loss is weight - 1
        words = ", ".join(f"process {rank} divides by {100 * rank + 100}" for rank in ranks)
        with pytest.raises(gp.errors.WorkersDiffer, match=f"{words}. .*gp.metrics.gather_rows"):
            train(100 * size, way)  # by no process the number of before
        assert net.weight.data(DEVICES[1]).asscalar() == weight
        train(num, way)
        weight = net.weight.data(DEVICES[1]).asscalar()
        with pytest.raises(gp.errors.WorkersDiffer, match=f"process 0 divides by {num + 1}, process.* {num}. "):
            train(num + (store.rank == 0), way)  # also where the number is that of before
        assert net.weight.data(DEVICES[1]).asscalar() == weight
    trainer.set_learning_rate(0.5 / size)
    words = ", ".join(f"process {rank} trains with the learning rate {0.5 / (rank + 1):.6g}" for rank in ranks)
    with pytest.raises(gp.errors.WorkersDiffer, match=f"{words}. .*the same learning rate and schedule everywhere"):
        train(num, "step")


def check_a_process_without_samples_sends_no_gradients_of_an_earlier_pass(store):
    """It is refused, and one more pass on a process alone is not. Clipping before the sum is refused everywhere."""
    net = gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Zero(), ctx=DEVICES[:1])
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=store, update_on_kvstore=False)

    def backward(num_passes):
        for _ in range(num_passes):
            with mx.autograd.record():
                loss = gluon.loss.L2Loss()(net(nd.ones((1, 1))), nd.ones((1, 1)))
            loss.backward()

    for num_passes in (2, 3 if store.rank == 0 else 2, 2):  # of a generator and a discriminator, say
        backward(num_passes)
        trainer.step(store.num_workers)
    weight = net.weight.data().asscalar()
    assert abs(weight - (1 - 0.5**3)) < 1e-6
    with pytest.raises(
        gp.errors.WorkersDiffer, match="makes? 2 backward passes, .*makes? 1 backward pass.*_fresh_grad"
    ):
        backward(2 if store.rank == 0 else 1)
        trainer.step(store.num_workers)
    assert net.weight.data().asscalar() == weight
    backward(2)
    gluon.utils.clip_global_norm([net.weight.grad()], 1e-3)
    with pytest.raises(gp.errors.GradientUnavailable, match=r"before they were summed, by the norm of .* one process"):
        trainer.step(store.num_workers)


def check_all_small_numbers_of_a_step_are_one_sum(store, monkeypatch):
    """Samples, parameters reached and digests of weights in DataParallel; divisors and rates in loops of a trainer."""
    started, start = [], work.NumberSum.start
    monkeypatch.setattr(work.NumberSum, "start", lambda *arguments: started.append(1) or start(*arguments))
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize(mx.init.One(), ctx=DEVICES)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    parallel = gp.DataParallel(net, gluon.loss.L2Loss(), trainer, ignore_stale_grad=True)
    x = nd.array([[1, 2], [3, 4], [5, 6 + store.rank]])
    for step in range(5):  # the weights are looked at after updates 1, 2 and 4
        assert np.isfinite(parallel.step(x, x.sum(axis=1)).asscalar())
        assert len(started) == step + 1
    for step in range(3):
        with mx.autograd.record():
            losses = [gluon.loss.L2Loss()(net(part), part.sum(axis=1)) for part in gp.split_and_load(x, DEVICES)]
        mx.autograd.backward(losses)
        trainer.step(3 * store.num_workers)
        assert len(started) == 5 + step + 1
    gp.check_replicas(net, store)


def check_other_learning_rates_are_refused_before_the_first_update(store):
    """Those of gp.DataParallel, which leaves the weights as they were."""
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize(mx.init.One(), ctx=DEVICES)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1 + store.rank}, kvstore=store)
    parallel = gp.DataParallel(net, gluon.loss.L2Loss(), trainer)
    with pytest.raises(
        gp.errors.WorkersDiffer, match=r"process 0 trains with the learning rate 0\.1, process 1 .* 1\.1"
    ):
        parallel.step(nd.array([[1, 2 + store.rank]]), nd.ones(1))
    assert (net.weight.data(DEVICES[1]).asnumpy() == 1).all()
    trainer.set_learning_rate(0.1)
    parallel.step(nd.array([[1, 2 + store.rank]]), nd.ones(1))
    assert (net.weight.data(DEVICES[1]).asnumpy() < 1).all()
    gp.check_replicas(net, store)


def check_counts_are_not_compressed(store):
    """Where gradients are compressed, numbers of samples and of processes that go on are not."""
    num = [40000 + 32 * rank for rank in range(store.num_workers)]  # float16 knows these gradients, but not their sum
    x, y = nd.ones((num[store.rank], 1)), nd.zeros((num[store.rank], 1))
    for options, total in (({"type": "fp16"}, sum(num)), ({"type": "2bit", "threshold": 0.5}, 0.5 * len(num))):
        store.set_gradient_compression(options)
        net = gluon.nn.Dense(1, in_units=1, use_bias=False)
        net.initialize(mx.init.One(), ctx=DEVICES)
        made = gluon.Trainer(
            net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=store, update_on_kvstore=False
        )
        gp.DataParallel(net, gluon.loss.L2Loss(), made, DEVICES)(x, y)  # the gradient of each sample is 1
        weight = net.weight.data(DEVICES[0]).asscalar()
        assert np.isclose(weight, 1 - 0.5 * total / sum(num), rtol=1e-6, atol=1e-7), (options, weight)
        stream = list(range(store.rank + 1))
        joined = list(gp.sampler.join(stream, store))
        assert joined == stream + [None] * (store.num_workers - 1 - store.rank), (options, joined)
    store.set_gradient_compression({"type": "none"})


def check_a_step_that_broke_off_leaves_nothing(store):
    """A step that broke off leaves neither its gradients nor its number of samples for the next update."""
    fails = []

    def loss(output, label):
        if fails:
            raise RuntimeError(fails.pop())
        return gluon.loss.L2Loss()(output, label)

    def build(kvstore):
        net = gluon.nn.Dense(1, in_units=2)
        net.initialize(mx.init.Constant(0.5), ctx=DEVICES)
        options = {"learning_rate": 0.5}
        made = gluon.Trainer(net.collect_params(), "sgd", options, kvstore=kvstore, update_on_kvstore=False)
        return net, gp.DataParallel(net, loss, made, DEVICES, accumulate=2)

    x = np.random.default_rng(2).standard_normal((40, 2)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    net, step = build(store)
    bounds = np.cumsum([0, *(2 + 3 * rank for rank in range(store.num_workers))])
    mine = slice(bounds[store.rank], bounds[store.rank + 1])
    step(nd.array(x[:9]), nd.array(y[:9]))
    fails.append("half a step")
    with pytest.raises(RuntimeError, match="half a step"):
        step(nd.array(x[:11]), nd.array(y[:11]))  # the last one before an update: its samples are told to all
    step(nd.array(x[mine]), nd.array(y[mine]))
    step.update()
    alone, reference = build(None)
    reference(nd.array(x[: bounds[-1]]), nd.array(y[: bounds[-1]]))
    reference.update()
    for _ in range(2):  # the next update follows from two whole steps
        step(nd.array(x[mine]), nd.array(y[mine]))
        reference(nd.array(x[: bounds[-1]]), nd.array(y[: bounds[-1]]))
    got, wanted = net.weight.data(DEVICES[0]).asnumpy(), alone.weight.data(DEVICES[0]).asnumpy()
    assert np.allclose(got, wanted, rtol=1e-5, atol=1e-6), (got, wanted)


def check_a_step_without_samples_on_any_process_is_refused(store):
    """A step without samples on any process is refused on all of them, and updates nothing."""
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize(mx.init.One(), ctx=DEVICES)
    options = {"learning_rate": 0.5, "momentum": 0.9}
    made = gluon.Trainer(net.collect_params(), "sgd", options, kvstore=store, update_on_kvstore=False)
    step = gp.DataParallel(net, gluon.loss.L2Loss(), made, DEVICES)
    step(nd.ones((4, 2)), nd.zeros(4))
    before = net.weight.data(DEVICES[1]).asnumpy()
    for _ in range(2):
        with pytest.raises(gp.errors.BatchMismatch, match="no process had any samples in this step"):
            step(None)
        assert (net.weight.data(DEVICES[1]).asnumpy() == before).all()
    step(*((nd.ones((4, 2)), nd.zeros(4)) if store.rank else (None,)))
    assert (net.weight.data(DEVICES[1]).asnumpy() != before).all()
