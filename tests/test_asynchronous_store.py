"""The modes as one store each: where they coincide, how stale they are, and that nothing is lost between threads."""

import threading
import time

import numpy as np
import pytest
from simulator import Worker, simulate, steady, uneven

from gluon_parallel.asynchronous import create_store, rules
from gluon_parallel.asynchronous.training import WorkerThreads
from gluon_parallel.errors import WorkerTimeout

pytestmark = pytest.mark.arithmetic

ALL = ["sync", "backup:1", "ssp:1", "local:3", "elastic", "async", "dc"]


@pytest.fixture
def problem(rng):
    """(weights, gradient, batches): least squares with 6 weights, batches of unequal size."""
    batches = [(rng.normal(size=(n, 6)), rng.normal(size=n)) for n in (4, 4, 4, 2, 5, 4, 3, 4, 4, 4, 1, 6)]

    def gradient(weights, batch):
        x, y = batch
        return x.T @ (x @ weights - y) / len(y), len(y)

    return rng.normal(size=6), gradient, batches


def train(mode, problem, num_workers=3, optimizer=("sgd", {}), workers=None, batches=None, **options):
    weights, gradient, all_batches = problem
    store = create_store(mode, weights, num_workers, rules.optimizer(*optimizer), 0.05, **options)
    workers = workers or [Worker(uneven(1.0, 0.3)) for _ in range(num_workers)]
    trace = simulate(store, gradient, workers, all_batches if batches is None else batches, seed=1)
    return store, trace


def equal_batches(problem, rng):
    weights, gradient, _ = problem
    return weights, gradient, [(rng.normal(size=(4, 6)), rng.normal(size=4)) for _ in range(12)]


def plain_sgd(problem, size, momentum=0.0):
    """Ten lines: one device, batches joined `size` at a time, in float64."""
    weights, gradient, batches = problem
    velocity = 0.0
    for start in range(0, len(batches), size):
        xs, ys = zip(*batches[start : start + size])
        found, _ = gradient(weights, (np.concatenate(xs), np.concatenate(ys)))
        velocity = momentum * velocity - 0.05 * found
        weights = weights + velocity
    return weights


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_sync_step_of_n_workers_is_one_step_on_the_n_fold_batch(problem, num_workers, momentum):
    store, trace = train("sync", problem, num_workers, ("sgd", {"momentum": momentum}))
    wanted = plain_sgd(problem, num_workers, momentum)
    np.testing.assert_allclose(store.weights, wanted, rtol=1e-12, atol=1e-13)  # roundings of numbers of size 1
    assert store.version == -(-12 // num_workers)
    assert store.staleness.total == {0: 12}


@pytest.mark.parametrize("optimizer", [("sgd", {"momentum": 0.9}), ("adam", {}), ("sgd", {})])
def test_backup_that_drops_nobody_and_dc_without_strength_are_sync_and_async_bit_for_bit(problem, optimizer):
    for mode, same in (("backup:0", "sync"), ("dc:0", "async")):
        found, wanted = (train(one, problem, optimizer=optimizer)[0].weights for one in (mode, same))
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("mode", ["ssp:0", "local:1"])
def test_modes_whose_workers_take_each_step_together_are_sync_up_to_the_order_of_adding(problem, rng, mode):
    problem = equal_batches(problem, rng)
    (found, trace), (sync, slow) = train(mode, problem), train("sync", problem)
    # Updates by a third each, or means of updated weights: other roundings, of numbers of size 1.
    np.testing.assert_allclose(found.weights, sync.weights, rtol=1e-13, atol=1e-13)
    assert trace.seconds == slow.seconds


@pytest.mark.parametrize("mode", ["sync", "ssp:0", "ssp:3", "local:1", "local:4", "async", "dc:0.5"])
@pytest.mark.parametrize("optimizer", [("sgd", {"momentum": 0.9}), ("adam", {})])
def test_one_worker_in_whatever_mode_is_a_device_by_itself(problem, mode, optimizer):
    weights, gradient, batches = problem
    update, state = rules.optimizer(*optimizer), ()
    for batch in batches:
        weights, state = update(weights, gradient(weights, batch)[0], state, 0.05)
    store, _ = train(mode, problem, 1, optimizer)
    np.testing.assert_array_equal(store.weights, weights)


def test_each_worker_is_compensated_from_the_weights_that_it_pulled_itself(problem):
    weights, gradient, batches = problem
    store = create_store("dc:0.7", weights, 2, rules.sgd, 0.1)
    store.begin(batches)
    first, second = store.take(0), store.take(1)
    store.push(0, gradient(weights, first.batch)[0])
    third = store.take(0)
    store.push(0, gradient(third.weights, third.batch)[0])
    late, now = gradient(weights, second.batch)[0], store.weights
    store.push(1, late)
    wanted = now - 0.1 / 2 * (late + 0.7 * late**2 * (now - weights))  # the backup is two updates old, not one
    np.testing.assert_allclose(store.weights, wanted, rtol=1e-14, atol=1e-14)  # weights of size 1


def test_staleness_counts_the_updates_since_the_pull(problem):
    _, gradient, batches = problem
    store = create_store("async", problem[0], 3, rules.sgd, 0.1)
    store.begin(batches)
    assert [store.take(worker).version for worker in range(3)] == [0, 0, 0]
    zero = np.zeros(6)
    assert [store.push(worker, zero).staleness for worker in (2, 0)] == [0, 1]
    store.take(2)  # what it was granted when it pushed, one update ago
    assert [store.push(worker, zero).staleness for worker in (1, 2)] == [2, 2]
    assert [dict(histogram) for histogram in store.staleness.histograms] == [{1: 1}, {2: 1}, {0: 1, 2: 1}]
    assert store.staleness.quantiles() == (1, 2, 2)
    store.staleness.record(worker=0, updates=9)
    assert store.staleness.quantiles() == (2, 9, 9)  # four of five are not nine tenths


def test_gradients_above_the_rejection_bound_are_counted_and_not_applied(problem):
    slow = [Worker(steady(5.0)), *(Worker(steady(1.0)) for _ in range(2))]
    store, trace = train("async", problem, workers=slow, reject_above=4)
    assert any(store.staleness.rejected)
    assert store.staleness.rejected[0] == sum(not step.applied for step in trace.steps)
    assert max(store.staleness.total) <= 4
    assert store.version == sum(step.applied for step in trace.steps) == 12 - sum(store.staleness.rejected)
    with pytest.raises(ValueError, match="no gradient is applied late"):
        create_store("sync", np.zeros(1), 2, rules.sgd, 1.0, reject_above=4)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_ssp_worker_is_further_ahead_than_its_bound(problem, bound):
    workers = [Worker(steady(7.0)), *(Worker(steady(1.0)) for _ in range(2))]
    _, trace = train(f"ssp:{bound}", problem, workers=workers, batches=problem[2] * 3)
    clock, ahead = [0, 0, 0], 0
    for step in trace.steps:
        clock[step.worker] += 1
        ahead = max(ahead, max(clock) - min(clock)) if step.end < trace.steps[-6].end else ahead
    assert ahead == bound + 1  # steps done; it began the last of them when it was `bound` ahead


def test_backup_drops_the_slowest_and_sync_waits_for_it(problem):
    workers = [Worker(steady(4.0)), *(Worker(steady(1.0)) for _ in range(2))]
    sync, slow = train("sync", problem, workers=workers)
    backup, fast = train("backup:1", problem, workers=workers)
    assert slow.seconds == 4 * 4.0
    assert fast.seconds <= 8.0
    assert sum(backup.staleness.rejected) == backup.staleness.rejected[0] >= 1
    with pytest.raises(ValueError, match="leaves no gradient"):
        create_store("backup:3", np.zeros(1), 3, rules.sgd, 1.0)


def test_a_worker_that_leaves_closes_the_round_of_one_that_waits_for_it():
    store = create_store("backup:1", np.zeros(1), 3, rules.sgd, 1.0)
    store.begin(range(5))
    for turn in ("take 0", "take 1", "take 2", "push 0", "push 1", "take 0", "take 1", "push 0", "push 2"):
        worker = int(turn[-1])
        store.take(worker) if turn.startswith("take") else store.push(worker, np.zeros(1))
    assert (store.version, store.is_gone(0), store.is_gone(1), store.is_gone(2)) == (2, True, False, True)


@pytest.mark.parametrize("mode", ALL)
def test_every_batch_is_handed_out_once_and_a_second_pass_works(problem, mode):
    weights, gradient, _ = problem
    seen = []

    def watched(weights, number):
        seen.append(number)
        return np.zeros(6), 1

    store = create_store(mode, weights, 3, rules.sgd, 0.1)
    for count in (11, 4, 2):
        seen.clear()
        simulate(store, watched, [Worker(uneven(1.0, 0.5)) for _ in range(3)], range(count))
        assert sorted(seen) == list(range(count))
    np.testing.assert_allclose(store.weights, weights, rtol=1e-12, atol=1e-13)


def test_writes_to_shared_weights_and_pushes_without_a_grant_or_of_another_shape_are_refused():
    store = create_store("async", np.zeros(3), 2, rules.sgd, 0.1)
    with pytest.raises(ValueError, match="read-only"):
        store.weights[:] = 0
    store.begin(range(4))
    with pytest.raises(ValueError, match="without having taken a grant"):
        store.push(0, np.zeros(3))
    store.take(0)
    with pytest.raises(ValueError, match=r"shape \(2,\); the weights have \(3,\)"):
        store.push(0, np.zeros(2))


@pytest.mark.parametrize("mode", ALL)
def test_no_update_is_lost_under_eight_threads_with_a_thousand_pushes_each(mode):
    """Every gradient is -1 and the learning rate 8, so the weights count what was applied."""
    store = create_store(mode, np.zeros(3), 8, rules.sgd, 8.0)
    threads, seen = WorkerThreads(store, timeout=60), []

    def work(worker):
        while True:
            grant = threads.next(worker)
            if grant is None:
                return
            seen.append(grant.batch)
            threads.push(worker, -np.ones(3))

    threads.run(work, range(8000))
    assert sorted(seen) == list(range(8000))
    applied = sum(store.staleness.total.values())
    assert applied + sum(store.staleness.rejected) == 8000
    versions = {"sync": 1000, "ssp:1": 8000, "async": 8000, "dc": 8000}
    assert store.version == versions.get(mode, store.version)
    if mode in ("sync", "backup:1"):
        np.testing.assert_allclose(store.weights, 8.0 * store.version, rtol=1e-12, atol=1e-12)  # sevenths are rounded
    elif mode in ("ssp:1", "async"):
        np.testing.assert_array_equal(store.weights, 8000.0)


def test_a_pass_without_pushes_ends_and_says_who_had_a_batch():
    threads, taken = WorkerThreads(create_store("sync", np.zeros(1), 2, rules.sgd, 0.1), timeout=60), threading.Event()

    def work(worker):
        while threads.next(worker) is not None:
            if worker == 1:
                taken.set()
                while not threads._stopped:
                    time.sleep(0.01)
            taken.wait()
            threads.timeout = 0.1  # counted from the next push, after which worker 1 alone has a batch
            threads.push(worker, np.zeros(1))

    with pytest.raises(WorkerTimeout, match=r"nothing was pushed for 0.1 s; worker 1 had a batch. Look for"):
        threads.run(work, range(4))
