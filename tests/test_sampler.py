"""Each process's part of the data."""

import queue

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gluon_parallel as gp
from gluon_parallel.mxnet import engine

pytestmark = pytest.mark.arithmetic


@given(
    length=st.integers(1, 60), batch_size=st.integers(1, 9), num_workers=st.integers(1, 5), shuffle=st.booleans(),
    epoch=st.integers(0, 5), last=st.sampled_from(gp.sampler.LAST_BATCH),
)  # fmt: skip
def test_processes_have_equally_many_batches_and_each_sample_once(
    length, batch_size, num_workers, shuffle, epoch, last
):
    if last == "discard" and length < batch_size * num_workers:
        return
    samplers = [
        gp.sampler.BatchSampler(length, batch_size, rank, num_workers, shuffle, seed=4, last_batch=last)
        for rank in range(num_workers)
    ]
    passes = []
    for sampler in samplers:
        sampler.set_epoch(epoch)
        passes.append(list(sampler))
        assert sampler.epoch == epoch + 1
    assert {len(batches) for batches in passes} == {len(samplers[0])}
    for together in zip(*passes):
        assert len({len(batch) for batch in together}) == 1  # padding makes them alike
    real = [
        sample
        for sampler, batches in zip(samplers, passes)
        for number, batch in enumerate(batches)
        for sample in batch[: sampler.num_real(number)]
    ]
    assert len(real) == len(set(real))
    if last == "pad":
        assert sorted(real) == list(range(length))
    else:
        assert length - len(real) < batch_size * num_workers
    one = gp.sampler.BatchSampler(length, batch_size * num_workers, shuffle=shuffle, seed=4, last_batch=last)
    one.set_epoch(epoch)
    for number, batch in enumerate(one):  # together they are the batch of one process
        parts = [mine[number][: sampler.num_real(number)] for sampler, mine in zip(samplers, passes)]
        assert [sample for part in parts for sample in part] == batch


def test_every_epoch_has_another_order_that_the_seed_decides():
    first, again = (gp.sampler.BatchSampler(40, 5, 1, 2, shuffle=True, seed=9) for _ in range(2))
    other = gp.sampler.BatchSampler(40, 5, 1, 2, shuffle=True, seed=10)
    epochs = [list(first) for _ in range(3)]
    assert epochs == [list(again) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] and list(other) != epochs[0]


@pytest.mark.parametrize(
    "wrong",
    [{"length": 0}, {"batch_size": 0}, {"batch_size": 1.5}, {"rank": 2}, {"rank": -1}, {"num_workers": 0}, {"seed": -1},
     {"last_batch": "keep"}, {"batch_size": 9, "last_batch": "discard"}],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(wrong):
    arguments = {"length": 10, "batch_size": 2, "rank": 0, "num_workers": 2, **wrong}
    with pytest.raises(gp.errors.BatchMismatch, match=f"sampler: .*{next(iter(wrong))}|batch on each"):
        gp.sampler.BatchSampler(**arguments)


def test_a_batch_that_does_not_exist_or_an_epoch_below_0_is_refused():
    sampler = gp.sampler.BatchSampler(10, 2)
    for ask in (lambda: sampler.num_real(5), lambda: sampler.num_real(-1), lambda: sampler.set_epoch(-1)):
        with pytest.raises(gp.errors.BatchMismatch):
            ask()


class Silent:
    """A store of two processes, of which the other one never sends its part."""

    rank, num_workers = 0, 2

    def __init__(self):
        self.sums = queue.Queue()

    def broadcast(self, key, value, out, priority=0):
        """Nothing to do."""

    def pushpull(self, key, value, out=None, priority=0):
        """Begin a sum that ends when the test lets it."""
        engine.push_async(self.sums.put, write=value)


def test_a_process_that_stops_asking_for_batches_is_not_waited_for_without_end(monkeypatch, tmp_path):
    monkeypatch.setenv("GLUON_PARALLEL_TIMEOUT", "0.02")
    monkeypatch.setenv("GLUON_PARALLEL_FLIGHT_RECORDER", str(tmp_path))
    store = Silent()
    try:
        with pytest.raises(
            gp.errors.WorkerLost, match=r"join: process \d of \d waited 0\.2 s for the others\. .*gp\.sampler\.join"
        ):
            next(gp.sampler.join([1], store))
    finally:
        store.sums.get(timeout=60)()
