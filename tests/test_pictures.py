"""Pictures of boxes and masks show what they were given, and replace a file as a whole."""

import numpy as np
import pytest
from PIL import Image

import gluon_parallel as gp

NAMES = ("cat", "dog")


def read(path):
    with Image.open(path) as file:
        return np.array(file.convert("RGB")).astype(int)


def near(picture, colour, tolerance=40):
    """How many pixels of the picture have about that colour."""
    return int((np.abs(picture - 255 * np.array(colour)).max(axis=2) < tolerance).sum())


def test_padding_and_unsure_predictions_are_left_out():
    image = np.zeros((8, 8, 3), np.uint8)
    truth = np.array([[0, 0, 3, 3, 1, 0], [-1, -1, -1, -1, -1, -1]], np.float32)
    found = np.array([[0, 0, 3, 3, 1, 0.5], [1, 1, 3, 3, 0, 0.49], [-1, -1, -1, -1, -1, -1]], np.float32)
    plain, right, predicted = gp.pictures.boxes(image, truth, found)
    assert (len(plain.boxes), len(right.boxes), len(predicted.boxes)) == (0, 1, 1)
    assert predicted.scores.tolist() == [0.5]


def test_boxes_have_the_colours_of_their_classes_in_truth_and_prediction(tmp_path):
    image = np.full((64, 64, 3), 128, np.uint8)
    row = gp.pictures.boxes(image, np.array([[8, 20, 40, 50, 0]]), np.array([[8, 20, 40, 50, 1, 0.9]]))
    picture = read(gp.pictures.sheet([row], tmp_path / "a.png", NAMES))
    third = picture.shape[1] // 3
    cat, dog = gp.pictures.colour(0), gp.pictures.colour(1)
    counts = [
        [near(picture[:, begin : begin + third], shade) for shade in (cat, dog)] for begin in (0, third, 2 * third)
    ]
    assert counts[0] == [0, 0]
    assert counts[1][0] > 100 and counts[1][1] == 0
    assert counts[2][1] > 100 and counts[2][0] == 0


def test_an_empty_truth_or_prediction_says_so_and_a_sheet_without_rows_is_refused(tmp_path):
    image, mask = np.zeros((8, 8, 3), np.uint8), np.eye(8, dtype=int)
    rows = [
        gp.pictures.boxes(image, np.array([[0, 0, 3, 3, 1]]), np.array([[0, 0, 3, 3, 1, 0.4]])),
        gp.pictures.masks(image, mask, 0 * mask),
        gp.pictures.boxes(image, np.zeros((0, 6)), np.zeros((0, 6))),
    ]
    notes = [[panel.note for panel in row] for row in rows]
    assert notes == [["", "", "nothing found"]] * 2 + [["", "no objects", "nothing found"]]
    [text] = gp.pictures.draw(rows[:1]).axes[2].texts
    assert text.get_text() == "nothing found"
    assert not any(panel.note for panel in gp.pictures.masks(image, mask, mask))
    assert gp.pictures.sheet([rows[2]] * 2, tmp_path / "new" / "a.png", NAMES, "title").exists()
    with pytest.raises(ValueError, match="no rows for .*a.png"):
        gp.pictures.sheet([], tmp_path / "a.png")


def test_a_new_image_whose_truth_is_not_known_has_no_panel_for_it(tmp_path):
    image, nothing = np.zeros((8, 8, 3), np.uint8), np.zeros((0, 6))
    for row in (gp.pictures.boxes(image, None, nothing), gp.pictures.masks(image, None, np.eye(8, dtype=int))):
        assert [axes.get_title(loc="left") for axes in gp.pictures.draw([row]).axes] == ["image", "prediction"]
        assert gp.pictures.sheet([row], tmp_path / "a.png", NAMES).exists()


def test_masks_have_the_colours_of_their_classes_and_grey_where_nothing_counts():
    image = np.full((4, 4, 3), 200, np.uint8)
    mask = np.array([[0, 0, 1, 1], [0, 0, 2, 2], [-1, -1, 0, 0], [0, 0, 0, 0]])
    mixed = gp.pictures.blend(image, mask).astype(int)
    background = mixed[0, 0]
    assert len({tuple(mixed[index]) for index in [(0, 0), (0, 2), (1, 2), (2, 0)]}) == 4
    assert len(set(background)) == 1 and len(set(mixed[2, 0])) == 1 and mixed[2, 0, 0] > background[0]
    assert np.argmax(mixed[0, 2]) == np.argmax(gp.pictures.colour(0))


def test_a_mask_and_many_classes_are_drawn_with_a_legend(tmp_path):
    image = np.zeros((32, 32, 3), np.uint8)
    rows = [gp.pictures.masks(image, np.full((32, 32), label), np.full((32, 32), -1)) for label in range(25)]
    narrow = read(gp.pictures.sheet(rows[:1], tmp_path / "a.png"))
    wide = read(gp.pictures.sheet(rows, tmp_path / "b.png", across=3))
    assert wide.shape[1] > 2.5 * narrow.shape[1]
    assert len({gp.pictures.colour(label) for label in range(100)}) == 100
