"""A loop reads each loss late, lets none pass that is not finite, and continues bit for bit wherever it was stopped."""

import contextlib
import gc
import io
import logging
import math
import os
import re
import signal
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import launcher
from gluon_parallel.errors import LOG, BatchMismatch, CheckpointError, NotFinite
from gluon_parallel.training import stopping
from gluon_parallel.training.prepare import progress
from gluon_parallel.training.prepare.progress import LAG
from gluon_parallel.training.stopping import Stopped


class Loss:
    """A loss that remembers when it was waited for."""

    def __init__(self, value, log):
        self.value, self.log = value, log

    def asnumpy(self):
        self.log.append(self.value)
        return np.array([self.value])


def array(value):
    return mx.nd.array([value], dtype="float64")


def test_the_mean_loss_and_its_parts_weigh_every_step_by_its_samples(rng):
    values, sizes = rng.normal(size=(30, 3)), rng.integers(1, 9, size=30)
    loop = gp.Loop(range(30))
    for i in loop.loaders[0]:
        loop.add(array(values[i].sum()), int(sizes[i]), dict(zip("abc", map(array, values[i]))))
    row = loop.end_epoch()
    # sums in another order
    for name, column in {"loss": values.sum(1), **{f"loss_{key}": one for key, one in zip("abc", values.T)}}.items():
        assert row[name] == pytest.approx(np.average(column, weights=sizes), rel=1e-9, abs=1e-12)
    assert (loop.epoch, loop.step_in_epoch, loop.num_steps) == (1, 0, 30)
    assert row["samples_per_second"] > 0
    assert math.isnan(loop.mean_loss())  # of no step


def test_no_loss_is_waited_for_before_younger_ones_are_on_their_way():
    log: list = []
    loop = gp.Loop(range(30))
    for i in loop.loaders[0]:
        loop.add(Loss(float(i), log), 1)
        assert log == list(range(i + 1 - LAG))
    assert log == list(range(30))  # at the end of the pass, where its time ends


@pytest.mark.parametrize(("value", "bad"), [(float("nan"), 1), (float("inf"), 5), (-float("inf"), 30)])
def test_a_loss_that_is_not_finite_stops_the_epoch_and_names_its_step(value, bad):
    loop, seen = gp.Loop(range(30)), 0
    loop.epoch = 3
    with pytest.raises(NotFinite, match=rf"epoch 4, step {bad}: the loss is {value}. No checkpoint has been saved yet"):
        for seen, _ in enumerate(loop.loaders[0], start=1):
            loop.add(mx.nd.array([value if seen == bad else 1.0]), 2)
    assert seen <= bad + LAG


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show_progress(schedule=None, **options):
    net = mx.gluon.nn.Dense(1, in_units=1)
    net.initialize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125, "lr_scheduler": schedule})
    loop = gp.Loop(range(LAG + 5), net=net, trainer=trainer)
    loop.epoch = 6
    for _ in loop.epochs(7, **options):
        for _ in loop.loaders[0]:
            loop.add(mx.nd.full(1, 0.25), 4)
            loop._bar._bar.refresh()


def test_a_terminal_shows_epoch_loss_learning_rate_and_samples_per_second(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", Terminal())
    show_progress()
    text = sys.stderr.getvalue()
    for part in ("epoch 7", "loss 0.2500, lr 0.125, ", "samples/s", f"/{LAG + 5}"):
        assert part in text
    assert text.rstrip(" ").endswith("\r")  # it is wiped away, and makes room for the table
    monkeypatch.setattr(sys, "stderr", Terminal())
    show_progress(progress=False)
    assert sys.stderr.getvalue() == ""


def test_a_notice_and_what_the_training_prints_begin_on_lines_of_their_own(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    shown = logging.StreamHandler(terminal)
    LOG.addHandler(shown)
    try:
        loop = gp.Loop(range(3))
        for _ in loop.epochs(1):
            assert terminal.getvalue() == ""  # what comes before the first step has ended is not in its way
            for _ in loop.loaders[0]:
                loop.add(mx.nd.ones(1), 1)
                loop._bar._bar.refresh()
                loop.print("printed")
                LOG.warning("noticed")
    finally:
        LOG.removeHandler(shown)
    for line in terminal.getvalue().splitlines():
        for word in ("printed", "noticed"):
            before = line.partition(word)[0].rpartition("\r")
            assert word not in line or not (before[0] + before[2]).rpartition("\r")[2].strip(), line


def test_a_launched_process_sends_its_progress_to_the_launcher_and_prints_a_line_a_minute(monkeypatch, capsys):
    sent: list = []
    monkeypatch.setattr(launcher, "is_heard", lambda: True)
    monkeypatch.setattr(launcher, "send", sent.append)
    show_progress()
    bars = [text.removeprefix(launcher.BAR).strip() for text in sent if text.startswith(launcher.BAR)]
    last = [*filter(None, bars)][-1]
    assert "epoch 7" in last and bars[-1] == ""
    assert re.search(r"loss 0\.2500, lr 0\.125, \d+ samples/s", last[: 79 - len("[0] ")]), last  # of 80 columns
    assert capsys.readouterr().err == ""
    sent.clear()
    show_progress(progress=False)
    assert not [text for text in sent if text.startswith(launcher.BAR)]


def test_where_there_is_no_terminal_a_long_epoch_prints_a_line_every_minute(monkeypatch, capsys):
    show_progress()
    printed = capsys.readouterr()
    assert printed.err == "" and "step" not in printed.out
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0.0)
    show_progress()
    *_, line, _, _ = capsys.readouterr().out.splitlines()  # before the table
    assert re.fullmatch(rf"epoch 7: step {LAG + 5} of {LAG + 5}, loss 0\.2500, lr 0\.125, \d+ samples/s", line)
    show_progress(progress=False)
    assert "step" not in capsys.readouterr().out


@pytest.mark.parametrize("options", [{}, {"progress": False}])
def test_a_loop_that_shows_no_learning_rate_does_not_call_the_schedule(options):
    calls = []
    schedule = mx.lr_scheduler.LRScheduler(0.125)
    schedule.__class__ = type("Counting", (mx.lr_scheduler.LRScheduler,), {"__call__": lambda *_: calls.append(1) or 1})
    show_progress(schedule, **options)
    assert not calls


def test_a_loop_runs_where_standard_error_is_closed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    show_progress()
    assert "samples/s" in capsys.readouterr().out


def test_a_notebook_shows_a_bar_of_its_own():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipywidgets")
    code = """
        import gluon_parallel as gp
        import mxnet as mx
        loop = gp.Loop(range(3))
        for _ in loop.epochs(1):
            for _ in loop.loaders[0]:
                loop.add(mx.nd.ones(1), 1)
    """
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(code))])
    nbclient.NotebookClient(notebook, timeout=280).execute()
    shown = [output.get("data", {}) for output in notebook.cells[0].outputs]
    assert any("application/vnd.jupyter.widget-view+json" in one for one in shown)


class Interrupted:
    """Send a signal to this process in the step, or between the epochs, of a training."""

    def __init__(self, moment=None):
        self.moment = moment

    def __call__(self, *moment):
        if moment == self.moment:
            os.kill(os.getpid(), signal.SIGTERM if moment[1] == "between" else signal.SIGINT)


def train(folder, moment=None, num_epochs=3, patience=None, loaders=lambda: [range(4), range(2)]):
    """A training loop whose weights are the sum of what it saw and drew; returns them and the loop."""
    weights = [mx.nd.zeros(3, dtype="float64", ctx=mx.cpu(number)) for number in range(2)]
    average = mx.nd.zeros(3, dtype="float64")  # which is updated after each step, as averages of weights are
    run = gp.Run(folder) if folder else None
    loop = gp.Loop(*loaders(), seed=5, run=run, saved={"weights": weights, "average": average})
    interrupt = Interrupted(moment)
    for epoch in loop.epochs(num_epochs, patience):
        for number, batch in enumerate(loop.loaders[0], start=loop.step_in_epoch):
            draw = mx.nd.random.uniform(shape=1).astype("float64")
            for copy in weights:
                copy += (epoch + 1) * (batch + 1) * draw.as_in_context(copy.context)
            loop.add(weights[0][:1].copy(), 2, {"second": weights[0][1:2].copy(), "ones": mx.nd.ones(1)})
            interrupt(epoch, number)
            average += weights[0]
        mx.nd.random.uniform(shape=7).wait_to_read()  # an evaluation that draws
        for _ in loop.loaders[1]:
            pass
        interrupt(epoch, "between")
        loop.end_epoch(score=-abs(epoch - 1), odd=epoch % 2)
    return [copy.asnumpy() for copy in [*weights, average]], loop


@pytest.mark.parametrize(
    ("moment", "patience"),
    [((0, 0), None), ((1, 3), None), ((2, 3), 1), ((1, "between"), 1), ((2, "between"), None)],
)
def test_a_training_that_is_stopped_anywhere_continues_as_if_it_never_was(tmp_path, capfd, moment, patience):
    wanted, loop = train(tmp_path / "whole", patience=patience)
    assert loop.epoch == 3 and loop.epochs_since_best == 1 and loop.best == 0
    with pytest.raises(Stopped) as stop:
        train(tmp_path / "parts", moment, patience=patience)
    assert stop.value.code == (143 if moment[1] == "between" else 130)
    said = capfd.readouterr().err
    epoch, step = moment
    where = f"after epoch {epoch + 1};" if step == "between" else f"in epoch {epoch + 1}, after step {step + 1};"
    assert f"stopped {where}" in said
    assert ("once more stops at once" in said) == (step != "between")
    assert "has everything. Start the script again to continue" in said
    got, again = train(tmp_path / "parts", patience=patience)
    np.testing.assert_array_equal(got, wanted)
    assert (again.best, again.epochs_since_best, again.num_steps) == (0, 1, 12)

    rows = [
        [{key: value for key, value in row.items() if key != "samples_per_second"} for row in one.run.rows]
        for one in (loop, again)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 3
    best = [(tmp_path / name / "best.npz") for name in ("whole", "parts")]
    assert gp.archive.read(best[0]).facts["loop"]["epoch"] == gp.archive.read(best[1]).facts["loop"]["epoch"] == 2


class Drawn(mx.gluon.data.Sampler):
    """A sampler of somebody's own; its numbers are drawn one by one, those of :meth:`batches` by MXNet too."""

    def __len__(self):
        return 8

    def __iter__(self):
        return iter([np.random.randint(8) for _ in range(8)])  # noqa: NPY002 (as Gluon's do)

    def batches(self):
        for first, second in zip(self, self):
            yield mx.nd.array([first, second]) + mx.nd.random.uniform(shape=2)


class Drawing:
    """An iterable of such batches."""

    def __iter__(self):
        return Drawn().batches()


@pytest.mark.parametrize("order", ["ours", "gluon's", "a list's", "that of workers", "a generator's"])
def test_loaders_of_every_kind_continue_within_a_pass(tmp_path, order):
    def loaders():
        numbers = np.arange(8.0)
        if order == "ours":
            return [gp.datasets.batches(numbers, numbers, 2, shuffle=True, seed=3), range(2)]
        if order == "gluon's":
            return [mx.gluon.data.DataLoader(numbers, 2, shuffle=True), range(2)]
        if order == "that of workers":
            return [mx.gluon.data.DataLoader(numbers, 2, sampler=Drawn(), num_workers=1), range(2)]
        if order == "a generator's":
            return [Drawing(), range(2)]
        return [list(numbers.reshape(4, 2)), range(2)]

    def train_on(folder, moment=None):
        total, interrupt = mx.nd.zeros(1), Interrupted(moment)
        loop = gp.Loop(*loaders(), run=gp.Run(folder), saved={"total": total})
        for epoch in loop.epochs(2):
            for number, batch in enumerate(loop.loaders[0], start=loop.step_in_epoch):
                part = batch[0] if order == "ours" else batch
                total *= 2  # so that the order counts
                total += float(np.sum(part.asnumpy() if isinstance(part, mx.nd.NDArray) else part))
                total += mx.nd.random.uniform(shape=1) + np.random.rand()  # noqa: NPY002 (as nets do)
                loop.add(mx.nd.ones(1), 1)
                interrupt(epoch, number)
        return total.asscalar()

    wanted = train_on(tmp_path / "whole")
    with pytest.raises(Stopped):
        train_on(tmp_path / "parts", (1, 1))
    assert train_on(tmp_path / "parts") == wanted
    gc.collect()  # ends workers


def test_training_ends_where_the_score_does_not_rise_and_the_closing_lines_name_the_best(tmp_path, capsys, caplog):
    scores = [None, 0.1, 0.5, math.nan, None, 0.5, None, 0.4, 0.9]
    for num in (3, 100):  # the second one continues
        loop = gp.Loop(range(2), run=gp.Run(tmp_path))
        for epoch in loop.epochs(num, patience=3):
            loop.add(array(1.0), 1)
            loop.end_epoch(score=scores[epoch])
    assert (loop.epoch, loop.best, loop.best_epoch) == (8, 0.5, 3) and "no epoch has had a score" not in caplog.text
    said = capsys.readouterr().out
    assert "no better score in 3 epochs; the best one is 0.5" in said
    assert f"best:       {tmp_path / 'best.npz'}, of epoch 3, score 0.5\n" in said.split("8  ")[-1]
    loop, handler = gp.Loop(range(2)), signal.getsignal(signal.SIGINT)
    for _ in loop.epochs(3, patience=2):
        assert signal.getsignal(signal.SIGINT) is handler  # nothing would be saved
        loop.add(array(1.0), 1)
    assert loop.epoch == 3 and caplog.text.count("patience=2: no epoch has had a score") == 1


def test_an_epoch_without_samples_is_refused():
    loop = gp.Loop(number for number in range(2))  # used up after one pass
    with pytest.raises(BatchMismatch, match=r"epoch 2 had no step with samples: the loader yielded no batch"):
        for _ in loop.epochs(3):
            for _ in loop.loaders[0]:
                loop.add(array(1.0), 1)
    assert loop.epoch == 1


def test_losses_and_scores_are_single_numbers():
    loop = gp.Loop(range(2))
    loop.add(0.5, 1)
    loop.add(array(1.5), 1)
    for loss, what in ((mx.nd.ones(5), r"of shape \(5,\)"), ("0.5", "of type str")):
        with pytest.raises(BatchMismatch, match=f"the loss is {what}, expected one value"):
            loop.add(loss, 5)
    for measured in ({"score": [("accuracy", 0.5)]}, {"test_accuracy": mx.nd.ones(1)}):
        with pytest.raises(TypeError, match=f"{next(iter(measured))} is a (list|NDArray), expected a number"):
            loop.end_epoch(**measured)
    assert loop.end_epoch(score=np.float32(0.5))["loss"] == 1.0


def test_an_interrupt_waits_for_the_update_and_the_pass_is_not_continued_with_batches_of_another_size(tmp_path, capfd):
    def loop_of(batch_size):
        return gp.Loop(np.arange(12).reshape(-1, batch_size), run=tmp_path, accumulate=3)

    with pytest.raises(Stopped):
        loop = loop_of(2)
        for _ in loop.epochs(1):
            for _ in loop.loaders[0]:
                loop.add(array(1.0), 2)
                if loop.num_steps == 1:
                    os.kill(os.getpid(), signal.SIGINT)
    assert "stopped in epoch 1, after step 3;" in capfd.readouterr().err
    with pytest.raises(CheckpointError, match=r"middle of an epoch, after 3 of 6 batches; now the loader has 3"):
        loop_of(4)
    assert loop_of(2).step_in_epoch == 3


@pytest.mark.parametrize(("is_main", "is_heard"), [(True, False), (False, True), (False, False)])
def test_where_process_0_alone_stops_others_leave_it_to_the_launcher_or_end_at_sigterm(monkeypatch, is_main, is_heard):
    before, killed = signal.getsignal(signal.SIGTERM), []
    monkeypatch.setattr(stopping.launcher, "is_heard", lambda: is_heard)
    with stopping.postponed(lambda: is_main, only_main=True), monkeypatch.context() as patched:
        patched.setattr(os, "kill", lambda process, number: killed.append((number, signal.getsignal(number))))
        signal.raise_signal(signal.SIGTERM)
        assert killed == [] if is_main or is_heard else [(signal.SIGTERM, signal.SIG_DFL)]
        assert stopping.requested() == signal.SIGTERM
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    "names",
    ["SIGTERM SIGTERM SIGHUP SIGTERM", "SIGINT SIGTERM SIGHUP", "SIGHUP SIGTERM", "SIGTERM SIGINT", "SIGINT SIGINT"],
)
def test_a_request_may_come_again_but_ctrl_c_then_stops_at_once(names):
    first, *others = [getattr(signal, name) for name in names.split()]
    at_once = pytest.raises(KeyboardInterrupt) if others[-1] == signal.SIGINT else contextlib.nullcontext()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping.postponed(lambda: True):  # as under nohup
            signal.raise_signal(signal.SIGHUP)
            assert stopping.requested() is None
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        handlers = [signal.getsignal(number) for number in stopping.SIGNALS]
        with stopping.postponed(lambda: True):
            signal.raise_signal(first)  # to this thread; os.kill may choose another one, which is handled later
            with at_once:
                for number in others:
                    signal.raise_signal(number)
            assert stopping.requested() == first
        assert [signal.getsignal(number) for number in stopping.SIGNALS] == handlers
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("has_trainer", [False, True])
def test_all_processes_hear_one_step_later_which_signal_one_of_them_had(monkeypatch, has_trainer):
    class Header:  # of one process, whose sums are those of all
        def __init__(self, *arguments, **options):
            self.own, self.num_sent, self.sent = {}, 0, []

        def send(self):
            self.num_sent += 1
            self.sent.append(self.own["stop"] if self.own else [0, 0, 0])

        def read(self):
            return {"stop": np.sum([one.sent[self.num_sent - 1] for one in headers], axis=0)}

    trainers = [SimpleNamespace(_kv_initialized=True, rank=rank) if has_trainer else None for rank in range(3)]
    monkeypatch.setattr(stopping, "StepHeader", Header)
    monkeypatch.setattr(stopping, "header_of", lambda trainer: headers[trainer.rank])
    headers = [Header() for _ in trainers]
    agreed = [stopping.AgreedStop(None, trainer) for trainer in trainers]
    headers = headers if has_trainer else [one._own for one in agreed]
    for here, heard in (
        ((None, None, None), None),
        ((None, signal.SIGTERM, None), None),
        ((None,) * 3, signal.SIGTERM),
    ):
        if has_trainer:  # a step of each
            for header in headers:
                header.send()
        got = [one.asked(number) for one, number in zip(agreed, here)]
        assert got == [heard] * 3
    assert [header.num_sent for header in headers] == [3 if has_trainer else 2] * 3


def test_a_stop_between_two_steps_is_heard_by_a_header_of_its_own(monkeypatch):
    class Header:
        num_sent, own = 1, {"stop": [0, 0, 0]}

        def send(self):
            self.num_sent += 1

        def read(self):
            return self.own

    header = Header()
    monkeypatch.setattr(stopping, "header_of", lambda trainer: header)
    agreed = stopping.AgreedStop(None, SimpleNamespace(_kv_initialized=True))
    assert agreed.asked(signal.SIGINT) is None
    assert header.num_sent == 1  # the next step sends it
    assert agreed.asked(signal.SIGINT) == signal.SIGINT
    header.own["stop"] = [0, 0, 0]
    assert agreed.asked(None) is None
    assert header.num_sent == 2  # at the end of an epoch, after the call behind its last step


def test_checkpoints_of_another_training_and_damaged_ones_are_refused(tmp_path):
    def files():
        return gp.Run(tmp_path).checkpoints()

    train(tmp_path)
    for loaders, seed in (([range(4)], 5), ([range(4), range(2)], 6)):
        with pytest.raises(CheckpointError, match="not saved by this training: it has another seed or other loaders"):
            gp.Loop(*loaders, seed=seed, run=gp.Run(tmp_path))
    with pytest.raises(CheckpointError, match=r"weights is float64 \(3,\) in the checkpoint and float32 \(1,\) here"):
        gp.Loop(range(4), range(2), seed=5, run=gp.Run(tmp_path), saved={"weights": mx.nd.zeros(1)})
    files()[-1].write_bytes(files()[-1].read_bytes()[:-5])
    with pytest.raises(
        CheckpointError, match=r"0003\.npz is damaged.*continues from the one before, .*epoch-0002\.npz"
    ):
        train(tmp_path)
    files()[-1].unlink()
    assert train(tmp_path, num_epochs=4)[1].epoch == 4
    with pytest.raises(CheckpointError, match=r"saved: number is \[5\], expected an object with state"):
        gp.Loop(saved={"number": 5})
    rollover = mx.gluon.data.DataLoader(np.arange(5), 2, last_batch="rollover")
    gp.Loop(rollover)
    with pytest.raises(TypeError, match="'rollover' keeps for its next pass is in none of its"):
        gp.Loop(rollover, run=gp.Run(tmp_path / "rollover"))
