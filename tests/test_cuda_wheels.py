"""The real wheels: `pip install gluon-parallel[cu112]` brings MXNet's build for GPUs and all of CUDA but the driver."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_stubs import NO_CARD, build_driver, needs_gcc

from gluon_parallel.mxnet.cuda.wheels import NOT_NEEDED, WHEELS

ROOT = Path(__file__).resolve().parents[1]
GIGABYTES = 15  # on the disk, most of the time 8
TRAIN = """
import json, os
import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

devices = gp.devices("cpu:2")
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Conv2D(4, 3), gp.nn.SyncBatchNorm(), gluon.nn.Dense(2))
net.initialize(ctx=devices)
net.hybridize()
step = gp.DataParallel(net, gluon.loss.L2Loss(), gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}))
losses = [float(step(nd.ones((6, 1, 8, 8)), nd.ones((6, 2))).mean().asscalar()) for _ in range(20)]
print(json.dumps({
    "cuda": mx.runtime.Features().is_enabled("CUDA"),
    "gpus": mx.context.num_gpus(),
    "losses": losses,
    "loaded": sorted({line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}),
}))
"""

pytestmark = [pytest.mark.slow, needs_gcc]  # two gigabytes are fetched


class Installed:
    """An environment with one of the extras, in which nothing is installed but what it brings."""

    def __init__(self, folder):
        self.python, self.folder = folder / "venv" / "bin" / "python", folder
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=600)

    def install(self, *words):
        """What pip says that fails, or nothing; or uv, where UV names it, as continuous integration does."""
        pip = [self.python, "-m", "pip", "install", "--no-cache-dir", "--only-binary", ":all:"]
        if os.environ.get("UV"):
            pip = [os.environ["UV"], "pip", "install", "--python", self.python, "--no-cache"]
        command = [*pip, "--quiet", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2400)
        return done.returncode and done.stderr

    def run(self, *words, **environment):
        variables = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "PYTHONWARNINGS": "ignore", **environment}
        return subprocess.run(
            [self.python, *words], cwd="/", env=variables, capture_output=True, text=True, timeout=1000
        )


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.exhaustive if name == "mxnet-cu112" else ()) for name in NOT_NEEDED],
)
def installed(request, tmp_path_factory):
    """An environment with the extra of one of MXNet's builds."""
    folder = tmp_path_factory.mktemp("cuda")
    if shutil.disk_usage(folder).free < GIGABYTES * 1e9:
        pytest.skip(f"less than {GIGABYTES} GB are free in {folder}")
    try:
        here = Installed(folder)
        refused = here.install("--no-deps", WHEELS["libnvToolsExt.so.1"])
        if refused:
            pytest.skip(f"the package index was not reached: {refused.strip().splitlines()[-1]}")
        source = folder / "source"
        for name in ("gluon_parallel", "scripts"):  # of the latter, what builds the C library
            shutil.copytree(ROOT / name, source / name)
        for name in ("setup.py", "pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, source)
        assert not here.install(f"{source}[{request.param.partition('-')[2]}]")
        if sys.version_info >= (3, 13):  # for which there is no NumPy 1, see setup.py
            assert not here.install("--no-deps", f"{request.param}==1.9.1")
        here.build, here.needed = request.param, WHEELS.keys() - NOT_NEEDED[request.param]
        yield here
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_every_library_but_the_drivers_is_there(installed):
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a driver")
    last = installed.run("-c", "import gluon_parallel").stderr.strip().splitlines()[-1]
    assert "MXNetUnavailable: MXNet's build for GPUs does not work here. There is no NVIDIA driver" in last
    assert "missing" not in last


def test_with_a_stub_of_the_driver_it_trains_on_cpus_with_the_libraries_of_the_wheels(installed, tmp_path):
    environment = {"LD_LIBRARY_PATH": build_driver(tmp_path, status=NO_CARD)["LD_LIBRARY_PATH"]}
    done = installed.run("-c", TRAIN, **environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["cuda"], found["gpus"]) == (True, 0)
    assert found["losses"][-1] < found["losses"][0] / 10
    paths = {os.path.basename(path): path for path in found["loaded"]}
    assert {name for name in installed.needed if "/nvidia/" not in paths.get(name, "")} == set()
    parity = ["-m", "gluon_parallel", "parity", "--devices", "cpu:2", "--processes", "1"]
    done = installed.run(*parity, **environment)
    assert done.returncode == 0 and "\nequal: " in done.stdout, done.stdout + done.stderr


def test_the_doctor_reads_the_real_library_and_refuses_a_card_that_it_holds_no_code_for(installed, tmp_path):
    environment = {"LD_LIBRARY_PATH": build_driver(tmp_path, capability=90)["LD_LIBRARY_PATH"]}
    done = installed.run("-m", "gluon_parallel", "doctor", "--json", "--timeout", "900", **environment)
    sections = {section["name"]: section for section in json.loads(done.stdout)["sections"]}
    assert done.returncode == 1
    assert sections["GPUs"]["facts"]["holds code for"] == "compute capability 5.0, 6.0, 7.0, 8.0, 8.6"
    [finding] = sections["GPUs"]["findings"]
    assert "9.0 (Hopper)" in finding["text"] and "24.06" in finding["cure"]
    assert sections["MXNet"]["findings"][0]["cure"] == "see GPUs"
