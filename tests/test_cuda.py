"""MXNet's builds for GPUs find CUDA's libraries without LD_LIBRARY_PATH, and say what they need before they crash."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_stubs import NO_CARD, build, build_driver, build_mxnet, needs_gcc

import mxnet as mx
from gluon_parallel.mxnet.cuda import driver, libraries
from gluon_parallel.mxnet.cuda.wheels import NOT_NEEDED, WHEELS, wheels_for

ROOT = Path(__file__).resolve().parents[1]
PREPARE = """
import json, os, sys, pathlib
sys.path.insert(0, sys.argv[1])
from cuda import prepare
found = prepare(pathlib.Path(sys.argv[2]))
maps = open("/proc/self/maps").read().split()
print(json.dumps([found, sorted(set(maps)), {name: value for name, value in os.environ.items() if "MXNET" in name}]))
"""


class Machine:
    """A folder in which stubs are built; processes see these and nothing else of CUDA."""

    def __init__(self, folder):
        self.folder, self.site = folder, folder / "site-packages"
        self.environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}

    def mxnet(self, *names):
        return build_mxnet(self.site, self.folder / "stubs", "libcuda.so.1", *names)

    def driver(self, **answers):
        self.environment = build_driver(self.folder / "driver", **answers)

    def wheel(self, package, *names):
        """NVIDIA's wheel `package`, with stubs that have been built before."""
        folder = self.site / "nvidia" / package / "lib"
        folder.mkdir(parents=True)
        for name in names:
            shutil.copy(self.folder / "stubs" / name, folder)
        return folder

    def prepare(self):
        """(problems, paths of loaded libraries, MXNet's variables), in a process of its own."""
        done = self.run("-c", PREPARE, str(ROOT / "gluon_parallel" / "mxnet"), str(self.site / "mxnet"))
        found, loaded, variables = json.loads(done.stdout)
        return [f"{text} -> {cure}" for text, cure in found], loaded, variables

    def run(self, *words):
        environment = {**self.environment, "PYTHONPATH": os.pathsep.join([str(self.site), str(ROOT)])}
        return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


# ---- what works ------------------------------------------------------------------------------------------------------


@needs_gcc
def test_libraries_are_loaded_from_wheels_by_path(machine):
    machine.mxnet("libcudnn.so.8", "libcudart.so.11.0")
    build(machine.folder / "stubs" / "libcudnn_ops_infer.so.8")
    cudnn = machine.wheel("cudnn", "libcudnn.so.8", "libcudnn_ops_infer.so.8")
    cudart = machine.wheel("cuda_runtime", "libcudart.so.11.0")
    machine.driver()
    others = build(machine.folder / "driver" / "libcudart.so.11.0")  # on LD_LIBRARY_PATH, where the wheel comes first
    found, loaded, variables = machine.prepare()
    assert found == []
    assert {str(cudnn / "libcudnn.so.8"), str(cudnn / "libcudnn_ops_infer.so.8"),
            str(cudart / "libcudart.so.11.0")} <= set(loaded)  # fmt: skip
    assert str(others) not in loaded
    assert variables == {"MXNET_CUDNN_LIB_CHECKING": "0"}


@needs_gcc
@pytest.mark.parametrize(
    ("answers", "fusion"),
    [({"cuda": 11040}, "0"), ({"cuda": 11080}, None), ({"cuda": 12040}, None), ({"status": NO_CARD}, None)],
)
def test_a_driver_older_than_the_compiler_of_fused_operators_does_without_them_and_one_without_card_trains_on_cpus(
    machine, answers, fusion
):
    machine.mxnet("libnvrtc.so.11.2", "libcudart.so.11.0")
    machine.wheel("cuda_nvrtc", "libnvrtc.so.11.2")
    machine.driver(**answers)
    path = build(machine.folder / "driver" / "libcudart.so.11.0")  # no wheel: where the loader always looks
    found, loaded, variables = machine.prepare()
    assert found == [] and variables.get("MXNET_USE_FUSION") == fusion and str(path) in loaded


# ---- what is said ----------------------------------------------------------------------------------------------------


@needs_gcc
@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"capability": 90}, ["9.0 (Hopper)", "5.0, 6.0, 7.0, 8.0, 8.6 only", "24.06", "CUDA_VISIBLE_DEVICES="]),
        ({"status": 803}, ["CUDA error 803 (words of the driver)", "nvidia-smi"]),
        ({"status": -1}, ["a process that asked it was killed by SIG", "mxnet==1.9.1"]),
    ],
)
def test_what_the_driver_answers_is_a_sentence_before_mxnet_crashes(machine, answers, words):
    machine.mxnet()
    machine.driver(**answers)
    [said] = machine.prepare()[0]
    assert all(word in said for word in words), said


@needs_gcc
def test_a_missing_driver_and_missing_libraries_are_an_import_error_with_the_packages(machine):
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a driver")
    machine.mxnet("libcudnn.so.8", "libnccl.so.2", "libcudart.so.11.0")
    machine.wheel("nccl", "libnccl.so.2")
    done = machine.run("-c", "import gluon_parallel")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("gluon_parallel.errors.MXNetUnavailable: MXNet's build for GPUs does not work here."), last
    assert "libcudart.so.11.0 and libcudnn.so.8 are missing" in last
    assert (
        "pip install nvidia-cuda-runtime-cu11==11.8.89 nvidia-cudnn-cu11==8.9.6.50; There is no NVIDIA driver" in last
    )
    assert "docker run --gpus all" in last and "pip install --no-deps mxnet==1.9.1" in last


@needs_gcc
def test_a_library_that_is_there_and_does_not_load_is_told_with_the_reason(machine):
    machine.mxnet("libcudnn.so.8")
    zlib = build(machine.folder / "stubs" / "libz_of_nobody.so.1", "", "-Wl,-soname,libz_of_nobody.so.1")
    build(machine.folder / "stubs" / "libcudnn_cnn_infer.so.8", "", "-Wl,--no-as-needed", zlib)
    machine.wheel("cudnn", "libcudnn.so.8", "libcudnn_cnn_infer.so.8")
    machine.driver()
    [said] = machine.prepare()[0]
    assert said.startswith("libcudnn_cnn_infer.so.8 does not load: libz_of_nobody.so.1: cannot open"), said


# ---- what is read ----------------------------------------------------------------------------------------------------


@needs_gcc
@pytest.mark.parametrize("name", ["mxnet-1.9.1", "mxnet_cu117-1.9.1+hopper", "mxnet_cu102-1.9.1"])
def test_cards_of_a_build_that_is_no_wheel_of_cuda_11_are_not_judged(machine, name):
    folder = machine.mxnet().with_name("mxnet_cu112-1.9.1.dist-info")
    shutil.move(folder, folder.with_name(f"{name}.dist-info"))
    machine.driver(capability=90)
    assert machine.prepare()[0] == []


def test_what_a_driver_prints_beside_its_answers_is_no_answer(monkeypatch):
    said = subprocess.CompletedProcess([], 0, 'vGPU: licensed\n{"cuda": 11080, "devices": []}\n', "")
    monkeypatch.setattr(driver.subprocess, "run", lambda *_, **__: said)
    assert driver.ask_apart() == {"cuda": 11080, "devices": []}
    monkeypatch.setattr(sys, "executable", None)  # as in a program that embeds Python
    assert driver.ask_apart() == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"version https://git-lfs.example", "no shared library"), (b"\x7fELF\x02\x01", "is cut off")],
)
def test_what_a_library_asks_for_is_read_without_loading_it_and_a_file_that_is_none_is_refused(
    tmp_path, content, words
):
    assert libraries.needed(Path(mx.__path__[0]) / "libmxnet.so") == []  # for CPUs
    (tmp_path / "libmxnet.so").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        libraries.needed(tmp_path / "libmxnet.so")


def test_every_wheel_is_pinned_and_in_the_extra_of_its_build():
    assert all(wheel.startswith("nvidia-") and "-cu11==" in wheel for wheel in WHEELS.values())
    for build_name in NOT_NEEDED:
        assert "nvidia-cudnn-cu11==8.9.6.50" in wheels_for(build_name)
