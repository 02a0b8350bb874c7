"""What a training step exchanges, and how long that takes over a link."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...errors import ConfigError
from ...kvstore import exchange_seconds
from ...kvstore.cost import statistics_seconds, step_seconds, times_sent
from ...nn.sync_batch_norm.graph import MARK

_HEADER = 2  # numbers in front of a SyncBatchNorm layer's own


class Exchanged(NamedTuple):
    """Of one step."""

    sizes: list  # bytes of each gradient, in the order of the backward pass
    statistics: list  # bytes of each SyncBatchNorm layer's vectors, of both directions
    rows: list  # bytes of each row_sparse gradient of a process, which it sends to every other one

    @property
    def gradients(self):
        """Bytes of all gradients of a process."""
        return sum(self.sizes) + sum(self.rows)


def exchanged(nodes, weights, rows):
    """The :class:`Exchanged` of a traced net with these trained variables, of which `rows` has the row_sparse ones."""
    statistics = []
    for node in nodes:
        if MARK in node.attrs:
            (channels,) = nodes[node.inputs[1][0]].shapes[0]
            statistics += [8 * (_HEADER + 1 + 2 * channels), 8 * (_HEADER + 2 * channels)]
    dense = [nodes[number].sizes[0] for number in reversed(weights) if number not in rows]
    return Exchanged(dense, statistics, list(rows.values()))


def sent_by_each(step, num_workers, engine):
    """(bytes of gradients, bytes of statistics) that a process, as a mean, sends to the others in a step."""
    share, statistics = times_sent(num_workers, engine), sum(step.statistics)
    times = num_workers - 1 if engine == "mpi" else share * _rows(num_workers)
    return round(share * sum(step.sizes) + (num_workers - 1) * sum(step.rows)), round(times * statistics)


def _rows(num_workers):
    """How many times as large as a vector is what a store adds up that cannot gather, see :mod:`.exchange`.

    It has a row for each process, of four float32 per float64.
    """
    return 2 * num_workers


def _statistics_seconds(num_workers, size, latency, bandwidth, engine):
    """Seconds in which every process gets what all processes' vectors of `size` bytes combine to."""
    if engine == "mpi":
        return statistics_seconds(num_workers, size, latency, bandwidth)
    return exchange_seconds(num_workers, _rows(num_workers) * size, latency, bandwidth, engine)


def parse_link(text):
    """(seconds of latency, bytes per second) of a link.

    Example:
        >>> parse_link("25us:10Gbit")
        (2.5e-05, 1250000000.0)
    """
    latency, _, bandwidth = text.lower().partition(":")
    try:
        link = float(latency.removesuffix("us")) / 1e6, float(bandwidth.removesuffix("gbit")) * 1e9 / 8
    except ValueError:
        link = 0.0, 0.0
    if not (0 <= link[0] < np.inf and 0 < link[1] < np.inf):
        raise ConfigError(f"--link: {text!r}; expected a latency and a bandwidth such as 25us:10Gbit")
    return link


def over_link(step, num_workers, link, engine, gathered=0):
    """Seconds that gradients and statistics take, with nothing hidden behind the backward pass.

    Args:
        step: an :class:`Exchanged`.
        link: (seconds of latency, bytes per second) of each process.
        engine: ``mpi``, ``ring`` or ``ps``.
        gathered: bytes of weights of which each process sends its part to all after the update.
    """
    gathered += num_workers * sum(step.rows)
    latency, bandwidth = link
    gradients = step_seconds(num_workers, step.sizes, latency, bandwidth, engine)
    if gathered:  # of weights or of rows: the second half of a sum
        gradients += exchange_seconds(num_workers, gathered, latency, bandwidth, engine) / 2
    statistics = (_statistics_seconds(num_workers, size, latency, bandwidth, engine) for size in step.statistics)
    return gradients, sum(statistics)
