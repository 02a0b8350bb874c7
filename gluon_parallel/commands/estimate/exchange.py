"""What a training step exchanges between processes, and how long that takes over a link."""

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


def cost(step, num_workers, link, kind, gathered=0):
    """(bytes that a process, as a mean, sends to the others, seconds that this takes with nothing hidden) in a step.

    Args:
        step: an :class:`Exchanged`.
        link: (seconds of latency, bytes per second) of each process.
        kind: ``mpi``, ``ring`` or ``ps``.
        gathered: bytes of weights of which each process sends its part to all after the update.
    """
    if num_workers == 1:
        return 0, 0.0
    (latency, bandwidth), rows, share = link, sum(step.rows), times_sent(num_workers, kind)
    # A store that cannot gather sums vectors with a row for each process, of four float32 per float64.
    width = 1 if kind == "mpi" else 2 * num_workers
    times = num_workers - 1 if kind == "mpi" else share * width
    sent = share * sum(step.sizes) + (num_workers - 1) * rows + times * sum(step.statistics)
    seconds = step_seconds(num_workers, step.sizes, latency, bandwidth, kind)
    if gathered + rows:  # the second half of a sum
        seconds += exchange_seconds(num_workers, gathered + num_workers * rows, latency, bandwidth, kind) / 2
    for size in step.statistics:
        if kind == "mpi":
            seconds += statistics_seconds(num_workers, size, latency, bandwidth)
        else:
            seconds += exchange_seconds(num_workers, width * size, latency, bandwidth, kind)
    return round(sent + (num_workers - 1) / num_workers * gathered), seconds


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
