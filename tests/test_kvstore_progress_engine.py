"""Exchanges between processes, with threads for processes and a communicator between them for MPI."""

import argparse
import collections
import ctypes
import functools
import mmap
import queue
import threading
import time
import types

import numpy as np
import pytest
import threads_for_processes
from batch_norm_reference import in_parallel

import gluon_parallel as gp
from gluon_parallel import native
from gluon_parallel.kvstore.mpi import lost_workers, operations, progress_engine
from gluon_parallel.kvstore.mpi.operations import allreduce
from gluon_parallel.kvstore.mpi.plan import Pushes
from gluon_parallel.kvstore.mpi.progress_engine import ProgressEngine
from gluon_parallel.kvstore.mpi.python_sums import compressor
from gluon_parallel.kvstore.mpi.shared_memory.memory import SharedMemory
from gluon_parallel.kvstore.mpi.shared_memory.sums import KeySums
from gluon_parallel.kvstore.mpi.store import MPI
from gluon_parallel.kvstore.mpi.transport import MPI_LOCK, made_within_limit
from gluon_parallel.mxnet.engine import failures
from gluon_parallel.native import new_mutex
from gluon_parallel.native.records import C, address_of
from mxnet import nd


@pytest.fixture
def engines(monkeypatch):
    """Makes the progress engines of so many processes; they part at the end."""
    made = []

    def make(num, timeout=60.0, persistent=True):
        monkeypatch.setattr(progress_engine, "has_persistent", lambda: persistent)
        world = threads_for_processes.World(num)
        made.extend(ProgressEngine(threads_for_processes.Comm(world, rank), timeout) for rank in range(num))
        for progress in made:
            progress.messages._status = types.SimpleNamespace()
            progress.mpi = types.SimpleNamespace(**{**vars(progress.mpi), "Request": threads_for_processes.Request})
        return made

    yield make
    in_parallel([functools.partial(progress.close, limit=1.0) for progress in made])


class Ends:
    """Collects how exchanges end."""

    def __init__(self):
        self.errors = queue.Queue()

    def wait(self, num=1):
        return [self.errors.get(timeout=60) for _ in range(num)]

    def sum(self, progress, key, vector=None):
        """Sum once."""
        vector = np.ones(2) if vector is None else vector
        self.call(allreduce(progress.everyone, key, b"f", vector))

    def call(self, *operations):
        for operation in operations:
            operation.call(lambda: None, self.errors.put)


@pytest.mark.parametrize(("num", "persistent"), [(1, True), (2, True), (3, True), (5, True), (8, True), (3, False)])
def test_keys_in_any_order_and_repeated_meet_by_key(engines, rng, num, persistent):
    """Also where MPI has no persistent operations, and by another operation each time."""
    group, ends = engines(num, persistent=persistent), Ends()
    keys = [f"0s:{number % 7}".encode() for number in range(70)]  # each ten times
    values = rng.standard_normal((num, len(keys), 50))
    results = np.empty_like(values)
    for progress in group:

        def made(key, progress=progress):
            array = np.empty(50)
            return array, allreduce(progress.everyone, key, b"float64 (50,)", array)

        # Every key's exchanges keep their order; beyond that each process has an order of its own.
        left = {key: [index for index, one in enumerate(keys) if one == key] for key in set(keys)}
        known = {key: made(key) for key in left}
        for key in map(bytes, rng.permutation(keys)):
            index, (array, summing) = left[key].pop(0), known[key] if persistent else made(key)

            def finish(error, index=index, array=array, rank=progress.rank):
                results[rank, index] = array
                ends.errors.put(error)

            summing.call(functools.partial(np.copyto, array, values[progress.rank, index]), finish)
    assert ends.wait(num * len(keys)) == [None] * (num * len(keys))
    assert np.allclose(results, values.sum(axis=0))


@pytest.mark.parametrize("agreed", [False, True])
def test_a_missing_process_is_named_with_the_key_on_all_others_and_nothing_works_after_it(engines, agreed):
    group, ends = engines(3), Ends()
    sums = [allreduce(progress.everyone, b"0s:weight", b"f", np.ones(4)) for progress in group]
    if agreed:
        ends.call(*sums)
        assert ends.wait(3) == [None] * 3
    ends.call(*sums[:2])
    for progress in group[:2]:
        while [exchange.ranks_missing() for exchange in progress.active()[:1]] != [{2}]:
            time.sleep(0.01)
    for progress in group[:2]:
        progress.timeout = 0.1  # from now on process 2 is late
    first, second = ends.wait(2)
    for error in (first, second):
        assert isinstance(error, gp.errors.WorkerLost)
        assert "key weight" in str(error) and "for process 2" in str(error), error
    ends.sum(group[0], b"0s:other")
    [error] = ends.wait()
    assert error is group[0].failure
    with pytest.raises(gp.errors.WorkerLost):
        group[0].check()


def test_a_slow_process_that_goes_on_with_others_is_waited_for(engines, monkeypatch):
    group, ends, seconds = engines(2), Ends(), [time.monotonic()]
    clock = types.SimpleNamespace(**{**vars(time), "monotonic": lambda: seconds[0]})
    with monkeypatch.context() as patch:
        for module in (lost_workers, operations):
            patch.setattr(module, "time", clock)
        ends.sum(group[0], b"0s:slow")
        for number in range(8):
            for progress in group:
                ends.sum(progress, f"0s:{number}".encode())
            assert ends.wait(2) == [None] * 2
            seconds[0] += 0.4 * group[0].timeout
            wanted = sum(sum(signatures.values()) for signatures in group[1].counts.values())
            while group[0].lost._accounts.get(1, [-1])[0] < wanted:  # until it has asked
                time.sleep(0.001)
        ends.sum(group[1], b"0s:slow")
        assert ends.wait(2) == [None] * 2


def test_a_process_that_leaves_is_not_waited_for(engines):
    group, ends = engines(2), Ends()
    ends.sum(group[0], b"0s:w")
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


def test_last_words_to_a_process_that_has_gone_are_not_waited_for(engines):
    first, second = engines(2)
    first.messages._sending.append((types.SimpleNamespace(Test=lambda: False), b"nobody receives it"))
    leaving = threading.Thread(target=first.close)  # its limit is 60 seconds
    leaving.start()
    second.close("ValueError: broken image", limit=0.1)
    leaving.join(30)
    assert not leaving.is_alive()


def test_a_key_that_becomes_known_while_another_process_asks_is_no_error(engines):
    one, _ = engines(2)

    class Grows(dict):
        def items(self):  # as the thread that pushes does, between two keys
            one.counts[b"new %d" % len(one.counts)] = {b"f": 1}
            return super().items()

    one.counts.update({b"first": Grows({b"f": 2}), b"second": {b"f": 1}})
    account = one.lost.account([b"first"])
    assert (account.num_exchanges, account.counts) == (4, {b"first": {b"f": 2}})


@pytest.mark.parametrize("num", [1, 2, 7, 30])
def test_a_new_key_costs_each_process_one_message_up_and_one_to_each_child(engines, num):
    group, ends, posted = engines(num), Ends(), collections.Counter()
    for progress in group:

        def post(rank, message, progress=progress, original=progress.messages.post):
            posted[progress.rank] += message.kind in progress_engine.OF_ALL
            original(rank, message)

        progress.messages.post = post
        ends.sum(progress, b"0s:w")
    assert ends.wait(num) == [None] * num
    assert sum(posted.values()) == 2 * (num - 1) and max(posted.values(), default=0) <= 3


@pytest.mark.parametrize("wrong", [{}, {"type": "3bit"}, {"type": "2bit", "threshold": 0}, {"type": "fp16", "x": 1}])
def test_compression_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="compression_params"):
        compressor(wrong)


@pytest.mark.parametrize(("seconds", "is_asked"), [(0, False), (10, True)])
def test_a_look_asks_an_exchange_who_is_missing_only_when_it_is_late(engines, seconds, is_asked):
    (one, _), asked = engines(2), []
    since = time.monotonic() - seconds
    exchange = argparse.Namespace(
        name=b"0s:w", signature=b"f", since=since, ranks_missing=lambda: asked.append(1) or {1}
    )
    one.active = lambda: [exchange]
    one.lost.look()
    assert bool(asked) == is_asked


def test_a_process_that_is_just_writing_its_row_does_not_wait_for_itself():
    lines = (C.Line * 3)()
    progress = types.SimpleNamespace(rank=1, size=3, announce=lambda *_: None)
    shared = types.SimpleNamespace(progress=progress, members=[0, 1, 2], num_hosts=1)
    rows = KeySums(shared, b"0s:weight", b"float32 (4,)", [4], np.dtype("float32"))
    rows.record.next_number, rows.record.lines = 1, address_of(lines)
    lines[0].arrived = 1
    assert rows.ranks_missing("arrived", 1) == {2}


def test_an_exchange_that_the_engine_refuses_gets_no_number_and_those_before_it_are_under_way(monkeypatch):
    pushed, kind = [], ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 12)
    engine = kind(lambda _function, exchange, *_: pushed.append(exchange) or -(len(pushed) == 2))
    external = C.External.in_dll(native.library(), "gp_external")
    monkeypatch.setattr(external, "MXEnginePushAsyncND", ctypes.cast(engine, ctypes.c_void_p).value)
    mutex, keys = new_mutex(), [C.HostKey() for _ in range(3)]
    host, exchanges = C.Host(pushing=address_of(mutex)), [C.HostExchange(key=address_of(key)) for key in keys]
    addresses, priorities = np.array([*map(address_of, exchanges)]), np.zeros(3, np.int64)
    push = functools.partial(native.function("gp_push", 5), *map(address_of, (host, addresses, priorities)))
    assert push(0, 3) == ~1 and pushed == addresses[:2].tolist()
    assert [(one.state, key.pushed) for one, key in zip(exchanges, keys)] == [(C.PUSHED, 1), (C.IDLE, 0), (C.IDLE, 0)]
    assert push(0, 3) == 0  # the first one is under way, and has no twin
    twin = C.HostExchange(key=address_of(keys[0]))
    exchanges[0].twin = address_of(twin)
    assert push(0, 3) == 3 and pushed[2:] == [address_of(twin), *addresses[1:].tolist()]
    assert [key.pushed for key in keys] == [2, 1, 1] and twin.number == 2


def test_the_error_that_ended_shared_memory_is_raised_after_a_thousand_others():
    progress = types.SimpleNamespace(
        rank=0, size=1, whole=None, failure=None, counts=collections.defaultdict(dict),
        announce=lambda key, _record: key.agreed(), is_watching=True,
    )  # fmt: skip
    shared = SharedMemory(progress, mmap.mmap(-1, 1 << 22), [0], 1, None)
    error = gp.errors.WorkerLost("process 1 is lost")
    shared.abandon(error)
    failures.mark_reported(error)
    others = [ValueError(f"another {number}") for number in range(1500)]
    for other in others:
        failures.mark_reported(other)
    array = nd.ones(3)
    try:
        sums = shared.rows_of(KeySums, b"0s:x", b"f", [3], array.dtype)
        pushes = Pushes(shared, [sums.exchange([array], [array])], [0])
        pushes.push()
        with pytest.raises(Exception, match="process 1 is lost"):
            array.wait_to_read()
    finally:
        shared.close()  # whose thread works on its memory


def test_a_process_can_end_while_mpi_keeps_the_thread_that_has_called_it(engines):
    first, _ = engines(2, timeout=0.3)
    left = []
    ending = threading.Thread(target=lambda: left.append(first.close("an error")))
    with MPI_LOCK:
        ending.start()
        ending.join(60)
    assert left == [[1]]


def test_a_group_that_mpi_could_not_make_has_failed_before_mpi_names_a_lost_process(monkeypatch, engines):
    monkeypatch.setenv("GLUON_PARALLEL_MIN_PROCESSES", "1")
    [progress] = engines(1)

    def split():
        raise RuntimeError("a process is lost")

    with pytest.raises(gp.errors.WorkerLost, match="made no new communicator: a process is lost") as caught:
        made_within_limit(progress, split)
    assert progress.failure is caught.value  # else the training that goes on without it would end by the error


def test_the_end_of_an_exchange_made_before_a_loss_does_not_end_the_key_of_one_made_after_it():
    before, after = (types.SimpleNamespace(shared=types.SimpleNamespace(ended=[])) for _ in range(2))
    store = object.__new__(MPI)
    store._number, store._progress = 0, before
    end = store.end_of_gather(7)
    store._progress = after  # where keys are numbered anew
    end()
    assert before.shared.ended == [(0, 7)] and after.shared.ended == []


def test_who_goes_on_after_a_failure_waits_until_it_has_ended_everything(engines):
    (progress, _), order, begun, goes_on = engines(2), [], threading.Event(), threading.Event()

    def abandon(_error):
        begun.set()
        assert goes_on.wait(60)
        order.append("ended")

    def go_on():
        progress.wait_for_end()
        order.append("goes on")

    progress.shared = types.SimpleNamespace(abandon=abandon, close=lambda: None)
    failing = threading.Thread(target=progress.fail, args=(gp.errors.WorkerLost("process 1 is lost"), False))
    failing.start()
    assert begun.wait(60) and progress.failure is not None  # so the training has heard of it
    going_on = threading.Thread(target=go_on)
    going_on.start()
    goes_on.set()
    in_parallel([failing.join, going_on.join])
    assert order == ["ended", "goes on"]
    progress.shared = None


def test_what_a_fork_submits_ends_although_the_thread_of_its_parent_was_just_being_woken(engines):
    [progress], ends = engines(1), Ends()
    progress._work.set()  # as the fork has it; the thread that would look next runs in the parent alone
    progress.disown(gp.errors.StoreUnavailable("this is a fork"))
    ends.sum(progress, b"0s:weight")
    assert ends.errors.get(timeout=5) is progress.failure


def test_where_no_thread_starts_any_more_what_is_submitted_is_called_at_once(engines, monkeypatch):
    (progress, _), called = engines(2), []
    with monkeypatch.context() as at_the_end:  # of the interpreter

        def start(_thread):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        at_the_end.setattr(threading.Thread, "start", start)
        Ends().sum(progress, b"0s:weight")  # for which process 1 does not come
        progress.submit(lambda: called.append("submitted"))
    assert called == ["submitted"]


def test_what_is_submitted_while_others_are_under_way_is_started_and_left_to_the_thread_to_test(engines, monkeypatch):
    group, ends, tests = engines(2), Ends(), []
    mine, others = (
        [allreduce(progress.everyone, b"0s:%d" % key, b"f", np.ones(4)) for key in range(20)] for progress in group
    )
    ends.call(*mine, *others)
    assert ends.wait(40) == [None] * 40  # from here on the keys are known, and begin without a message
    test = group[0]._test

    def count():
        tests.append(threading.current_thread())
        return test()

    monkeypatch.setattr(group[0], "_test", count)
    ends.call(*mine)
    by_whom = [*tests]
    ends.call(*others)
    assert ends.wait(40) == [None] * 40
    assert by_whom.count(threading.current_thread()) <= 1


def test_what_is_submitted_after_the_end_is_called_at_once(engines):
    [progress], called = engines(1), []
    progress._wake()
    progress.close(limit=1.0)
    progress.submit(lambda: called.append("submitted"))
    assert called == ["submitted"]


def test_a_thread_that_has_been_woken_finds_what_is_submitted(engines, monkeypatch):
    [progress], called, tried = engines(1), threading.Event(), []
    progress._wake()
    with progress._lock:
        progress._wake()
        while progress._work.is_set():  # until the thread has been woken, and waits for the lock
            time.sleep(0.001)
        progress._wake()
        monkeypatch.setattr(progress, "_try", lambda *arguments: tried.append(arguments))
        progress.submit(called.set)
        assert not tried and not called.is_set()
    assert called.wait(60)
