"""Checks of losses over the whole batch of all processes: they train as a plain loop on one device."""

import contrastive
import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd


def parts_of(store, size, turn):
    """The bounds of this process's part of a batch: even parts, uneven ones, and parts without samples, in turns."""
    num = store.num_workers
    if turn % 3 == 0:
        return gp.split.shard_bounds(size, store.rank, num)
    empty = {1: 0, 2: num - 1}[turn % 3]
    sizes = [0 if rank == empty else 1 for rank in range(num)]
    sizes[1 - empty if num == 2 else 1] += size - sum(sizes)
    ends = np.cumsum([0, *sizes])
    return int(ends[store.rank]), int(ends[store.rank + 1])


def trains_as_one_device(name, store, devices, sizes=(7, 6, 5, 8, 4, 6), **options):
    steps = list(contrastive.batches(name, sizes))
    losses, wanted = contrastive.train_alone(name, steps)
    net, loss, trainer, parameters = contrastive.make(name, devices, store, hybridize=len(devices) > 1)
    step = gp.DataParallel(net, loss, trainer, loss_over="batch", **options)
    values = []
    for turn, (inputs, labels) in enumerate(steps):
        begin, end = parts_of(store, len(inputs[0]), turn)
        mine = [tuple(array[begin:end] for array in side) for side in (inputs, labels)]
        values.append(step(*(mine if end > begin else (None,))).asscalar())  # the same on all
    np.testing.assert_allclose(values, losses, rtol=1e-4, atol=1e-5)
    contrastive.assert_equal_weights(parameters, wanted)
    gp.check_replicas(net, store)


def check_processes_with_one_device_train_as_one_device(store):
    """Each of the losses, with SyncBatchNorm, uneven parts, and processes without samples, also in the first step."""
    for name in contrastive.CASES:
        trains_as_one_device(name, store, [mx.cpu(0)])


def check_processes_with_two_devices_train_as_one_device(store):
    for name in contrastive.CASES:
        trains_as_one_device(name, store, [mx.cpu(0), mx.cpu(1)])


def check_a_loop_of_ones_own_gathers_with_gradients(store):
    """Outputs and labels of two devices of each process, through SyncBatchNorm, and a parameter of the loss."""
    devices = [mx.cpu(0), mx.cpu(1)]
    for name in ("clip", "triplet"):
        steps = list(contrastive.batches(name, (7, 6, 9, 8, 7)))
        _, wanted = contrastive.train_alone(name, steps)
        net, loss, trainer, parameters = contrastive.make(name, devices, store)
        for inputs, labels in steps:
            begin, end = gp.split.shard_bounds(len(inputs[0]), store.rank, store.num_workers)
            mine = [tuple(array[begin:end] for array in side) for side in (inputs, labels)]
            shards = gp.split_and_load(tuple(mine), devices)
            with gp.nn.participants(net, devices[: len(shards)]), mx.autograd.record():
                outputs = [net(*x) for x, _ in shards]
                outputs = [one if isinstance(one, (list, tuple)) else (one,) for one in outputs]
                whole = gp.gather(outputs, store)
                whole_labels = gp.gather([y for _, y in shards], store) if labels else ()
                value = (
                    loss(*whole, *whole_labels)
                    if store.rank == 0 or name != "clip"
                    else without_its_gradient(loss, whole)
                )
                value.backward()
            trainer.step(1)
        contrastive.assert_equal_weights(parameters, wanted)


def without_its_gradient(loss, outputs):
    """The loss where its own parameter has no gradient, as on all processes but the first."""
    return loss.hybrid_forward(nd, *outputs, loss.scale.data(outputs[0].ctx).detach())


def check_arrays_of_every_dtype_are_gathered_in_the_order_of_the_batch(store):
    """Nested as they were, with their bits; nobody has a row more than another one's rows say."""
    num, rank = store.num_workers, store.rank
    sizes = [1 + (3 * one) % 4 for one in range(num)]
    begin, end, total = sum(sizes[:rank]), sum(sizes[: rank + 1]), sum(sizes)
    random = np.random.RandomState(8)
    made = {
        dtype: (random.standard_normal((total, 2)) * 2 ** (7 if dtype == "int8" else 40)).astype(dtype)
        for dtype in ("float32", "float64", "int64")
    }
    made["float32"][:2] = np.inf, np.nan
    made["float64"][:2] = np.nan, -np.inf
    made["int64"][0] = 2**53 - 1, -(2**53) + 1
    for dtype in ("float16", "int32", "int8", "uint8", "bool"):
        made[dtype] = random.randint(0, 100, (total, 1, 3)).astype(dtype)
    batch = {name: (nd.array(array, dtype=array.dtype), [nd.array(array[:, 0], dtype=array.dtype)])
             for name, array in made.items()}  # fmt: skip
    devices = [mx.cpu(0), mx.cpu(1)]
    shards = gp.split_and_load(gp.split.map_arrays(lambda array: array[begin:end], batch), devices)
    for _ in range(3):
        whole = gp.gather(shards, store)
        assert whole.keys() == batch.keys()
        for name, (array, [part]) in whole.items():
            assert array.ctx == part.ctx == devices[0] and array.dtype == made[name].dtype
            np.testing.assert_array_equal(array.asnumpy(), made[name])
            np.testing.assert_array_equal(part.asnumpy(), made[name][:, 0])
    x = nd.array(made["float64"], dtype="float64").T  # samples along axis 1
    whole = gp.gather(gp.split_and_load(x[:, begin:end], devices, 1), store, batch_axis=1)
    np.testing.assert_array_equal(whole.asnumpy(), made["float64"].T)


def check_processes_with_other_arrays_are_refused(store):
    """All of them hear of it, and go on together."""
    own = nd.ones((2, 3 + store.rank))
    with pytest.raises(gp.errors.WorkersDiffer, match=r"process 0 gives rows of float32 \(3,\), process 1 .* \(4,\)"):
        gp.gather([own], store)
    assert gp.gather([nd.ones((2, 3))], store).shape == (2 * store.num_workers, 3)


def check_what_a_loss_takes_from_weights_of_the_net_counts_once(store):
    """A loss function that reads the net's weights: their gradient is that of both."""
    x = np.random.RandomState(2).standard_normal((5, 3))

    def trained(store, devices, begin, end):
        net = gluon.nn.Dense(2, in_units=3, use_bias=False)
        net.initialize(mx.init.Constant(0.5), ctx=devices)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
        step = gp.DataParallel(
            net, lambda y: (y * y).mean() + (net.weight.data(y.ctx) ** 2).sum(), trainer, loss_over="batch"
        )
        for _ in range(3):
            step(x[begin:end])
        return net.weight.data(devices[-1]).asnumpy()

    alone = trained(None, [mx.cpu(3)], 0, 5)
    bounds = gp.split.shard_bounds(5, store.rank, store.num_workers)
    np.testing.assert_allclose(trained(store, [mx.cpu(0), mx.cpu(1)], *bounds), alone, rtol=1e-5, atol=1e-6)


def check_over_another_store(store):
    """One loss, whose parameter counts once, without SyncBatchNorm's own exchanges."""
    trains_as_one_device("clip", store, [mx.cpu(0), mx.cpu(1)], sizes=(7, 6, 5))
