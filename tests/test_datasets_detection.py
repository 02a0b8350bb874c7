"""Images with boxes and with masks on their way to a net: batches of every process, and what is done to images."""

import threading

import numpy as np
import pytest

from gluon_parallel.datasets import detection, pictures, segmentation
from gluon_parallel.datasets.samples import SampleBatches
from gluon_parallel.errors import BatchMismatch


def boxes_set(number=7, height=8, width=10):
    """Image i is filled with i; it has i % 3 boxes, of class i."""
    return [
        (
            np.full((height, width, 3), index, np.uint8),
            np.array([[box, 0, box + 2, 5, index, 0] for box in range(index % 3)], np.float32).reshape(-1, 6),
        )
        for index in range(number)
    ]


def masks_set(number=7):
    return [(np.full((4, 6, 3), index, np.uint8), np.full((4, 6), index, np.int32)) for index in range(number)]


def box_batches(dataset, batch_size, transform=None, max_boxes=3, **options):
    def collate(samples):
        images, labels = zip(*samples)
        return pictures.as_input(images), detection.pad(labels, max_boxes)

    return SampleBatches(dataset, collate, batch_size, transform, **options)


def test_a_batch_holds_normalised_images_and_labels_padded_with_minus_one(rng):
    data = [
        (rng.integers(256, size=(8, 10, 3), dtype=np.uint8), rng.random((boxes, 6), np.float32)) for boxes in (2, 0, 3)
    ]
    [(images, labels)] = box_batches(data, batch_size=3, max_boxes=4)
    assert images.shape == (3, 3, 8, 10) and labels.shape == (3, 4, 6) and images.dtype == labels.dtype == np.float32
    for (image, label), batched, padded in zip(data, images, labels):
        expected = (image.astype(np.float64) / 255 - pictures.MEAN) / pictures.STD
        assert np.abs(batched - expected.transpose(2, 0, 1)).max() < 1e-6
        assert np.array_equal(padded[: len(label)], label) and (padded[len(label) :] == -1).all()


def test_padding_is_that_of_gluoncv(rng):
    gluoncv = pytest.importorskip("gluoncv", reason="GluonCV is an optional dependency")
    labels = [rng.random((boxes, 6), np.float32) for boxes in (2, 1, 3)]
    theirs = gluoncv.data.batchify.Pad(pad_val=-1)(labels)
    assert np.array_equal(detection.pad(labels, 3), theirs.asnumpy())


def test_images_and_masks_of_several_sizes_are_padded_below_and_on_the_right():
    data = [
        (np.full((5, 9, 3), 100, np.uint8), np.full((5, 9), 5)),
        (np.full((7, 3, 3), 100, np.uint8), np.ones((7, 3))),
    ]
    [(images, masks)] = segmentation.batches(data, batch_size=2)
    assert images.shape == (2, 3, 7, 9) and masks.shape == (2, 7, 9) and masks.dtype == np.int32
    for image, mask, (_, whole) in zip(images, masks, data):
        height, width = whole.shape
        assert (image[:, :height, :width] != 0).all() and (mask[:height, :width] == whole).all()
        assert (image[:, height:] == 0).all() and (image[:, :, width:] == 0).all()
        assert (mask[height:] == -1).all() and (mask[:, width:] == -1).all()


@pytest.mark.parametrize("batches_of", [box_batches, segmentation.batches])
@pytest.mark.parametrize("num_threads", [0, 3])
def test_the_batches_of_all_processes_together_are_those_of_one(batches_of, num_threads):
    data = boxes_set() if batches_of is box_batches else masks_set()
    shared = {"shuffle": True, "seed": 3, "num_threads": num_threads}
    alone = batches_of(data, batch_size=6, **shared)
    workers = [batches_of(data, batch_size=2, rank=rank, num_workers=3, **shared) for rank in range(3)]
    for epoch in range(2):
        passes = [list(loader) for loader in (alone, *workers)]
        assert [len(batches) for batches in passes] == [2, 2, 2, 2] == [len(loader) for loader in (alone, *workers)]
        for number, (images, targets) in enumerate(passes[0]):
            parts = [batches[number] for batches in passes[1:]]
            assert np.array_equal(np.concatenate([part[0] for part in parts]), images)
            together = [row.tolist() for part in parts for row in part[1]]
            assert together == targets.tolist()
        assert alone.epoch == epoch + 1
    # The last image is another process's; this one has an empty share, of the shape of the others.
    assert [array.shape for array in passes[1][1]] == [(0, *array.shape[1:]) for array in passes[0][1]]


def noisy(image, label, random):
    return np.clip(image + random.randint(100), 0, 255).astype(np.uint8), label


@pytest.mark.parametrize("num_threads", [0, 2])
def test_what_is_drawn_at_random_follows_from_seed_epoch_and_image_alone(num_threads):
    data = boxes_set()

    def images(epoch, start=0, **arguments):
        loader = box_batches(data, transform=noisy, shuffle=True, num_threads=num_threads, **arguments)
        loader.set_epoch(epoch, start)
        return {
            int(label[0, 4]): image.tobytes() for batch in loader for image, label in zip(*batch) if label[0, 4] > 0
        }

    whole = images(0, batch_size=2, seed=5)
    assert images(0, batch_size=3, seed=5) == whole
    parts = [images(0, batch_size=1, seed=5, rank=rank, num_workers=2) for rank in range(2)]
    assert {**parts[0], **parts[1]} == whole
    resumed = images(0, start=2, batch_size=2, seed=5)
    assert resumed and resumed.items() <= whole.items()
    assert images(1, batch_size=2, seed=5) != whole != images(0, batch_size=2, seed=6)


def test_threads_read_ahead_by_one_batch_and_are_gone_when_a_pass_is_left(monkeypatch):
    read = []

    class Data(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    loader = box_batches(Data(boxes_set(20)), batch_size=2, num_threads=2)
    passing = iter(loader)
    next(passing)
    passing.close()
    assert set(read) <= set(range(4))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gp-samples")]
    assert sum(len(images) for images, _ in loader) == 20


def test_an_error_in_a_thread_reaches_the_loop():
    def failing(image, label, random):
        raise RuntimeError("no such file")

    with pytest.raises(RuntimeError, match="no such file"):
        list(box_batches(boxes_set(), 2, transform=failing, num_threads=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2, "rank": 2, "num_workers": 2}, "rank=2"),
        ({"batch_size": 2, "last_batch": "roll"}, "last_batch='roll'"),
        ({"batch_size": 9, "last_batch": "discard"}, "do not fill one batch"),
        ({"batch_size": 2, "num_threads": -1}, "num_threads=-1"),
    ],
)
@pytest.mark.parametrize("batches_of", [box_batches, segmentation.batches])
def test_arguments_that_make_no_sense_are_refused(batches_of, arguments, message):
    with pytest.raises(BatchMismatch, match=message):
        next(iter(batches_of(boxes_set() if batches_of is box_batches else masks_set(), **arguments)))


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


def test_an_image_for_the_eye_is_the_one_that_went_in(rng):
    image = rng.integers(256, size=(5, 7, 3), dtype=np.uint8)
    assert np.array_equal(pictures.as_picture(pictures.as_input([image])[0]), image)
