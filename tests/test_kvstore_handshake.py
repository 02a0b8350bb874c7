"""Processes, which here are threads that share a sum, go on only if all of them say the same."""

import threading

import numpy as np
import pytest
from batch_norm_reference import in_parallel

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.engine import push
from gluon_parallel.kvstore import handshake
from gluon_parallel.kvstore.handshake import Comparing


class Member(Comparing):
    """One process of a group whose members add up whatever they start at the same time."""

    type = "test_sum"

    def __init__(self, rank, arrays, barrier):
        self.rank, self.num_workers, self._arrays, self._barrier = rank, barrier.parties, arrays, barrier
        self.started = []

    def _start_sum(self, name, array):
        self.started.append((name, array.shape))
        self._arrays[self.rank] = array.asnumpy()
        self._barrier.wait(60)
        total = sum(self._arrays)
        self._barrier.wait(60)
        array[:] = total


def call(lists):
    """What each process of a group hears that says these items: None, or the error in words; and the members."""
    arrays, barrier, heard = [None] * len(lists), threading.Barrier(len(lists)), [None] * len(lists)
    members = [Member(rank, arrays, barrier) for rank in range(len(lists))]

    def process(member):
        try:
            member._agree("send", lists[member.rank], "Do the same")
        except gp.errors.WorkersDiffer as error:
            heard[member.rank] = str(error)

    in_parallel([lambda member=member: process(member) for member in members])
    return heard, members


@pytest.mark.parametrize("num", [2, 3, 5])
def test_those_who_say_the_same_go_on_after_one_message_of_a_fixed_length(num, rng):
    for items in (["one"], ["one", "two"], [str(number) for number in rng.integers(9, size=200)]):
        heard, members = call([items] * num)
        assert heard == [None] * num
        assert all(member.started == [(handshake.HANDSHAKE_DIGEST, (num, 8))] for member in members)


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ([["a"], ["b"]], "process 0 sends a, process 1 sends b"),
        ([["a", "b"], ["a", "c"], ["a", "b"]], "processes 0, 2 send b, process 1 sends c"),
        ([["a", "b"], ["a"], ["a", "b"], ["a"]], "processes 0, 2 send b, processes 1, 3 send nothing more"),
        ([["a"], ["a", "b", "c"]], "process 0 sends nothing more, process 1 sends b"),
        ([["a", "b"], ["b", "a"]], "process 0 sends a, process 1 sends b"),
        ([["a" * 300], ["b"]], f"process 0 sends {'a' * 143}~"),
        ([["a" * 300 + "b"], ["a" * 300]], f"process 0 sends {'a' * 143}~"),
    ],
)
def test_all_hear_who_says_what_at_the_first_item_that_differs(lists, words):
    heard, _ = call(lists)
    assert heard == [heard[0]] * len(lists)
    assert heard[0].startswith(f"store 'test_sum': {words}") and heard[0].endswith(". Do the same")


def test_any_two_texts_are_told_apart_whoever_says_them(rng):
    for _ in range(50):
        num = int(rng.integers(2, 5))
        lists = [[str(number) for number in row] for row in rng.integers(2, size=(num, 3))]
        heard, _ = call(lists)
        assert [words is None for words in heard] == [lists == [lists[0]] * num] * num


def test_one_process_alone_sends_nothing():
    _, [member] = call([["a"]])
    assert member.started == []


def test_a_process_that_does_not_answer_is_waited_for_no_longer_than_the_limit(monkeypatch):
    release, leaving = threading.Event(), []
    monkeypatch.setenv("GLUON_PARALLEL_TIMEOUT", "0.2")
    monkeypatch.setattr(handshake.atexit, "register", leaving.append)

    def start(name, array):
        push(lambda: release.wait(20), write=[array])  # as a store does that waits for its peers

    member = Member(1, [], threading.Barrier(2))
    member._start_sum = start
    with pytest.raises(gp.errors.WorkerLost, match="float32 .3,. under key 1: process 1 of 2 waited 0.2 s"):
        member._agree("send", ["float32 (3,) under key 1"], "")
    release.set()
    assert len(leaving) == 1  # MXNet's own way out would wait for that sum


def test_arrays_are_described_by_what_a_server_must_know():
    arrays = [[mx.nd.zeros((2, 3)), mx.nd.zeros((2, 3))], mx.nd.zeros(4, dtype="float16")]
    assert handshake.described(["w", 3], arrays) == ["float32 (2, 3) under key w", "float16 (4,) under key 3"]
    assert not handshake.words_of("").any()


def test_long_words_that_differ_at_their_end_differ():
    one, other = (handshake.words_of("float32 (2, 3) under key " + 200 * "a" + end) for end in "bc")
    assert one.size == other.size == handshake.words_of("").size
    assert not np.array_equal(one, other)
    assert handshake.spelled(one).startswith("float32 (2, 3) under key aaa")
