"""`gluon-parallel doctor` on drivers and CUDA libraries, which are stubs that a C compiler builds."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gluon_parallel.commands.doctor import elf, gpu, report
from gluon_parallel.commands.doctor.probes import Probes

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc, which builds the stubs")

DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return STATUS; }
int cuDriverGetVersion(int *version) { *version = CUDA; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "Stub 9000", length); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device)
{ *value = attribute == 75 ? CAPABILITY / 10 : CAPABILITY % 10; return 0; }
"""


def build(path, source="", *options):
    """A shared library at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-x", "none", "-o", str(path), *map(str, options)]
    subprocess.run(command, input=source, check=True, text=True, timeout=60)
    return path


@pytest.fixture
def driver(tmp_path):
    """A function that builds a driver; returns probes that find it."""

    def make(cuda=11040, capability=86, status=0):
        numbers = f"-DCUDA={cuda}", f"-DCAPABILITY={capability}", f"-DSTATUS={status}"
        folder = build(tmp_path / "driver" / "libcuda.so.1", DRIVER, *numbers).parent
        return Probes(time.monotonic() + 60, sys.executable, {**os.environ, "LD_LIBRARY_PATH": str(folder)})

    return make


@pytest.fixture
def cuda_build(tmp_path, monkeypatch):
    """A function that builds a libmxnet.so which asks for some libraries; returns the folder beside MXNet's."""
    site = tmp_path / "site-packages"

    def make(*names):
        stubs = [build(tmp_path / "stubs" / name, "", f"-Wl,-soname,{name}") for name in names]
        build(site / "mxnet" / "libmxnet.so", "", "-Wl,--no-as-needed", *stubs)
        monkeypatch.setattr(gpu, "mxnet_folder", lambda: site / "mxnet")
        return site

    return make


def findings(section):
    lines = report.text(section).splitlines()
    assert all(len(line) <= report.WIDTH or "LD_LIBRARY_PATH" in line for line in lines)
    return [(finding.verdict, f"{finding.text} -> {finding.cure}") for finding in section.findings]


@needs_gcc
def test_a_card_that_a_cpu_build_does_not_use_is_pointed_out(driver):
    section = gpu.check(driver())
    [(verdict, said)] = findings(section)
    assert verdict == "warning" and "1 GPU could be used" in said and "mxnet-cu112" in said
    assert section.facts["gpu(0)"] == "Stub 9000, compute capability 8.6"
    assert section.facts["driver"].endswith("for CUDA up to 11.4")


@needs_gcc
@pytest.mark.parametrize(
    ("answers", "words", "cure"),
    [
        ({"cuda": 10020}, "too old: it runs programs up to CUDA 10.2", "driver 450.80.02 or newer"),
        ({"capability": 90}, "compute capability 9.0 (Hopper)", "container mxnet:24.06-py3"),
        ({"capability": 120}, "compute capability 12.0 (Blackwell", "container mxnet:24.06-py3"),
        ({"capability": 35}, "compute capability 3.5", "train on CPUs"),
        ({"status": 100}, "gives no GPU: it answers with CUDA error 100", "docker run --gpus all"),
    ],
)
def test_a_driver_or_a_card_that_mxnet_cannot_use_gets_its_sentence(driver, cuda_build, answers, words, cure):
    cuda_build("libcuda.so.1")
    [(verdict, said)] = findings(gpu.check(driver(**answers)))
    assert verdict == "failed" and words in said.partition(" -> ")[0] and cure in said.partition(" -> ")[2]


@needs_gcc
def test_a_cuda_build_without_a_driver_gets_its_sentence(cuda_build):
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a driver")
    cuda_build("libcuda.so.1")
    [(verdict, said)] = findings(gpu.check(Probes(time.monotonic() + 60)))
    assert verdict == "failed" and "no NVIDIA driver here" in said


@needs_gcc
def test_each_missing_cuda_library_is_named_with_its_wheel_or_where_it_lies(driver, cuda_build, tmp_path):
    names = ["libcudnn.so.8", "libcudart.so.11.0", "libnccl.so.2", "libcublas.so.11", "libcudart.so.10.2"]
    site = cuda_build("libcuda.so.1", *names)
    shutil.copy(tmp_path / "stubs" / "libcublas.so.11", site / "mxnet")  # where the loader looks
    build(site / "nvidia" / "nccl" / "lib" / "libnccl.so.2")  # where it does not
    section = gpu.check(driver())
    said = [words for verdict, words in findings(section) if verdict == "failed"]
    assert len(said) == 4 == len(section.findings)
    assert "does not find libnccl.so.2" in said[0] and f"LD_LIBRARY_PATH={site}/nvidia/nccl/lib" in said[0]
    assert "libcudart.so.11.0 is missing" in said[1] and said[1].endswith("pip install nvidia-cuda-runtime-cu11")
    assert "libcudnn.so.8 is missing" in said[2] and said[2].endswith("pip install nvidia-cudnn-cu11==8.9.6.50")
    assert "libcudart.so.10.2 is missing" in said[3] and "mxnet-cu112" in said[3]


@pytest.mark.parametrize(
    ("driver", "cuda_build", "verdicts"),
    [
        ({"error": "none"}, False, []),
        ({"error": "none"}, True, ["failed"]),
        ({"cuda": 12020, "devices": [("A100", 80), ("RTX 4090", 89)]}, True, []),
        ({"cuda": 12020, "devices": [("A100", 80), ("H100", 90)]}, True, ["failed"]),
        ({"cuda": 12020, "devices": [("H100", 90)]}, False, ["warning"]),
        ({"cuda": 10020, "devices": [("K80", 37)]}, True, ["failed", "failed"]),
    ],
)
def test_the_drivers_answers_are_judged(driver, cuda_build, verdicts):
    assert [finding.verdict for finding in gpu.judge_driver(driver, cuda_build)] == verdicts


def test_what_mxnets_library_asks_for_is_read_without_loading_it():
    wanted = gpu._needed(gpu.mxnet_folder())
    assert "libgomp.so.1" in wanted and "libc.so.6" in wanted


def test_a_file_that_is_no_library_is_refused(tmp_path):
    (tmp_path / "libmxnet.so").write_text("version https://git-lfs.example")
    with pytest.raises(ValueError, match="no shared library"):
        elf.needed(tmp_path / "libmxnet.so")
