"""`gluon-parallel doctor` on drivers and CUDA libraries, which are stubs that a C compiler builds."""

import shutil
import sys
import time
from pathlib import Path

import pytest
from gpu_stubs import build, build_driver, build_mxnet, needs_gcc

from gluon_parallel.commands.doctor import mxnet_build, report
from gluon_parallel.commands.doctor.probes import Probes
from gluon_parallel.cuda import fat_binary


@pytest.fixture
def driver(tmp_path):
    """A function that builds a driver; returns probes that find it."""

    def make(**answers):
        return Probes(time.monotonic() + 60, sys.executable, build_driver(tmp_path / "driver", **answers))

    return make


@pytest.fixture
def cuda_build(tmp_path, monkeypatch):
    """A function that builds a libmxnet.so which asks for some libraries; returns the folder beside MXNet's."""
    site = tmp_path / "site-packages"

    def make(*names):
        folder = build_mxnet(site, tmp_path / "stubs", *names)
        monkeypatch.setattr(mxnet_build, "mxnet_folder", lambda: folder)
        return site

    return make


def findings(section):
    lines = report.text([section]).splitlines()
    assert all(len(line) <= report.WIDTH for line in lines)
    return [(finding.verdict, f"{finding.text} -> {finding.cure}") for finding in section.findings]


@needs_gcc
def test_a_card_that_a_cpu_build_does_not_use_is_pointed_out(driver):
    section = mxnet_build.check_gpus(driver())
    [(verdict, said)] = findings(section)
    assert verdict == "warning" and "1 GPU could be used" in said and "mxnet-cu112" in said
    assert section.facts["gpu(0)"] == "Stub 9000, compute capability 8.6"
    assert section.facts["driver"].endswith("for CUDA up to 11.8")


@needs_gcc
@pytest.mark.parametrize(
    ("answers", "words", "cure"),
    [
        ({"cuda": 10020}, "too old: it runs programs up to CUDA 10.2", "driver 520.61.05 or newer"),
        ({"capability": 90}, "compute capability 9.0 (Hopper)", "container mxnet:24.06-py3"),
        ({"capability": 120}, "compute capability 12.0 (Blackwell", "container mxnet:24.06-py3"),
        ({"capability": 35}, "compute capability 3.5", "train on CPUs"),
        (
            {"status": 100},
            "gives no GPU: it answers with CUDA error 100 (words of the driver)",
            "docker run --gpus all",
        ),
    ],
)
def test_a_driver_or_a_card_that_mxnet_cannot_use_gets_its_sentence(driver, cuda_build, answers, words, cure):
    cuda_build("libcuda.so.1")
    [(verdict, said)] = findings(mxnet_build.check_gpus(driver(**answers)))
    assert verdict == "failed" and words in said.partition(" -> ")[0] and cure in said.partition(" -> ")[2]


@needs_gcc
def test_a_cuda_build_without_a_driver_gets_its_sentence(cuda_build):
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a driver")
    cuda_build("libcuda.so.1")
    [(verdict, said)] = findings(mxnet_build.check_gpus(Probes(time.monotonic() + 60)))
    assert verdict == "failed" and "no NVIDIA driver here" in said


@needs_gcc
def test_missing_cuda_libraries_are_named_with_their_wheels(driver, cuda_build, tmp_path):
    names = ["libcudnn.so.8", "libcudart.so.11.0", "libnccl.so.2", "libcublas.so.11", "libcudart.so.10.2"]
    site = cuda_build("libcuda.so.1", *names)
    shutil.copy(tmp_path / "stubs" / "libcublas.so.11", site / "mxnet")  # where the loader looks
    build(tmp_path / "wheels" / "nvidia" / "nccl" / "lib" / "libnccl.so.2")  # where it does not, but the import does
    probes = driver()
    probes = probes._replace(environment={**probes.environment, "PYTHONPATH": str(tmp_path / "wheels")})
    section = mxnet_build.check_gpus(probes)
    said = [words for verdict, words in findings(section) if verdict == "failed"]
    assert len(said) == 2 == len(section.findings)
    assert "libcudart.so.11.0 and libcudnn.so.8 are missing" in said[0]
    assert said[0].endswith("pip install nvidia-cuda-runtime-cu11==11.8.89 nvidia-cudnn-cu11==8.9.6.50")
    assert "libcudart.so.10.2" in said[1] and "mxnet-cu112" in said[1]


@needs_gcc
def test_a_driver_older_than_the_compiler_of_fused_operators_is_a_warning(driver, cuda_build, tmp_path):
    cuda_build("libcuda.so.1", "libnvrtc.so.11.2")
    probes = driver(cuda=11040)
    shutil.copy(tmp_path / "stubs" / "libnvrtc.so.11.2", tmp_path / "driver")
    [(verdict, said)] = findings(mxnet_build.check_gpus(probes))
    assert verdict == "warning" and "up to CUDA 11.4" in said and "MXNET_USE_FUSION=0" in said and "520.61.05" in said


@pytest.mark.parametrize(
    ("driver", "cuda_build", "verdicts"),
    [
        ({"error": "none"}, False, []),
        ({"error": "libcuda.so.1: No such file"}, True, ["failed"]),
        ({"cuda": 12020, "devices": [("A100", 80), ("RTX 4090", 89)]}, True, []),
        ({"cuda": 12020, "devices": [("A100", 80), ("H100", 90)]}, True, ["failed"]),
        ({"cuda": 12020, "devices": [("H100", 90)]}, False, ["warning"]),
        ({"cuda": 10020, "devices": [("K80", 37)]}, True, ["failed", "failed"]),
    ],
)
def test_the_drivers_answers_are_judged(driver, cuda_build, verdicts):
    assert [finding.verdict for finding in mxnet_build.judge_gpus(driver, cuda_build, fat_binary.WHEELS)] == verdicts
