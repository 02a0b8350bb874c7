"""No run overwrites another, and a run that was stopped, wherever that was, has what it needs to go on."""

import math
import os
import signal

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.archive import Archive
from gluon_parallel.errors import CheckpointError, NotFinite, OutputUnavailable
from gluon_parallel.training import runs
from gluon_parallel.training.progress import Position
from gluon_parallel.training.runs import Run, begin, checkpoints, find


def state(value=0.0):
    return Archive({"weights": np.full(4, value, "float32")}, {"net": "small"})


def row(epoch):
    return {"epoch": epoch, "loss": 1.0 / epoch, "test_accuracy": 1 - 0.5**epoch}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_every_run_gets_the_next_number_and_nothing_is_overwritten(tmp_path):
    parent = tmp_path / "runs" / "lenet"
    first = begin(parent)
    (first / "metrics.jsonl").write_text("precious")
    (parent / "notes").mkdir()
    (parent / "9").mkdir()
    assert [begin(parent).name, begin(parent).name] == ["10", "11"]
    assert first.name == "1" and (first / "metrics.jsonl").read_text() == "precious"


def test_a_folder_that_another_run_makes_at_the_same_moment_is_left_to_it(tmp_path, monkeypatch):
    (tmp_path / "1").mkdir()
    monkeypatch.setattr(runs, "_numbered", lambda parent: [])
    assert begin(tmp_path).name == "2"


def test_an_output_folder_that_cannot_be_made_is_named_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputUnavailable, match=r"file/sub cannot be written to: .*Choose another: --output FOLDER"):
        begin(tmp_path / "file" / "sub")
    with pytest.raises(OutputUnavailable, match=r"nowhere cannot be written to"):
        Run(tmp_path / "nowhere", "a: 1\n")


def test_the_two_newest_checkpoints_and_the_best_are_kept(tmp_path):
    with Run(tmp_path, "a: 1\n") as run:
        for epoch, score in enumerate([math.nan, 0.9, math.nan, 0.6], start=1):
            run.save(state(epoch), epoch, score=score)
    assert [path.name for path in checkpoints(tmp_path)] == ["epoch-0003.npz", "epoch-0004.npz"]
    assert gp.archive.read(tmp_path / "best.npz").arrays["weights"][0] == 2
    assert names(tmp_path) == ["best.npz", "config.yaml", "epoch-0003.npz", "epoch-0004.npz", "metrics.jsonl"]


def test_checkpoints_within_an_epoch_lie_between_those_of_whole_epochs(tmp_path):
    files = ["epoch-0001.npz", "epoch-0001-step-00007.npz", "epoch-0001-step-00012.npz", "epoch-0002.npz"]
    for name in [*reversed(files), "best.npz", "epoch-x.npz", "epoch-0003.npz.tmp"]:
        (tmp_path / name).write_text("")
    assert [path.name for path in checkpoints(tmp_path)] == files


def test_a_resumed_run_begins_where_the_newest_checkpoint_was_written(tmp_path):
    with Run(tmp_path, "a: 1\n") as run:
        for epoch in (1, 2):
            run.report.add(**row(epoch))
            run.save(state(epoch), epoch, score=epoch)
        run.report.add(**row(3))  # and then the power went off
    with Run(tmp_path, "a: 2\n", resumed=True) as run:
        assert run.position == Position(epoch=2)
        assert run.state.facts == {"net": "small"}
        np.testing.assert_array_equal(run.state.arrays["weights"], state(2).arrays["weights"])
        assert (run.best, run.report.rows) == (2, [row(1), row(2)])
    assert (tmp_path / "config.yaml").read_text() == "a: 2\n"


def test_find_takes_the_newest_run_that_has_a_checkpoint_or_the_one_that_is_named(tmp_path):
    folders = [begin(tmp_path) for _ in range(12)]
    for folder in (folders[0], folders[9]):
        with Run(folder, "a: 1\n") as run:
            run.save(state(), 1)
    assert find(tmp_path, "newest") == folders[9]
    assert find(tmp_path, str(folders[0])) == folders[0]
    for parent, resume in [(tmp_path / "none", "newest"), (tmp_path, str(folders[4])), (tmp_path, "nowhere")]:
        with pytest.raises(CheckpointError, match=r"there is no run with a checkpoint in .*Leave --resume out"):
            find(parent, resume)


def test_a_damaged_checkpoint_is_named_with_the_one_before_it(tmp_path):
    with Run(tmp_path, "a: 1\n") as run:
        run.save(state(1), 1)
        run.save(state(2), 2)
    (tmp_path / "epoch-0002.npz").write_bytes((tmp_path / "epoch-0002.npz").read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"epoch-0002\.npz is damaged.*Delete it and .*continues from epoch-0001"):
        Run(tmp_path, "a: 1\n", resumed=True)
    (tmp_path / "epoch-0002.npz").unlink()
    with Run(tmp_path, "a: 1\n", resumed=True) as run:
        assert run.position.epoch == 1
    (tmp_path / "epoch-0001.npz").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"epoch-0001\.npz is damaged.*Delete it and begin anew"):
        Run(tmp_path, "a: 1\n", resumed=True)


def test_a_file_that_holds_no_position_cannot_be_continued(tmp_path):
    gp.archive.write(tmp_path / "epoch-0001.npz", {}, {"epoch": 1})
    with pytest.raises(CheckpointError, match="has no position to continue from"):
        Run(tmp_path, "a: 1\n", resumed=True)


def test_a_state_that_is_not_finite_is_not_saved_and_the_last_good_one_is_named(tmp_path):
    with Run(tmp_path, "a: 1\n") as run:
        with pytest.raises(NotFinite, match=r"after epoch 1: weights has .*No checkpoint has been saved yet"):
            run.save(state(np.nan), 1)
        run.save(state(1), 1, score=0.5)
        with pytest.raises(NotFinite, match=r"after epoch 2: .*The last good checkpoint is .*epoch-0001\.npz"):
            run.save(state(np.inf), 2, score=0.9)
        assert run.best == 0.5
    assert gp.archive.read(tmp_path / "best.npz").arrays["weights"][0] == 1


def test_a_loss_that_is_not_finite_is_noticed_before_a_checkpoint_within_an_epoch(tmp_path):
    with Run(tmp_path, "a: 1\n") as run:
        progress = run.progress(range(5), 0)
        progress.add(mx.nd.array([np.nan]), 1)
        with pytest.raises(NotFinite, match=r"epoch 1, step 1: the loss is nan. No checkpoint has been saved yet\. A"):
            run.save(state(), 0, within=progress)
    assert checkpoints(tmp_path) == []


def train(run, num_epochs=3, num_steps=4, interrupt=None):
    """A training loop in the form that the scripts have; its state is the sum of what it saw."""
    total = run.state.arrays["weights"].copy() if run.state else np.zeros(4, "float32")
    for epoch in range(run.position.epoch, num_epochs):
        batches = list(range(num_steps))
        progress = run.progress(batches, epoch)
        del batches[: progress.step]
        for batch in progress:
            total += (epoch + 1) * (batch + 1)
            progress.add(mx.nd.array([total[0]]), 2, {"weights": mx.nd.array([total[1]]), "batches": mx.nd.ones(1)})
            if interrupt == (epoch, batch):
                os.kill(os.getpid(), signal.SIGINT)
            if run.stop_requested:
                run.save(Archive({"weights": total}, {}), epoch, within=progress)
        run.report.add(epoch=epoch + 1, loss=progress.loss, **progress.together(mx.kv.create("local"))[2])
        if interrupt == (epoch, "between"):
            os.kill(os.getpid(), signal.SIGTERM)
        run.save(Archive({"weights": total}, {}), epoch + 1)
    return total


@pytest.mark.parametrize("moment", [(0, 0), (0, 2), (1, 3), (2, 3), (1, "between"), (2, "between")])
def test_a_run_that_is_stopped_anywhere_continues_as_if_it_never_was(tmp_path, capfd, moment):
    whole, stopped = begin(tmp_path), begin(tmp_path)
    with Run(whole, "a: 1\n") as run:
        wanted = train(run)
    code = 130 if moment[1] != "between" else 143
    with pytest.raises(runs.Stopped, match=r"stopped .*Continue with --resume") as stop, Run(stopped, "a: 1\n") as run:
        train(run, interrupt=moment)
    assert stop.value.exit_code == code and checkpoints(stopped)
    assert "once more stops at once" in capfd.readouterr().err
    with Run(stopped, "a: 1\n", resumed=True) as run:
        np.testing.assert_array_equal(train(run), wanted)
    assert (stopped / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()


def test_a_second_interrupt_stops_at_once_and_so_does_one_before_training(tmp_path):
    with Run(tmp_path, "a: 1\n"), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    with Run(tmp_path, "a: 1\n") as run:
        run.progress([], 0)
        os.kill(os.getpid(), signal.SIGINT)
        assert run.stop_requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_that_fails_before_it_begins_leaves_no_folder_and_one_that_began_leaves_all(tmp_path):
    for number, began in [("1", False), ("1", True), ("2", False), ("2", True)]:
        folder = begin(tmp_path)
        assert folder.name == number
        with pytest.raises(ZeroDivisionError), Run(folder, "a: 1\n") as run:
            if began:
                run.progress([], 0)
            raise ZeroDivisionError
        assert names(folder.parent) == [str(i + 1) for i in range(int(number) - 1 + began)]
    with Run(folder, "a: 1\n") as run:
        progress = run.progress([1], 0)
        progress.add(mx.nd.ones(1), 1)
        run.save(state(), 0, within=progress)
    with pytest.raises(ZeroDivisionError), Run(folder, "a: 1\n", resumed=True):
        raise ZeroDivisionError
    assert names(folder) == ["config.yaml", "epoch-0000-step-00001.npz", "metrics.jsonl"]


def test_signals_are_handled_as_before_once_the_run_is_over(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Run(tmp_path, "a: 1\n"):
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
