"""Checks of processes of one group that train separately, run as ``python separate_checks.py store check...``."""

import inspect
import sys
import warnings

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import patches
from gluon_parallel.kvstore import separate_training
from mxnet import gluon, nd

DEVICES = gp.devices("cpu:1")


def data(seed):
    random = np.random.RandomState(seed)
    return nd.array(random.standard_normal((8, 3))), nd.array(random.standard_normal((8, 1)))


def make(store, norm=None, wd=0.0):
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Dense(4, in_units=3), *([norm] if norm else []), gluon.nn.Dense(1, in_units=4))
    net.initialize(mx.init.Xavier(), ctx=DEVICES)
    options = {"kvstore": store} if store else {}
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "wd": wd}, **options)


def plain_loop(net, trainer, batch, num_steps=5):
    for _ in range(num_steps):
        with mx.autograd.record():
            loss = gluon.loss.L2Loss()(net(batch[0]), batch[1])
        loss.backward()
        trainer.step(len(batch[0]))


def warned(function):
    """What `function` warns of, on process 0; the program begins anew before it."""
    separate_training._uses.__init__()
    for owner, name, ours in patches.WRAPPERS_IN_GROUPS:  # which remove themselves
        setattr(owner, name, inspect.unwrap(getattr(owner, name)))
        setattr(owner, name, patches._wrapped(owner, name, ours))
    separate_training._uses.opened = True  # main() has made the store
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
        nd.waitall()
    return [str(one.message) for one in caught if one.category is gp.errors.SeparateTraining], result


def forgotten(store):
    """A trainer without the store trains two nets; so does nobody notice until somebody asks."""
    mx.random.seed(store.rank)
    said, (net, _) = warned(lambda: run_plain(None, store))
    assert (len(said) == 1 and "gluon.Trainer updates the weights of this process" in said[0]) == (store.rank == 0), (
        said
    )
    try:
        gp.check_replicas(net, store)
    except gp.errors.ReplicasDiffer as error:
        assert "parameter 0.weight differs between the processes 0 | 1, and 3 more do" in str(error), error
        assert "kvstore=store" in str(error)
    else:
        raise AssertionError("weights that differ were not noticed")


def run_plain(kvstore, store):
    net, trainer = make(kvstore)
    plain_loop(net, trainer, data(store.rank))
    return net, trainer


def remembered(store):
    """With the store nobody complains, and the weights are the same."""
    said, (net, _) = warned(lambda: run_plain(store, store))
    assert not said, said
    gp.check_replicas(net, store)


def left_out(store):
    """What has no store is named in one warning after the first steps, and an evaluation when it comes."""

    def run():
        norm = gp.nn.SyncBatchNorm(in_channels=4)
        net, trainer = make(store, norm=norm)
        sampler = gp.sampler.BatchSampler(8, 4)
        step = gp.DataParallel(net, gluon.loss.L2Loss(), trainer, DEVICES)
        for _ in range(4):
            step(*data(store.rank))
        gp.evaluate(net, [data(store.rank)], "mse", DEVICES)
        return sampler

    said, _ = warned(run)
    if store.rank == 0:
        assert len(said) == 2, said
        assert "the sampler" in said[0] and "rank=store.rank" in said[0] and "SyncBatchNorm takes" in said[0], said
        assert "gluon.Trainer" not in said[0] and "one process of 2" in said[0], said
        assert "gp.evaluate(..., store)" in said[1] and "the sampler" not in said[1], said
    else:
        assert not said, said


def same_batches(store):
    """Processes that train on the same samples are told so, from what they train on."""

    def run():
        net, trainer = make(store)
        step = gp.DataParallel(net, gluon.loss.L2Loss(), trainer, DEVICES)
        for _ in range(4):
            step(*data(7))

    said, _ = warned(run)
    expected = ["the first batch was the same on all 2 processes"] if store.rank == 0 else []
    assert all("hand the loader to gp.prepare" in line for line in said), said
    assert [line[:47] for line in said] == [line[:47] for line in expected], said


def smoke_test(store):
    """Made-up data, of which all batches are equal, is not taken for the same samples."""
    random = np.random.RandomState(0)
    same = np.tile(random.standard_normal((2, 3)), (8, 1))

    def run(x, uses_loader):
        net, trainer = make(store)
        data = gluon.data.ArrayDataset(nd.array(x), nd.ones((len(x), 1)))
        training, loader = gp.prepare(net, gluon.loss.L2Loss(), trainer, gluon.data.DataLoader(data, 4))
        if not uses_loader:  # but batches that it was not handed
            net, trainer = make(store)
            training = gp.prepare(net, gluon.loss.L2Loss(), trainer)
        for images, labels in loader:
            training.step(images, labels)

    for x, uses_loader in ((same, True), (np.ones((16, 3)), True), (np.ones((16, 3)), False)):
        said, _ = warned(lambda x=x, uses_loader=uses_loader: run(x, uses_loader))
        assert not said, said


def apart(store):
    """Weights that come apart are an error soon after, on every process, whatever the reason."""
    net, trainer = make(store, wd=0.1 * store.rank)
    step = gp.DataParallel(net, gluon.loss.L2Loss(), trainer, DEVICES)
    step(*data(store.rank))
    try:
        step(*data(store.rank))
    except gp.errors.ReplicasDiffer as error:
        assert "parameter 0.weight differs between the processes 0 | 1" in str(error), error
        assert "same learning rate" in str(error), error
    else:
        raise AssertionError("weights that differ were not noticed")


def apart_later(store):
    """One that changes a weight alone is noticed at the next comparison."""
    net, trainer = make(store)
    step = gp.DataParallel(net, gluon.loss.L2Loss(), trainer, DEVICES)
    for number in range(1, 9):
        if number == 6 and store.rank == 1:
            net[1].weight.data()[:] += 1e-6
        step(*data(10 * number + store.rank))
    nd.waitall()
    try:
        step(*data(store.rank))
    except gp.errors.ReplicasDiffer as error:
        assert "parameter 1.weight" in str(error) or "parameter 0.weight" in str(error), error
    else:
        raise AssertionError("weights that differ were not noticed")


def frozen(store):
    """check_replicas compares weights that are not trained, and of all devices, but no running statistics."""
    net, _ = make(None, norm=gluon.nn.BatchNorm(in_channels=4))
    for number, (name, parameter) in enumerate(net.collect_params().items()):
        parameter.set_data(nd.ones(parameter.shape) * (number + ("running" in name) * store.rank))
    gp.check_replicas(net, store)
    net[0].weight.grad_req = "null"
    if store.rank == 1:
        net[0].weight.data()[0, 0] = 5
    try:
        gp.check_replicas(net, store)
    except gp.errors.ReplicasDiffer as error:
        assert "parameter 0.weight differs between the processes 0 | 1. " in str(error), error
    else:
        raise AssertionError("a frozen weight that differs was not noticed")
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize("ones", ctx=gp.devices("cpu:2"))
    if store.rank == 1:
        net.weight.list_data()[1][:] = 5
    try:
        gp.check_replicas(net, store)
    except gp.errors.ReplicasDiffer as error:
        found = "parameter weight differs between cpu(0) and cpu(1)", "differ between the devices of process 1, whose"
        assert found[store.rank == 0] in str(error), error
    else:
        raise AssertionError("devices of one process that differ were not noticed by all processes")


def reduction(store):
    """A sum and a mean over unequal shards of two processes are one device's with the whole batch."""
    devices = [mx.cpu(0), mx.cpu(1)]
    random = np.random.RandomState(3)
    x, y = random.standard_normal((7, 3)), random.standard_normal((7, 1))
    mine = slice(0, 5) if store.rank == 0 else slice(5, 7)

    def weights(devices, reduction, kvstore, part):
        net = gluon.nn.Dense(1, in_units=3)
        net.cast("float64")
        net.initialize(mx.init.Constant(0.5), ctx=devices)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kvstore)

        def loss(output, label):
            values = ((output - label) ** 2).sum(axis=1)
            return getattr(values, reduction)() if reduction else values

        step = gp.DataParallel(net, loss, trainer, devices, reduction=reduction, accumulate=2, clip_global_norm=0.5)
        for _ in range(4):
            step(nd.array(x[part], dtype="float64"), nd.array(y[part], dtype="float64"))
        return net.weight.data(devices[-1]).asnumpy()

    wanted = weights(devices[:1], None, None, slice(None))
    for word in ("sum", "mean"):
        got = weights(devices, word, store, mine)
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7)


def nan_in_a_batch(store):
    """A NaN in the samples of one process ends all of them with the same error, at the same step."""
    net = gluon.nn.HybridSequential(prefix="net_")
    net.add(gluon.nn.Dense(4, in_units=3, activation="relu", prefix="first_"), gluon.nn.Dense(1, in_units=4))
    net.initialize(mx.init.Xavier(), ctx=DEVICES)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    step = gp.DataParallel(net, gluon.loss.L2Loss(), trainer, DEVICES)
    try:
        for number in range(1, 30):
            x, y = data(10 * number + store.rank)
            if number == 10 and store.rank == 1:
                x[2, 0] = np.nan
            assert np.isfinite(step(x, y).asscalar())
    except gp.errors.NotFinite as error:
        assert "parameter first_weight is NaN or infinite since one of the steps 9 to 16" in str(error), error
        assert number == 26, number
    else:
        raise AssertionError("a NaN was not noticed")


def by_name(store):
    """A trainer that is told its store by name; the first step of one process has no samples."""
    net, trainer = make("auto")
    step = gp.DataParallel(net, gluon.loss.L2Loss(), trainer, DEVICES)
    step(*(data(store.rank) if store.rank == 0 else (None,)))
    assert trainer._kvstore.num_workers == 2
    gp.check_replicas(net, store)


def main():
    for name in sys.argv[2:]:
        store = gp.kvstore.create(sys.argv[1])
        globals()[name](store)
        print(f"passed {name} on {store.rank}", flush=True)


if __name__ == "__main__":
    main()
