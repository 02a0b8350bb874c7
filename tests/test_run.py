"""No run overwrites another; a folder keeps the newest and the best checkpoints and the log of what they hold."""

import errno
import json
import math
import os
import struct
import sys

import numpy as np
import pytest

import gluon_parallel as gp
from gluon_parallel.errors import CheckpointError, ConfigError, OutputUnavailable
from gluon_parallel.training import run as runs
from gluon_parallel.training.report import curves, header, line
from gluon_parallel.training.run import Run, find, number

ROWS = [
    {"epoch": 1, "loss": 2.0, "train_accuracy": 0.4, "test_accuracy": 0.35, "samples_per_second": 1234.5},
    {"epoch": 2, "loss": 0.5, "train_accuracy": 0.9, "test_accuracy": 0.85, "samples_per_second": 2345.6},
    {"epoch": 3, "loss": 0.03, "train_accuracy": 1.0, "test_accuracy": 0.975, "samples_per_second": 2345.6},
]


def keep(run, epoch, value=0.0, **options):
    arrays = {"weights": np.full(4, value, "float32")}
    return run.keep(lambda path: gp.archive.write(path, arrays, {"epoch": epoch}), epoch, **options)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def logged(folder, rows=ROWS, **options):
    run = Run(folder, **options)
    for row in rows:
        run.log(**row)
    return run


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_run_gets_the_next_number_and_nothing_is_overwritten(tmp_path, monkeypatch):
    parent = tmp_path / "runs" / "lenet"
    first = number(parent)
    (first / "metrics.jsonl").write_text("precious")
    (parent / "notes").mkdir()
    (parent / "9").mkdir()
    run = Run(parent, is_numbered=True)
    assert names(parent) == ["1", "9", "notes"]  # it has not begun
    run.log(epoch=1, loss=0.5)
    assert run.folder.name == "10" and number(parent).name == "11"
    assert first.name == "1" and (first / "metrics.jsonl").read_text() == "precious"
    monkeypatch.setattr(runs, "_numbered", lambda parent: [])  # others make folders at the same moment
    assert number(parent).name == "2"
    (tmp_path / "file").write_text("")
    for make, other in ((number, "--output FOLDER"), (lambda folder: Run(folder).begin(), r"gp.Run\(folder\)")):
        with pytest.raises(OutputUnavailable, match=f"file/sub cannot be written: .*hoose another: {other}"):
            make(tmp_path / "file" / "sub")


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path):
    for num in (1, 2, 3):
        run = Run(tmp_path / str(num), keep=num, config="a: 1\n")
        for epoch in range(1, 5):
            keep(run, epoch, epoch, is_best=epoch == 2)
        kept = [f"epoch-000{epoch}.npz" for epoch in range(5 - num, 5)]
        assert [path.name for path in run.checkpoints()] == kept
        assert gp.archive.read(run.folder / "best.npz").arrays["weights"][0] == 2
        assert names(run.folder) == ["best.npz", "config.yaml", *kept, "metrics.jsonl"]


def test_checkpoints_within_an_epoch_lie_between_those_of_whole_epochs(tmp_path):
    files = ["epoch-0001.npz", "epoch-0001-step-00007.npz", "epoch-0001-step-00012.npz", "epoch-0002.npz"]
    for name in [*reversed(files), "best.npz", "epoch-x.npz", "epoch-0003.npz.tmp"]:
        (tmp_path / name).write_text("")
    assert [path.name for path in Run(tmp_path).checkpoints()] == files
    assert keep(Run(tmp_path), 2, step=3).name == "epoch-0002-step-00003.npz"


def test_find_takes_the_newest_run_that_has_a_checkpoint_or_the_one_that_is_named(tmp_path):
    folders = [number(tmp_path) for _ in range(12)]
    for folder in (folders[0], folders[9]):
        keep(Run(folder, config="a: 1\n"), 1)
    assert find(tmp_path, "newest") == folders[9]
    assert find(tmp_path, str(folders[0])) == folders[0]
    for parent, resume in [(tmp_path / "none", "newest"), (tmp_path, str(folders[4])), (tmp_path, "nowhere")]:
        with pytest.raises(CheckpointError, match=r"there is no run with a checkpoint in .*Leave --resume out"):
            find(parent, resume)


def test_of_several_processes_the_first_one_alone_writes_and_prints(tmp_path, capsys):
    run = Run(tmp_path / "other")
    run.begin(writes=False)
    run.log(epoch=1, loss=0.5)
    assert run.keep(lambda path: None, 1, is_best=True).name == "epoch-0001.npz"
    run.finish()
    assert not (tmp_path / "other").exists() and capsys.readouterr().out == ""


def test_the_table_shows_a_line_per_epoch_and_metrics_hold_it_to_the_last_bit(tmp_path, capsys):
    rows = [{**row, "loss": row["loss"] / 3} for row in ROWS]
    for folder in (tmp_path, None):
        logged(folder, rows)
        shown = capsys.readouterr().out.splitlines()
        assert shown[0].split() == ["epoch", "loss", "train", "acc", "test", "acc", "samples/s"]
        assert shown[3].split() == ["3", "0.0100", "100.00%", "97.50%", "2,346"]
        assert len(shown) == 4 and len({len(line) for line in shown}) == 1
    assert lines(tmp_path / "metrics.jsonl") == rows
    # A column that only some epochs have gets its title with the first of them.
    logged(None, [{"epoch": i, "loss": 1.0, **({"map": 0.5} if i % 2 == 0 else {})} for i in range(1, 6)])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[0] == ["epoch", "loss"] and shown[2] == ["epoch", "loss", "mAP"]
    assert [row[0] for row in shown] == ["epoch", "1", "epoch", "2", "3", "4", "5"]


def test_a_continued_run_keeps_the_epochs_that_a_checkpoint_has_and_drops_later_ones(tmp_path, capsys):
    run = Run(tmp_path, config="a: 1\n")
    for row in ROWS:
        run.log(**row)
        if row["epoch"] < 3:  # and then the power went off
            keep(run, row["epoch"])
    capsys.readouterr()
    other = {**ROWS[2], "loss": 0.04}
    run = logged(tmp_path, [other], config="a: 2\n")
    assert lines(tmp_path / "metrics.jsonl") == [*ROWS[:2], other] == run.rows
    assert len(capsys.readouterr().out.splitlines()) == 4  # the whole table again
    assert (tmp_path / "config.yaml").read_text() == "a: 2\n"


def test_a_last_line_that_a_crash_cut_off_does_not_count_and_without_a_checkpoint_none_does(tmp_path):
    keep(logged(tmp_path), 3)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    run = Run(tmp_path)
    run.begin()
    assert run.rows == ROWS[:2]
    run.checkpoints()[0].unlink()
    run = Run(tmp_path)
    run.begin()
    assert run.rows == [] and path.read_text() == ""


@pytest.mark.parametrize("rows", [ROWS, [], [{"epoch": 1, "loss": math.nan}], [{"epoch": 1, "loss": 0.0}]])
def test_the_curves_are_drawn_into_the_folder_also_of_few_or_strange_rows(tmp_path, rows):
    content = logged(tmp_path, rows).finish().read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert content.startswith(b"\x89PNG") and width > 1000 and height > 400 and "curves.png" in names(tmp_path)


def test_tensorboard_files_are_written_on_request_or_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("CRC32C_SW_MODE", "auto")  # tensorboardX sets it when it is imported
    pytest.importorskip("tensorboardX", reason="an extra of its own; install gluon-parallel[tensorboard]")
    logged(tmp_path / "without")
    assert not (tmp_path / "without" / "tensorboard").exists()
    logged(tmp_path / "with", tensorboard=True).finish()
    (events,) = (tmp_path / "with" / "tensorboard").iterdir()
    content = events.read_bytes()
    assert content.count(b"test_accuracy") == 3 and struct.pack("<f", 0.975) in content
    run = Run(tmp_path / "steps", tensorboard=True)
    run.log_step(50, 1, weight_norm=0.8125)
    run.log(epoch=1, loss=1.0)
    (events,) = (tmp_path / "steps" / "tensorboard" / "steps").iterdir()  # another axis than that of the epochs
    content = events.read_bytes()
    assert content.count(b"steps/weight_norm") == 1 and struct.pack("<f", 0.8125) in content
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"pip install 'tensorboardX.*metrics\.jsonl has the same numbers"):
        Run(tmp_path, tensorboard=True).begin()


@pytest.mark.parametrize(
    ("part", "act"),
    [
        ("metrics.jsonl", lambda run: run.log(epoch=4, loss=1.0)),
        ("tensorboard", lambda run: run.log(epoch=4, loss=1.0)),
        ("tensorboard", lambda run: run.finish()),
        ("curves.png", lambda run: run.finish()),
        ("epoch-0004.npz", lambda run: keep(run, 4)),
        ("best.npz", lambda run: keep(run, 4, is_best=True)),
        ("config.yaml", lambda run: Run(run.folder, config="lr: 0.1").begin()),
        ("metrics.jsonl", lambda run: Run(run.folder).begin()),
        ("metrics.csv", lambda run: logged(run.folder, csv=True)),
    ],
)
def test_a_file_that_cannot_be_written_is_named_and_the_old_ones_stay(tmp_path, monkeypatch, part, act):
    monkeypatch.setenv("CRC32C_SW_MODE", "auto")  # tensorboardX sets it when it is imported
    pytest.importorskip("tensorboardX", reason="an extra of its own; install gluon-parallel[tensorboard]")
    run = logged(tmp_path, tensorboard=True)
    keep(run, 3, is_best=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    sync = os.fsync

    def disk_is_full(number):
        if part in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(number)

    monkeypatch.setattr(os, "fsync", disk_is_full)
    with pytest.raises(OutputUnavailable, match=f"{tmp_path}.* cannot be written: No space left on device"):
        act(run)
    monkeypatch.setattr(os, "fsync", sync)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    if part in ("tensorboard", "metrics.csv"):
        del before["metrics.jsonl"]  # written before
    assert before.items() <= after.items() and not [name for name in after if name.endswith(".part")]


@pytest.mark.parametrize("end", [b'{"loss": 1}', b"[]", b"7", b'{"epoch": "x"}', b"\xff", b"[" * 10**6])
def test_metrics_that_were_damaged_count_up_to_the_damage(tmp_path, end):
    keep(logged(tmp_path), 3)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(end)
    run = Run(tmp_path)
    run.begin()
    assert run.rows == ROWS


# ---- curves and columns, also of metrics that nobody has named before ------------------------------------------------


def test_metrics_of_a_scripts_own_get_columns_and_curves_and_parts_of_a_loss_only_curves():
    rows = [{"epoch": 1, "loss": 2.0, "test_loss": 2.5, "f1_score": 0.25, "perplexity": 12.5, "loss_box": 1.0}]
    assert header(rows[0]).split() == ["epoch", "loss", "test", "loss", "f1", "score", "perplexity"]
    assert line(rows[0]).split() == ["1", "2.0000", "2.5", "0.25", "12.5"]
    loss, accuracy = curves(rows, "own").axes
    assert [line.get_label() for line in loss.lines] == ["loss box", "test loss", "sum of the parts"]
    assert [list(line.get_ydata()) for line in accuracy.lines] == [[0.25]]  # the perplexity is no share
    loss, accuracy = curves(ROWS, "LeNet").axes
    assert [list(line.get_ydata()) for line in loss.lines] == [[2.0, 0.5, 0.03]]
    found = {line.get_label(): list(line.get_ydata()) for line in accuracy.lines}
    assert found == {"train": [0.4, 0.9, 1.0], "test": [0.35, 0.85, 0.975]}
    assert (loss.get_yscale(), accuracy.get_yscale()) == ("log", "linear")


def test_a_loss_beside_its_parts_is_named_their_sum_and_no_curve_lies_under_the_legend():
    rows = [{"epoch": epoch, "loss": 3 / epoch, "loss_rpn_box": 1 / epoch, "map": 0.1 * epoch} for epoch in (1, 2)]
    figure = curves(rows, "detection")
    figure.draw_without_rendering()
    loss, _ = figure.axes
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["sum of the parts", "proposals' boxes"]
    assert not loss.get_legend().get_window_extent().overlaps(loss.get_window_extent())
