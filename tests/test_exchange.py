"""What processes compare, gather and combine through a store that can only sum; here they are threads."""

import functools
import threading
import time

import numpy as np
import pytest
from batch_norm_reference import combined, in_parallel, measured

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.kvstore import handshake, work
from gluon_parallel.kvstore.collective import gather
from gluon_parallel.kvstore.contract import Contract, contract
from gluon_parallel.kvstore.exchange import StatisticsExchange, open_store
from gluon_parallel.kvstore.gathering import gathered
from gluon_parallel.mxnet.engine import push


class Servers:
    """What `num_workers` stores share: a sum per key, complete when all have pushed."""

    def __init__(self, num_workers, spoil=lambda total: total):
        self.num_workers, self.spoil = num_workers, spoil
        self.parts, self.changed, self.done = {}, threading.Condition(), {}


class Worker(mx.kvstore.KVStoreBase):
    """One process's view of them: the smallest store that sums."""

    type = "test_sum"

    def __init__(self, servers, rank):
        self.servers, self._rank, self.rounds, self.sent = servers, rank, {}, []

    rank = property(lambda self: self._rank)
    num_workers = property(lambda self: self.servers.num_workers)

    @staticmethod
    def is_capable(capability):
        return False

    def broadcast(self, key, value, out, priority=0):
        out[:] = value

    def pushpull(self, key, value, out=None, priority=0):
        servers, self.rounds[key] = self.servers, self.rounds.get(key, 0) + 1
        slot = (key, self.rounds[key])
        self.sent.append(value.shape)
        with servers.changed:
            parts = servers.parts.setdefault(slot, [])
            parts.append(value.asnumpy())
            if len(parts) == servers.num_workers:
                servers.done[slot] = servers.spoil(sum(parts))
                servers.changed.notify_all()
            if servers.changed.wait_for(lambda: slot in servers.done, timeout=60):
                out[:] = servers.done[slot]


def on_all(num, function, spoil=lambda total: total):
    """What ``function(worker)`` returns on each of `num` processes, or the error that it raises, in words."""
    servers, results = Servers(num, spoil), [None] * num
    workers = [Worker(servers, rank) for rank in range(num)]

    def process(worker):
        try:
            results[worker.rank] = function(worker)
        except gp.errors.GluonParallelError as error:
            results[worker.rank] = f"{type(error).__name__}: {error}"

    in_parallel([lambda worker=worker: process(worker) for worker in workers])
    return results, workers


def agree(lists):
    return on_all(len(lists), lambda worker: handshake.agree(contract(worker), lists[worker.rank], "Do the same"))


def test_processes_that_say_the_same_go_on_after_one_message_of_a_fixed_length(rng):
    many = [f"send {number}" for number in rng.integers(9, size=200)]
    for num, says in ((2, ["send one"]), (3, ["send one", "send two"]), (5, many)):
        heard, workers = agree([says] * num)
        assert heard == [None] * num
        assert all(worker.sent == [(num, 4)] for worker in workers)
    assert agree([["send one"]])[1][0].sent == []  # a process that is alone


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        (["a", "b"], "process 0 sends a, process 1 sends b"),
        (["a b", "a c", "a b"], "processes 0, 2 send b, process 1 sends c"),
        (["a b", "a", "a b", "a"], "processes 0, 2 send b, processes 1, 3 send nothing more"),
        (["a", "a b c"], "process 0 sends nothing more, process 1 sends b"),
        (["a b", "b a"], "process 0 sends a, process 1 sends b"),
        (["a" * 300, "b"], f"process 0 sends {'a' * 138}~"),
        (["a" * 300 + "b", "a" * 300], f"process 0 sends {'a' * 138}~"),
    ],
)
def test_all_hear_who_says_what_at_the_first_sentence_that_differs(lists, words):
    heard, _ = agree([[f"send {word}" for word in text.split()] for text in lists])
    assert heard == [heard[0]] * len(lists)
    assert heard[0].startswith(f"WorkersDiffer: store 'test_sum': {words}") and heard[0].endswith(". Do the same")


def test_processes_at_different_agreements_hear_what_each_does():
    heard, _ = agree([["send float32 (2,) under key 1"], ["call gp.evaluate() with 4 values"]])
    assert "process 0 sends float32 (2,) under key 1, process 1 calls gp.evaluate() with 4 values" in heard[0]


def test_arrays_are_described_by_what_a_server_must_know():
    arrays = [[mx.nd.zeros((2, 3)), mx.nd.zeros((2, 3))], mx.nd.zeros(4, dtype="float16")]
    says = handshake.described(["w", 3], arrays)
    assert says == ["send float32 (2, 3) under key w", "send float16 (4,) under key 3"]


@pytest.mark.parametrize("length", [0, 1, 500])
@pytest.mark.parametrize("num", [1, 3])
def test_a_vector_of_any_length_arrives_from_all_processes(num, length, rng):
    vectors = rng.standard_normal((num, length))
    results, _ = on_all(num, lambda worker: gather(worker, "a test", vectors[worker.rank]))
    for rows in results:
        np.testing.assert_array_equal(rows, vectors)


def test_processes_that_gather_in_different_functions_or_other_lengths_hear_of_it():
    heard, _ = on_all(2, lambda worker: gather(worker, f"function {worker.rank}()", np.ones(1)))
    assert "process 0 calls function 0() with 1 values, process 1 calls function 1()" in heard[0]
    heard, _ = on_all(2, lambda worker: gather(worker, "one()", np.ones(1 + worker.rank)))
    assert "process 0 calls one() with 1 values, process 1 calls one() with 2 values" in heard[1]


def test_not_a_bit_is_lost_in_a_store_that_keeps_float32(rng):
    # MXNet's servers do, with whatever a worker sends, if a variable of theirs that nothing sets happens to be true.
    vectors = [np.concatenate([rng.normal(size=20) * 1e6, [0.1, -0.0, 5e-324, np.inf, 1.7e308]]) for _ in range(3)]
    results, _ = on_all(
        3,
        lambda worker: gathered(contract(worker), 1, vectors[worker.rank]),
        spoil=lambda total: total.astype(np.float32).astype(total.dtype),
    )
    assert all(rows.tobytes() == np.stack(vectors).tobytes() for rows in results)


@pytest.mark.parametrize("spoil", [lambda total: -0.1 * total, lambda total: 0.5 * total, lambda total: 8 * total])
def test_a_store_that_runs_an_optimizer_is_found_out(spoil):
    heard, _ = on_all(2, lambda worker: gathered(contract(worker), 1, np.array([0.1, 0.7])), spoil)
    assert all("ExchangeError" in words and "update_on_kvstore=False" in words for words in heard)


@pytest.mark.parametrize("num", [2, 5])
def test_moments_of_processes_combine_as_exactly_as_those_of_devices(num, rng):
    x = [rng.normal(size=(n + 1, 4)) + 1e6 for n in range(num)]
    results, _ = on_all(num, lambda worker: gather(worker, "a test", measured(x[worker.rank])))
    expected = combined([measured(part) for part in x])
    for rows in results:
        assert (combined(rows) == expected).all()


def test_layers_share_a_store_with_a_trainer():
    store = mx.kv.create("local")
    assert open_store("local") is open_store("local") and open_store(store) is store
    store.init(0, mx.nd.zeros(3))  # a trainer's first parameter
    exchanges = [StatisticsExchange(store, "layer") for _ in range(3)]
    for n, exchange in enumerate(exchanges):
        exchange.prepare(n + 1)
    for n, exchange in enumerate(exchanges):
        assert exchange.combine(0, np.arange(n + 1.0), 1).tolist() == list(range(n + 1))


def test_processes_that_are_out_of_step_are_told():
    heard, _ = on_all(
        2, lambda worker: StatisticsExchange(worker, "layer", timeout=30).combine(3 + worker.rank, np.ones(2), 0)
    )
    assert all("layer: the processes are out of step: process 0 at call 3, process 1 at call 4" in one for one in heard)


def test_calls_that_go_backward_in_another_order_on_each_process_find_each_other(rng):
    servers, orders = Servers(2), ((8, 9), (9, 8))
    exchanges = [StatisticsExchange(Worker(servers, rank), "layer", timeout=60) for rank in range(2)]
    in_parallel([lambda exchange=exchange: exchange.prepare(2) for exchange in exchanges])
    vectors, sums = {call: rng.normal(size=(2, 2)) for call in (8, 9)}, []

    def process(rank, turn):
        call = orders[rank][turn]
        while turn and exchanges[rank].begun() != (1, orders[rank][0]):
            time.sleep(0.001)
        sums.append((call, exchanges[rank].combine(call, vectors[call][rank], 1)))

    in_parallel([lambda rank=rank, turn=turn: process(rank, turn) for rank in range(2) for turn in range(2)])
    assert sorted(call for call, _ in sums) == [8, 8, 9, 9]
    for call, total in sums:
        np.testing.assert_allclose(total, vectors[call].sum(axis=0), rtol=1e-15, atol=1e-15)


class Silent(Contract):
    """A store whose other process does not come."""

    type, rank, num_workers = "test_sum", 1, 2

    def __init__(self):
        self.release = threading.Event()

    def pushpull(self, key, value, out=None, priority=0):
        push(functools.partial(self.release.wait, 20), write=[out])


def test_a_process_that_does_not_come_is_waited_for_no_longer_than_the_limit(monkeypatch):
    leaving, store = [], Silent()
    monkeypatch.setenv("GLUON_PARALLEL_TIMEOUT", "0.2")
    monkeypatch.setattr(work, "at_exit", leaving.append)
    with pytest.raises(gp.errors.WorkerLost, match="float32 .3,. under key 1: process 1 of 2 waited 0.2 s"):
        handshake.agree(store, ["send float32 (3,) under key 1"], "")
    assert len(leaving) == 1  # MXNet's own way out would wait for that sum
    store.release.set()
    store.release = threading.Event()
    exchange = StatisticsExchange(store, "layer, forward", timeout=0.3)
    with pytest.raises(gp.errors.BarrierTimeout, match=r"layer, forward, call 7: .*process 1 of 2 waited 0.3 s"):
        exchange.combine(7, np.ones(1), 0)
    store.release.set()
