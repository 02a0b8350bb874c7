import concurrent.futures
import contextvars
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
import weakref

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.datasets.indexed import _Reading
from gluon_parallel.mxnet.device_threads import hand_written_loops, seeds
from gluon_parallel.mxnet.device_threads.thread import thread_of
from gluon_parallel.nn import executor
from mxnet import gluon, nd

DEVICES = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]


def on_devices(num=2):
    """One shard of one array per device."""
    return [(nd.ones((2, 3), ctx=device),) for device in DEVICES[:num]]


def run(code, seconds=120, **environment):
    """The words that a new Python process prints."""
    ours = ("MXNET_CPU_TEMP_COPY", "OMP_NUM_THREADS")
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **environment}, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


# ---- parallel_apply ----------------------------------------------------------------------------------------------
def test_each_shard_is_handled_in_its_turn_by_the_thread_of_its_device_which_stays_the_same():
    order = []
    gp.parallel_apply(lambda x: (order.append(x.context), time.sleep(0.01), order.append(x.context)), on_devices(3))
    assert order == [device for device in DEVICES for _ in range(2)]
    first = gp.parallel_apply(lambda x: (x.context, threading.get_ident()), on_devices(3))
    second = gp.parallel_apply(lambda x: (x.context, threading.get_ident()), on_devices(3)[::-1])
    assert [device for device, _ in first] == DEVICES
    assert first == second[::-1]
    assert len({ident for _, ident in first} | {threading.get_ident()}) == 4


def test_a_shard_may_be_one_array_or_nested(rng):
    x = rng.random((5, 2)).astype("float32")
    whole = gp.split_and_load(x, DEVICES[:2])
    assert [part.shape for part in gp.parallel_apply(lambda part: part, whole)] == [(3, 2), (2, 2)]
    nested = gp.split_and_load({"a": [x, x]}, DEVICES[:2])
    sums = gp.parallel_apply(lambda part: (part["a"][0] + part["a"][1]).asnumpy(), nested)
    np.testing.assert_array_equal(np.concatenate(sums), 2 * x)


def test_inside_a_device_thread_the_own_device_is_called_directly():
    def outer(x):
        return gp.parallel_apply(lambda y: threading.get_ident(), [x])[0] == threading.get_ident()

    assert gp.parallel_apply(outer, on_devices()) == [True, True]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([(1, "two")], r"shards\[0\] must hold NDArrays of one GPU or of one CPU device.*there is none"),
        ([(nd.ones(1),), ()], r"shards\[1\]"),
        (
            [(nd.ones(1, ctx=mx.cpu(0)), [nd.ones(1, ctx=mx.cpu(1))])],
            r"shards\[0\]\[0\] is on cpu\(0\).*\[1\]\[0\] is on",
        ),
    ],
)
def test_a_shard_without_a_device_of_its_own_is_refused_before_anything_runs(shards, message):
    calls = []
    with pytest.raises(gp.errors.BatchMismatch, match=message):
        gp.parallel_apply(lambda *arguments: calls.append(arguments), shards)
    assert not calls


def test_an_exception_arrives_with_its_own_traceback_and_the_threads_go_on():
    called = []

    def fails_at_home(x):
        called.append(x.context)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as raised:
        gp.parallel_apply(fails_at_home, on_devices())
    assert "fails_at_home" in [frame.name for frame in traceback.extract_tb(raised.tb)]
    assert called == DEVICES[:1]  # the later shards are not launched
    with pytest.raises(SystemExit):
        gp.parallel_apply(lambda x: sys.exit(3), on_devices())
    assert [y.asscalar() for y in gp.parallel_apply(lambda x: x.sum(), on_devices())] == [6, 6]


# ---- what MXNet keeps per thread ---------------------------------------------------------------------------------
def flags():
    return mx.autograd.is_recording(), mx.autograd.is_training(), mx.util.is_np_shape(), mx.util.is_np_array()


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("numpy", [(False, False), (True, False), (True, True)])
def test_recording_training_and_numpy_mode_follow_the_work(recording, training, numpy):
    shape, array = numpy
    shards = on_devices()
    with mx.util.np_shape(shape), mx.util.np_array(array):
        with mx.autograd._RecordingStateScope(recording, training):
            seen = gp.parallel_apply(lambda x: flags(), shards)
            assert seen == [flags()] * 2 == [(recording, training, shape, array)] * 2
    assert gp.parallel_apply(lambda x: flags(), shards) == [flags()] * 2


def test_scopes_and_the_default_device_follow_the_work():
    variable = contextvars.ContextVar("variable", default="outside")

    def seen(x):
        symbol = mx.sym.relu(mx.sym.var("x"))
        return symbol.name[:6], symbol.attr("hint"), mx.context.current_context(), variable.get()

    with mx.name.Prefix("mine1_"), mx.AttrScope(hint="yes"), mx.cpu(2):
        token = variable.set("inside")
        assert gp.parallel_apply(seen, on_devices()) == [("mine1_", "yes", mx.cpu(2), "inside")] * 2
        variable.reset(token)
    assert {what[1:] for what in gp.parallel_apply(seen, on_devices())} == {(None, mx.cpu(0), "outside")}
    outer = gluon.nn.HybridSequential(prefix="outer_")
    with outer.name_scope():
        names = gp.parallel_apply(lambda x: gluon.nn.Dense(1).name, on_devices())
    assert names == ["outer_dense0", "outer_dense1"]


# ---- random numbers ----------------------------------------------------------------------------------------------
def drawn():
    """64 numbers per device of each of MXNet's two generators, drawn in the devices' threads."""

    def draw(x):
        with mx.autograd.train_mode():
            dropped = nd.Dropout(nd.ones(64, ctx=x.context), p=0.5)
        return np.concatenate([dropped.asnumpy(), nd.random.uniform(shape=64, ctx=x.context).asnumpy()])

    return np.stack(gp.parallel_apply(draw, on_devices(3)))


@pytest.mark.parametrize("seed_all", [mx.random.seed, gp.reseed], ids=["mx.random.seed", "gp.reseed"])
def test_a_seed_decides_the_numbers_of_every_device(seed_all):
    seed_all(5)
    first, more = drawn(), drawn()
    seed_all(6)
    other = drawn()
    seed_all(5)
    np.testing.assert_array_equal(drawn(), first)
    np.testing.assert_array_equal(drawn(), more)
    for part in (slice(0, 64), slice(64, 128)):  # of either generator
        rows = np.concatenate([first[:, part], more[:, part], other[:, part]])
        assert len(np.unique(rows, axis=0)) == len(rows)  # devices, draws and seeds all differ
        assert 0.1 < (rows > 0.5).mean() < 0.9  # they are random numbers, not only zeros


def test_the_first_cpu_device_draws_what_one_thread_would_draw_and_the_seed_of_a_device_is_for_it_alone():
    mx.random.seed(11)
    with mx.autograd.train_mode():
        wanted = nd.Dropout(nd.ones(64), p=0.5).asnumpy()
    mx.random.seed(11)
    np.testing.assert_array_equal(drawn()[0, :64], wanted)
    for device in DEVICES:
        mx.random.seed(7, ctx=device)
    rows = drawn()
    np.testing.assert_array_equal(rows[1:], [rows[0]] * 2)
    mx.random.seed(7)
    assert not (drawn()[1] == rows[1]).all()  # a seed for all replaces it


LIFE = """
import threading
import gluon_parallel as gp, mxnet as mx
from gluon_parallel.mxnet.device_threads.thread import end_all
def num_threads():
    return len([thread for thread in threading.enumerate() if "cpu(" in thread.name])
shards = [mx.nd.ones(64, ctx=mx.cpu(i)) for i in range(2)]
with mx.autograd.train_mode():  # without a seed the first numbers are random, and differ between devices
    rows = gp.parallel_apply(lambda x: mx.nd.Dropout(x, p=0.5).asnumpy() > 0, shards)
print(*(10 < row.sum() < 54 for row in rows), (rows[0] != rows[1]).any(), num_threads())
end_all()
print(num_threads(), *gp.parallel_apply(lambda x: int((x + 1).sum().asscalar()), shards))
"""


def test_threads_start_at_the_first_use_and_end_with_the_program():
    assert run(LIFE) == ["True", "True", "True", "2", "0", "128", "128"]


def _in_a_child(pipe):
    pipe.send([float(y.asscalar()) for y in gp.parallel_apply(lambda x: x.sum(), on_devices())])


def test_threads_that_start_at_the_same_time_leave_the_variables_of_the_process_alone(monkeypatch):
    monkeypatch.delenv("MXNET_CPU_TEMP_COPY", raising=False)
    follow = seeds.follow
    monkeypatch.setattr(seeds, "follow", lambda device: (follow(device), time.sleep(0.05)))
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda number: thread_of(("a test", number))(lambda: None), range(3)))
    assert "MXNET_CPU_TEMP_COPY" not in os.environ


def test_a_forked_process_has_threads_of_its_own():
    gp.parallel_apply(lambda x: x.sum(), on_devices())
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_in_a_child, args=(there,))
    child.start()
    assert here.poll(60), "the child did not answer"
    assert here.recv() == [6, 6]
    child.join(60)
    assert child.exitcode == 0


def _takes(lock):
    sys.exit(not lock.acquire(timeout=10))


@pytest.mark.parametrize("lock", [seeds._lock, _Reading.lock, executor._lock])
def test_a_forked_process_finds_no_lock_held(lock):
    is_held = threading.Event()

    def hold():
        with lock:
            is_held.set()
            time.sleep(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    child = multiprocessing.get_context("fork").Process(target=_takes, args=(lock,))
    child.start()
    child.join()
    thread.join()
    assert child.exitcode == 0


INTERRUPTED = """
import time
import gluon_parallel as gp, mxnet as mx
shards = [mx.nd.ones(2, ctx=mx.cpu(i)) for i in range(2)]
def forever(x):
    print("waits", flush=True)
    while True:
        time.sleep(0.05)
try:
    gp.parallel_apply(forever, shards)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(*gp.parallel_apply(lambda x: int(x.sum().asscalar()), shards), flush=True)
"""


def test_ctrl_c_ends_the_function_too_and_the_threads_go_on():
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert said.split() == ["interrupted", "2", "2"]
    assert process.returncode == 0


def test_ctrl_c_ends_a_function_that_waits_for_its_turn_and_not_the_one_before_it(monkeypatch):
    thread, has_begun, goes_on, ran = thread_of(DEVICES[0]), threading.Event(), threading.Event(), []

    def first():
        has_begun.set()
        goes_on.wait(60)
        ran.append("first")

    def put(job, put=thread.jobs.put):
        put(job)
        raise KeyboardInterrupt

    another = threading.Thread(target=thread, args=[first])
    another.start()
    assert has_begun.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(thread, "jobs", types.SimpleNamespace(put=put, get=thread.jobs.get))
        with pytest.raises(KeyboardInterrupt):
            thread(lambda: ran.append("second"))
    goes_on.set()
    another.join(60)
    assert thread(lambda: ran) == ["first"]


def test_arrays_live_as_long_as_the_call_that_has_their_handles_although_ctrl_c_has_ended_its_caller(monkeypatch):
    thread, has_begun, goes_on, arrays, lived = thread_of(DEVICES[0]), threading.Event(), threading.Event(), [], []

    class Array:
        pass

    def put(job, put=thread.jobs.put):
        put(job)
        assert has_begun.wait(60)
        raise KeyboardInterrupt

    def call():
        has_begun.set()
        try:
            goes_on.wait(60)
        finally:
            lived.append(arrays[0]() is not None)

    def caller():
        array = Array()
        arrays.append(weakref.ref(array))
        hand_written_loops._launch(DEVICES[0], call)

    with monkeypatch.context() as patch:
        patch.setattr(thread, "jobs", types.SimpleNamespace(put=put, get=thread.jobs.get))
        try:
            caller()
        except KeyboardInterrupt:  # not `pytest.raises`, which keeps the traceback
            pass
    goes_on.set()
    thread(lambda: None)
    assert lived == [True]
    assert arrays[0]() is None


class AsksForMode(mx.operator.CustomOpProp):
    """An operator of the user's, which MXNet makes in the thread that launches it."""

    seen: list = []

    def create_operator(self, device, shapes, dtypes):
        self.seen.append((*flags()[2:], mx.context.current_context()))
        return mx.operator.CustomOp()


mx.operator.register("asks_for_mode")(AsksForMode)


def test_the_python_code_of_an_operator_of_the_users_finds_the_mode_of_its_loop():
    gp.nn.SyncBatchNorm(in_channels=3)
    x = mx.nd.ones(3)
    with mx.util.np_shape(True), mx.util.np_array(True), mx.cpu(2):
        gp.parallel_apply(lambda x: mx.np.ones(3), on_devices())
        mx.nd.Custom(x, op_type="asks_for_mode")
    mx.nd.Custom(x, op_type="asks_for_mode")
    mx.nd.waitall()
    assert AsksForMode.seen == [(True, True, mx.cpu(2)), (False, False, mx.cpu(0))]
