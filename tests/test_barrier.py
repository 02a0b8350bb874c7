"""The barrier alone: devices are threads, values are numbers, and the programs they run are random."""

import threading
import time
import types

import numpy as np
import pytest
from batch_norm_reference import in_parallel

from gluon_parallel import barrier as barrier_module
from gluon_parallel.barrier import Barrier
from gluon_parallel.errors import BarrierBroken, BarrierTimeout


def run(functions):
    """Each function on a thread of its own; the results, or the errors they raised, in order."""
    results = [None] * len(functions)

    def guarded(i):
        try:
            results[i] = functions[i]()
        except BaseException as error:
            results[i] = error

    in_parallel([lambda i=i: guarded(i) for i in range(len(functions))])
    return results


def test_all_leave_with_what_all_brought():
    barrier = Barrier("layer", timeout=30)
    devices = "abcd"
    results = run([lambda d=d: barrier.allreduce(("f", 0), d, d, devices, "".join) for d in devices])
    assert results == ["abcd"] * 4  # in the order of their names, whoever came first


def test_one_alone_does_not_wait():
    assert Barrier("layer", timeout=30).allreduce(("f", 0), "a", 3, {"a"}, sum) == 3


def test_the_exchange_happens_once_per_rendezvous_and_everyone_gets_its_result():
    calls = []

    def exchange(key, value):
        calls.append((key, value))
        return value * 10

    barrier = Barrier("layer", timeout=30, exchange=exchange)
    for n in range(300):
        results = run([lambda i=i: barrier.allreduce(("f", n), str(i), i, {"0", "1", "2"}, sum) for i in range(3)])
        assert results == [30, 30, 30]
    assert calls == [(("f", n), 3) for n in range(300)]


def test_a_key_may_be_used_again_by_whoever_leaves_first():
    barrier = Barrier("layer", timeout=30)

    def device(i):
        return [barrier.allreduce(("same",), str(i), n, {"0", "1", "2"}, sum) for n in range(300)]

    assert run([lambda i=i: device(i) for i in range(3)]) == [[3 * n for n in range(300)]] * 3


def test_rendezvous_at_different_keys_do_not_wait_for_each_other():
    barrier = Barrier("layer", timeout=30)
    orders = {"a": [0, 1], "b": [1, 0]}  # each on threads of its own, as independent operators are
    functions = [
        lambda d=d, k=k: barrier.allreduce(("f", k), d, k, {"a", "b"}, sum) for d, ks in orders.items() for k in ks
    ]
    assert run(functions) == [0, 2, 2, 0]


@pytest.fixture
def time_passes(monkeypatch):
    """Makes the time pass by which a barrier is out of patience, but not before so many devices have come."""

    def when(num, barrier):
        def monotonic():
            return 1000.0 * (sum(len(rendezvous.values) for rendezvous in barrier._rendezvous.values()) >= num)

        monkeypatch.setattr(barrier_module, "time", types.SimpleNamespace(monotonic=monotonic))

    return when


def test_who_is_missing_is_named(time_passes):
    barrier = Barrier("layer7", timeout=1.0)
    time_passes(2, barrier)
    for device in "abc":
        barrier.count(device)[0] += 1
    results = run([lambda d=d: barrier.allreduce(("forward", 4), d, 0, {"a", "b", "c"}, sum) for d in "ac"])
    for error in results:
        assert isinstance(error, BarrierTimeout)
        assert isinstance(error, TimeoutError)
        for words in ("layer7, forward 4", "waited 1 s", "a, c arrived, b did not", "b has come to 1 calls"):
            assert words in str(error)


def test_who_waits_elsewhere_is_said(time_passes):
    barrier = Barrier("layer", timeout=0.2)
    time_passes(2, barrier)
    results = run([lambda: barrier.allreduce(("forward", 1), "a", 0, {"a", "b"}, sum),
                   lambda: barrier.allreduce(("backward", 0), "b", 0, {"a", "b"}, sum)])  # fmt: skip
    assert {type(error) for error in results} == {BarrierTimeout}
    assert "waits at" in str(results[0])


def test_after_a_failure_everyone_is_refused_until_it_is_opened_again():
    gate = types.SimpleNamespace()  # what compiled code reads
    barrier = Barrier("layer", timeout=0.05, gate=gate)
    assert gate.is_open
    with pytest.raises(BarrierTimeout):
        barrier.allreduce(("f", 0), "a", 1, {"a", "b"}, sum)
    assert not gate.is_open
    with pytest.raises(BarrierBroken, match=r"layer, f 0: b comes after the step has failed: .*a waited"):
        barrier.allreduce(("f", 0), "b", 1, {"a", "b"}, sum)  # had it waited, this would be another BarrierTimeout
    barrier.reopen()
    assert gate.is_open
    barrier.timeout = 60  # from here on nothing goes wrong, however busy the machine is
    assert barrier.count("a")[0] == 0
    assert run([lambda d=d: barrier.allreduce(("f", 0), d, 1, {"a", "b"}, sum) for d in "ab"]) == [2, 2]


def test_abandoning_releases_everyone_with_the_reason():
    barrier = Barrier("layer", timeout=60)
    waiting = threading.Event()

    def device(name, key):
        waiting.set()
        return barrier.allreduce(key, name, 1, {"a", "b", "c"}, sum)

    def abandon():
        waiting.wait()
        time.sleep(0.05)
        barrier.abandon("out of data")
        barrier.abandon("what comes later is not told")

    errors = run([lambda: device("a", ("f", 0)), lambda: device("b", ("f", 1)), abandon])
    for error in errors[:2]:
        assert isinstance(error, BarrierBroken)
        assert "out of data" in str(error)


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["combine", "exchange"])
def test_an_error_of_the_one_who_combines_is_everyones(where, error):
    def fails(*_):
        raise error("on purpose")

    barrier = Barrier("layer", timeout=30, exchange=fails if where == "exchange" else None)
    combine = fails if where == "combine" else sum
    errors = run([lambda d=d: barrier.allreduce(("f", 0), d, 1, {"a", "b"}, combine) for d in "ab"])
    assert [str(error) for error in errors] == ["on purpose"] * 2
    with pytest.raises(BarrierBroken, match="on purpose"):
        barrier.allreduce(("f", 1), "a", 1, {"a"}, sum)


def test_a_device_that_comes_twice_or_does_not_belong_is_refused():
    barrier = Barrier("layer", timeout=30)
    with pytest.raises(BarrierBroken, match="z takes no part in this rendezvous of a, b"):
        barrier.allreduce(("f", 0), "z", 1, {"a", "b"}, sum)
    barrier.reopen()
    errors = run([lambda: barrier.allreduce(("f", 0), "a", 1, {"a", "b"}, sum)] * 2)
    assert {type(error) for error in errors} == {BarrierBroken}
    assert "a came twice to" in str(errors[0])


def program(rng, number):
    """A random program: how many devices meet how often, who is slow, who fails, and who loses its way.

    Returns:
        (results per device, what each should be or None if the program was made to fail).
    """
    num_devices, num_calls = int(rng.integers(1, 5)), int(rng.integers(1, 6))
    devices = [f"device{i}" for i in range(num_devices)]
    kind = rng.choice(["right", "right", "right", "raises", "stops", "extra", "reorders"])
    culprit, moment = int(rng.integers(num_devices)), int(rng.integers(num_calls))
    goes_wrong = kind != "right" and not (kind == "reorders" and (moment == num_calls - 1 or num_devices == 1))
    goes_wrong = goes_wrong and not (num_devices == 1 and kind in ("extra", "stops"))
    # Where nothing goes wrong the timeout is long, so that a busy machine cannot make it do so.
    barrier = Barrier(f"program{number}", timeout=0.01 if goes_wrong and kind != "raises" else 60)
    delays = rng.choice([0, 0, 0, 1e-4, 1e-3], size=(num_devices, num_calls))

    def device(i):
        keys = [("forward" if rng_key % 2 == 0 else "backward", rng_key) for rng_key in range(num_calls)]
        if kind == "reorders" and i == culprit:
            keys[moment:] = keys[moment:][::-1]
        if kind == "extra" and i == culprit:
            keys.insert(moment, ("surplus", 0))
        results = []
        for n, key in enumerate(keys):
            if i == culprit and n == moment and kind == "raises":
                barrier.abandon(f"{devices[i]} raised")
                raise ArithmeticError("on purpose")
            if i == culprit and n == moment and kind == "stops":
                return results
            time.sleep(delays[i][min(n, num_calls - 1)])
            results.append(barrier.allreduce(key, devices[i], (i + 1) * (key[1] + 1), devices, sum))
        return results

    total = num_devices * (num_devices + 1) // 2
    expected = None if goes_wrong else [total * (n + 1) for n in range(num_calls)]
    return barrier, kind, total, run([lambda i=i: device(i) for i in range(num_devices)]), expected


def test_three_hundred_random_programs_end_with_the_right_result_or_the_right_error(rng):
    kinds = []
    for number in range(300):
        barrier, kind, total, results, expected = program(rng, number)
        kinds.append(kind)
        where = f"program {number} ({kind}): {results}"
        if expected is not None:
            if kind in ("right", "reorders"):
                assert all(sorted(result) == expected for result in results), where
            continue
        for result in results:
            if isinstance(result, list):  # this device was done before anything went wrong, or is the one that stopped
                assert all(value == total * (n + 1) for n, value in enumerate(result)) or kind in (
                    "extra",
                    "reorders",
                ), where
            else:
                assert isinstance(result, (BarrierTimeout, BarrierBroken, ArithmeticError)), where
                assert str(result) == "on purpose" or f"program{number}" in str(result), where
        assert any(isinstance(result, Exception) for result in results) or kind == "stops", where
        barrier.reopen()
        barrier.timeout = 60  # from here on nothing goes wrong, however busy the machine is
        devices = ["p", "q"]
        assert run([lambda d=d: barrier.allreduce(("again", 0), d, 1, devices, sum) for d in devices]) == [2, 2], where
    assert len(np.unique(kinds)) == 5
