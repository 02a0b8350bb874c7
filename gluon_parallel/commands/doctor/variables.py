"""Section on environment variables: values that MXNet cannot read or that stop training, and those of a launcher."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from .probes import Probes
from .report import FAILED, VALUE_WIDTH, WARNING, Finding, Section

_SHOWN = re.compile(r"(MXNET|NNVM|OMP|KMP|OPENBLAS|DMLC|PS|NCCL|OMPI|GLUON_PARALLEL)_|(CUDA_VISIBLE_DEVICES|"
                    r"LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|MPI4PY_LIBMPI)$")  # fmt: skip

# The kinds of values that MXNet 1.9.1 reads, with its documented variables; many a "0 or 1" is read as an integer.
KINDS = {
    ("a whole number", r"\s*[+-]?\d+\s*"): """
        OMP_NUM_THREADS MXNET_OMP_MAX_THREADS DMLC_NUM_WORKER DMLC_NUM_SERVER DMLC_PS_ROOT_PORT
        DMLC_LOG_STACK_TRACE_DEPTH NNVM_EXEC_MATCH_RANGE MXNET_BACKWARD_DO_MIRROR
        MXNET_CPU_PARALLEL_RAND_COPY MXNET_CPU_PARALLEL_SIZE MXNET_CPU_PRIORITY_NTHREADS MXNET_CPU_TEMP_COPY
        MXNET_CPU_WORKER_NTHREADS MXNET_CUDA_GRAPHS_MAX_LOG_ENTRIES MXNET_CUDNN_AUTOTUNE_DEFAULT MXNET_ENABLE_CYTHON
        MXNET_ENABLE_GPU_P2P MXNET_ENFORCE_CYTHON MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN
        MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_FWD
        MXNET_GPU_COPY_NTHREADS MXNET_GPU_CUDNN_DROPOUT_STATE_COPY MXNET_GPU_MEM_LARGE_ALLOC_ROUND_SIZE
        MXNET_GPU_MEM_POOL_RESERVE MXNET_GPU_MEM_POOL_ROUND_LINEAR_CUTOFF MXNET_GPU_PARALLEL_RAND_COPY
        MXNET_GPU_TEMP_COPY MXNET_GPU_WORKER_NSTREAMS MXNET_GPU_WORKER_NTHREADS MXNET_KVSTORE_BIGARRAY_BOUND
        MXNET_KVSTORE_LOGTREE MXNET_KVSTORE_REDUCTION_NTHREADS MXNET_KVSTORE_SLICE_THRESHOLD
        MXNET_KVSTORE_TREE_ARRAY_BOUND MXNET_KVSTORE_TREE_BACKTRACK MXNET_KVSTORE_USETREE MXNET_MKLDNN_CACHE_NUM
        MXNET_MP_OPENCV_NUM_THREADS MXNET_MP_WORKER_NTHREADS MXNET_OPTIMIZER_AGGREGATION_SIZE MXNET_PROFILER_AUTOSTART
        MXNET_PROFILER_MODE MXNET_UPDATE_ON_KVSTORE MXNET_USE_MKLDNN_RNN MXNET_USE_NUM_CORES_OPERATOR_TUNING""",
    ("0, 1, true or false", r"(?i:0|1|true|false)"): """
        MXNET_CUDA_ALLOW_TENSOR_CORE MXNET_CUDA_GRAPHS_VERBOSE MXNET_CUDA_LIB_CHECKING
        MXNET_CUDA_TENSOR_OP_MATH_ALLOW_CONVERSION MXNET_CUDNN_LIB_CHECKING MXNET_ELIMINATE_COMMON_EXPR
        MXNET_ENABLE_CUDA_GRAPHS MXNET_ENFORCE_DETERMINISM MXNET_EXEC_BULK_EXEC_INFERENCE MXNET_EXEC_BULK_EXEC_TRAIN
        MXNET_FC_TRUE_FP16 MXNET_FUSION_VERBOSE MXNET_MKLDNN_ENABLED MXNET_MKLDNN_FORCE_FC_AB_FORMAT
        MXNET_SAFE_ACCUMULATION MXNET_USE_FUSION""",
    ("a number", r"\s*[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\s*"): "MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY",
    ("NaiveEngine, ThreadedEngine or ThreadedEnginePerDevice", "(?:Naive|Threaded)Engine|ThreadedEnginePerDevice"):
        "MXNET_ENGINE_TYPE",
    ("Naive, Round or Unpooled", "Naive|Round|Unpooled"): "MXNET_GPU_MEM_POOL_TYPE",
    ("worker, server or scheduler", "worker|server|scheduler"): "DMLC_ROLE",
}  # fmt: skip
_LAUNCHERS = re.compile(r"DMLC_(ROLE|NUM_(WORKER|SERVER)|PS_ROOT_(URI|PORT)|(WORKER|SERVER|TASK)_ID|NODE_HOST)$")


def check(probes: Probes) -> Section:
    """The variables that matter, and what is wrong with them."""
    chosen = {name: value for name, value in sorted(probes.environment.items())
              if _SHOWN.match(name) and "TOKEN" not in name}  # fmt: skip
    shown = [f"{name}={value}"[:VALUE_WIDTH] for name, value in chosen.items()] or "none that matter here"
    return Section("Variables", {"variables": shown}, list(judge(chosen)))


def judge(variables: Mapping[str, str]) -> Iterator[Finding]:
    """What is wrong with the variables that are set.

    Example:
        >>> [finding] = judge({"MXNET_KVSTORE_BIGARRAY_BOUND": "abc"})
        >>> finding.text
        "MXNET_KVSTORE_BIGARRAY_BOUND is 'abc', but MXNet wants a whole number, and fails where it reads it."
    """
    for (wanted, pattern), names in KINDS.items():
        for name in names.split():
            value = variables.get(name, "")
            if value and not re.fullmatch(pattern, value):
                text = f"{name} is {value!r}, but MXNet wants {wanted}, and fails where it reads it."
                yield Finding(FAILED, text, f"unset {name}")
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
