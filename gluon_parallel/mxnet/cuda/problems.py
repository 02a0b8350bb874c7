"""What keeps MXNet's builds from NVIDIA GPUs, in sentences with their cures, for the import and for the doctor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .driver import DRIVER
from .wheels import CAPABILITIES, WHEELS, runs_on

OLDEST_DRIVER = 11000  # which runs every CUDA 11 program
CPU_BUILD = "pip uninstall -y mxnet-cu112 mxnet-cu117; pip install --no-deps mxnet==1.9.1"
_NEW_DRIVER = "install NVIDIA's driver 520.61.05 or newer (the newest that knows the card is best), and start again"
_CONTAINER = "NVIDIA's NGC container mxnet:24.06-py3 (MXNet 1.9.1 on CUDA 12.4)"


class Problem(NamedTuple):
    """Something that is wrong."""

    text: str  # a sentence
    cure: str  # a command, or what to do


def of_driver(driver: Mapping[str, Any], is_wheel: bool = True) -> Iterator[Problem]:
    """What is wrong with the driver, by its answers, and with the cards, if MXNet is one of its wheels for GPUs."""
    if "cuda" not in driver:
        if DRIVER in driver["error"] and "No such file" in driver["error"]:
            yield Problem(
                f"There is no NVIDIA driver here ({DRIVER}), and MXNet's CUDA build does not even import without it.",
                f"{_NEW_DRIVER}; in a container: docker run --gpus all; or for CPUs: {CPU_BUILD}",
            )
        else:
            text = f"The NVIDIA driver ({DRIVER}) does not answer: {driver['error']}."
            yield Problem(text, f"{_NEW_DRIVER}; or for CPUs: {CPU_BUILD}")
        return
    if driver["cuda"] < OLDEST_DRIVER:
        yield Problem(
            f"The NVIDIA driver is too old: it runs programs up to CUDA {version(driver['cuda'])}, and MXNet's wheels "
            "for GPUs are made with CUDA 11.", _NEW_DRIVER,
        )  # fmt: skip
    if driver.get("error"):
        yield Problem(
            f"The NVIDIA driver is here, but gives no GPU: {driver['error']}.",
            "look at nvidia-smi and CUDA_VISIBLE_DEVICES; in a container: docker run --gpus all",
        )
    capabilities = ", ".join(map(dotted, CAPABILITIES))
    for number, (name, capability) in enumerate(driver.get("devices", []) if is_wheel else ()):
        if runs_on(capability):
            continue
        family = "" if capability < 90 else " (Hopper)" if capability < 100 else " (Blackwell or newer)"
        yield Problem(
            f"gpu({number}), {name}, is of compute capability {dotted(capability)}{family}, and this MXNet "
            f"holds code for {capabilities} only: it would end with `no kernel image` (CUDA error 209).",
            (f"{_CONTAINER}; or " if capability >= 90 else "")
            + "hide the card: CUDA_VISIBLE_DEVICES= with the numbers of other cards, or with none to train on CPUs",
        )


def dotted(capability: int) -> str:
    """A compute capability as it is written, 8.6 for 86."""
    return f"{capability // 10}.{capability % 10}"


def of_libraries(missing: Mapping[str, str]) -> Iterator[Problem]:
    """What is wrong with the CUDA libraries, by those that are missing, with the loader's reasons."""
    absent = [name for name, reason in missing.items() if reason.startswith(f"{name}: ") and "No such file" in reason]
    for name, reason in missing.items():
        if name not in absent:
            yield Problem(f"{name} does not load: {reason}.", _install([name]) or "install what it asks for")
    wheels = [name for name in absent if name in WHEELS]
    if wheels:
        text = f"{_list(wheels)} {'is' if len(wheels) == 1 else 'are'} missing, which this MXNet asks for."
        yield Problem(text, _install(wheels))
    others = [name for name in absent if name not in WHEELS]
    if others:
        text = f"{_list(others)}, which this MXNet asks for, is missing, and no wheel for CUDA 11 brings it."
        yield Problem(text, "take MXNet for CUDA 11.2: pip install --no-deps mxnet-cu112==1.9.1")


def of_fusion(driver: Mapping[str, Any], nvrtc: int) -> Iterator[Problem]:
    """What is slower than it could be: a driver that is older than the compiler of fused operators cannot run these."""
    if OLDEST_DRIVER <= driver.get("cuda", 0) < nvrtc:
        yield Problem(
            f"The NVIDIA driver runs programs up to CUDA {version(driver['cuda'])}, and the compiler of fused "
            f"operators is of CUDA {version(nvrtc)}: MXNet runs without fused operators (MXNET_USE_FUSION=0).",
            _NEW_DRIVER,
        )


def version(number: int) -> str:
    """A CUDA version as it is written, 11.2 for 11020."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _list(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _install(names: Iterable[str]) -> str:
    wheels = sorted({WHEELS[name] for name in (re.sub("^libcudnn_.*", "libcudnn.so.8", name) for name in names)
                     if name in WHEELS})  # fmt: skip
    return f"pip install {' '.join(wheels)}" if wheels else ""
