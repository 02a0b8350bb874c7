"""What gp.prepare does, run by every process: ``python prepare_checks.py num_devices folder check...``."""

import sys
import time
import warnings
from pathlib import Path

import numpy as np

import gluon_parallel as gp
from mxnet import gluon, nd

# Without arguments the file is only read, by pytest's search for doctests.
NUM_DEVICES, FOLDER = (sys.argv[1], Path(sys.argv[2])) if __name__ == "__main__" else ("2", Path())
DEVICES = gp.devices(f"cpu:{NUM_DEVICES}")


def make_net(dropout=0.0, batch_norm=gluon.nn.BatchNorm):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(5, in_units=3), batch_norm(in_channels=5), gluon.nn.Dropout(dropout))
    net.add(gluon.nn.Dense(2, in_units=5))
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


def train(num_epochs, path=None, dropout=0.0, stop=None, batch_norm=gluon.nn.BatchNorm):
    """A script as its author would write it; returns what it printed and the weights."""
    net, said = make_net(dropout, batch_norm), []
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    train_loader, test_loader = make_loaders(shuffle=True)
    training, train_loader, test_loader = gp.prepare(
        net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, train_loader, test_loader,
        sync_batch_norm=batch_norm is gluon.nn.BatchNorm, clip_global_norm=1,
    )  # fmt: skip
    begin = training.resume(path, epoch=0)["epoch"] if path else 0
    for epoch in range(begin, num_epochs):
        for x, y in train_loader:
            training.step(x, y)
        accuracy = training.evaluate(test_loader, ["acc", "ce"] if dropout < 0 else "acc")
        said.append((training.mean_loss(), accuracy))
        if path:
            training.save(path, epoch=epoch + 1)
        if epoch + 1 == stop:
            break
    gp.check_replicas(net, training.store)
    return training, said, [parameter.data(DEVICES[-1]).asnumpy() for parameter in net.collect_params().values()]


def exact(store, batch_norm=gluon.nn.BatchNorm):
    """Write, or compare with, the numbers of one process on one device."""
    training, said, weights = train(3, batch_norm=batch_norm)
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
        np.testing.assert_allclose(
            our, their, rtol=1e-5, atol=1e-6
        )  # Adam divides by small numbers, in float32 scalars


def exact_with_own_layers(store):
    """SyncBatchNorm layers that the net has already get the store, too."""
    exact(store, gp.nn.SyncBatchNorm)


def loaded_at_once(store):
    """A process that loads right after saving does not read the file from before, nor another one than process 0."""
    net, path = make_net(), FOLDER / f"at-once-{store.num_workers}.npz"
    trainer = gluon.Trainer(net.collect_params(), "adam", kvstore=store, update_on_kvstore=False)
    write = gp.archive.write

    def write_late(*args):
        time.sleep(1)
        write(*args)

    for value, gp.archive.write in ((1.0, write), (2.0, write_late)):
        net[0].weight.set_data(nd.full((5, 3), value, dtype="float64"))
        gp.checkpoint.save(path, net, trainer)
    gp.archive.write = write
    net[0].weight.set_data(nd.full((5, 3), 3.0, dtype="float64"))
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
    """A training that is stopped and resumed is the one that goes through, random numbers included."""
    _, _, wanted = train(4, FOLDER / f"through-{store.num_workers}.npz", dropout=0.4)
    path = FOLDER / f"stopped-{store.num_workers}.npz"
    train(4, path, dropout=0.4, stop=2)
    training, said, got = train(4, path, dropout=0.4)
    assert len(said) == 2 and training.num_steps == 16, (said, training.num_steps)
    for our, their in zip(got, wanted):
        np.testing.assert_array_equal(our, their)


def alone_on_disk(store):
    """A file that only some processes see is refused on all of them."""
    net = make_net()
    training = gp.prepare(net, gluon.loss.L2Loss(), gluon.Trainer(net.collect_params(), "sgd"), sync_batch_norm=True)
    path = FOLDER / f"seen-{store.rank}.npz"
    if store.rank == 0:
        path.write_text("")
    try:
        training.resume(path)
    except gp.errors.CheckpointError as error:
        assert "there for some processes and not for 1; put it into a folder" in str(error), error
    else:
        raise AssertionError("processes went on from different files")


def main():
    warnings.simplefilter("error", gp.errors.SeparateTraining)
    warnings.simplefilter("error", gp.errors.StatisticsPerDevice)
    store = gp.kvstore.create("auto")
    for name in sys.argv[3:]:
        globals()[name](store)
        print(f"passed {name} on {store.rank}", flush=True)


if __name__ == "__main__":
    main()
