""" "cpu:2", "gpu@0,2", "auto" or a list becomes a list of ``mx.Context``; what is not there is refused by name."""

import os
import re

from .compat import mx
from .engine import push
from .errors import DeviceUnavailable

_FORMS = '"cpu", "cpu:2" (the first 2), "gpu" (all), "gpu:2", "gpu@0,2" (these), "auto", or a list of them'

# MXNet lends the CPU operators of all devices together this many temporary buffers (4 unless told). Operators that
# share one wait for each other, so with fewer buffers than operators in flight the devices take turns; and with fewer
# than the other devices' forward passes ask for, layers that wait for other devices (SyncBatchNorm) would deadlock.
# DenseNet-201's forward pass asks for about 200. A buffer that no operator asks for takes no memory, but in time each
# grows to the largest request: the price of 256 is 1 GB more per device for ResNet-20 with 64 images on it.
_TEMP_COPIES_PER_DEVICE = 256
# The same holds for the random generators that Dropout draws from (1 unless told), except that each takes 5 MB at
# once, for every thread that launches operators: so these are few.
_RANDOM_COPIES = 8

_CHOSEN = "GLUON_PARALLEL_DEVICES"  # what `gluon-parallel launch --devices` says "auto" means


def _num_gpus():
    try:
        return mx.context.num_gpus()
    except mx.base.MXNetError:  # a CUDA build on a machine without a driver
        return 0


def _cores():
    """Cores that this process may use (a container or ``taskset`` may leave it fewer than the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _available():
    count = _num_gpus()
    gpus = f"{count} GPU{'s' if count > 1 else ''}: gpu(0)" + (f" to gpu({count - 1})" if count > 1 else "")
    if count == 0:
        build = "this MXNet is built without CUDA" if not mx.runtime.Features().is_enabled("CUDA") else "no GPU found"
        gpus = f"no GPU ({build})"
    return f"this machine has {gpus}, and CPU devices as many as you name"


def read(text):
    """What "cpu", "gpu:2" or "gpu@0,2" says, wherever these devices may be.

    Returns:
        ("cpu" or "gpu", how many or None, their numbers or None).

    Raises:
        DeviceUnavailable: it cannot be read, or asks for no device at all.

    Example:
        >>> read("gpu:2"), read("gpu@0,2")
        (('gpu', 2, None), ('gpu', None, [0, 2]))
    """
    match = re.fullmatch(r"(cpu|gpu)(?::(\d+)|@(\d+(?:,\d+)*)|\((\d+)\))?", text.strip().lower())
    if match is None:
        raise DeviceUnavailable(f"devices: cannot read {text!r}; expected {_FORMS}")
    kind, count, chosen, one = match.groups()
    if count is not None and int(count) == 0:
        raise DeviceUnavailable(f"devices: {text!r} asks for no device at all; expected {_FORMS}")
    numbers = [int(number) for number in (chosen or one).split(",")] if chosen or one else None
    return kind, None if count is None else int(count), numbers


def _parse(spec):
    if isinstance(spec, mx.Context):
        return [spec]
    if not isinstance(spec, str):
        raise DeviceUnavailable(f"devices: got {spec!r} of type {type(spec).__name__}; expected {_FORMS}")
    text = spec.strip().lower()
    if text == "auto" and os.environ.get(_CHOSEN, "auto").strip().lower() != "auto":
        return _parse(os.environ[_CHOSEN])
    if text == "auto":
        if _num_gpus():
            return _parse("gpu")
        return _parse("cpu:2" if _cores() > 1 else "cpu")
    kind, count, chosen = read(spec)
    if chosen is not None:
        numbers = chosen
    elif count is None:
        numbers = [0] if kind == "cpu" else list(range(_num_gpus()))
        if not numbers:
            raise DeviceUnavailable(f"devices: {spec!r} asks for all GPUs, but {_available()}")
    else:
        numbers = list(range(count))
    return [mx.Context(kind, number) for number in numbers]


def _set_up_engine(contexts):
    """Give several CPU devices their own temporary buffers and their share of the cores, unless the user chose."""
    if "MXNET_CPU_TEMP_COPY" not in os.environ:
        # Read when MXNet first asks for a buffer, so it is in time if this is called before the first operator.
        os.environ["MXNET_CPU_TEMP_COPY"] = str(_TEMP_COPIES_PER_DEVICE * len(contexts))
    if "OMP_NUM_THREADS" in os.environ:
        return
    threads = max(1, _cores() // len(contexts))
    for context in contexts:  # the number belongs to a thread, so every device's worker has to set its own
        push(lambda: mx.base._LIB.MXSetNumOMPThreads(threads), device=context, name="omp_set_num_threads")


def devices(spec="auto"):
    """The devices to train on.

    Several CPU devices are virtual: each runs operators on a thread of its own, with its share of the cores. Choosing
    them sets what MXNet's engine needs for them, and so belongs before the first operator: ``MXNET_CPU_TEMP_COPY``,
    ``MXNET_CPU_PARALLEL_RAND_COPY`` (temporary buffers and random generators, of which each device needs its own), and
    the number of OpenMP threads per device. What the environment already says is left alone; set a smaller
    ``MXNET_CPU_TEMP_COPY`` where memory is short.

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
    specs = list(spec) if isinstance(spec, (list, tuple)) else [spec]
    contexts = [context for one in specs for context in _parse(one)]
    if not contexts:
        raise DeviceUnavailable(f"devices: got an empty list; expected {_FORMS}")
    twice = sorted({str(context) for context in contexts if contexts.count(context) > 1})
    if twice:
        raise DeviceUnavailable(f"devices: {', '.join(twice)} named more than once in {spec!r}; name each device once")
    for context in contexts:
        if context.device_type == "gpu" and context.device_id >= _num_gpus():
            raise DeviceUnavailable(f"devices: {context} in {spec!r} is not there; {_available()}")
        if context.device_type not in ("cpu", "gpu"):
            raise DeviceUnavailable(f"devices: {context} is memory, not a device to compute on; expected {_FORMS}")
    cpus = [context for context in contexts if context.device_type == "cpu"]
    if cpus and "MXNET_CPU_PARALLEL_RAND_COPY" not in os.environ:
        # For one device too: the numbers that follow from a seed depend on it, and so do a net's first weights.
        os.environ["MXNET_CPU_PARALLEL_RAND_COPY"] = str(_RANDOM_COPIES)
    if len(cpus) > 1:
        _set_up_engine(cpus)
    return contexts
