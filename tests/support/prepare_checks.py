"""What gp.prepare does, run by every process: ``python prepare_checks.py num_devices folder check...``."""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

# Without arguments the file is only read, by pytest's search for doctests.
NUM_DEVICES, FOLDER = (sys.argv[1], Path(sys.argv[2])) if __name__ == "__main__" else ("2", Path())
DEVICES = gp.devices(f"cpu:{NUM_DEVICES}")


def make_net(dropout=0.0):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(9, in_units=3), gluon.nn.BatchNorm(in_channels=9), gluon.nn.Dropout(dropout))
    net.add(gluon.nn.Dense(2, in_units=9))
    net.cast("float64")
    net.initialize(ctx=DEVICES)
    random = np.random.RandomState(0)
    for parameter in net.collect_params().values():
        if parameter.name.endswith(("weight", "bias")):
            parameter.set_data(nd.array(random.standard_normal(parameter.shape), dtype="float64"))
    return net


def make_loaders(**options):
    random = np.random.RandomState(1)
    images, labels = random.standard_normal((13, 3)), random.randint(0, 2, 13).astype("float64")
    data = gluon.data.ArrayDataset(nd.array(images, dtype="float64"), nd.array(labels, dtype="float64"))
    return gluon.data.DataLoader(data, batch_size=4, **options), gluon.data.DataLoader(data, batch_size=8)


def adam():
    return "adam", {"learning_rate": 0.01}


def adamw():
    cosine = mx.lr_scheduler.CosineScheduler(16, 0.002)
    return "adamw", {"wd": 0.1, "lr_scheduler": gp.LinearScalingScheduler(cosine, 16, 4, warmup_steps=5)}


def train(num_epochs, path=None, dropout=0.0, stop=None, optimizer=adam, interrupt=None, **options):
    """A script as its author would write it; returns what it printed, and the weights and their averages."""
    net, said = make_net(dropout), []
    trainer = gluon.Trainer(net.collect_params(), *optimizer())
    average = gp.ExponentialMovingAverage(net, trainer, 0.8, warmup=True)
    train_loader, test_loader = make_loaders(shuffle=True)
    training, train_loader, test_loader = gp.prepare(
        net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, train_loader, test_loader,
        sync_batch_norm=True, clip_global_norm=1,
        run=gp.Run(path) if path else None, saved={"average": average}, **options,
    )  # fmt: skip
    for epoch in training.epochs(num_epochs):
        for x, y in train_loader:
            training.step(x, y)
            if training.num_steps == interrupt and training.is_main:
                os.kill(os.getpid(), signal.SIGINT)
            average.update()
        accuracy = training.evaluate(test_loader, ["acc", "ce"] if dropout < 0 else "acc")
        said.append((training.end_epoch()["loss"], accuracy))
        if epoch + 1 == stop:
            break
    weights = [parameter.data(DEVICES[-1]).asnumpy() for parameter in net.collect_params().values()]
    with average.applied():
        gp.check_replicas(net, training.store)
        said.append((0.0, training.evaluate(test_loader, "acc")))
        weights += [parameter.data(DEVICES[-1]).asnumpy() for parameter in net.collect_params().values()]
    gp.check_replicas(net, training.store)
    return training, said, weights


def exact(store):
    """Write, or compare with, the numbers of one process on one device."""
    training, said, weights = train(3)
    path = FOLDER / "alone.npz"
    if store.num_workers * len(DEVICES) == 1:
        losses = np.array([loss for loss, _ in said])
        accuracies = np.array([accuracy for _, [(_, accuracy)] in said])
        np.savez(path, losses, accuracies, *weights)
        return
    losses, accuracies, *wanted = np.load(path).values()
    np.testing.assert_allclose([loss for loss, _ in said], losses, rtol=1e-6)
    assert [accuracy for _, [(_, accuracy)] in said] == accuracies.tolist()
    for our, their in zip(weights, wanted):
        np.testing.assert_allclose(our, their, rtol=1e-5, atol=1e-6)  # Adam divides by small numbers


def loaded_at_once(store):
    """A process that loads right after saving does not read the file from before, nor another one than process 0."""
    net, path = make_net(), FOLDER / f"at-once-{store.num_workers}.npz"
    trainer = gluon.Trainer(net.collect_params(), "adam", kvstore=store, update_on_kvstore=False)
    write = gp.archive.write

    def write_late(*args):
        time.sleep(1)
        write(*args)

    for value, gp.archive.write in ((1.0, write), (2.0, write_late)):
        net[0].weight.set_data(nd.full((9, 3), value, dtype="float64"))
        gp.checkpoint.save(path, net, trainer)
    gp.archive.write = write
    net[0].weight.set_data(nd.full((9, 3), 3.0, dtype="float64"))
    gp.checkpoint.load(path, net, trainer)
    assert (net[0].weight.data(DEVICES[-1]).asnumpy() == 2).all()
    for name, wanted in ((f"own-{store.rank}.npz", "another file for process"), ("none.npz", "No such file")):
        if name.startswith("own"):
            gp.archive.write(FOLDER / name, gp.checkpoint.state(net, trainer).arrays, {"rank": store.rank})
        try:
            gp.checkpoint.load(FOLDER / name, net, trainer)
        except gp.errors.CheckpointError as error:
            assert wanted in str(error), error
        else:
            raise AssertionError(f"{name} was loaded")


def resumed(store):
    """A training that is stopped and resumed is the one that goes through: random numbers, rates, averages included."""
    _, _, wanted = train(4, FOLDER / f"through-{store.num_workers}", dropout=0.4, optimizer=adamw)
    path = FOLDER / f"stopped-{store.num_workers}"
    train(4, path, dropout=0.4, stop=2, optimizer=adamw)
    training, said, got = train(4, path, dropout=0.4, optimizer=adamw)
    assert len(said) == 3 and training.num_steps == 16, (said, training.num_steps)
    for our, their in zip(got, wanted):
        np.testing.assert_array_equal(our, their)


def interrupted(store):
    """Ctrl-C in the second step of the second epoch, of which all hear in the third; process 0 saves."""
    train(3, FOLDER / "moved", interrupt=6)


def interrupted_together(store):
    """Ctrl-C in process 0, where each has a part of what is saved: all leave, and continue bit for bit."""
    hooks = gp.communication_hooks
    for number, options in enumerate((
        lambda: {"communication_hook": hooks.PowerSGD(rank=1, start_step=2)},
        lambda: {"communication_hook": hooks.two_bits(0.01)},
        lambda: {"shard_optimizer": True},
    )):  # fmt: skip
        _, whole, wanted = train(3, **options())
        try:
            train(3, FOLDER / f"together-{number}", interrupt=5, **options())
        except SystemExit:
            pass
        else:
            raise AssertionError("it has gone on")
        _, said, got = train(3, FOLDER / f"together-{number}", **options())
        np.testing.assert_allclose([loss for loss, _ in said], [loss for loss, _ in whole[1:]], rtol=1e-12)
        for our, their in zip(got, wanted):
            np.testing.assert_array_equal(our, their)


def moved(store):
    """What was interrupted continues on another number of processes and devices, with the weights of one device."""
    assert gp.Run(FOLDER / "moved").checkpoints()[-1].name == "epoch-0001-step-00003.npz"
    training, said, weights = train(3, FOLDER / "moved")
    assert training.num_steps == 12 and len(said) == 3
    losses, _, *wanted = np.load(FOLDER / "alone.npz").values()
    np.testing.assert_allclose([loss for loss, _ in said], losses[1:], rtol=1e-6)  # of the whole epoch
    for our, their in zip(weights, wanted):
        np.testing.assert_allclose(our, their, rtol=1e-5, atol=1e-6)  # as in `exact`


def alone_on_disk(store):
    """A file that only some processes see is refused on all of them."""
    net = make_net()
    trainer, folder = gluon.Trainer(net.collect_params(), "sgd"), FOLDER / f"seen-{store.rank}"
    if store.rank == 0:
        folder.mkdir()
        gp.archive.write(folder / "epoch-0001.npz", {}, {})
    try:
        gp.prepare(net, gluon.loss.L2Loss(), trainer, sync_batch_norm=True, run=gp.Run(folder))
    except gp.errors.CheckpointError as error:
        assert f"is another file for process {1 - store.rank}, or none; put it where all hosts" in str(error), error
    else:
        raise AssertionError("processes went on from different files")


class Nested(gluon.Block):
    """Returns one input as it is, and several nested."""

    def __init__(self):
        super().__init__()
        self.dense = gluon.nn.Dense(1, in_units=1, use_bias=False, weight_initializer="ones")

    def forward(self, x, *more):
        x = self.dense(x.reshape((-1, 1)))
        return {"x": x, "both": [x[:, 0] + more[0], (x > 3).astype("int32")]} if more else x


def predicted(store):
    """Outputs come in the data set's order, one row per sample, from whichever loader of however many samples."""
    DataLoader, batches = gluon.data.DataLoader, gp.datasets.batches
    for num, size in ((13, 4), (1, 4), (9, 1), (8, 8)):
        x = np.arange(num, dtype="float32")
        pairs, nested = gluon.data.ArrayDataset(x, -x), [((one, 10 * one), -1) for one in x]
        loaders = [DataLoader(pairs, size), DataLoader(pairs, size, shuffle=True), DataLoader(nd.array(x), size)]
        loaders += [batches(x, -x, size, shuffle=True), DataLoader(nested, size, shuffle=True)]
        net = Nested()
        net.initialize(ctx=DEVICES)
        trainer = gluon.Trainer(net.collect_params(), "sgd")
        training, *loaders = gp.prepare(net, gluon.loss.L2Loss(), trainer, *loaders)
        for loader in loaders * 2:  # in another order each time
            got = training.predict(loader)
            if isinstance(got, dict):
                both = got["both"]
                assert isinstance(both, list) and both[1].dtype == np.int32
                np.testing.assert_array_equal(both[0], x * 11)
                np.testing.assert_array_equal(both[1], (x > 3)[:, None])
                got = got["x"]
            np.testing.assert_array_equal(got, x[:, None])
        several = store.num_workers > 1
        try:
            assert len(training.predict([(nd.array(x), 0)])) == num and not several
        except TypeError as error:
            assert several and "a list that every process reads as a whole; hand it to gp.prepare" in str(error), error
    assert training.rank == store.rank and training.is_main == (store.rank == 0)
    assert training.broadcast_object({"rank": store.rank}) == {"rank": 0}


def main():
    warnings.simplefilter("error", gp.errors.SeparateTraining)
    warnings.simplefilter("error", gp.errors.StatisticsPerDevice)
    store = gp.kvstore.create("auto")
    for name in sys.argv[3:]:
        globals()[name](store)
        print(f"passed {name} on {store.rank}", flush=True)


if __name__ == "__main__":
    main()
