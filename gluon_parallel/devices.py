"""Devices from a description: "cpu:2", "gpu@0,2", "auto" or a list becomes a list of ``mx.Context``."""

import os
from collections.abc import Iterable

from . import cores
from .device_names import FORMS, read
from .errors import DeviceUnavailable
from .mxnet.compat import mx
from .mxnet.engine import push
from .mxnet.library import set_num_threads

_CHOSEN = "GLUON_PARALLEL_DEVICES"  # set by `gluon-parallel launch --devices`; stands for "auto"


def num_gpus():
    """The number of GPUs that MXNet can use."""
    try:
        return mx.context.num_gpus()
    except mx.base.MXNetError:  # a CUDA build on a machine without a driver
        return 0


def _available():
    count = num_gpus()
    gpus = f"{count} GPU{'s' if count > 1 else ''}: gpu(0)" + (f" to gpu({count - 1})" if count > 1 else "")
    if count == 0:
        build = "this MXNet is built without CUDA" if not mx.runtime.Features().is_enabled("CUDA") else "no GPU found"
        gpus = f"no GPU ({build})"
    return f"this machine has {gpus}, and CPU devices as many as you name"


def _parse(spec):
    if isinstance(spec, mx.Context):
        return [spec]
    if not isinstance(spec, str):
        raise DeviceUnavailable(f"devices: got {spec!r} of type {type(spec).__name__}; expected {FORMS}")
    text = spec.strip().lower()
    if text == "auto":
        text = os.environ.get(_CHOSEN, "auto").strip().lower()
    if text == "auto":
        text = "gpu" if num_gpus() else "cpu:2" if len(os.sched_getaffinity(0)) > 1 else "cpu"
    kind, count, numbers = read(text)
    if numbers is None:
        numbers = range((1 if kind == "cpu" else num_gpus()) if count is None else count)
        if not numbers:
            raise DeviceUnavailable(f"devices: {text!r} asks for all GPUs, but {_available()}")
    return [mx.Context(kind, number) for number in numbers]


def check_available(contexts, spec):
    """Refuse contexts that this machine does not have or that are no compute devices; errors quote `spec`."""
    told = f"{spec!r} ({_CHOSEN}={os.environ[_CHOSEN]})" if spec == "auto" and _CHOSEN in os.environ else repr(spec)
    for context in contexts:
        if context.device_id < 0 or context.device_type == "gpu" and context.device_id >= num_gpus():
            raise DeviceUnavailable(f"devices: {context} in {told} is not there; {_available()}")
        if context.device_type not in ("cpu", "gpu"):
            raise DeviceUnavailable(f"devices: {context} is memory, not a device to compute on; expected {FORMS}")


def devices(spec="auto"):
    """The devices to train on.

    Several CPU devices are virtual: each runs its operators on threads of its own. This function sets their number: one
    CPU device gets all physical cores that this process may use, several get an equal share. (MXNet alone would leave
    half of the cores idle, because it assumes hyper-threading.) If ``OMP_NUM_THREADS`` or ``MXNET_OMP_MAX_THREADS`` is
    set, nothing is changed.

    Args:
        spec: ``"cpu"`` (one CPU device), ``"cpu:2"`` or ``"gpu:2"`` (the first 2), ``"gpu"`` (all GPUs),
            ``"gpu@0,2"`` (these), ``"auto"`` (all GPUs; without a GPU two CPU devices, on one core one; or what
            ``GLUON_PARALLEL_DEVICES`` says), or a list of such strings and of ``mx.Context``.

    Returns:
        A list of distinct ``mx.Context``.

    Raises:
        DeviceUnavailable: names what is not there, what is, and the spellings that are understood.

    Example:
        >>> devices("cpu:2")
        [cpu(0), cpu(1)]
        >>> devices(["cpu", "cpu(3)"])
        [cpu(0), cpu(3)]
    """
    if isinstance(spec, Iterable) and not isinstance(spec, (str, dict)):
        spec = list(spec)  # a generator yields its devices once
    specs = spec if isinstance(spec, list) else [spec]
    contexts = [context for one in specs for context in _parse(one)]
    if not contexts:
        raise DeviceUnavailable(f"devices: got an empty list; expected {FORMS}")
    twice = sorted({str(context) for context in contexts if contexts.count(context) > 1})
    if twice:
        raise DeviceUnavailable(f"devices: {', '.join(twice)} named more than once in {spec!r}; name each device once")
    check_available(contexts, spec)
    cpus = [context for context in contexts if context.device_type == "cpu"]
    if cpus and "OMP_NUM_THREADS" not in os.environ and "MXNET_OMP_MAX_THREADS" not in os.environ:
        threads = max(1, cores.num_physical() // len(cpus))
        for context in cpus:  # the setting is per thread: each device's worker sets its own
            push(lambda: set_num_threads(threads), device=context, name="omp_set_num_threads")
    return contexts
