"""Warnings about a DataLoader: threads that share random numbers, and a data set that is a process's part already."""

import contextlib
import pickle
import random
from typing import Any

import numpy as np

from ...errors import LOG
from ...mxnet.loaders import dataset_of, has_worker_threads, inner_dataset, make_batch, mapped_data


def warn(loader: Any, rank: int, num_workers: int) -> None:
    """Warn of what goes wrong in silence when process `rank` of `num_workers` reads its part of this loader."""
    if has_worker_threads(loader) and rank == 0 and _draws(loader):
        LOG.warning(
            "gluon_parallel: threads of a DataLoader with thread_pool=True draw from NumPy's or Python's one "
            "generator, so another run draws others. Leave thread_pool=True out: processes repeat their draws"
        )
    if _is_part(dataset_of(loader), rank, num_workers):
        LOG.warning(
            f"gluon_parallel: the data set of process {rank} of {num_workers} looks like its part of a larger one, by "
            "Dataset.shard or a sampler. gp.prepare divides it once more, so each process reads a part of its part. "
            "Leave that out, and hand over DataLoader(data, ...) of the whole data"
        )


def _is_part(dataset: Any, rank: int, num_workers: int) -> bool:
    """Whether it has the `rank`-th of `num_workers` parts of a larger data set: a block of it, or every n-th sample.

    Not asked of process 0, since the first samples are also what ``Dataset.take`` has, on all processes.
    """
    while rank and dataset is not None:
        inner, chosen = inner_dataset(dataset)
        if inner is not None and chosen and isinstance(chosen[0], (int, np.integer)):
            num, first = len(inner), min(chosen)
            is_block = abs(first - num * rank / num_workers) <= num_workers and max(chosen) - first < len(chosen)
            is_strided = {number % num_workers for number in chosen} == {rank}
            if abs(len(chosen) - num / num_workers) < 1 and (is_block or is_strided):
                return True
        dataset = inner if inner is not None else mapped_data(dataset)
    return False


def _draws(loader: Any) -> bool:
    """Whether reading its first sample draws from the random numbers of NumPy or Python."""

    def states() -> bytes:
        return pickle.dumps((random.getstate(), np.random.get_state()))  # noqa: NPY002 (as transforms do)

    before = states()
    with contextlib.suppress(Exception):  # which comes again when it is read
        make_batch(loader)([dataset_of(loader)[0]])
    drawn = states() != before
    of_python, of_numpy = pickle.loads(before)
    random.setstate(of_python)
    np.random.set_state(of_numpy)  # noqa: NPY002
    return drawn
