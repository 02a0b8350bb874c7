"""Random transforms of images with boxes and with masks: what is done to the image is done to its target."""

import numpy as np
import pytest

from gluon_parallel.datasets import detection, segmentation


def drawn(label, height, width):
    """An image on which each box is filled with a number of its own, so that a transform's boxes can be checked."""
    image = np.zeros((height, width, 3), np.uint8)
    for value, (xmin, ymin, xmax, ymax) in enumerate(label[:, :4].astype(int), 1):
        image[ymin : ymax + 1, xmin : xmax + 1] = 80 * value
    return image


LABEL = np.array([[2, 3, 9, 14, 4, 0], [15, 1, 28, 10, 7, 1]], np.float32)


def bounds(image, value):
    rows, columns = np.nonzero(np.abs(image[..., 0].astype(int) - value) < 20)
    return [columns.min(), rows.min(), columns.max(), rows.max()]


@pytest.mark.parametrize("transform", [detection.flip, detection.crop(0.9, 1)])
def test_boxes_stay_on_what_they_show(transform):
    image, outcomes = drawn(LABEL, 20, 30), set()
    for seed in range(40):
        before = image.copy(), LABEL.copy()
        changed, label = transform(image, LABEL, np.random.RandomState(seed))
        assert np.array_equal(image, before[0]) and np.array_equal(LABEL, before[1])
        outcomes.add((changed.shape, label.tobytes()))
        for row in label:
            value = 80 if row[4] == 4 else 160
            assert bounds(changed, value) == row[:4].tolist() and row[5] == (row[4] == 7)
    assert transform is not detection.flip or len(outcomes) == 2


def test_a_crop_drops_boxes_that_it_mostly_cuts_away_and_never_all_of_them():
    image, transform, kept = drawn(LABEL, 20, 30), detection.crop(least=0.3, keep=0.5), []
    for seed in range(80):
        changed, label = transform(image, LABEL, np.random.RandomState(seed))
        kept.append(len(label))
        height, width = changed.shape[:2]
        assert (label[:, :2] >= 0).all() and (label[:, 2] < width).all() and (label[:, 3] < height).all()
        whole = {4: 8 * 12, 7: 14 * 10}
        for xmin, ymin, xmax, ymax, kind, _ in label:
            assert (xmax - xmin + 1) * (ymax - ymin + 1) >= 0.5 * whole[int(kind)]
    assert set(kept) == {1, 2}
    empty = np.empty((0, 6), np.float32)
    sizes = {transform(image, empty, np.random.RandomState(seed))[0].shape for seed in range(20)}
    assert len(sizes) > 5  # an image without boxes is cropped as well


@pytest.mark.parametrize(
    ("transform", "size"),
    [
        (detection.resize(40), (40, 60)),
        (detection.resize(40, longest=45), (30, 45)),
    ],
)
def test_boxes_are_scaled_with_their_image(transform, size):
    changed, label = transform(drawn(LABEL[:1], 20, 30), LABEL, np.random.RandomState(0))
    assert changed.shape == (*size, 3) and changed.dtype == np.uint8
    across, down = size[1] / 30, size[0] / 20
    both = detection.compose(detection.without_difficult, transform)
    np.testing.assert_array_equal(both(drawn(LABEL, 20, 30), LABEL, np.random.RandomState(0))[1], label[:1])
    # Edges are those of pixels: the first pixel's left and the last one's right.
    assert label[0].tolist() == [2 * across, 3 * down, 10 * across - 1, 15 * down - 1, 4, 0]
    rows, columns = np.nonzero(changed[..., 0] > 40)
    assert np.abs([columns.min(), rows.min(), columns.max(), rows.max()] - label[0, :4]).max() <= 0.5


@pytest.mark.parametrize("size", [(20, 30), (6, 30), (20, 6)])
def test_a_mask_stays_on_its_image(size):
    # Every pixel's colour is its class, so that whatever is done to both must leave that true.
    mask = np.arange(size[0] * size[1], dtype=np.int32).reshape(size) % 60
    image = np.repeat(mask[..., None], 3, axis=2).astype(np.uint8)
    alter = segmentation.compose(segmentation.flip, segmentation.crop(12))
    shapes = set()
    for seed in range(30):
        changed, target = alter(image, mask, np.random.RandomState(seed))
        assert changed.shape == (12, 12, 3) and target.shape == (12, 12) and target.dtype == np.int32
        counts = target >= 0
        assert (changed[..., 0] == target)[counts].all()
        assert counts.sum() == min(12, size[0]) * min(12, size[1])
        assert (changed[~counts] == [124, 116, 104]).all()
        shapes.add(target.tobytes())
    assert len(shapes) > 5


def test_a_mask_is_scaled_by_its_nearest_pixel():
    image, mask = np.zeros((10, 20, 3), np.uint8), np.full((10, 20), -1, np.int32)
    image[:, 10:], mask[:, 10:] = 255, 7
    changed, target = segmentation.resize(20)(image, mask, np.random.RandomState(0))
    assert changed.shape == (20, 40, 3) and target.shape == (20, 40) and set(np.unique(target)) == {-1, 7}
    assert (target[:, 20:] == 7).all() and (target[:, :20] == -1).all()
    heights = {
        segmentation.resize(20, (0.5, 2))(image, mask, np.random.RandomState(seed))[1].shape[0] for seed in range(30)
    }
    assert min(heights) < 14 and max(heights) > 34 and heights <= set(range(10, 41))
