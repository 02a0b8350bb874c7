"""`gluon-parallel doctor` on environment variables that MXNet cannot read, or that a launcher has left behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_checks import some_seconds

import mxnet
from gluon_parallel.commands.doctor import variables


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("MXNET_KVSTORE_BIGARRAY_BOUND", "1000000 -1", "abc 1e6 4k 1.5"),
        ("MXNET_EXEC_BULK_EXEC_TRAIN", "0 1 true FALSE", "yes 2 on"),
        ("MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY", "0.7 1 .5 1e-3", "half 0,7"),
        ("MXNET_ENGINE_TYPE", "ThreadedEngine ThreadedEnginePerDevice", "naive threadedengine"),
        ("OMP_NUM_THREADS", "2", "all 2,1"),
    ],
)
def test_a_value_that_mxnet_cannot_read_is_named_and_a_good_one_is_not(name, good, bad):
    for value in [*good.split(), ""]:
        assert list(variables.judge({name: value})) == [], value
    for value in bad.split():
        [finding] = variables.judge({name: value})
        assert finding.verdict == "failed" and finding.cure == f"unset {name}"
        assert finding.text.startswith(f"{name} is {value!r}, but MXNet wants ")


def test_the_table_has_only_variables_that_this_mxnet_reads():
    folder = Path(mxnet.__file__).parent
    read = b"".join(path.read_bytes() for path in [folder / "libmxnet.so", *folder.rglob("*.py")])
    named = [name for names in variables.KINDS.values() for name in names.split()]
    assert len(named) == len(set(named)) > 60
    of_gpus = re.compile("GPU|CUDA|CUDNN|_TREE_|FUSION|FP16|DETERMINISM")  # a build for CPUs lacks them
    assert [name for name in named if name.encode() not in read and not of_gpus.search(name)] == []


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ({"DMLC_ROLE": "worker"}, "warning"),
        ({"DMLC_NUM_WORKER": "1", "DMLC_PS_ROOT_URI": "10.0.0.1"}, "warning"),
        ({"DMLC_NUM_WORKER": "2", "DMLC_ROLE": "worker"}, "failed"),
        ({"DMLC_ROLE": "server"}, "failed"),
    ],
)
def test_what_a_launcher_has_left_behind_is_named(values, verdict):
    [finding] = variables.judge({**values, "DMLC_INTERFACE": "eth0", "PS_VERBOSE": "1"})
    assert finding.verdict == verdict and finding.cure == f"unset {' '.join(values)}"


def test_a_token_is_not_shown():
    section = variables.check(some_seconds(GLUON_PARALLEL_AGENT_TOKEN="hush", OMP_NUM_THREADS="1"))
    assert "OMP_NUM_THREADS=1" in section.facts["variables"]
    assert "hush" not in str(section)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [("MXNET_ENGINE_TYPE", "NaiveEngine"), ("MXNET_CPU_WORKER_NTHREADS", "abc")],
)
def test_the_advice_begins_with_the_variable_that_is_the_cause(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    done = subprocess.run(
        [sys.executable, "-m", "gluon_parallel", "doctor", "--timeout", "200"], env=os.environ, text=True,
        stdin=subprocess.DEVNULL, capture_output=True, timeout=220,
    )  # fmt: skip
    *_, summary, advice = done.stdout.splitlines()
    assert done.returncode == 1 and summary.startswith("Training does NOT work here; failed: Variables, ")
    assert advice == f"Begin with Variables: unset {name}"
