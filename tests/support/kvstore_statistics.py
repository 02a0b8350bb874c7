"""Checks of statistics that are combined over processes, as every process of a group runs them."""

import re

import numpy as np
import pytest

from gluon_parallel.errors import ExchangeError
from gluon_parallel.kvstore.collective import gather
from gluon_parallel.kvstore.exchange import StatisticsExchange

CHANNELS = 5


def moments(values):
    """(1 + 2C,) count, mean and squared deviations of (n, C) values."""
    mean = values.mean(0) if len(values) else np.zeros(CHANNELS)
    return np.concatenate([[len(values)], mean, ((values - mean) ** 2).sum(0)])


def check_statistics_are_those_of_the_values_of_all_processes(store):
    """Shards of all sizes, means far above the deviation; the same bits on each process."""
    exchanges = [StatisticsExchange(store, f"layer, {name}") for name in ("forward", "backward")]
    exchanges[0].prepare(1 + 2 * CHANNELS)
    exchanges[1].prepare(2 * CHANNELS)
    for call in range(12):
        random = np.random.default_rng(call)
        shards = [random.normal(1e4, 1, (size, CHANNELS)) for size in random.integers(0, 9, store.num_workers)]
        got = exchanges[0].combine(call, moments(shards[store.rank]), 0)
        whole = np.concatenate(shards).astype(np.longdouble)
        wanted = moments(whole).astype(float)
        np.testing.assert_allclose(got[: 1 + CHANNELS], wanted[: 1 + CHANNELS], rtol=1e-14, atol=1e-12)
        # float64 keeps a mean of 1e4 to 1e-12, and so the deviations of up to 16 values to 1e-10.
        np.testing.assert_allclose(got[1 + CHANNELS :], wanted[1 + CHANNELS :], rtol=1e-12, atol=1e-10)
        vectors = random.normal(size=(store.num_workers, 2 * CHANNELS))
        sums = exchanges[1].combine(call, vectors[store.rank], 1)
        np.testing.assert_allclose(sums, vectors.sum(0), rtol=1e-13, atol=1e-13)
        if call % 6 == 0:
            mine = np.concatenate([got, sums])
            for row in gather(store, "check", mine) if store.type == "mpi" else ():
                assert row.tobytes() == mine.tobytes()


def check_processes_at_other_calls_are_told_which(store):
    """A layer that one process has run more often than the others."""
    exchange = StatisticsExchange(store, "layer out of step", timeout=1)
    exchange.prepare(2 * CHANNELS)
    last = store.num_workers - 1
    with pytest.raises(ExchangeError, match="out of step") as caught:
        exchange.combine(7 if store.rank == last else 3, np.ones(2 * CHANNELS), 1)
    assert "waited 1 s for process" in str(caught.value)
    said = re.findall(r"process (\d+) at call (\d+)", str(caught.value))
    assert said[-1] == (str(store.ranks[last] if hasattr(store, "ranks") else last), "7"), caught.value
