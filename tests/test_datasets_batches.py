"""Batches of arrays, texts, and images with boxes or masks: every sample once, alike for every number of processes."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gluon_parallel.datasets import batches, detection, pictures, segmentation, text
from gluon_parallel.datasets.samples import SampleBatches
from gluon_parallel.errors import BatchMismatch
from mxnet import nd


def labels_of(loader):
    return [labels.tolist() for _images, labels in loader]


def data(length):
    """Images of which each shows its own number, with that number as label."""
    labels = np.arange(length, dtype=np.int32)
    return np.broadcast_to(labels[:, None, None, None], (length, 1, 2, 2)).astype(np.float32), labels


def boxes_set(number=7, height=8, width=10):
    """Image i is filled with i; it has i % 3 boxes, of class i."""
    return [
        (
            np.full((height, width, 3), index, np.uint8),
            np.array([[box, 0, box + 2, 5, index, 0] for box in range(index % 3)], np.float32).reshape(-1, 6),
        )
        for index in range(number)
    ]


def box_batches(dataset, batch_size, transform=None, max_boxes=3, **options):
    def collate(samples):
        images, labels = zip(*samples)
        return pictures.as_input(images), detection.pad(labels, max_boxes)

    return SampleBatches(dataset, collate, batch_size, transform, **options)


def encoded(number=203):
    """Texts of which each repeats a number of its own, with labels."""
    lengths = np.random.RandomState(number).randint(1, 40, size=number)
    return [np.full(length, index + 2) for index, length in enumerate(lengths)], np.arange(number) % 3


def test_without_shuffling_the_batches_are_slices_in_order_and_copies_of_the_arrays():
    images, labels = data(7)
    for arrays in ((images, labels), (nd.array(images), nd.array(labels, dtype="int32"))):
        found = list(batches(*arrays, 3))
        np.testing.assert_array_equal(np.concatenate([some for some, _ in found]), images)
        assert labels_of(found) == [[0, 1, 2], [3, 4, 5], [6]]
        for some_images, some_labels in found:
            assert some_images.dtype == np.float32 and some_labels.dtype == np.int32
            some_images += 1
            some_labels += 1
    np.testing.assert_array_equal(images, data(7)[0])
    np.testing.assert_array_equal(labels, data(7)[1])


@given(
    length=st.integers(1, 40),
    size=st.integers(1, 9),
    workers=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 2**32 - 1),
)
def test_all_workers_together_see_every_sample_once_in_equally_many_batches(length, size, workers, seed, epoch):
    loaders = [batches(*data(length), size, True, seed, rank=rank, num_workers=workers) for rank in range(workers)]
    for loader in loaders:
        loader.set_epoch(epoch)
    assert all((images[:, 0, 0, 0] == labels).all() for images, labels in loaders[0])
    loaders[0].set_epoch(epoch)
    per_worker = [labels_of(loader) for loader in loaders]
    assert {len(found) for found in per_worker} == {len(loaders[0])} == {-(-length // (size * workers))}
    assert sorted(sum((labels for found in per_worker for labels in found), [])) == list(range(length))
    # Batch k of all workers together is batch k of one worker alone with a batch as large as theirs together.
    alone = batches(*data(length), size * workers, True, seed)
    alone.set_epoch(epoch)
    assert [sum(shares, []) for shares in zip(*per_worker)] == labels_of(alone)
    assert all(len(share) <= size for found in per_worker for share in found)


MASKS = [(np.full((4, 6, 3), index, np.uint8), np.full((4, 6), index, np.int32)) for index in range(7)]
KINDS = {
    "boxes": lambda size, **options: box_batches(boxes_set(), size, **options),
    "boxes read by threads": lambda size, **options: box_batches(boxes_set(), size, num_threads=3, **options),
    "masks": lambda size, **options: segmentation.batches(MASKS, size, **options),
    "texts": lambda size, **options: text.batches(*encoded(), size, **options),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_batches_of_all_processes_together_are_those_of_one(kind):
    shared = {"shuffle": True, "seed": 3}
    alone = KINDS[kind](6, **shared)
    workers = [KINDS[kind](2, rank=rank, num_workers=3, **shared) for rank in range(3)]
    for epoch in range(2):
        passes = [list(loader) for loader in (alone, *workers)]
        assert {len(one) for one in passes} == {len(loader) for loader in (alone, *workers)}
        for (inputs, targets), *parts in zip(*passes):
            arrays = [*(inputs if isinstance(inputs, tuple) else [inputs]), targets]
            shares = [[*(one if isinstance(one, tuple) else [one]), other] for one, other in parts]
            for array, *some in zip(arrays, *shares):
                np.testing.assert_array_equal(np.concatenate(some), array)  # an empty share has the shape of others
        assert alone.epoch == epoch + 1


@given(length=st.integers(1, 30), size=st.integers(1, 8), start=st.integers(0, 30), epoch=st.integers(0, 5))
def test_a_pass_that_starts_at_batch_k_is_the_rest_of_the_whole_pass(length, size, start, epoch):
    loader = batches(*data(length), size, shuffle=True, seed=3)
    loader.set_epoch(epoch)
    whole = labels_of(loader)
    start = min(start, len(loader))
    loader.set_epoch(epoch, start=start)
    assert labels_of(loader) == whole[start:] and len(loader) == len(whole)
    loader.set_epoch(epoch + 1)
    following = labels_of(loader)
    loader.set_epoch(epoch, start=start)
    list(loader)
    assert labels_of(loader) == following, "the epoch after a resumed one is a whole one, with its own order"


def test_every_epoch_and_every_seed_has_its_own_order_and_it_is_the_one_that_checkpoints_rely_on():
    orders = set()
    for seed in range(3):
        loader = batches(*data(30), 30, shuffle=True, seed=seed)
        orders |= {tuple(labels_of(loader)[0]) for _epoch in range(3)}  # nobody called set_epoch
    assert len(orders) == 9 and tuple(range(30)) not in orders
    # Written down on purpose: a run resumed under another version of NumPy must see the same batches.
    loader = batches(*data(10), 10, shuffle=True, seed=42)
    loader.set_epoch(3)
    assert labels_of(loader) == [[4, 6, 3, 2, 7, 5, 0, 1, 8, 9]]


def test_passes_that_are_broken_off_or_made_at_the_same_time_do_not_disturb_the_epoch():
    loader = batches(*data(9), 2, shuffle=True)
    first = next(iter(loader))[1]
    np.testing.assert_array_equal(next(iter(loader))[1], first)
    assert loader.epoch == 0
    wanted = labels_of(loader)
    loader.set_epoch(0)
    assert [[a.tolist(), b.tolist()] for (_, a), (_, b) in zip(loader, loader)] == [[a, a] for a in wanted]


def test_discard_leaves_the_smaller_batch_out():
    assert labels_of(batches(*data(7), 3, last_batch="discard")) == [[0, 1, 2], [3, 4, 5]]
    assert labels_of(batches(*data(7), 3, last_batch="discard", rank=1, num_workers=2)) == [[3, 4, 5]]
    assert labels_of(batches(*data(6), 3, last_batch="discard")) == [[0, 1, 2], [3, 4, 5]]


ARGUMENTS = [
    (batches, {"images": data(3)[0]}, "3 samples but 4 labels"),
    (batches, {"images": data(0)[0], "labels": data(0)[1]}, "no samples at all"),
    (batches, {"images": np.float32(1)}, "images is a single float32 value"),
    (batches, {"batch_size": 2.0}, "batch_size=2.0; expected a whole number"),
    (batches, {"seed": -1}, "seed=-1; expected a whole number from 0"),
    (batches, {"num_workers": 0}, "num_workers=0; expected a whole number of at least 1"),
    (text.batches, {"texts": [np.array([1])], "labels": [0, 1]}, "1 samples but 2 labels"),
    *[
        (function, arguments, message)
        for function in (batches, segmentation.batches)
        for arguments, message in (
            ({"batch_size": 0}, "batch_size=0; expected a whole number of at least 1"),
            ({"rank": 2, "num_workers": 2}, "rank=2; expected a number from 0 to 1"),
            ({"batch_size": 9, "last_batch": "discard"}, "4 samples do not fill one batch"),
            ({"last_batch": "roll"}, "last_batch='roll' is none of 'keep', 'discard'"),
        )
    ],
    (segmentation.batches, {"num_threads": -1}, "num_threads=-1"),
]


@pytest.mark.parametrize(("function", "arguments", "words"), ARGUMENTS)
def test_arguments_that_make_no_sense_are_refused_by_name(function, arguments, words):
    given = dict(zip(("images", "labels"), data(4))) if function is batches else {"dataset": MASKS[:4]}
    given = {} if function is text.batches else given
    with pytest.raises(BatchMismatch) as refusal:
        function(**{**given, "batch_size": 2, **arguments})
    assert words in str(refusal.value)


@pytest.mark.parametrize("arguments", [(-1,), (2**32,), (0, -1), (0, 3), (0, 1.0), ("one",)])
def test_an_epoch_or_start_out_of_range_is_refused_and_changes_nothing(arguments):
    loader = batches(*data(4), 2)
    loader.set_epoch(1, start=1)
    with pytest.raises(BatchMismatch):
        loader.set_epoch(*arguments)
    assert (loader.epoch, loader.start) == (1, 1)


def test_a_batch_holds_normalised_images_and_labels_padded_as_gluoncv_does(rng):
    gluoncv = pytest.importorskip("gluoncv", reason="GluonCV is an optional dependency")
    samples = [
        (rng.integers(256, size=(8, 10, 3), dtype=np.uint8), rng.random((boxes, 6), np.float32)) for boxes in (2, 1, 3)
    ]
    [(images, labels)] = box_batches(samples, batch_size=3)
    assert images.shape == (3, 3, 8, 10) and images.dtype == labels.dtype == np.float32
    for (image, _), batched in zip(samples, images):
        expected = (image.astype(np.float64) / 255 - pictures.MEAN) / pictures.STD
        assert np.abs(batched - expected.transpose(2, 0, 1)).max() < 1e-6
        assert np.array_equal(pictures.as_picture(batched), image)
    theirs = gluoncv.data.batchify.Pad(pad_val=-1)([label for _, label in samples])
    assert np.array_equal(labels, theirs.asnumpy())


def test_images_and_masks_of_several_sizes_are_padded_below_and_on_the_right():
    samples = [
        (np.full((5, 9, 3), 100, np.uint8), np.full((5, 9), 5)),
        (np.full((7, 3, 3), 100, np.uint8), np.ones((7, 3))),
    ]
    [(images, masks)] = segmentation.batches(samples, batch_size=2)
    assert images.shape == (2, 3, 7, 9) and masks.shape == (2, 7, 9) and masks.dtype == np.int32
    for image, mask, (_, whole) in zip(images, masks, samples):
        height, width = whole.shape
        assert (image[:, :height, :width] != 0).all() and (mask[:height, :width] == whole).all()
        assert (image[:, height:] == 0).all() and (image[:, :, width:] == 0).all()
        assert (mask[height:] == -1).all() and (mask[:, width:] == -1).all()


def noisy(image, label, random):
    return np.clip(image + random.randint(100), 0, 255).astype(np.uint8), label


@pytest.mark.parametrize("num_threads", [0, 2])
def test_what_is_drawn_at_random_follows_from_seed_epoch_and_image_alone(num_threads):
    def images(epoch, start=0, **arguments):
        loader = box_batches(boxes_set(), transform=noisy, shuffle=True, num_threads=num_threads, **arguments)
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


def test_threads_read_ahead_by_one_batch_hand_errors_on_and_are_gone_when_a_pass_is_left():
    read = []

    class Data(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    def failing(image, label, random):
        raise RuntimeError("no such file")

    loader = box_batches(Data(boxes_set(20)), batch_size=2, num_threads=2)
    passing = iter(loader)
    next(passing)
    passing.close()
    assert set(read) <= set(range(4))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gp-samples")]
    assert sum(len(images) for images, _ in loader) == 20
    with pytest.raises(RuntimeError, match="no such file"):
        list(box_batches(boxes_set(), 2, transform=failing, num_threads=2))


def test_every_text_comes_once_per_epoch_with_its_label_and_its_length():
    texts, labels = encoded()
    loader = text.batches(texts, labels, 16, shuffle=True, seed=3)
    orders = []
    for _ in range(2):
        seen = []
        for (tokens, lengths), batch_labels in loader:
            assert tokens.shape[1] % 4 == 0
            for row, length, label in zip(tokens, lengths, batch_labels):
                index = row[0] - 2
                np.testing.assert_array_equal(row[: int(length)], texts[index])
                assert not row[int(length) :].any() and label == labels[index]
                seen.append(index)
        assert sorted(seen) == list(range(203))
        orders.append(seen)
    assert orders[0] != orders[1] and len(loader) == 13


def test_texts_of_similar_length_go_together():
    def cost(pool):
        loader = text.batches(*encoded(), 16, shuffle=True, pool=pool, multiple=1)
        return sum(tokens.size for (tokens, _), _ in loader)

    assert cost(20) < 0.75 * cost(1)
