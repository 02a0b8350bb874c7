"""Section on NVIDIA GPUs: the driver's answers, the cards, and the CUDA libraries that this MXNet asks for."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

from . import elf
from .probes import Probes
from .report import FAILED, WARNING, Finding, Section

# Which wheel brings a library of CUDA 11, in an order in which they can be loaded.
WHEELS = {
    "libcudart.so.11.0": "nvidia-cuda-runtime-cu11",
    "libnvToolsExt.so.1": "nvidia-nvtx-cu11",
    "libnvrtc.so.11.2": "nvidia-cuda-nvrtc-cu11",
    "libcublasLt.so.11": "nvidia-cublas-cu11",
    "libcublas.so.11": "nvidia-cublas-cu11",
    "libcufft.so.10": "nvidia-cufft-cu11",
    "libcurand.so.10": "nvidia-curand-cu11",
    "libcusparse.so.11": "nvidia-cusparse-cu11",
    "libcusolver.so.11": "nvidia-cusolver-cu11",
    "libcudnn.so.8": "nvidia-cudnn-cu11==8.9.6.50",  # newer ones are cuDNN 9, which is another library
    "libnccl.so.2": "nvidia-nccl-cu11",
}
DRIVER = "libcuda.so.1"  # comes with the driver alone
_CUDA = re.compile(r"lib(cuda|cudart|cublas|cublasLt|cudnn|nccl|cufft|curand|cusolver|cusparse|nvrtc|nvToolsExt)\.so")
OLDEST_DRIVER = 11000  # which runs every CUDA 11 program
_CPU_BUILD = "pip uninstall -y mxnet-cu112; pip install --no-deps mxnet==1.9.1"
_GPU_BUILD = "pip uninstall -y mxnet; pip install --no-deps mxnet-cu112==1.9.1"
_NEW_DRIVER = "install NVIDIA's driver 450.80.02 or newer (the newest that knows the card is best), and start again"
_CONTAINER = "NVIDIA's NGC container mxnet:24.06-py3, MXNet 1.9.1 on CUDA 12.4; or train on CPUs"


def check(probes: Probes) -> Section:
    """The section; without a GPU and without a CUDA build there is nothing wrong."""
    folder = mxnet_folder()
    wanted = [name for name in _needed(folder) if _CUDA.match(name)]
    libraries = sorted((name for name in wanted if name != DRIVER), key=lambda name: [*WHEELS, name].index(name))
    answer = probes.ask("ask_driver", folder or "", *libraries)
    driver = answer.found.get("driver", {"error": answer.error or "no answer"})
    absent = answer.found.get("missing", [])
    elsewhere = {name: path for name in absent for path in _in_wheels(name, folder)}
    build = f"CUDA, asks for {', '.join(wanted)}" if wanted else "for CPUs" if folder else "not installed"
    facts: dict = {"MXNet's build": build}
    facts["driver"] = _describe(driver)
    for number, (name, capability) in enumerate(driver.get("devices", [])):
        facts[f"gpu({number})"] = f"{name}, compute capability {capability / 10:.1f}"
    if "CUDA_VISIBLE_DEVICES" in probes.environment:
        facts["visible"] = f"CUDA_VISIBLE_DEVICES={probes.environment['CUDA_VISIBLE_DEVICES']}"
    findings = [*judge_driver(driver, bool(wanted)), *judge_libraries(absent, elsewhere)]
    return Section("GPUs", facts, findings, {"driver": driver, "wanted": wanted, "missing": absent})


def mxnet_folder() -> Optional[Path]:
    """Where MXNet's files are; it is not imported."""
    spec = importlib.util.find_spec("mxnet")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def _needed(folder: Optional[Path]) -> list[str]:
    library = folder / "libmxnet.so" if folder else None
    return elf.needed(library) if library and library.exists() else []


def _in_wheels(name: str, folder: Optional[Path]) -> Iterable[str]:
    """A library of one of NVIDIA's wheels, which lie beside MXNet, where the loader does not look."""
    return glob.glob(os.path.join(glob.escape(str(folder and folder.parent)), "nvidia", "*", "lib", name))[:1]


def _describe(driver: Mapping[str, Any]) -> str:
    if "cuda" not in driver:
        return "none" if "No such file" in driver["error"] else f"none ({driver['error']})"
    return f"{driver.get('release') or 'release unknown'}, for CUDA up to {_dotted(driver['cuda'])}"


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def judge_driver(driver: Mapping[str, Any], cuda_build: bool) -> Iterator[Finding]:
    """What is wrong with the driver and the cards, from the driver's answers.

    Args:
        driver: ``cuda``, the newest CUDA that it runs, as 11020 for 11.2, and ``devices``, pairs of a name and a
            compute capability, as 86 for 8.6; ``error``, why there is less.
        cuda_build: whether the installed MXNet is for GPUs.

    Example:
        >>> [finding.verdict for finding in judge_driver({"cuda": 10020, "devices": []}, cuda_build=True)]
        ['failed']
    """
    if "cuda" not in driver:
        if cuda_build:
            yield Finding(
                FAILED, "There is no NVIDIA driver here (libcuda.so.1), and MXNet's CUDA build does not even import "
                "without it.", f"{_NEW_DRIVER}; in a container: docker run --gpus all; or for CPUs: {_CPU_BUILD}",
            )  # fmt: skip
        return
    bad = FAILED if cuda_build else WARNING
    if driver["cuda"] < OLDEST_DRIVER:
        yield Finding(
            bad, f"The NVIDIA driver is too old: it runs programs up to CUDA {_dotted(driver['cuda'])}, and MXNet's "
            "wheels for GPUs are made with CUDA 11.", _NEW_DRIVER,
        )  # fmt: skip
    if driver.get("error"):
        yield Finding(
            bad, f"The NVIDIA driver is here, but gives no GPU: {driver['error']}.",
            "look at nvidia-smi and CUDA_VISIBLE_DEVICES; in a container: docker run --gpus all",
        )  # fmt: skip
    usable = 0
    for number, (name, capability) in enumerate(driver.get("devices", [])):
        if capability >= 90:
            family = "Hopper" if capability < 100 else "Blackwell or newer"
            yield Finding(
                bad, f"gpu({number}), {name}, is of compute capability {capability / 10:.1f} ({family}), and MXNet's "
                "wheels hold code up to 8.9 only: they would end with `no kernel image` (CUDA error 209).", _CONTAINER,
            )  # fmt: skip
        elif capability < 50:
            yield Finding(
                bad, f"gpu({number}), {name}, is of compute capability {capability / 10:.1f}, and MXNet's wheels hold "
                "code from 5.0 (Maxwell) on only.", "train on CPUs, or take another card",
            )  # fmt: skip
        else:
            usable += 1
    if usable and driver["cuda"] >= OLDEST_DRIVER and not cuda_build:
        text = f"{usable} GPU{'s' if usable > 1 else ''} could be used, but this MXNet is built for CPUs."
        yield Finding(WARNING, text, _GPU_BUILD)


def judge_libraries(absent: Iterable[str], elsewhere: Mapping[str, str]) -> Iterator[Finding]:
    """What is wrong with the CUDA libraries.

    Args:
        absent: those that the loader does not find.
        elsewhere: name -> path, of those among them that are in NVIDIA's wheels.
    """
    folders = sorted({os.path.dirname(path) for path in elsewhere.values()})
    if elsewhere:
        yield Finding(
            FAILED, f"The loader does not find {', '.join(elsewhere)}, although wheels with them are installed.",
            f"export LD_LIBRARY_PATH={':'.join(folders)}",
        )  # fmt: skip
    for name in absent:
        if name in elsewhere:
            continue
        if name in WHEELS:
            yield Finding(FAILED, f"{name} is missing, which this MXNet asks for.", f"pip install {WHEELS[name]}")
        else:
            text = f"{name} is missing, which this MXNet asks for; no wheel for CUDA 11 brings it."
            yield Finding(FAILED, text, "take MXNet for CUDA 11.2: pip install --no-deps mxnet-cu112==1.9.1")
