"""The virtual clock: the same run twice, the known facts about waiting, pauses and deaths."""

import doctest

import numpy as np
import pytest
import simulator
from simulator import FlatNet, Worker, simulate, steady, uneven

from gluon_parallel.asynchronous import create_store, rules

pytestmark = pytest.mark.arithmetic

MODES = ["sync", "backup:1", "ssp:1", "local:3", "elastic", "async", "dc"]


def run(mode, workers, num_batches=60, seed=0, **options):
    store = create_store(mode, np.ones(4), len(workers), rules.sgd, 0.1)
    batches = np.random.RandomState(7).normal(size=(num_batches, 4))
    return store, simulate(store, lambda w, batch: (w - batch, 1), workers, batches, seed=seed, **options)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_gives_the_same_run_to_the_last_bit(mode, seed):
    workers = [Worker(uneven(1.0, 0.5)), Worker(uneven(1.0, 2.0)), Worker(uneven(2.0, 0.2), dies_at=4)]
    (first, trace), (second, again) = (run(mode, workers, seed=seed) for _ in range(2))
    assert trace == again
    np.testing.assert_array_equal(first.weights, second.weights)
    assert run(mode, workers, seed=seed + 1)[1] != trace


def test_sync_is_as_slow_as_the_slowest_and_async_is_not():
    for factor in (1, 4, 16):
        workers = [Worker(steady(factor)), *(Worker(steady(1)) for _ in range(3))]
        assert run("sync", workers)[1].seconds == 15 * factor
        # 3 steps per second, and 1/factor of the slow one's
        assert run("async", workers)[1].seconds == pytest.approx(60 / (3 + 1 / factor), abs=factor)


def test_the_staleness_of_n_equal_workers_is_n_less_one():
    for num in (1, 2, 5):
        store, _ = run("async", [Worker(steady(1)) for _ in range(num)])
        assert store.staleness.quantiles() == (num - 1,) * 3


def test_steps_have_the_mean_length_that_was_asked_for():
    random = np.random.RandomState(3)
    # 20,000 draws: the standard error is 0.6 %
    assert np.mean([uneven(2.0, 0.8)(random) for _ in range(20000)]) == pytest.approx(2.0, rel=0.03)


@pytest.mark.parametrize(
    ("pauses", "ends"),
    [([(3.0, 10.0), (0.0, 0.5)], [2.5, 14.5, 16.5]), ([(1.0, 10.0), (3.0, 2.0), (5.0, 8.0)], [14.0])],
)
def test_a_pause_makes_one_step_longer_by_what_is_left_of_it_and_pauses_that_overlap_count_once(pauses, ends):
    assert [step.end for step in run("async", [Worker(steady(2.0), pauses)], len(ends))[1].steps] == ends


def test_nobody_notices_a_death_and_sync_waits_for_ever_while_async_goes_on():
    workers = [Worker(steady(1), dies_at=5), Worker(steady(1)), Worker(steady(1))]
    for mode in ("sync", "ssp:2", "local:2"):
        assert run(mode, workers)[1].stalled == [0]
    store, trace = run("async", workers)
    assert trace.stalled == []
    assert store.version == 60 - 1  # all but the batch that died with its worker


def test_the_observer_sees_the_beginning_and_every_push_of_as_many_workers_as_the_store_has():
    seen = []
    store, _ = run("async", [Worker(steady(1))], 5, observe=lambda time, store: seen.append((time, store.version)))
    assert seen == [(float(number), number) for number in range(6)]
    with pytest.raises(ValueError, match="3 workers for a store of 1"):
        simulate(store, lambda w, b: (w, 1), [Worker(steady(1))] * 3, range(5))


def test_the_flat_nets_gradient_is_that_of_its_loss(rng):
    net = FlatNet(num_inputs=6, num_hidden=5, num_classes=3)
    weights = net.initial(1).astype("float64")
    x, y = rng.normal(size=(7, 6)), rng.integers(3, size=7)
    direction = rng.normal(size=weights.shape)

    def loss(weights):
        logits = net.logits(weights, x)
        return np.mean([np.log(np.exp(row).sum()) - row[label] for row, label in zip(logits, y)])

    slope = (loss(weights + 1e-6 * direction) - loss(weights - 1e-6 * direction)) / 2e-6
    # central differences of a loss with kinks (ReLU)
    assert net.gradient(weights, (x, y))[0] @ direction == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_the_examples_of_the_simulator_run():
    tried = doctest.testmod(simulator, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried.attempted and not tried.failed
