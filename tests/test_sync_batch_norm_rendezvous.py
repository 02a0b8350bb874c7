"""Rendezvous in compiled code: threads in place of devices; all complete an exchange, or all leave it to Python."""

import builtins
import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from batch_norm_reference import (
    added,
    close,
    combined,
    hybridized,
    in_parallel,
    joint,
    normalised,
    on,
    reference,
    shards,
)
from batch_norm_waiting import wait_for

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import nn
from gluon_parallel.barrier import Barrier
from gluon_parallel.engine.ending import InterpreterState
from gluon_parallel.errors import BarrierTimeout
from gluon_parallel.nn.sync_batch_norm import operator, operator_state, rendezvous
from gluon_parallel.nn.sync_batch_norm.measured import recorded
from gluon_parallel.nn.sync_batch_norm.operator_state import passes
from gluon_parallel.nn.sync_batch_norm.rendezvous import NUM_SLOTS, Rendezvous, address_of

pytestmark = pytest.mark.arithmetic

CHANNELS = 3
FORWARD, BACKWARD = range(2)
FREE = 0


@pytest.fixture
def patience(monkeypatch):
    """Set how long, in seconds, layers made from now on wait before an exchange is left to Python; one, if given."""

    def set_to(seconds, *made):
        monkeypatch.setattr(rendezvous, "PATIENCE", seconds)
        for one in made:
            one.record.patience = int(seconds * 1e9)

    set_to(60)
    return set_to


@pytest.fixture
def done_in_python(monkeypatch):
    """Of each call of `Barrier.allreduce`, for how many seconds the device had waited in compiled code."""
    allreduce, seconds = Barrier.allreduce, []

    def noted(self, key, device, value, devices, combine, since):
        seconds.append(time.monotonic() - since)
        return allreduce(self, key, device, value, devices, combine, since)

    monkeypatch.setattr(Barrier, "allreduce", noted)
    return seconds


def at_rendezvous(num_devices, only=None):
    made = Rendezvous()
    made.record.is_open = 1
    made.prepare(frozenset(f"cpu({i})" for i in range(num_devices)), only, CHANNELS)
    return made


def allreduce(at, call, direction, device, vector, operator=0):
    """What the device leaves with, or None if Python has to do it."""
    values = np.array(vector, np.float64)
    key, number = 2 * call + direction, at.number(f"cpu({device})")
    done = passes().library.function("exchange", 5)(address_of(at.record), key, number, address_of(values), operator)
    return values if done else None


def free(at):
    """Whether all slots are free."""
    return all(slot.state == FREE for slot in at.slots)


def run(functions):
    results = [None] * len(functions)

    def one(i):
        results[i] = functions[i]()

    in_parallel([lambda i=i: one(i) for i in range(len(functions))])
    return results


def moments(rng, count):
    return np.array([count, *(rng.normal(size=CHANNELS) * (count > 0)), *(rng.uniform(size=CHANNELS) * count)])


@pytest.mark.parametrize("counts", [(4,), (3, 5), (7, 0, 2), (0, 0), (1, 2, 3, 4)], ids=str)
def test_the_result_is_bit_for_bit_the_combination_in_the_order_of_the_devices(rng, patience, counts):
    at = at_rendezvous(len(counts))
    for call in range(50):
        parts = [moments(rng, count) for count in counts]
        results = run([lambda d=d: allreduce(at, call, FORWARD, d, parts[d]) for d in range(len(counts))])
        assert all((result == combined(parts)).all() for result in results)
        sums = [rng.normal(size=2 * CHANNELS) for _ in counts]
        results = run([lambda d=d: allreduce(at, call, BACKWARD, d, sums[d]) for d in range(len(counts))])
        assert all((result == added(sums)).all() for result in results)
    assert free(at)


def test_branches_meet_in_any_order_and_directions_do_not_mix(rng, patience):
    at = at_rendezvous(3)
    keys = [(call, direction) for call in range(6) for direction in (FORWARD, BACKWARD)]
    for _ in range(30):
        functions = []
        for device in range(3):
            for number in rng.permutation(len(keys)):
                call, direction = keys[number]
                vector = np.full(2 * CHANNELS + (direction == FORWARD), number * 10.0 + device)
                if direction == FORWARD:
                    vector[0] = 1
                functions.append(lambda c=call, r=direction, d=device, v=vector: (c, r, allreduce(at, c, r, d, v)))
        for call, direction, result in run(functions):
            number = keys.index((call, direction))
            expected = number * 10 + 1 if direction == FORWARD else 3 * (number * 10 + 1)
            np.testing.assert_allclose(result[1 : 1 + CHANNELS], expected, rtol=1e-15, atol=1e-15)
        assert free(at)


def test_the_same_call_may_come_back_before_the_last_has_left(rng, patience):
    at = at_rendezvous(3)

    def device(d):
        return [allreduce(at, 0, BACKWARD, d, np.full(2 * CHANNELS, float(n)))[0] for n in range(500)]

    assert run([lambda d=d: device(d) for d in range(3)]) == [[3.0 * n for n in range(500)]] * 3
    assert free(at)


def test_who_is_late_finds_that_all_have_gone_to_python(patience):
    patience(0.05)
    at = at_rendezvous(3)
    vector = np.ones(2 * CHANNELS)
    assert run([lambda d=d: allreduce(at, 0, BACKWARD, d, vector) for d in range(2)]) == [None] * 2
    assert allreduce(at, 0, BACKWARD, 2, vector) is None
    assert free(at)
    patience(60, at)
    assert [result[0] for result in run([lambda d=d: allreduce(at, 1, BACKWARD, d, vector) for d in range(3)])] == [
        3.0
    ] * 3


def test_strangers_the_closed_and_the_crowded_are_left_to_python(patience):
    vector = np.ones(2 * CHANNELS)
    at = at_rendezvous(2, only=frozenset({"cpu(1)"}))
    assert allreduce(at, 0, BACKWARD, 0, vector) is None  # takes no part
    assert allreduce(at, 0, BACKWARD, 7, vector) is None  # nobody knows it
    assert (allreduce(at, 0, BACKWARD, 1, vector) == vector).all()
    at.record.is_open = 0
    assert allreduce(at, 1, BACKWARD, 1, vector) is None
    assert free(at)
    patience(0.05)
    at = at_rendezvous(2)
    assert (
        run([lambda c=c: allreduce(at, c, BACKWARD, 0, vector) for c in range(20)]) == [None] * 20
    )  # no blocks are left
    at.clear()
    assert free(at)


def test_a_device_that_comes_twice_is_left_to_python(patience):
    at = at_rendezvous(2)
    vector = np.ones(2 * CHANNELS)
    first = threading.Thread(target=allreduce, args=(at, 0, BACKWARD, 0, vector))
    first.start()
    wait_for(lambda: any(slot.arrived for slot in at.slots))
    assert allreduce(at, 0, BACKWARD, 0, vector) is None
    assert allreduce(at, 0, BACKWARD, 1, vector)[0] == 2
    first.join()


def test_devices_that_ctrl_c_did_not_let_change_meet_again(patience, monkeypatch):
    at = at_rendezvous(2)
    allocate, both = at._allocate, at.prepared

    def interrupted(*arguments):
        allocate(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(at, "_allocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        at.prepare(frozenset({"cpu(0)"}), None, CHANNELS)
    monkeypatch.setattr(at, "_allocate", allocate)
    at.prepare(*both)
    results = run([lambda d=d: allreduce(at, 0, BACKWARD, d, np.ones(2 * CHANNELS))[0] for d in range(2)])
    assert results == [2.0, 2.0]


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_an_error_in_what_compiled_code_asks_of_python_is_the_operators(monkeypatch, error):
    class State:
        def allreduce_devices(self, *_):
            raise error

    state = State()
    monkeypatch.setitem(operator_state._states, 1, state)
    assert operator_state.answering(operator_state.OperatorState.allreduce_devices)(1, 0, 0) == 1
    assert isinstance(state.error, error)


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_one_meets_the_other_processes_for_all(patience, monkeypatch, fails):
    at = at_rendezvous(2)
    at.record.spans_processes = 1
    calls = []

    class State:
        def allreduce_processes(self, key, where, has_begun):
            calls.append((key, has_begun))
            values = np.ctypeslib.as_array((ctypes.c_double * (2 * CHANNELS)).from_address(where))
            values *= 10
            if fails:
                raise ArithmeticError("on purpose")

    monkeypatch.setitem(operator_state._states, 7, State())
    results = run([lambda d=d: allreduce(at, 4, BACKWARD, d, np.ones(2 * CHANNELS), operator=7) for d in range(2)])
    assert calls == [(2 * 4 + BACKWARD, 0)]
    assert results == [None, None] if fails else [result[0] for result in results] == [20.0, 20.0]
    assert free(at)


@pytest.mark.parametrize(
    ("dtype", "arithmetic"), [("float32", None), ("float64", None), ("float16", None), ("float32", "operators")]
)
@pytest.mark.parametrize("hybridize", [False, True])
def test_python_is_not_needed_while_nothing_goes_wrong(rng, patience, monkeypatch, dtype, arithmetic, hybridize):
    devices = gp.devices("cpu:2")
    net = nn.SyncBatchNorm(in_channels=CHANNELS, arithmetic=arithmetic)
    net.initialize(ctx=devices)
    net.cast(dtype)
    net = hybridized(net) if hybridize else net

    def fail(*_args, **_kwargs):
        raise AssertionError("Python was asked to exchange")

    monkeypatch.setattr(Barrier, "allreduce", fail)
    for _ in range(3):
        xs = on(devices, shards(rng, (6, 2), (CHANNELS, 4), dtype))
        ys = joint(net, xs, on(devices, shards(rng, (6, 2), (CHANNELS, 4), dtype), grad=False))
        normalised(ys, 2e-3 if dtype == "float16" else 1e-6)
    mx.nd.waitall()
    assert net.sync_group.rendezvous.record.in_callbacks > 0
    assert free(net.sync_group.rendezvous)


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("in_python", [False, True])
def test_a_slow_device_changes_nothing_but_what_they_exchange_through(
    rng, patience, hybridize, in_python, done_in_python
):
    patience(0.02 if in_python else 60)
    devices = gp.devices("cpu:2")
    net = nn.SyncBatchNorm(in_channels=CHANNELS)
    net.initialize(ctx=devices)
    net = hybridized(net) if hybridize else net

    def wait_a_little(call, direction):  # once the first device has come
        at, key = net.sync_group.rendezvous, 2 * call + direction
        wait_for(lambda: any(slot.key == key and slot.arrived for slot in at.slots))
        time.sleep(0.1)

    with nn.measured([net.sync_group]) as spent, recorded([net.sync_group]) as passes:
        for call in range(3):
            x, heads = shards(rng, (6, 2), (CHANNELS, 4)), shards(rng, (6, 2), (CHANNELS, 4))
            xs, placed = on(devices, x), on(devices, heads, grad=False)
            with mx.autograd.record():
                ys = [net(xs[0])]
                wait_a_little(call, FORWARD)
                ys.append(net(xs[1]))
            ys[0].backward(placed[0])
            wait_a_little(call, BACKWARD)
            ys[1].backward(placed[1])
            normalised(ys, 1e-6)
            dx = reference(x, heads, np.ones(CHANNELS), np.zeros(CHANNELS))[1]
            close(np.concatenate([a.grad.asnumpy() for a in xs]), np.concatenate(dx), 3e-6)
        mx.nd.waitall()
    assert bool(done_in_python) == in_python
    assert free(net.sync_group.rendezvous)
    assert len(passes) == 3 * 2 * 2
    assert all(one.began <= one.arrived <= one.complete <= one.reduced <= one.ended for one in passes)
    assert 0.6 <= spent["waiting"] < spent["callbacks"]  # six times 0.1 s
    assert spent["waiting"] == pytest.approx(sum(one.complete - one.arrived for one in passes) / 1e9)
    assert spent["callbacks"] == pytest.approx(sum(one.ended - one.began for one in passes) / 1e9)


def test_a_net_may_be_deleted_while_its_devices_wait_for_each_other(rng, patience, done_in_python):
    patience(0.02)
    devices = gp.devices("cpu:2")
    net = nn.SyncBatchNorm(in_channels=CHANNELS)
    net.initialize(ctx=devices)
    deleted = weakref.ref(net)
    x, heads = shards(rng, (6, 2), (CHANNELS, 4)), shards(rng, (6, 2), (CHANNELS, 4))
    xs, placed = on(devices, x), on(devices, heads, grad=False)
    with mx.autograd.record():
        ys = [net(one) for one in xs]
    mx.nd.waitall()
    done_in_python.clear()
    ys[0].backward(placed[0])
    wait_for(lambda: done_in_python)
    del net
    gc.collect()
    assert deleted() is None
    ys[1].backward(placed[1])
    dx = reference(x, heads, np.ones(CHANNELS), np.zeros(CHANNELS))[1]
    close(np.concatenate([a.grad.asnumpy() for a in xs]), np.concatenate(dx), 3e-6)
    assert len(done_in_python) == 2


def test_the_limit_counts_from_when_a_device_came_not_from_when_python_took_over(rng, patience, done_in_python):
    patience(0.3)
    devices = gp.devices("cpu:2")
    net = nn.SyncBatchNorm(in_channels=CHANNELS, timeout=0.3)
    net.initialize(ctx=devices)
    with mx.autograd.record():
        y = net(on(devices[:1], shards(rng, (6,), (CHANNELS, 4)))[0])
    with pytest.raises(BarrierTimeout):
        y.wait_to_read()
    [seconds] = done_in_python
    assert seconds > 0.299
    began, barrier = time.monotonic(), Barrier("layer", timeout=100)
    with pytest.raises(BarrierTimeout):
        barrier.allreduce(("forward", 0), "cpu(0)", None, {"cpu(0)", "cpu(1)"}, sum, since=began - 100)
    assert time.monotonic() - began < 100


FIRST_USE = """
import gc, threading
import gluon_parallel as gp
import mxnet as mx

devices = gp.devices("cpu:2")
net = gp.nn.SyncBatchNorm(in_channels=3, timeout=60)
net.initialize(ctx=devices)
xs = [mx.nd.random.normal(shape=(4, 3, 5), ctx=device) for device in devices]
for x in xs:
    x.attach_grad()
mx.nd.waitall()
gate, ys = threading.Barrier(2), [None] * 2


def run(i):
    gate.wait()
    with mx.autograd.record():
        ys[i] = net(xs[i])
    ys[i].wait_to_read()


threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
gc.collect()
others = [float(i) for i in range(300_000)]  # in whatever memory was given back
heads = [y * y for y in ys]  # of which no part of a channel's gradient is left but what is not linear in y
mx.autograd.backward(ys, heads)
gradients = mx.nd.concat(*[x.grad.as_in_context(devices[0]) for x in xs], dim=0).asnumpy()
print("gradient", abs(gradients).max() > 0.1, abs(gradients.sum(axis=(0, 2))).max() < 1e-4)
"""


def test_the_first_use_may_be_by_several_threads_at_once():
    result = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, timeout=120)
    assert result.stdout == "gradient True True\n", result.stderr


def test_a_net_that_moves_to_other_devices_counts_its_calls_anew(rng, patience, done_in_python):
    devices = gp.devices("cpu:3")
    net = nn.SyncBatchNorm(in_channels=CHANNELS, timeout=60)
    net.initialize(ctx=devices[:1])
    for some in (devices[:1], devices[:2], devices[1:], devices):
        net.collect_params().reset_ctx(some)
        sizes = range(1, 1 + len(some))
        for _ in range(2):
            xs = on(some, shards(rng, sizes, (CHANNELS, 4)))
            ys = joint(net, xs, on(some, shards(rng, sizes, (CHANNELS, 4)), grad=False))
            normalised(ys, 1e-5)
    assert not done_in_python  # but in compiled code


def test_memory_stays_where_it_is_when_other_devices_take_part(patience):
    at = at_rendezvous(2)
    before = at.slots
    at.prepare(frozenset({"cpu(0)", "cpu(1)"}), frozenset({"cpu(0)"}), CHANNELS)
    assert at.slots is before
    at.prepare(frozenset({"cpu(1)", "cpu(2)"}), None, CHANNELS)
    assert at.slots is not before
    assert any(slots is before for slots, *_ in at._kept)  # somebody may be waiting in it


def test_devices_of_both_ways_meet_in_python_however_often(rng, patience):
    patience(0.01)
    devices = gp.devices("cpu:2")
    net = nn.SyncBatchNorm(in_channels=CHANNELS, timeout=60)
    net.initialize(ctx=devices)
    for _ in range(2 * NUM_SLOTS):  # of which none is taken for good
        xs = [mx.nd.array(rng.normal(size=(4, CHANNELS, 5)), devices[0]),
              mx.nd.array(rng.normal(size=(4, CHANNELS, 5)), devices[1], dtype="float64")]  # fmt: skip
        with mx.autograd.record():
            ys = [net(x) for x in xs]
        mx.autograd.backward(ys)
        normalised(ys, 1e-5)
    mx.nd.waitall()  # nothing waits with the old patience
    patience(60, net.sync_group.rendezvous)
    vector = np.ones(2 * CHANNELS)
    at = net.sync_group.rendezvous
    assert run([lambda d=d: allreduce(at, 999, BACKWARD, d, vector)[0] for d in range(2)]) == [2.0, 2.0]


def test_an_error_while_others_are_told_of_an_error_is_no_success(rng, monkeypatch, capfd):
    devices = gp.devices("cpu:2")
    net = nn.SyncBatchNorm(in_channels=CHANNELS, timeout=0.1)
    net.initialize(ctx=devices)

    def fail(*_args):
        raise ArithmeticError("on purpose")

    monkeypatch.setattr(type(net.sync_group), "callback_failed", fail)
    with mx.autograd.record():
        y = net(on(devices[:1], shards(rng, (6,), (CHANNELS, 4)))[0])
    with pytest.raises((mx.base.MXNetError, BarrierTimeout)):
        y.wait_to_read()
    monkeypatch.undo()
    net.sync_group.abandon("the test is over")
    assert "on purpose" in capfd.readouterr().err


def test_a_state_that_is_used_again_knows_nothing_of_the_forward_pass_before():
    layer = gp.nn.SyncBatchNorm(in_channels=2)
    layer.initialize(ctx=mx.cpu(0))
    settings = operator.Settings(layer.sync_group.token)
    given = settings, layer.sync_group, mx.cpu(0), (4, 2), (np.dtype("float32"),) * 3
    state = operator_state.OperatorState.take(*given)
    state.record.valid = state.record.failed = 1
    state.error = ValueError("mine")
    operator_state.release(state.address)
    again = operator_state.OperatorState.take(*given)
    assert again is state
    assert (again.record.valid, again.record.failed, again.error) == (0, 0, None)
    operator_state.release(again.address)


LAST_USE = """
import gc
import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.nn.sync_batch_norm import operator, operator_state

layer = gp.nn.SyncBatchNorm(in_channels=2)
layer.initialize(ctx=mx.cpu(0))
with mx.autograd.record():
    y = layer(mx.nd.ones((4, 2, 3)))
y.wait_to_read()
vars(operator).clear(), vars(operator_state).clear()
del y
gc.collect()
mx.nd.waitall()
"""


def test_mxnet_finds_its_callbacks_when_the_modules_are_gone_at_the_end_of_python():
    overwritten = {**os.environ, "PYTHONMALLOC": "malloc", "MALLOC_PERTURB_": "165"}  # what was freed
    result = subprocess.run(
        [sys.executable, "-c", LAST_USE], env=overwritten, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("ended", [False, True])
def test_an_operator_that_is_deleted_after_the_end_of_python_does_not_call_it(monkeypatch, ended):
    ends, called = InterpreterState(has_ended=ended), []
    monkeypatch.setattr(operator_state, "INTERPRETER_STATE", ends)
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)(
        lambda number: called.append((number, ends.num_calls)) or 0
    )
    deletion = operator_state.deletion(function, 7)
    delete = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(operator_state.passes().callbacks[0])
    assert delete(address_of(deletion)) == 1
    assert called == ([] if ended else [(7, 1)])  # the end waits until the number is 0 again
    assert ends.num_calls == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # ctypes prints the error
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_description_that_cannot_be_made_is_an_error_and_no_crash(monkeypatch, error):
    layer = gp.nn.SyncBatchNorm(in_channels=2)
    layer.initialize(ctx=mx.cpu(0))

    def fail(_strings):
        raise error("on purpose")

    for _ in range(5):  # what MXNet would take for a description is whatever lay in that memory
        with monkeypatch.context() as patch:
            patch.setattr(operator.Settings, "parse", fail)
            with pytest.raises(mx.base.MXNetError, match="custom.cc"), mx.autograd.record():
                layer(mx.nd.ones((4, 2)))
        with mx.autograd.record():
            assert not layer(mx.nd.ones((4, 2))).asnumpy().any()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # ctypes prints the error
@pytest.mark.parametrize("name", ["describe", "create"])
def test_ctrl_c_before_the_first_line_of_a_callback_is_an_error_and_no_crash(name):
    layer = gp.nn.SyncBatchNorm(in_channels=2)
    layer.initialize(ctx=mx.cpu(0))

    def interrupt(frame, event, _argument):
        if event == "call" and frame.f_code.co_name == name and frame.f_code.co_filename == operator.__file__:
            raise KeyboardInterrupt

    def interrupted(x):
        sys.setprofile(interrupt)
        try:
            return layer(x)
        finally:
            sys.setprofile(None)

    x = mx.nd.ones((4, 2))
    for _ in range(5):
        with pytest.raises(mx.base.MXNetError, match="custom.cc"), mx.autograd.record():
            gp.parallel_apply(interrupted, [x])
        with mx.autograd.record():
            assert not layer(x).asnumpy().any()


def test_attributes_are_read_without_pythons_compiler_which_fails_in_several_threads(monkeypatch):
    def fail(*_args, **_kwargs):
        raise SystemError("AST constructor recursion depth mismatch (before=51, after=50)")

    given = {"token": "t1", "axis": "-1", "eps": "1e-05", "momentum": "0.9", "fix_gamma": "False"}
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "compile", fail)
        assert operator.Settings.parse(given) == operator.Settings("t1", -1, 1e-5, 0.9, False, False)


def test_operators_that_mxnet_has_deleted_are_forgotten():
    layer = gp.nn.SyncBatchNorm(in_channels=2)
    layer.initialize(ctx=mx.cpu(0))
    with mx.autograd.record():
        y = layer(mx.nd.ones((4, 2)))
    kept = operator_state._states, operator._props
    before = [len(some) for some in kept]
    y.backward()
    del y
    end = time.monotonic() + 60
    while time.monotonic() < end and any(len(some) >= old for some, old in zip(kept, before)):
        time.sleep(0.01)  # MXNet deletes them after it has told that they are done
    assert all(len(some) < old for some, old in zip(kept, before))
