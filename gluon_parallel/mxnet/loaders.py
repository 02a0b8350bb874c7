"""What a ``DataLoader``, its samplers and its data sets keep to themselves."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Callable

_OfLoader = Callable[[Any], Any]

dataset_of: _OfLoader = attrgetter("_dataset")
batch_sampler_of: _OfLoader = attrgetter("_batch_sampler")
make_batch: _OfLoader = attrgetter("_batchify_fn")  # samples -> batch
first_number: _OfLoader = attrgetter("_start")  # of a SequentialSampler
size_of_batch: _OfLoader = attrgetter("_batch_size")  # of a BatchSampler


def set_batch_sampler(loader: Any, sampler: Any) -> None:
    """Have the loader read the samples that this sampler says; worker processes know the data set alone."""
    loader._batch_sampler = sampler


def has_worker_threads(loader: Any) -> bool:
    """Whether threads of this process, not other processes, read the samples."""
    return loader._worker_pool is not None and loader._thread_pool


def sampler_in(sampler: Any, default: Any = None) -> Any:
    """What a BatchSampler takes its samples' numbers from; `default` for samplers of other kinds."""
    return getattr(sampler, "_sampler", default)


def last_batch_of(sampler: Any) -> Any:
    """What a BatchSampler does with the last, smaller batch; None for samplers of other kinds."""
    return getattr(sampler, "_last_batch", None)


def inner_dataset(dataset: Any) -> tuple[Any, Any]:
    """(the data set of which it is a part, or whose samples it changes; their numbers there); each None if unknown."""
    return getattr(dataset, "_dataset", None), getattr(dataset, "_indices", None)


def mapped_data(dataset: Any) -> Any:
    """What a data set that changes each sample takes them from; None for others."""
    return getattr(dataset, "_data", None)
