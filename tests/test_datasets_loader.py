"""Batches: every sample once per epoch, the same ones for the same seed, epoch and number."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gluon_parallel.datasets import batches
from gluon_parallel.errors import BatchMismatch
from mxnet import nd


def labels_of(loader):
    return [labels.tolist() for _images, labels in loader]


def data(length):
    """Images of which each shows its own number, with that number as label."""
    labels = np.arange(length, dtype=np.int32)
    return np.broadcast_to(labels[:, None, None, None], (length, 1, 2, 2)).astype(np.float32), labels


def test_without_shuffling_the_batches_are_slices_in_order_and_copies_of_the_arrays():
    images, labels = data(7)
    for arrays in ((images, labels), (nd.array(images), nd.array(labels, dtype="int32"))):
        found = list(batches(*arrays, 3))
        assert [len(some) for some, _ in found] == [3, 3, 1]
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


@given(length=st.integers(1, 30), size=st.integers(1, 8), start=st.integers(0, 30), epoch=st.integers(0, 5))
def test_a_pass_that_starts_at_batch_k_is_the_rest_of_the_whole_pass(length, size, start, epoch):
    loader = batches(*data(length), size, shuffle=True, seed=3)
    loader.set_epoch(epoch)
    whole = labels_of(loader)
    start = min(start, len(loader))
    loader.set_epoch(epoch, start=start)
    assert labels_of(loader) == whole[start:]
    assert len(loader) == len(whole)
    loader.set_epoch(epoch + 1)
    following = labels_of(loader)
    loader.set_epoch(epoch, start=start)
    list(loader)
    assert labels_of(loader) == following, "the epoch after a resumed one is a whole one, with its own order"


def test_every_epoch_and_every_seed_has_its_own_order():
    orders = set()
    for seed in range(3):
        loader = batches(*data(30), 30, shuffle=True, seed=seed)
        orders |= {tuple(labels_of(loader)[0]) for _epoch in range(3)}  # nobody called set_epoch
    assert len(orders) == 9
    assert tuple(range(30)) not in orders


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


def test_the_order_of_an_epoch_is_the_one_that_checkpoints_rely_on():
    # Written down on purpose: a run resumed under another version of NumPy must see the same batches.
    loader = batches(*data(10), 10, shuffle=True, seed=42)
    loader.set_epoch(3)
    assert labels_of(loader) == [[4, 6, 3, 2, 7, 5, 0, 1, 8, 9]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"images": data(3)[0]}, "3 samples but 4 labels"),
        ({"images": data(0)[0], "labels": data(0)[1]}, "no samples at all"),
        ({"images": np.float32(1)}, "images is a single float32 value"),
        ({"batch_size": 0}, "batch_size=0; expected a whole number of at least 1"),
        ({"batch_size": 2.0}, "batch_size=2.0; expected a whole number"),
        ({"batch_size": 5, "last_batch": "discard"}, "4 samples do not fill one batch"),
        ({"last_batch": "rollover"}, "last_batch='rollover' is none of 'keep', 'discard'"),
        ({"seed": -1}, "seed=-1; expected a whole number from 0"),
        ({"rank": 2, "num_workers": 2}, "rank=2; expected a number from 0 to 1"),
        ({"num_workers": 0}, "num_workers=0; expected a whole number of at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(arguments, words):
    images, labels = data(4)
    with pytest.raises(BatchMismatch) as refusal:
        batches(**{"images": images, "labels": labels, "batch_size": 2, **arguments})
    assert words in str(refusal.value)


@pytest.mark.parametrize("arguments", [(-1,), (2**32,), (0, -1), (0, 3), (0, 1.0), ("one",), (1.0,)])
def test_an_epoch_or_start_out_of_range_is_refused_and_changes_nothing(arguments):
    loader = batches(*data(4), 2)
    loader.set_epoch(1, start=1)
    with pytest.raises(BatchMismatch):
        loader.set_epoch(*arguments)
    assert (loader.epoch, loader.start) == (1, 1)
