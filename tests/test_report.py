"""Every metric has its column in the table and its curve in the picture, also one that nobody has named before."""

from gluon_parallel.training.report import curves, header, line

ROWS = [
    {"epoch": 1, "loss": 2.0, "train_accuracy": 0.4, "test_accuracy": 0.35, "samples_per_second": 1234.5},
    {"epoch": 2, "loss": 0.5, "train_accuracy": 0.9, "test_accuracy": 0.85, "samples_per_second": 2345.6},
    {"epoch": 3, "loss": 0.03, "train_accuracy": 1.0, "test_accuracy": 0.975, "samples_per_second": 2345.6},
]


def test_the_picture_has_every_curve():
    loss, accuracy = curves(ROWS, "LeNet").axes
    assert [list(line.get_ydata()) for line in loss.lines] == [[2.0, 0.5, 0.03]]
    assert {line.get_label(): list(line.get_ydata()) for line in accuracy.lines} == {
        "train": [0.4, 0.9, 1.0],
        "test": [0.35, 0.85, 0.975],
    }
    assert (loss.get_yscale(), accuracy.get_yscale()) == ("log", "linear")


def test_metrics_of_a_scripts_own_get_columns_and_curves_and_parts_of_a_loss_only_curves():
    rows = [{"epoch": 1, "loss": 2.0, "test_loss": 2.5, "f1_score": 0.25, "perplexity": 12.5, "loss_box": 1.0}]
    assert header(rows[0]).split() == ["epoch", "loss", "test", "loss", "f1", "score", "perplexity"]
    assert line(rows[0]).split() == ["1", "2.0000", "2.5", "0.25", "12.5"]
    loss, accuracy = curves(rows, "own").axes
    assert [line.get_label() for line in loss.lines] == ["loss box", "test loss", "sum of the parts"]
    assert [list(line.get_ydata()) for line in accuracy.lines] == [[0.25]]  # the perplexity is no share


def test_a_loss_beside_its_parts_is_named_their_sum_and_no_curve_lies_under_the_legend():
    rows = [{"epoch": epoch, "loss": 3 / epoch, "loss_rpn_box": 1 / epoch, "map": 0.1 * epoch} for epoch in (1, 2)]
    figure = curves(rows, "detection")
    figure.draw_without_rendering()
    loss, _ = figure.axes
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["sum of the parts", "proposals' boxes"]
    assert not loss.get_legend().get_window_extent().overlaps(loss.get_window_extent())
