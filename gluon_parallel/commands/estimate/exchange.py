"""What a training step exchanges, and how long that takes over a link."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...errors import ConfigError
from ...kvstore import exchange_seconds
from ...kvstore.cost import FEW, statistics_seconds, step_seconds, times_sent
from ...nn.sync_batch_norm.graph import MARK

# name -> (seconds of latency, bytes per second of each process); what is sold, not what was measured here
LINKS = {
    "1GbE": (50e-6, 0.125e9),
    "10GbE": (25e-6, 1.25e9),
    "25GbE": (20e-6, 3.125e9),
    "100GbE": (10e-6, 12.5e9),
    "infiniband-hdr": (3e-6, 25e9),
}
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


class Link(NamedTuple):
    """What the exchange of a step takes over one link, where nothing is hidden behind the backward pass; seconds."""

    name: str
    gradients: float
    statistics: float


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
    if engine == "mpi":
        times = num_workers - 1 if num_workers < FEW else share
    else:
        times = share * _rows(num_workers)
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


def parse_links(text):
    """{name: (latency, bandwidth)} of "10GbE,100GbE" or "25us:10Gbit".

    Example:
        >>> parse_links("25us:10Gbit")
        {'25us:10Gbit': (2.5e-05, 1250000000.0)}
    """
    links: dict[str, tuple] = {}
    for name in text.split(","):
        found = {key.lower(): (key, value) for key, value in LINKS.items()}.get(name.strip().lower())
        links.update([found or (name.strip(), _link(name.strip()))])
    return links


def _link(text):
    """(seconds, bytes per second) of "25us:10Gbit"."""
    latency, _, bandwidth = text.lower().partition(":")
    try:
        link = float(latency.removesuffix("us")) / 1e6, float(bandwidth.removesuffix("gbit")) * 1e9 / 8
    except ValueError:
        link = 0.0, 0.0
    if not (0 <= link[0] < np.inf and 0 < link[1] < np.inf):
        raise ConfigError(
            f"--links: {text!r}; expected some of {', '.join(LINKS)}, or a latency and a bandwidth such as 25us:10Gbit"
        )
    return link


def over_links(step, num_workers, links, engine, gathered=0):
    """The :class:`Link` of each link, with the cost model of ``gp.kvstore.exchange_seconds``.

    Args:
        step: an :class:`Exchanged`.
        engine: ``mpi``, ``ring`` or ``ps``.
        gathered: bytes of weights of which each process sends its part to all after the update.
    """
    found = []
    gathered += num_workers * sum(step.rows)
    for name, (latency, bandwidth) in links.items():
        gradients = step_seconds(num_workers, step.sizes, latency, bandwidth, engine)
        if gathered:  # of weights or of rows: the second half of a sum
            gradients += exchange_seconds(num_workers, gathered, latency, bandwidth, engine) / 2
        statistics = sum(_statistics_seconds(num_workers, size, latency, bandwidth, engine) for size in step.statistics)
        found.append(Link(name, gradients, statistics))
    return found
