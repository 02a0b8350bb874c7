"""One device, several devices, several processes: the same weights, also through a checkpoint between them."""

import importlib.util
import sys
from pathlib import Path

import kvstore_resume
import numpy as np
import pytest
from processes import needs_horovod, needs_mpi, run_command, run_mpi, run_servers

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.commands import cli, parity


@pytest.fixture
def no_processes(monkeypatch):
    """Processes whose weights are those of one device, but for what the test changes."""
    changes = {}

    def train_processes(plan, devices, processes, engine, timeout):
        values = parity.train(plan, [mx.cpu(0)])
        return [{name: value + changes.get(name, 0) for name, value in values.items()}] * processes

    monkeypatch.setattr(parity, "train_processes", train_processes)
    return changes


@needs_mpi
def test_devices_and_processes_train_as_one_device_does(capsys):
    words = ["--devices", "2", "--processes", "2", "--steps", "3", "--accumulate", "2"]
    assert cli.main(["parity", *words]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert said.startswith("sync_batch_norm: 3 updates of 28 samples, in float64\n")
    assert "2 x 1" in said and "2 x 2" in said and "1.running_mean" in said and "equal" in said


@needs_mpi
def test_what_a_process_raises_is_shown_once_and_ends_the_command(tmp_path, capfd):
    file = tmp_path / "mine.py"
    file.write_text(
        "import os\n"
        "from gluon_parallel.commands import parity\n"
        "def task(store):\n"
        "    assert os.environ.get('GLUON_PARALLEL_RANK') != '1', 'on purpose'\n"
        "    return tuple(parity.make('plain', store))\n"
    )
    assert cli.main(["parity", "--net", f"{file}:task", "--steps", "1"]) == 2
    said = capfd.readouterr()
    assert said.out == "" and "gluon-parallel parity: the 2 processes failed:\nrank 1 (process " in said.err
    assert said.err.count("AssertionError: on purpose") == 1


@needs_mpi
def test_replicas_of_a_pipeline_in_two_processes_train_as_one_device_does(capsys):
    # In every third batch the last process has no samples; of the others each micro-batch has one to four.
    words = ["--stages", "2", "--devices", "4", "--processes", "2", "--steps", "4", "--accumulate", "2"]
    assert cli.main(["parity", *words]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "4 x 1" in said and "4 x 2" in said and "1.running_var" in said and "equal" in said


MINE = """
import mxnet as mx
def task(store):
    return mx.gluon.nn.Dense(1, in_units=2), mx.gluon.loss.L2Loss(), lambda num, rng: (
        rng.random((num, 2)), rng.random((num, 1)))
"""


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--stages", "2", "--devices", "3"], "", "wanted a multiple of the stages"),
        (["--stages", "2", "--batch_size", "3", "--micro_batches", "4"], "", "3 samples and 4 micro-batches"),
        *(([name, "0"], "", f"{name} is 0") for name in ("--processes", "--steps", "--batch_size", "--accumulate")),
        (["--timeout", "0"], "", "--timeout is 0"),
        (["--seed", "-1"], "", "--seed is -1"),
        (["--tolerance", "nan"], "", "--tolerance is nan"),
        (["--net", "resnet"], "", "--net is"),
        (["--net", "nowhere.py:task"], "", "--net is"),
        (["--net", "mine.py:nothing"], MINE, "--net is"),
        (["--net", "mine.py:task"], "def task(store)", "SyntaxError"),
        (["--net", "mine.py:task"], "import nothing_like_this", "raises ModuleNotFoundError in line 1"),
        (["--net", "mine.py:task"], "def task(store):\n    return 1",
         "returns int (--net: the function takes a store, and returns a net that is not initialized, a loss"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_in_a_sentence(
    no_processes, tmp_path, monkeypatch, capsys, words, code, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(code)
    assert cli.main(["parity", "--steps", "1", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1
    assert not said.out


@pytest.mark.skipif(importlib.util.find_spec("gluoncv") is None, reason="GluonCV is an optional dependency")
@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", [pytest.param("mpi", marks=needs_mpi), "ps", pytest.param("horovod", marks=needs_horovod)]
)
def test_a_real_net_on_two_devices_of_two_processes_trains_as_on_one_device(engine):
    # In float64, where only the order of the sums differs; the third step leaves the last process without samples.
    nets = Path(__file__).with_name("support") / "parity_nets.py"
    command = [sys.executable, "-m", "gluon_parallel", "parity", "--net", f"{nets}:resnet20", "--engine", engine]
    if engine == "ps":  # whose servers may keep float32, which batch norm blows up; without synchronisation it is 1.1
        command += ["--tolerance", "0.01"]
    status, said = run_command([*command, "--devices", "2", "--processes", "2", "--steps", "3"], seconds=1500)
    assert status == 0 and "2 x 2" in said and "equal" in said, said
    assert "features.4.2.body.4.running_var" in said


@pytest.mark.parametrize("net", ["plain", "sync_batch_norm"])
def test_a_difference_above_the_tolerance_ends_with_status_1_and_names_it(no_processes, capsys, net):
    words = ["--devices", "2", "--steps", "2", "--net", net, "--batch_size", "6"]
    assert cli.main(["parity", *words]) == 0, capsys.readouterr()
    no_processes["0.weight"] = 1e-3
    assert cli.main(["parity", *words]) == 1
    assert "DIFFERENT" in capsys.readouterr().out
    no_processes["0.weight"] = np.nan
    assert cli.main(["parity", *words]) == 1


def test_with_one_process_the_devices_of_this_one_are_compared(no_processes, capsys):
    no_processes["0.weight"] = 1e-3  # in the other processes, which there are none of
    assert cli.main(["parity", "--processes", "1", "--steps", "1", "--net", "plain"]) == 0
    assert "2 x 1" in capsys.readouterr().out


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_the_shares_of_a_batch_are_unequal_and_lose_nothing(num_workers):
    for step in range(4):
        shares = [range(20)[parity.shard_slice(20, rank, num_workers, step)] for rank in range(num_workers)]
        assert [sample for mine in shares for sample in mine] == list(range(20))
        assert bool(shares[-1]) == (step % 3 != 2 or num_workers == 1)  # in every third step the last has none
    assert len(set(map(len, shares))) > 1 or num_workers == 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", [pytest.param("mpi", marks=needs_mpi), "dist_sync"])
def test_a_checkpoint_goes_from_one_device_to_two_by_two_and_back(tmp_path, engine):
    task, trainer, undisturbed = kvstore_resume.build([mx.cpu(0)])
    kvstore_resume.train(task, undisturbed, range(2))
    state = gp.checkpoint.state(task.net, trainer)
    before, after = tmp_path / "before.npz", tmp_path / "after.npz"
    gp.archive.write(before, state.arrays, state.facts)
    start = {"mpi": run_mpi, "dist_sync": run_servers}[engine]
    status, output = start(2, Path(kvstore_resume.__file__), engine, str(before), str(after))
    assert status == 0 and output.count("wrote") == 1, output

    kvstore_resume.train(task, undisturbed, range(2, 5))  # the undisturbed run on one device
    wanted, found = gp.checkpoint.state(task.net, trainer), gp.archive.read(after)
    assert found.facts == wanted.facts
    # ps-lite's servers and MXNet's update operators round scalars to float32.
    tolerance = 1e-9 if engine == "mpi" else 1e-5
    for key, array in wanted.arrays.items():
        assert np.allclose(found.arrays[key], array, rtol=tolerance, atol=tolerance), key

    again, trainer, step = kvstore_resume.build([mx.cpu(0), mx.cpu(1), mx.cpu(2)])
    gp.checkpoint.restore(found, again.net, trainer)
    kvstore_resume.train(again, step, [5])
    kvstore_resume.train(task, undisturbed, [5])
    for key, array in gp.checkpoint.state(task.net).arrays.items():
        got = gp.checkpoint.state(again.net).arrays[key]
        assert np.allclose(got, array, rtol=tolerance, atol=tolerance), key
