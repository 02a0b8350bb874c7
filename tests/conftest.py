"""What every test is given: a printed seed, an engine set up for several CPU devices, and a clean place to leave."""

import collections
import contextlib
import gc
import importlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import tqdm

# One thread per device, also in the processes that tests start: files run side by side, and the order of a sum must not
# depend on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The processes that tests start share Python's compiled files, which each would have to make for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if "GLUON_PARALLEL_FLIGHT_RECORDER" not in os.environ:  # not among the user's runs, and gone at the end
    _flight_recorder = tempfile.TemporaryDirectory()  # of this process and of all that it starts
    os.environ["GLUON_PARALLEL_FLIGHT_RECORDER"] = _flight_recorder.name

# Tests send these signals, also where whoever runs the tests in the background, or under nohup, ignores them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.kvstore.flight_recorder import RECORDER
from gluon_parallel.mxnet.device_threads.thread import device_threads

with contextlib.suppress(ImportError):
    importlib.import_module("cv2")  # its import changes LD_LIBRARY_PATH, and would be a test's that happens to use it

# The assertions of helpers, too, show what they compared; none is imported yet.
pytest.register_assert_rewrite(*(path.stem for path in Path(__file__).with_name("support").glob("*.py")))
# Otherwise, where PYTHONDONTWRITEBYTECODE is set, each worker would rewrite the assertions of all files in each run.
sys.dont_write_bytecode = False

SEED_VARIABLE = "GLUON_PARALLEL_TEST_SEED"
SESSION_SEED = int(os.environ.get(SEED_VARIABLE) or 1)

gp.devices("cpu:8")  # a share of the cores for each, whatever devices a test names itself

os.environ["MPLBACKEND"] = "Agg"  # no test opens a window, nor do the scripts that tests start
tqdm.tqdm.monitor_interval = 0  # tqdm's watchdog is a thread that would outlive the test that started it
# A shared machine may be slow at any moment, so no example has a deadline; failures print what reproduces them.
hypothesis.settings.register_profile("gluon_parallel", deadline=None, print_blob=True, database=None)
hypothesis.settings.load_profile("gluon_parallel")


def pytest_addoption(parser):
    parser.addoption(
        "--seeds", help="run each test that draws numbers (by rng or hypothesis) once per seed of this list: 1,2,77"
    )
    parser.addoption(
        "--devices", default="cpu", choices=["cpu", "gpu"],
        help="gpu: where a test names cpu:2, it gets two GPUs, or is skipped if there are fewer (scripts/gpu_check.py)",
    )  # fmt: skip


def pytest_configure(config):
    if config.option.devices == "gpu":
        named = gp.devices

        def devices(spec="auto"):
            try:
                return named(re.sub("^cpu", "gpu", spec) if isinstance(spec, str) else spec)
            except gp.errors.DeviceUnavailable as error:
                if hypothesis.currently_in_test_context():
                    hypothesis.reject()  # this example; others draw fewer devices
                pytest.skip(str(error))

        gp.devices = devices


# The files that take longest, fast or slow, start first: then all workers end at about one time.
LONGEST = """
joining kvstore_lost_workers survival compat kvstore package cuda_wheels random_programs random_trainings faster_rcnn
hosts recompute trainer_loops prepare scripts_segmentation asynchronous_scripts communication_hooks launch
hand_written_loops kvstore_groups stuck_loop precision scripts_faster_rcnn scripts_lenet parity
flight_recorder
""".split()


# It is kept, too; it writes a warning where making it takes more than five seconds.
FONTS = "import matplotlib.font_manager"


def pytest_sessionstart(session):
    """Make Matplotlib's list of fonts before the workers begin, so that no test waits for it."""
    if session.config.getoption("numprocesses", None):
        subprocess.run([sys.executable, "-W", "ignore", "-c", FONTS], check=True, timeout=1800)


def pytest_collection_modifyitems(config, items):
    if config.option.seeds:
        drawn = {True: [], False: []}
        for item in items:
            drawn["rng" in item.fixturenames or hasattr(getattr(item, "function", None), "hypothesis")].append(item)
        items[:] = drawn[True]
        config.hook.pytest_deselected(items=drawn[False])
    for item in items:
        if item.get_closest_marker("slow"):  # minutes on two idle cores, and others may be several times slower
            item.add_marker(pytest.mark.timeout(3600))
    order = {f"test_{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_collection_finish():
    """Let Python's garbage collector, which each of MXNet's DataLoaders starts, look only at what tests make."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter, config):
    """With --durations, the files that took longest, all of their tests with setup and teardown together."""
    if config.option.durations is None:
        return
    seconds = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("slowest files")
    for file, duration in seconds.most_common(config.option.durations or None):
        terminalreporter.write_line(f"{duration:7.1f}s  {file}")


def pytest_report_header(config):
    return f"seeds: {config.option.seeds}" if config.option.seeds else f"seed: {SEED_VARIABLE}={SESSION_SEED}"


@pytest.hookimpl(trylast=True)  # so that the seed is the last part of a test's name
def pytest_generate_tests(metafunc):
    if metafunc.config.option.seeds and "session_seed" in metafunc.fixturenames:
        seeds = [int(seed) for seed in metafunc.config.option.seeds.split(",")]
        metafunc.parametrize("session_seed", seeds, ids=[f"seed={seed}" for seed in seeds])


@pytest.fixture
def session_seed():
    return SESSION_SEED


@pytest.fixture
def seed(request, session_seed):
    """Seed of one test: a function of its name and of the session's seed, whichever tests run beside it."""
    name = re.sub(r"\[seed=\d+\]$|-seed=\d+(?=\]$)", "", request.node.nodeid)  # as without --seeds
    value = (session_seed + zlib.crc32(name.encode())) % 2**31
    print(f"seed {value} ({SEED_VARIABLE}={session_seed})")  # pytest shows it if the test fails
    return value


@pytest.fixture
def rng(seed):
    """NumPy's generator, started with this test's seed."""
    return np.random.default_rng(seed)


@pytest.fixture
def numpy_mode():
    """MXNet in NumPy mode."""
    mx.npx.set_np()
    yield
    mx.npx.reset_np()


@pytest.fixture
def pictures():
    """For tests of what is drawn, see :func:`script_files.draw_only_for`."""


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Groups of processes, each started once per file: ``groups[group].assert_passed(check)``."""
    from checks_group import Groups

    return Groups(tmp_path_factory)


@pytest.fixture(autouse=True)
def _every_test_starts_from_the_seed(request, seed):
    if hasattr(getattr(request, "function", None), "hypothesis"):
        hypothesis.seed(seed)(request.function)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - MXNet's initializers and iterators draw from NumPy's global generator
    mx.random.seed(seed)


class _Names(mx.name.NameManager):
    """Numbers of names that do not depend on the tests before: gluon.Trainer sorts names, and dense10 before dense9."""

    def __init__(self, first):
        super().__init__()
        self.first = first

    def get(self, name, hint):
        self._counter.setdefault(hint, self.first)
        return super().get(name, hint)


@pytest.fixture(autouse=True)
def _every_test_names_its_blocks_from_a_number_of_the_seed(seed):
    with _Names(seed % 12):
        yield


@pytest.fixture(autouse=True)
def _every_test_leaves_nothing_behind():
    environment, threads, children = dict(os.environ), set(threading.enumerate()), _children()
    of_process = _state_of_process()
    yield
    mx.nd.waitall()
    left = _wait_for_end(lambda: [thread.name for thread in threading.enumerate() if _is_new(thread, threads)])
    assert not left, f"threads left behind: {left}"
    left = _wait_for_end(lambda: [_command(process) for process in _children() - children])
    assert not left, f"processes left behind: {left}"
    changed = _changed_variables(environment)
    for name in changed:
        os.environ.pop(name, None)
        os.environ.update({name: environment[name]} if name in environment else {})
    assert not changed, f"environment variables left changed: {changed} (use monkeypatch.setenv)"
    assert _state_of_process() == of_process, "a signal's handler, or who this process is, was left changed"


def _state_of_process():
    """What a store of several processes sets for as long as its process lives."""
    return [signal.getsignal(number) for number in signal.valid_signals()], RECORDER.rank, RECORDER.size


def _changed_variables(before):
    # pytest's own, and those that tensorboardX and scikit-learn set when they are imported for the first time.
    others = {"PYTEST_CURRENT_TEST", "CRC32C_SW_MODE", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
    names = (before.keys() | os.environ.keys()) - others
    return sorted(name for name in names if before.get(name) != os.environ.get(name))


def _is_new(thread, before):
    # MXNet calls back from threads of its own; Python knows each as a dummy, which nobody can join. A device's thread
    # lives as long as the program; that it ends then is a test of its own. So do the one that listens to SIGUSR1, and
    # those of the store mpi.
    mine = isinstance(thread, threading._DummyThread) or thread.ident in device_threads()
    mine = mine or thread.name in ("gluon_parallel.flight_recorder", "gluon_parallel.shared", "gluon_parallel.mpi")
    return thread not in before and not mine


def _children():
    """The process ids of this process's children, as Linux lists them."""
    children = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
                children.update(map(int, file.read().split()))
        except FileNotFoundError:  # that thread has just ended, or this kernel has no such list
            continue
    return children


def _command(process):
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return f"{process} {file.read().replace(bytes(1), b' ').decode(errors='replace')}".strip()
    except FileNotFoundError:
        return f"{process} (ended, but nobody waited for it)"


def _wait_for_end(remaining, seconds=30.0):
    """What `remaining` still returns after a while: what is on its way out may take a moment."""
    end = time.monotonic() + seconds
    while remaining() and time.monotonic() < end:
        time.sleep(0.02)
    return remaining()
