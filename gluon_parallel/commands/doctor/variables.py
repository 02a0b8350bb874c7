"""Section on environment variables: those that are set, the engine that stops training, and those of a launcher."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from .probes import Probes
from .report import FAILED, WARNING, Finding, Section

_SHOWN = re.compile(r"(MXNET|NNVM|OMP|KMP|OPENBLAS|DMLC|PS|NCCL|OMPI|GLUON_PARALLEL)_|(CUDA_VISIBLE_DEVICES|"
                    r"LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|MPI4PY_LIBMPI)$")  # fmt: skip
_LAUNCHERS = re.compile(r"DMLC_(ROLE|NUM_(WORKER|SERVER)|PS_ROOT_(URI|PORT)|(WORKER|SERVER|TASK)_ID|NODE_HOST)$")


def check(probes: Probes) -> Section:
    """The variables that matter, and what is wrong with them. Values that MXNet cannot read, it names itself."""
    chosen = {name: value for name, value in sorted(probes.environment.items())
              if _SHOWN.match(name) and "TOKEN" not in name}  # fmt: skip
    shown = ", ".join(f"{name}={value}" for name, value in chosen.items())
    return Section("Variables", {"set are" if shown else "none": shown or "that matter here"}, list(judge(chosen)))


def judge(variables: Mapping[str, str]) -> Iterator[Finding]:
    """What is wrong with the variables that are set.

    Example:
        >>> [finding.cure for finding in judge({"MXNET_ENGINE_TYPE": "NaiveEngine"})]
        ['unset MXNET_ENGINE_TYPE']
    """
    if variables.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        text = "MXNET_ENGINE_TYPE is NaiveEngine: one operation at a time, and SyncBatchNorm cannot work."
        yield Finding(FAILED, text, "unset MXNET_ENGINE_TYPE")
    left = list(filter(_LAUNCHERS.match, variables))
    if left:
        is_alone = variables.get("DMLC_ROLE", "worker") == "worker" and variables.get("DMLC_NUM_WORKER", "1") == "1"
        words = ", ".join(f"{name}={variables[name]}" for name in left)
        text = f"{words}: a launcher of MXNet's servers sets such variables for the processes that it starts." + (
            "" if is_alone else " A program that is started with them by hand fails, or waits for other processes."
        )
        yield Finding(WARNING if is_alone else FAILED, text, f"unset {' '.join(left)}")
