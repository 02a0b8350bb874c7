"""MXNet's builds for NVIDIA GPUs: what they need of the driver, the cards and CUDA's libraries, before the import.

Imports nothing but the standard library, so that the doctor can use it where nothing else works.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from . import driver, libraries, problems
from .wheels import NOT_NEEDED


def mxnet_folder() -> Path | None:
    """Where MXNet's files are, if it is installed; it is not imported."""
    spec = importlib.util.find_spec("mxnet")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def is_wheel(folder: Path) -> bool:
    """Whether the MXNet in `folder` is one of its wheels whose cards are known, see :data:`.wheels.CAPABILITIES`."""
    builds = (build.replace("-", "_") for build in NOT_NEEDED)
    return any((folder.parent / f"{build}-1.9.1.dist-info").is_dir() for build in builds)


def prepare(folder: Path) -> list[problems.Problem]:
    """Load the CUDA libraries that the MXNet in `folder` asks for; does nothing for a build for CPUs.

    A machine whose driver names no card, or where ``CUDA_VISIBLE_DEVICES`` hides all, can train on CPUs with a build
    for GPUs. Variables that the driver and the libraries make necessary are set, unless they are set already.

    Returns:
        What would make MXNet fail, in its import or on its first GPU; empty if nothing will.
    """
    try:
        names = libraries.needed(folder / "libmxnet.so")
    except (OSError, ValueError):
        return []  # the import says what is wrong with it
    if not names:
        return []
    missing = libraries.load(folder, names)
    answers = {"error": missing.pop(driver.DRIVER)} if driver.DRIVER in missing else driver.ask_apart()
    found = [*problems.of_libraries(missing)]
    if answers and answers.get("status") != driver.NO_DEVICE:
        found += problems.of_driver(answers, is_wheel(folder))
    if libraries.from_wheels("libcudnn.so.8", folder):  # newer than the one MXNet was built with, on purpose
        os.environ.setdefault("MXNET_CUDNN_LIB_CHECKING", "0")
    if list(problems.of_fusion(answers, libraries.nvrtc_version())):
        os.environ.setdefault("MXNET_USE_FUSION", "0")
    return found
