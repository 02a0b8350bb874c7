"""Top-k: only the largest values of each gradient travel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..compat import mx
from ..engine import push, view
from .bucket import BucketStore, GradientBucket, StatefulHook, check_whole_numbers
from .together import sum_together


class TopK(StatefulHook):
    """A communication hook that sends only the largest values of each gradient, and their places in it.

    Each process chooses its own, and sends them to all others. What it has not sent is added to its next gradient
    (error feedback), so every value is sent once it has grown. That takes about 1 / `ratio` updates, in which batch
    norm and biases would keep old values and training could fail; so gradients of few values travel whole.

    A value and its place are 8 bytes (12 in float64), and a process receives those of all others, so what it receives
    grows with the number of processes.

    Args:
        ratio: which part of a gradient's values is sent, at least one of each gradient.
        start_step: so many first updates of the optimizer are not compressed: early gradients change quickly. About a
            tenth of all updates serves well.
        min_size: gradients of fewer values are not compressed.
        error_feedback: whether what was not sent is added to the next gradient. Without it, small values are lost.

    Raises:
        ValueError: an argument makes no sense.

    Example:
        >>> import gluon_parallel as gp
        >>> gp.communication_hooks.TopK(ratio=0.01, start_step=100)
        TopK(ratio=0.01, start_step=100)
    """

    def __init__(
        self, ratio: float = 0.01, start_step: int = 0, min_size: int = 1024, error_feedback: bool = True
    ) -> None:
        super().__init__()
        if not 0 < ratio <= 1:
            raise ValueError(f"TopK: ratio is {ratio!r}, expected a part of 1, such as 0.01")
        check_whole_numbers("TopK", start_step=(start_step, 0), min_size=(min_size, 1))
        self.ratio, self.start_step, self.min_size = float(ratio), int(start_step), int(min_size)
        self.error_feedback = error_feedback

    def __repr__(self) -> str:
        return f"TopK(ratio={self.ratio:g}, start_step={self.start_step})"

    def __call__(self, bucket: GradientBucket, store: BucketStore) -> Sequence[mx.nd.NDArray]:
        least = self.min_size if bucket.num_updates >= self.start_step else math.inf
        sum_together([array for array in bucket.gradients if array.size < least], store)
        chosen = [pair for pair in zip(bucket.numbers, bucket.gradients) if pair[1].size >= least]
        if chosen:
            numbers, gradients = zip(*chosen)
            self._sum(numbers, gradients, bucket.divisor, store)
        return bucket.gradients

    def _sum(
        self, numbers: Sequence[int], gradients: Sequence[mx.nd.NDArray], divisor: float, store: BucketStore
    ) -> None:
        """Each gradient becomes the sum of what the processes send of it."""
        dtype = np.dtype(gradients[0].dtype)
        counts = [max(1, round(self.ratio * array.size)) for array in gradients]
        num, words = sum(counts), dtype.itemsize // 4
        parts = [slice(end - count, end) for count, end in zip(counts, np.cumsum(counts).tolist())]
        errors = [self.errors.get(number) for number in numbers]
        left_out = [mx.nd.empty(array.shape, dtype=dtype) for array in gradients] if self.error_feedback else []
        sent = mx.nd.empty((num * (1 + words),), dtype="int32")  # places, then the values' bits

        @np.errstate(all="ignore")  # the caller finds what is not finite
        def select() -> None:
            places, values = view(sent)[:num], view(sent)[num:].view(dtype)
            for number, (array, count, part) in enumerate(zip(gradients, counts, parts)):
                own, error = view(array).reshape(-1), errors[number]
                if error is not None:
                    own += view(error).reshape(-1) * dtype.type(divisor)
                # What is not a number counts as the largest, so that all hear of it.
                places[part] = np.sort(np.argpartition(np.abs(own), own.size - count)[own.size - count :])
                values[part] = own[places[part]]
                if left_out:
                    rest = view(left_out[number]).reshape(-1)
                    np.multiply(own, dtype.type(1 / divisor), out=rest)
                    rest[places[part]] = 0

        @np.errstate(all="ignore")  # the caller finds what is not finite
        def add_up() -> None:
            for array in gradients:
                view(array)[...] = 0
            for row in view(received):
                places, values = row[:num], row[num:].view(dtype)
                for array, part in zip(gradients, parts):
                    view(array).reshape(-1)[places[part]] += values[part]  # a process sends a place once

        held = [error for error in errors if error is not None]
        push(select, read=held, write=[*gradients, *left_out, sent], name="gluon_parallel.TopK")
        received = store.allgather(sent)
        push(add_up, read=[received], write=gradients, name="gluon_parallel.TopK")
        self.errors.update(zip(numbers, left_out))
