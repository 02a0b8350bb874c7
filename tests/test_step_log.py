"""A run's log of single steps, functions that are called after them, and metrics of the training steps."""

import csv
import logging
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import step_log_checks
from processes import needs_mpi, run_command, run_mpi
from step_log_checks import BATCH, EVERY, LARGEST, NUM, data, rows, train

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.errors import NotFinite
from gluon_parallel.training.prepare.progress import LAG
from mxnet import gluon, nd

CHECKS = Path(step_log_checks.__file__)
CLOSE = {"rel": 1e-5, "abs": 1e-7}  # norms and mean losses are float32


def by_hand(num_epochs=2):
    """The same training in NumPy: (rows of steps, rows of epochs)."""
    images, labels, weight = data()
    steps, epochs, number, losses = [], [], 0, []
    for epoch in range(1, num_epochs + 1):
        losses, since, scores = [], [], []
        for begin in range(0, NUM, BATCH):
            x, y = images[begin : begin + BATCH], labels[begin : begin + BATCH].astype(int)
            number += 1
            logits = x @ weight.T
            shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            loss = -np.log(shares[np.arange(len(y)), y])
            gradient = (shares - np.eye(2)[y]).T @ x / len(y)
            norm, rate = np.linalg.norm(gradient), 0.5 * 0.9 ** ((number - 1) // 2)
            weight = weight - rate * gradient * min(1, LARGEST / norm)
            losses, since, scores = [*losses, *loss], [*since, *loss], [*scores, logits]
            row = {}
            if number % EVERY == 0:
                row.update(loss=np.mean(since), learning_rate=rate, gradient_norm=norm)
                since = []
            if number % 4 == 0:
                row.update(weight_norm=np.linalg.norm(weight), fours=number // 4)
            if row:
                steps.append({"step": number, "epoch": epoch, **row})
        found = np.concatenate(scores).argmax(axis=1)
        right, ones = found == labels, (found == 1) & (labels == 1)
        f1 = [
            2 * np.sum(one) / (np.sum(guess) + np.sum(label))
            for one, guess, label in zip(*map(batches, (ones, found == 1, labels == 1)))
        ]
        squares = [np.mean((label[:, None] - score) ** 2) for label, score in zip(batches(labels), scores)]
        epochs.append({"epoch": epoch, "loss": np.mean(losses), "train_accuracy": np.mean(right),
                       "train_f1": np.mean(f1), "train_mse": np.mean(squares)})  # fmt: skip
    return steps, epochs


def batches(array):
    return [array[begin : begin + BATCH] for begin in range(0, NUM, BATCH)]


def check(found, wanted):
    assert [row.keys() for row in found] == [row.keys() for row in wanted]
    for ours, theirs in zip(found, wanted):
        assert ours == pytest.approx(theirs, **CLOSE)


@pytest.mark.parametrize("num_devices", [1, 3])
def test_the_log_and_the_metrics_are_those_of_a_loop_in_numpy(tmp_path, num_devices, capsys):
    train(tmp_path, gp.devices(f"cpu:{num_devices}"))
    for found, wanted in zip(rows(tmp_path), by_hand()):
        check(found, wanted)
    title = capsys.readouterr().out.splitlines()[0].split()
    assert title == ["epoch", "loss", "train", "acc", "train", "f1", "train", "mse", "samples/s"]
    with open(tmp_path / "metrics.csv", encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    steps, epochs = rows(tmp_path)
    assert len(table) == len(steps) + len(epochs) and {*table[0]} == {*steps[0], *steps[1], *epochs[0]} | {
        "samples_per_second"
    }
    assert [row["fours"] for row in table if row["weight_norm"]] == ["1", "2", "3"]


@needs_mpi
def test_processes_log_and_measure_as_one_does_and_so_do_runs_that_are_continued_within_an_epoch(tmp_path, caplog):
    status, output = run_command([sys.executable, str(CHECKS), "cpu:2", str(tmp_path / "alone")])
    assert status == 0, output
    status, output = run_mpi(2, CHECKS, "cpu:1", str(tmp_path / "two"))
    assert status == 0 and output.count("passed on") == 2, output
    assert output.count("train_metric: f1 of epoch 2 has its steps after step 4") == 1, output  # stops one step later
    wanted_steps, wanted_epochs = by_hand()
    for folder in (tmp_path / "alone", tmp_path / "two"):
        steps, epochs = rows(folder / "whole")
        check(steps, wanted_steps)
        check(epochs, wanted_epochs)
        steps, epochs = rows(folder / "parts")
        assert [row["step"] for row in steps] == [row["step"] for row in wanted_steps]
        for ours, theirs in zip(steps, wanted_steps):  # a mean begins where the run was continued
            assert {**ours, "loss": 0} == pytest.approx({**theirs, "loss": 0}, **CLOSE)
        for name in ("loss", "train_accuracy"):  # sums go on
            assert [row[name] for row in epochs] == pytest.approx([row[name] for row in wanted_epochs], **CLOSE)


class Value:
    """An array that notes when it is waited for."""

    shape, size = (1,), 1

    def __init__(self, value, read):
        self.value, self.read = value, read

    def copy(self):
        return self

    def asnumpy(self):
        self.read.append(self.value)
        return np.array([self.value])


def test_a_value_is_read_some_steps_later_and_is_that_of_its_step(tmp_path):
    read, loop, kept = [], gp.Loop(range(20), run=gp.Run(tmp_path, log_every=0)), nd.zeros(1)
    for _ in loop.epochs(1):
        for number in loop.loaders[0]:
            loop.add(nd.ones(1), 1)
            kept += 1
            loop.log(value=Value(float(number), read), kept=kept)
            loop.log(more=np.float32(0.5), half=nd.ones(1, dtype="float16"), numpy=np.full((1, 1), 0.25))
            assert read == list(range(number + 1 - LAG))
    steps, _ = rows(tmp_path)
    more = {"more": 0.5, "half": 1.0, "numpy": 0.25}
    assert steps == [{"step": n + 1, "epoch": 1, "value": n, "kept": n + 1, **more} for n in range(20)]
    for value, words in ((nd.ones(2), r"an array of shape \(2,\)"), ("a", "a str")):
        with pytest.raises(TypeError, match=f"log: kept is {words}, expected a number or an array of one value"):
            loop.log(kept=value)
    with pytest.raises(ValueError, match="log_every: expected a whole number of steps"):
        gp.Run(tmp_path, log_every=2.5)


def test_rows_behind_the_checkpoint_that_is_continued_are_dropped(tmp_path):
    run = gp.Run(tmp_path)
    for step in range(1, 7):
        run.log_step(step, 1 + (step > 3), loss=1.0)
        if step == 3:
            run.log(epoch=1, loss=1.0)
            run.keep(lambda path: path.write_text(""), 1)
    run.finish()
    for num_steps, kept in ((5, 5), (None, 3)):
        again = gp.Run(tmp_path)
        again.begin(num_steps=num_steps)
        assert [row["step"] for row in rows(tmp_path)[0]] == list(range(1, kept + 1)) and len(again.rows) == 1


def test_functions_are_called_after_each_step_and_epoch_and_an_error_ends_the_run_with_their_name():
    loop, seen = gp.Loop(range(3)), []
    loop.on_step(lambda loop: seen.append(("step", loop.num_steps)))
    assert loop.on_epoch(len) is len
    loop._on_epoch.clear()

    @loop.on_epoch
    def note(loop):
        seen.append(("epoch", loop.row["epoch"], loop.row["accuracy"]))

    def run():
        for _ in loop.epochs(2):
            for _ in loop.loaders[0]:
                loop.add(nd.ones(1), 1)
                seen.append(mx.nd.random.uniform(shape=1).asscalar())
            loop.end_epoch(accuracy=0.5)
            break

    run()
    assert [one for one in seen if isinstance(one, tuple)] == [*(("step", n) for n in (1, 2, 3)), ("epoch", 1, 0.5)]
    drawn = [one for one in seen if not isinstance(one, tuple)]

    class Mine:
        def fails(self, loop):
            raise NotFinite("of my own") if loop.num_steps == 5 else KeyError("key")

    loop.on_step(Mine().fails)
    with pytest.raises(RuntimeError, match=r"training.on_step\(.*Mine.fails\), epoch 2, step 1: KeyError: 'key'"):
        run()
    with pytest.raises(NotFinite, match=r"training.on_step\(.*Mine.fails\), epoch 2, step 2: of my own"):
        run()
    other, seen = gp.Loop(range(3)), []
    other.on_step(lambda loop: mx.nd.random.uniform(shape=7).wait_to_read())
    for _ in other.loaders[0]:
        other.add(nd.ones(1), 1)
        seen.append(mx.nd.random.uniform(shape=1).asscalar())
    assert seen == drawn  # a function that draws changes no step


@pytest.mark.parametrize("largest", [0.01, 1e6, math.inf])
def test_the_norm_is_that_of_the_mean_losss_gradient_before_clipping(largest, rng):
    x, y = rng.standard_normal((7, 3)), rng.standard_normal((7, 2))
    weight = rng.standard_normal((2, 3))
    net = gluon.nn.Dense(2, in_units=3, use_bias=False)
    net.cast("float64")
    net.initialize(ctx=gp.devices("cpu:2"))
    net.weight.set_data(nd.array(weight, dtype="float64"))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    parallel = gp.DataParallel(net, gluon.loss.L2Loss(), trainer, clip_global_norm=largest, accumulate=2)
    batch = nd.array(x, dtype="float64"), nd.array(y, dtype="float64")
    parallel.step(*batch)
    assert parallel.gradient_norm is None
    parallel.step(*batch)
    gradient = (x @ weight.T - y).T @ x / 2 / 7
    norm = np.linalg.norm(gradient)
    assert parallel.gradient_norm.shape == (1,)
    assert parallel.gradient_norm.asscalar() == pytest.approx(norm, rel=1e-6)
    moved = weight - net.weight.data(mx.cpu(1)).asnumpy()
    np.testing.assert_allclose(moved, gradient * min(1, largest / norm), rtol=1e-5, atol=1e-9)
    plain = gp.DataParallel(net, gluon.loss.L2Loss(), gluon.Trainer(net.collect_params(), "sgd"))
    plain.step(*batch)
    assert plain.gradient_norm is None
    np.testing.assert_allclose(  # what a gradient is after a step: of the sum over the samples
        net.weight.grad(mx.cpu(1)).asnumpy(), (x @ (weight - moved).T - y).T @ x / 2, rtol=1e-6, atol=1e-12
    )


def backwards(batch, devices):
    """The last samples on the first device."""
    [half, rest] = gp.split_and_load(batch, devices)
    move = lambda shard, device: tuple([x.as_in_context(device) for x in some] for some in shard)  # noqa: E731
    return [move(rest, devices[0]), move(half, devices[1])]


def test_a_metric_is_measured_once_over_labels_and_outputs_of_the_same_samples(caplog):
    net = gluon.nn.Dense(2, in_units=2, weight_initializer=mx.init.One(), use_bias=False)
    net.initialize(ctx=gp.devices("cpu:2"))
    net.weight.set_data(nd.array([[1, 0], [0, 1]]))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3})
    training = gp.prepare(net, gluon.loss.SoftmaxCELoss(), trainer, train_metrics="acc", split=backwards)
    with pytest.raises(ValueError, match="accuracy is measured already"):
        training.train_metric(mx.metric.Accuracy())
    training.step(nd.array([[1, 0], [1, 0], [0, 1], [1, 0]]), nd.array([0, 0, 1, 1]))  # three are right
    with caplog.at_level(logging.WARNING):
        training.train_metric(gluon.loss.SoftmaxCELoss())
    assert "train_metric: loss of epoch 1 has its steps after step 1" in caplog.text
    training.step(nd.array([[1, 0], [0, 1]]), nd.array([0, 1]))
    row = training.end_epoch()
    assert {*row} == {"epoch", "loss", "train_accuracy", "train_loss", "samples_per_second"}
    assert row["train_accuracy"] == pytest.approx(5 / 6)
    assert row["train_loss"] == pytest.approx(math.log(1 + math.exp(-1)), rel=0.01)  # of the second step
