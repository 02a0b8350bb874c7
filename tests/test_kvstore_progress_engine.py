"""Exchanges between processes, with threads for processes and queues for MPI."""

import queue
import threading
import time
import types

import numpy as np
import pytest

import gluon_parallel as gp
from gluon_parallel.allreduce import sum_rows
from gluon_parallel.errors import WorkerLost
from gluon_parallel.kvstore.mpi import lost_workers, pending, progress_engine
from gluon_parallel.kvstore.mpi.collectives import Broadcast, Gather, Sum
from gluon_parallel.kvstore.mpi.compression import compressor
from gluon_parallel.kvstore.mpi.progress_engine import ProgressEngine
from gluon_parallel.kvstore.mpi.shared_memory.layout import ARRIVED, IDLE, LINE, PUSHED, STATE
from gluon_parallel.kvstore.mpi.shared_memory.rows import Rows
from gluon_parallel.kvstore.mpi.shared_memory.sums import KeySums, SharedSum
from gluon_parallel.kvstore.mpi.store import MPI


class QueueMessages:
    """Messages through queues: they arrive in the order of sending, copied when they are sent."""

    def __init__(self, rank, inboxes):
        self.rank, self.size, self._inboxes, self.sending = rank, len(inboxes), inboxes, False
        self._late = []

    def post(self, rank, message, sent=None):
        data = np.frombuffer(bytes(memoryview(message.payload).cast("B")), np.uint8)
        self._inboxes[rank].put((self.rank, message._replace(payload=data), sent is not None))
        if sent is not None:
            sent()

    def flush(self):
        pass

    def poll(self, memory_for):
        while not self._inboxes[self.rank].empty():
            self._late.append(self._inboxes[self.rank].get())
        arrived, late, self._late = [], self._late, []
        for source, message, bulk in late:
            memory = memory_for(source, message, message.payload.size) if bulk else message.payload
            if memory is None:
                self._late.append((source, message, bulk))
                continue
            if bulk:
                memory[:] = message.payload
            arrived.append((source, message._replace(payload=memory)))
        return arrived, False

    def expects_from(self, rank):
        return False


@pytest.fixture
def engines():
    """Makes the progress engines of so many processes; they part at the end."""
    made = []

    def make(num, timeout=60.0):
        inboxes = [queue.Queue() for _ in range(num)]
        made.extend(ProgressEngine(QueueMessages(rank, inboxes), timeout) for rank in range(num))
        return made

    yield make
    threads = [threading.Thread(target=progress.close, kwargs={"limit": 1.0}) for progress in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Ends:
    """Collects how exchanges end."""

    def __init__(self):
        self.errors = queue.Queue()

    def __call__(self, error):
        self.errors.put(error)

    def wait(self, num=1):
        return [self.errors.get(timeout=60) for _ in range(num)]


def at_once(function, items):
    results = [None] * len(items)

    def run(index, item):
        results[index] = function(item)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(items)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_keys_in_any_order_and_repeated_meet_by_key(engines, rng, num):
    group, ends = engines(num), Ends()
    keys = [f"0s:{number % 7}".encode() for number in range(70)]  # each ten times
    values = rng.standard_normal((num, len(keys), 50))
    vectors = values.copy()
    for progress in group:
        # Every key's exchanges keep their order; beyond that each process has an order of its own.
        left = {key: [index for index, one in enumerate(keys) if one == key] for key in set(keys)}
        for key in rng.permutation(keys):
            vector = vectors[progress.rank, left[key].pop(0)]
            progress.submit(Sum(bytes(key), b"float64 (50,)", ends, vector))
    assert ends.wait(num * len(keys)) == [None] * (num * len(keys))
    assert np.allclose(vectors, values.sum(axis=0))
    assert all(np.array_equal(vectors[0], other) for other in vectors[1:])  # every process has the same bits


def test_waiting_exchanges_go_on_while_others_are_under_way(engines, rng):
    group, ends = engines(3), Ends()
    numbers = np.arange(3000.0).reshape(3, 1000)
    totals = numbers.sum(axis=0)

    def process(progress):
        progress.submit(Sum(b"0s:large", b"f", ends, numbers[progress.rank]))
        rows = []
        for number in range(300):
            exchange = Gather(
                b"0g:small", b"g", lambda error: None, np.array([progress.rank * 1000 + number], np.int64)
            )
            progress.wait(exchange)
            rows.append([int(row.view(np.int64)[0]) for row in exchange.rows])
        return rows

    for rows in at_once(process, group):
        assert rows == [[number, 1000 + number, 2000 + number] for number in range(300)]
    assert ends.wait(3) == [None] * 3
    assert np.array_equal(numbers[0], totals)


def test_everyone_gets_the_first_ones_values(engines):
    group, ends = engines(3), Ends()
    vectors = [np.full(40000, float(rank + 4)) for rank in range(3)]
    for progress, vector in zip(group, vectors):
        progress.submit(Broadcast(b"0b:w", b"f", ends, vector))
    assert ends.wait(3) == [None] * 3
    assert all((vector == 4).all() for vector in vectors)


def test_a_missing_process_is_named_with_the_key_on_all_others_and_nothing_works_after_it(engines):
    group, ends = engines(3), Ends()
    for progress in group[:2]:
        progress.submit(Sum(b"0s:weight", b"f", ends, np.ones(4)))
    for progress in group[:2]:
        while [exchange.ranks_missing() for exchange in progress.pending.active()] != [{2}]:
            time.sleep(0.01)
    for progress in group[:2]:
        progress.timeout = 0.1  # from now on process 2 is late
    first, second = ends.wait(2)
    for error in (first, second):
        assert isinstance(error, gp.errors.WorkerLost)
        assert "key weight" in str(error) and "for process 2" in str(error), error
    group[0].submit(Sum(b"0s:other", b"f", ends, np.ones(4)))
    [error] = ends.wait()
    assert error is group[0].failure
    with pytest.raises(gp.errors.WorkerLost):
        group[0].check()


def test_a_slow_process_that_still_sends_is_waited_for(engines, monkeypatch):
    group, ends, seconds = engines(2), Ends(), [time.monotonic()]
    clock = types.SimpleNamespace(monotonic=lambda: seconds[0])
    with monkeypatch.context() as patch:
        for module in (lost_workers, pending, progress_engine):
            patch.setattr(module, "time", clock)
        group[0].submit(Sum(b"0s:slow", b"f", ends, np.ones(4)))
        for number in range(4):
            seconds[0] += 0.6 * group[0].timeout
            while group[0].lost._next_look <= seconds[0]:  # until it has looked for who is late
                time.sleep(0.001)
            for progress in group:
                progress.submit(Gather(f"0g:{number}".encode(), b"f", ends, np.ones(1)))
            assert ends.wait(2) == [None] * 2
        group[1].submit(Sum(b"0s:slow", b"f", ends, np.ones(4)))
        assert ends.wait(2) == [None] * 2


@pytest.mark.parametrize("late", [True, False])
def test_another_shape_is_refused_everywhere_with_the_key_and_both_ranks(engines, late):
    group, ends = engines(2), Ends()
    exchanges = [Sum(b"0s:w", b"float32 (2,)", ends, np.ones(2)), Sum(b"0s:w", b"float32 (3,)", ends, np.ones(3))]
    for progress, exchange in zip(group, exchanges):
        progress.submit(exchange)
        if late:
            time.sleep(0.05)
    messages = " / ".join(str(error) for error in ends.wait(2))
    for words in ("key w", "float32 (2,)", "float32 (3,)", "process 0", "process 1"):
        assert words in messages


def test_a_process_that_leaves_is_not_waited_for(engines):
    group, ends = engines(2), Ends()
    group[0].submit(Sum(b"0s:w", b"f", ends, np.ones(2)))
    group[1].close("ValueError: broken image", limit=0.1)
    [error] = ends.wait()
    assert "process 1 has ended its program with ValueError: broken image" in str(error)


def test_a_process_that_fails_stays_until_the_others_could_say_why_they_end(engines, monkeypatch):
    monkeypatch.setattr(progress_engine, "_LAST_WORDS", 60.0)
    first, second = engines(2)
    failing = threading.Thread(target=second.close, args=("ValueError: broken image",))
    failing.start()
    failing.join(0.3)
    assert failing.is_alive()
    first.close()
    failing.join()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "uint8"])
@pytest.mark.parametrize("num", [2, 3, 4])
def test_sums_agree_with_numpy_and_round_half_precision_once(rng, num, dtype):
    rows = [rng.uniform(0, 50, 70001).astype(dtype) for _ in range(num)]
    wide = np.sum([row.astype("float32" if dtype == "float16" else dtype) for row in rows], axis=0, dtype=None)
    out = rows[0]
    wanted = wide.astype(dtype)
    sum_rows(rows, [out])
    assert np.allclose(out.astype("float64"), wanted.astype("float64"), rtol=1e-6, atol=1e-6)


def test_two_bits_send_what_was_held_back_later(rng):
    compress, gradient = compressor({"type": "2bit", "threshold": 0.25}), rng.uniform(-0.2, 0.2, 1003).astype("float32")
    sent = [compress.decode(compress.encode("key", gradient), gradient) for _ in range(50)]
    assert compress.encode("key", gradient).nbytes <= 1003 / 4 + 1
    assert set(np.unique(sent)) <= {-0.25, 0.0, 0.25}
    assert np.abs(np.sum(sent, axis=0) - 50 * gradient).max() <= 0.25 + 1e-4


@pytest.mark.parametrize("wrong", [{}, {"type": "3bit"}, {"type": "2bit", "threshold": 0}, {"type": "fp16", "x": 1}])
def test_compression_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="compression_params"):
        compressor(wrong)


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_a_sum_that_fails_before_it_has_begun_ends_with_the_error(size):
    store = types.SimpleNamespace(num_workers=2, _compressor_of=lambda key, out: compressor({"type": "none"}))
    ended, error = [], WorkerLost("process 1 is gone")
    MPI._sum_of(store, "3", "float32", 3, np.zeros(size, "float32"), ended.append).finish(error)
    assert ended == [error]


class RowsOfSums(Rows):
    kind = "sum"


def test_a_process_that_is_just_writing_its_row_does_not_wait_for_itself():
    words = np.zeros(3 * LINE // 8, np.int64)
    shared = types.SimpleNamespace(progress=types.SimpleNamespace(rank=1, size=3), words=words)
    rows = RowsOfSums(shared, [b"0s:weight"], (4,), "float32")
    words[ARRIVED] = 1
    assert rows.ranks_missing(ARRIVED, 1) == {2}


@pytest.mark.parametrize(
    ("error", "state", "number"), [(KeyboardInterrupt, PUSHED, 1), (gp.errors.WorkerLost, IDLE, 0)]
)
def test_ctrl_c_during_a_push_does_not_free_what_the_engine_may_have(error, state, number):
    def push(_priority):
        raise error

    key, exchange = KeySums.__new__(KeySums), SharedSum.__new__(SharedSum)
    exchange.words, exchange._call, key._number = np.zeros(64, np.int64), types.SimpleNamespace(push=push), 0
    with pytest.raises(error):
        key._push(exchange, 0)
    assert (exchange.words[STATE], key._number) == (state, number)
