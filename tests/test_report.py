"""The same numbers stand in the table, in metrics.jsonl, in TensorBoard's files and in the picture."""

import json
import struct
import sys

import pytest

from gluon_parallel.errors import ConfigError
from gluon_parallel.training.report import Report, curves

ROWS = [
    {"epoch": 1, "loss": 2.0, "train_accuracy": 0.4, "test_accuracy": 0.35, "images_per_second": 1234.5},
    {"epoch": 2, "loss": 0.5, "train_accuracy": 0.9, "test_accuracy": 0.85, "images_per_second": 2345.6},
    {"epoch": 3, "loss": 0.03, "train_accuracy": 1.0, "test_accuracy": 0.975, "images_per_second": 2345.6},
]


def told(folder, rows=ROWS, **options):
    report = Report(folder, **options)
    for row in rows:
        report.add(**row)
    report.close()
    return report


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_table_shows_a_line_per_epoch_under_one_header(tmp_path, capsys):
    told(tmp_path)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["epoch", "loss", "train", "acc", "test", "acc", "images/s"]
    assert shown[3].split() == ["3", "0.0300", "100.00%", "97.50%", "2,346"]
    assert len(shown) == 4 and len({len(line) for line in shown}) == 1


def test_a_column_that_only_some_epochs_have_gets_its_title_with_the_first_of_them(tmp_path, capsys):
    told(tmp_path, [{"epoch": i, "loss": 1.0, **({"map": 0.5} if i % 2 == 0 else {})} for i in range(1, 6)])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[0] == ["epoch", "loss"] and shown[2] == ["epoch", "loss", "mAP"]
    assert [row[0] for row in shown] == ["epoch", "1", "epoch", "2", "3", "4", "5"]


def test_metrics_hold_every_epoch_to_the_last_bit(tmp_path):
    rows = [{**row, "loss": row["loss"] / 3} for row in ROWS]
    told(tmp_path, rows)
    assert lines(tmp_path / "metrics.jsonl") == rows


def test_a_resumed_run_keeps_the_epochs_that_a_checkpoint_has_and_drops_later_ones(tmp_path, capsys):
    told(tmp_path)
    capsys.readouterr()
    other = {**ROWS[2], "loss": 0.04}
    report = told(tmp_path, [other], until_epoch=2)
    assert lines(tmp_path / "metrics.jsonl") == [*ROWS[:2], other] == report.rows
    assert len(capsys.readouterr().out.splitlines()) == 4  # the whole table again


def test_a_last_line_that_a_crash_cut_off_does_not_count(tmp_path):
    told(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    assert Report(tmp_path, until_epoch=3).rows == ROWS[:2]


def test_a_new_report_begins_empty_whatever_lies_there(tmp_path):
    told(tmp_path)
    assert Report(tmp_path).rows == []


def test_the_picture_is_a_png_with_every_curve(tmp_path):
    path = told(tmp_path).draw("LeNet")
    content = path.read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert content.startswith(b"\x89PNG") and width > 1000 and height > 400
    loss, accuracy = curves(ROWS, "LeNet").axes
    assert [list(line.get_ydata()) for line in loss.lines] == [[2.0, 0.5, 0.03]]
    assert {line.get_label(): list(line.get_ydata()) for line in accuracy.lines} == {
        "train": [0.4, 0.9, 1.0],
        "test": [0.35, 0.85, 0.975],
    }
    assert (loss.get_yscale(), accuracy.get_yscale()) == ("log", "linear")


def test_a_loss_beside_its_parts_is_named_their_sum_and_no_curve_lies_under_the_legend():
    rows = [{"epoch": epoch, "loss": 3 / epoch, "loss_rpn_box": 1 / epoch, "map": 0.1 * epoch} for epoch in (1, 2)]
    figure = curves(rows, "detection")
    figure.draw_without_rendering()
    loss, _ = figure.axes
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["sum of the parts", "proposals' boxes"]
    assert not loss.get_legend().get_window_extent().overlaps(loss.get_window_extent())


@pytest.mark.parametrize("rows", [[], ROWS[:1], [{"epoch": 1, "loss": float("nan")}], [{"epoch": 1, "loss": 0.0}]])
def test_few_or_strange_rows_can_be_drawn_too(tmp_path, rows):
    assert told(tmp_path, rows).draw("LeNet").stat().st_size > 1000


def test_tensorboard_files_are_written_on_request_only(tmp_path, monkeypatch):
    monkeypatch.setenv("CRC32C_SW_MODE", "auto")  # tensorboardX sets it when it is imported
    pytest.importorskip("tensorboardX", reason="an extra of its own; install gluon-parallel[tensorboard]")
    (tmp_path / "without").mkdir()
    told(tmp_path / "without")
    assert not (tmp_path / "without" / "tensorboard").exists()
    (tmp_path / "with").mkdir()
    told(tmp_path / "with", tensorboard=True)
    (events,) = (tmp_path / "with" / "tensorboard").iterdir()
    content = events.read_bytes()
    assert content.count(b"test_accuracy") == 3 and struct.pack("<f", 0.975) in content


def test_without_tensorboardx_the_request_is_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"pip install 'tensorboardX.*metrics\.jsonl has the same numbers"):
        Report(tmp_path, tensorboard=True)
