"""`gluon-parallel doctor` on environment variables that MXNet cannot read, or that a launcher has left behind."""

import os
import subprocess
import sys

import pytest
from doctor_checks import Says, some_seconds, the_finding

from gluon_parallel.commands.doctor import mxnet_build, variables


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("  what():  Invalid Parameter format for OMP_NUM_THREADS expect int but value='abc'\n", "OMP_NUM_THREADS"),
        ("MXNetError: Cannot find Engine naive\n", "MXNET_ENGINE_TYPE"),
    ],
)
def test_a_value_that_mxnet_cannot_read_is_named_as_mxnet_does(output, name):
    section, _ = mxnet_build.check_mxnet(Says({}, -6, output))
    verdict, said = the_finding(section)
    assert verdict == "failed" and f"MXNet cannot read {name}=" in said and said.endswith(f" -> unset {name}")


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
    assert "OMP_NUM_THREADS=1" in section.facts["set are"]
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
    _, summary, advice, *_ = done.stdout.splitlines()
    assert done.returncode == 1 and summary.startswith("Training does NOT work here; failed: ")
    assert advice.startswith("Begin with ") and advice.endswith(f": unset {name}")
