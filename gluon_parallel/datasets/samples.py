"""Batches of samples that are read one by one, by threads; reproducible by seed and epoch."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..errors import BatchMismatch
from .loader import Loader

# Of an image with its boxes or its mask, by random numbers.
Transform = Callable[[np.ndarray, np.ndarray, np.random.RandomState], "tuple[np.ndarray, np.ndarray]"]
_MOST_THREADS = 1025  # more is a mistake


def compose(*transforms: Transform) -> Transform:
    """One transform that does several, one after the other."""

    def apply(image, label, random):
        for transform in transforms:
            image, label = transform(image, label, random)
        return image, label

    return apply


def padded(arrays: Sequence[np.ndarray], shape: Sequence[int], fill: Any, dtype: Any) -> np.ndarray:
    """Put arrays into one of shape ``(N, *shape)``, each at the beginning of every axis, with `fill` behind it."""
    batch = np.full((len(arrays), *shape), fill, dtype)
    for place, array in zip(batch, arrays):
        place[tuple(map(slice, array.shape))] = array
    return batch


class SampleBatches(Loader):
    """A pass over a data set each time it is iterated; options not named here are those of ``datasets.batches``.

    Args:
        dataset: ``dataset[index]`` is one sample, a tuple.
        collate: function of a list of samples, which makes a batch of them. An empty list never reaches it.
        batch_size: samples per batch and worker.
        transform: function ``(*sample, random) -> sample``, or None. Its `random` is a ``numpy.random.RandomState``
            that follows from the seed, the epoch and the sample's number: whichever process and thread reads the
            sample, and however training was resumed, it comes out alike.
        num_threads: how many threads read ahead, one batch at a time; 0 reads when a batch is asked for.
    """

    def __init__(self, dataset, collate, batch_size, transform=None, num_threads=0, **options):
        if num_threads not in range(_MOST_THREADS):
            raise BatchMismatch(f"batches: num_threads={num_threads!r}; expected a number below {_MOST_THREADS}")
        super().__init__(len(dataset), batch_size, **options)
        self._dataset, self._collate, self._transform, self._threads = dataset, collate, transform, num_threads

    def _read(self, epoch, numbers):
        def read(index):
            sample = self._dataset[int(index)]
            if self._transform is None:
                return sample
            return self._transform(*sample, np.random.RandomState([self._seed, epoch, int(index)]))

        def batch(mine, samples):
            return tuple(array[: len(mine)] for array in self._collate(list(samples)))

        # An empty share is made of a sample that is cut off again.
        wanted = ((mine, mine if len(mine) else [0]) for mine, _ in numbers)
        if not self._threads:
            yield from (batch(mine, map(read, indices)) for mine, indices in wanted)
            return
        with ThreadPoolExecutor(self._threads, "gp-samples") as pool:
            waiting = None
            for mine, indices in wanted:
                ahead = mine, pool.map(read, indices)
                if waiting is not None:
                    yield batch(*waiting)
                waiting = ahead
            if waiting is not None:
                yield batch(*waiting)
