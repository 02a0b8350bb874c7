"""The bar counts what was done, reads each loss late, and never lets a loss that is not finite pass."""

import io
import sys

import numpy as np
import pytest

import gluon_parallel as gp  # noqa: F401 - makes MXNet importable
import mxnet as mx
from gluon_parallel.errors import NotFinite
from gluon_parallel.training.progress import LAG, Position, Progress


class Loss:
    """A loss that remembers when it was waited for."""

    def __init__(self, value, log):
        self.value, self.log = value, log

    def asnumpy(self):
        self.log.append(self.value)
        return np.array([self.value])


def test_the_mean_loss_weighs_every_step_by_its_samples(rng):
    values, sizes = rng.normal(size=30), rng.integers(1, 9, size=30)
    progress = Progress(range(30), "epoch 1")
    for i in progress:
        progress.add(mx.nd.array([values[i]], dtype="float64"), int(sizes[i]))
    # both add 30 numbers in float64; only the order of the additions differs
    assert progress.loss == pytest.approx(np.average(values, weights=sizes), rel=1e-12, abs=1e-12)
    assert (progress.step, progress.num_samples) == (30, sizes.sum())
    assert progress.images_per_second > 0


def test_no_loss_is_waited_for_before_younger_ones_are_on_their_way():
    log: list = []
    progress = Progress(range(30), "epoch 1")
    for i in progress:
        progress.add(Loss(float(i), log), 1)
        assert log == list(range(i + 1 - LAG))
    progress.settle()
    assert log == list(range(30))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bad", [1, 5, 30])
def test_a_loss_that_is_not_finite_stops_the_epoch_and_names_its_step(value, bad):
    progress, seen = Progress(range(30), "epoch 4"), 0
    with pytest.raises(NotFinite, match=rf"epoch 4, step {bad}: the loss is {value}"):
        for seen, _ in enumerate(progress, start=1):
            progress.add(mx.nd.array([value if seen == bad else 1.0]), 2)
        progress.settle()
    assert seen <= bad + LAG


def test_an_epoch_that_was_interrupted_goes_on_counting_to_the_same_loss():
    def run(batches, *begin):
        progress = Progress(batches, "epoch 1", *begin)
        for value in progress:
            progress.add(mx.nd.array([value]), 3, {"half": mx.nd.array([value / 2])})
        progress.settle()
        return progress

    values = [0.1 * i for i in range(20)]
    first = run(values[:7])
    second = run(values[7:], Position(0, first.step, first.loss_sum, first.num_samples, first.part_sums))
    whole, store = run(values), mx.kv.create("local")
    assert (second.loss, second.step, second.num_samples) == (whole.loss, whole.step, whole.num_samples)
    assert second.together(store)[2] == whole.together(store)[2] == {"half": pytest.approx(whole.loss / 2)}
    assert first.part_sums["half"] == pytest.approx(first.loss_sum / 2)


def test_the_parts_of_a_loss_add_up_to_it_whatever_the_sizes_of_the_steps(rng):
    values, sizes = rng.normal(size=(20, 3)), rng.integers(1, 9, size=20)
    progress, store = Progress(range(20), "epoch 1"), mx.kv.create("local")
    for i in progress:
        total, *parts = (mx.nd.array([value], dtype="float64") for value in [values[i].sum(), *values[i]])
        progress.add(total, int(sizes[i]), dict(zip("abc", parts)))
    loss, _, parts = progress.together(store)
    for name, column in zip("abc", values.T):
        # sums in another order
        assert parts[name] == pytest.approx(np.average(column, weights=sizes), rel=1e-9, abs=1e-12)
    assert sum(parts.values()) == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert Progress([], "epoch 1").together(store)[2] == {}


def test_nothing_is_drawn_where_there_is_no_terminal(capsys):
    progress = Progress(range(3), "epoch 1")
    for _ in progress:
        progress.add(mx.nd.ones(1), 1)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_description_loss_and_rate(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress(range(LAG + 5), "epoch 7")
    for _ in progress:
        progress.add(mx.nd.full(1, 0.25), 4)
        progress._bar.refresh()
    text = terminal.getvalue()
    assert "epoch 7" in text and "loss 0.2500" in text and "samples/s" in text and f"/{LAG + 5}" in text
    assert text.rstrip(" ").endswith("\r")  # it is wiped away, and makes room for the table


def test_an_epoch_without_a_step_has_no_loss():
    progress = Progress([], "epoch 1")
    assert list(progress) == []
    assert np.isnan(progress.loss)
