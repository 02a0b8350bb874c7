"""Mixed precision against float32, with stated bounds, in processes of its own: it cannot be undone."""

import sys
from pathlib import Path

import pytest
from processes import ROOT, run_command, run_mpi, run_servers

from gluon_parallel.step.precision import has_bfloat16_on_cpus

CHECKS = Path(__file__).with_name("support") / "precision_checks.py"
IN_BFLOAT16 = ["bfloat16", "layers", "recomputation", "refusals_in_bfloat16"]
needs_bfloat16 = pytest.mark.skipif(
    not has_bfloat16_on_cpus(), reason="MXNet computes in bfloat16 on CPUs with AVX-512 only"
)

# Checks of one process: the first two before mixed precision is set, which cannot be undone.
TOGETHER = ["cast", "cast_pipeline", *IN_BFLOAT16, "skipping", "checkpoint"]


@pytest.fixture(scope="module")
def together():
    """Exit status and output of a process that runs them."""
    checks = [check for check in TOGETHER if has_bfloat16_on_cpus() or check not in IN_BFLOAT16]
    return run_command([sys.executable, str(CHECKS), *checks], seconds=280)


@pytest.mark.parametrize(
    "check", [pytest.param(check, marks=needs_bfloat16 if check in IN_BFLOAT16 else ()) for check in TOGETHER]
)
def test_precision_of_one_process(together, check):
    status, said = together
    assert f"{check}: right" in said and (status == 0 or ": wrong" in said), said


@pytest.mark.parametrize("check", ["refusals", pytest.param("bfloat16_by_amp", marks=needs_bfloat16), "float16_by_amp"])
def test_precision_of_a_process_that_asks_for_it_in_another_way(check):
    status, said = run_command([sys.executable, str(CHECKS), check], seconds=120)
    assert status == 0 and "right" in said, said


def test_bfloat16_is_refused_on_a_cpu_without_avx_512():
    status, said = run_command([sys.executable, str(CHECKS), "no_bfloat16"], seconds=120, DNNL_MAX_CPU_ISA="AVX2")
    assert status == 0 and "right" in said, said


@pytest.mark.slow
@needs_bfloat16
@pytest.mark.parametrize("script", ["lenet", "text_lstm", "segmentation", "faster_rcnn", "pipeline"])
def test_a_script_trains_in_bfloat16_and_refuses_float16_on_cpus(script, tmp_path):
    config = ROOT / "configs" / script / "smoke.yaml"
    command = [sys.executable, str(ROOT / "scripts" / f"train_{script}.py"), "--config", str(config)]
    command += ["--devices", "cpu:2", "--output", str(tmp_path), "--precision"]
    status, said = run_command([*command, "bfloat16"], seconds=1500)
    assert status == 0 and "checkpoint:" in said, said
    status, said = run_command([*command, "float16"], seconds=1500)
    assert status == 2 and "no float16 matrix product on CPUs" in said and "Traceback" not in said, said


def test_precision_of_two_processes_over_mpi():
    status, said = run_mpi(2, CHECKS, "mpi", "halves", "processes")
    assert status == 0 and said.count("halves: right") == said.count("processes: right") == 2, said


@pytest.mark.slow
def test_precision_of_two_processes_over_servers_of_mxnet():
    status, said = run_servers(2, CHECKS, "dist_sync", "processes")
    assert status == 0 and said.count("right") == 2, said
