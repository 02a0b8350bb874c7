"""The exchange between processes, which here are threads that share a store that sums."""

import threading
import time

import numpy as np
import pytest
from batch_norm_reference import combined, in_parallel, measured

import mxnet as mx
from gluon_parallel.errors import BarrierTimeout, ExchangeError
from gluon_parallel.kvstore.exchange import Exchange, open_store


class Servers:
    """What `num_workers` stores share: a sum per key, complete when all have pushed."""

    def __init__(self, num_workers, spoil=lambda total: total):
        self.num_workers, self.spoil = num_workers, spoil
        self.parts, self.changed, self.done = {}, threading.Condition(), {}


class Worker(mx.kvstore.KVStoreBase):
    """One process's view of them: the smallest store that sums."""

    type = "test_sum"

    def __init__(self, servers, rank):
        self.servers, self._rank, self.rounds = servers, rank, {}

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

        def work():
            with servers.changed:
                parts = servers.parts.setdefault(slot, [])
                parts.append(value.asnumpy())
                if len(parts) == servers.num_workers:
                    servers.done[slot] = servers.spoil(sum(parts))
                    servers.changed.notify_all()
                if servers.changed.wait_for(lambda: slot in servers.done, timeout=60):
                    out[:] = servers.done[slot]

        work()


def gathered(servers, vectors, calls=(0,), timeout=30):
    results = [None] * len(vectors)

    def process(rank):
        exchange = Exchange(Worker(servers, rank), "layer", timeout)
        exchange.prepare(len(vectors[rank]))
        results[rank] = [exchange.gather(call, vectors[rank]) for call in calls]

    in_parallel([lambda rank=rank: process(rank) for rank in range(len(vectors))])
    return results


@pytest.mark.parametrize("store", ["local", "device"])
def test_one_process_gets_its_own_vector_back_to_the_last_bit(rng, store):
    exchange = Exchange(open_store(store), "layer")
    exchange.prepare(50)
    for call in range(300):
        vector = rng.normal(size=50) * 1e6
        assert (exchange.gather(call, vector) == vector).all()


def test_a_store_is_opened_once_per_name():
    assert open_store("local") is open_store("local")
    own = mx.kv.create("local")
    assert open_store(own) is own


def test_several_layers_share_a_store_with_a_trainer():
    store = mx.kv.create("local")
    store.init(0, mx.nd.zeros(3))  # a trainer's first parameter
    exchanges = [Exchange(store, "layer") for _ in range(3)]
    for n, exchange in enumerate(exchanges):
        exchange.prepare(n + 1)
    for n, exchange in enumerate(exchanges):
        assert exchange.gather(0, np.arange(n + 1.0)).tolist() == [list(range(n + 1))]


@pytest.mark.parametrize("num_workers", [2, 3, 5])
def test_moments_of_processes_combine_as_exactly_as_those_of_devices(rng, num_workers):
    x = [rng.normal(size=(n + 1, 4)) + 1e6 for n in range(num_workers)]
    rows = gathered(Servers(num_workers), [measured(part) for part in x])
    expected = combined([measured(part) for part in x])
    for row in rows:
        assert (combined(row[0]) == expected).all()


def test_not_a_bit_is_lost_in_a_store_that_keeps_float32(rng):
    # MXNet's servers do, with whatever a worker sends, if a variable of theirs that nothing sets happens to be true.
    vectors = [np.concatenate([rng.normal(size=20) * 1e6, [0.1, -0.0, 5e-324, np.inf, 1.7e308]]) for _ in range(3)]
    servers = Servers(3, spoil=lambda total: total.astype(np.float32).astype(total.dtype))
    for rows in gathered(servers, vectors, calls=[2**40 + 1])[0]:
        assert rows.tobytes() == np.stack(vectors).tobytes()


def test_processes_that_are_out_of_step_are_told(rng):
    servers = Servers(2)
    exchanges = [Exchange(Worker(servers, rank), "layer", timeout=30) for rank in range(2)]
    errors = []

    def process(rank):
        exchanges[rank].prepare(2)
        try:
            exchanges[rank].gather(3 + rank, np.ones(2))
        except ExchangeError as error:
            errors.append(str(error))

    in_parallel([lambda rank=rank: process(rank) for rank in range(2)])
    assert len(errors) == 2
    assert "layer: the processes are out of step: process 0 at call 3, process 1 at call 4" in errors[0]


def test_calls_that_go_backward_in_another_order_on_each_process_find_each_other(rng):
    servers, orders = Servers(2), ((8, 9), (9, 8))
    exchanges = [Exchange(Worker(servers, rank), "layer", timeout=60) for rank in range(2)]
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


def test_a_store_that_runs_an_optimizer_is_found_out():
    with pytest.raises(ExchangeError, match="update_on_kvstore=False"):
        gathered(Servers(2, spoil=lambda total: -0.1 * total), [np.ones(2)] * 2)


def test_a_process_that_does_not_come_is_waited_for_no_longer_than_said():
    class Silent(Worker):
        def pushpull(self, key, value, out=None, priority=0):
            from gluon_parallel.engine import push

            self.release = threading.Event()
            push(lambda: self.release.wait(20), write=[out])  # as a store does that is waiting for its peers

    store = Silent(Servers(2), 1)
    exchange = Exchange(store, "layer, forward", timeout=0.2)
    exchange.prepare(1)
    with pytest.raises(BarrierTimeout, match=r"layer, forward, call 7: process 1 of 2 waited 0.2 s"):
        exchange.gather(7, np.ones(1))
    store.release.set()
