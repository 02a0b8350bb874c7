"""Mixed precision: which types MXNet can train with where, and a loss scale that all processes agree on."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..errors import NotFinite, PrecisionUnsupported
from ..kvstore.contract import contract
from ..kvstore.reserved_keys import OVERFLOW
from ..kvstore.work import NumberSum
from ..mxnet.blocks import own_parameters
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import BFLOAT16, as_legacy
from ..mxnet.compat.replacing import stands_for
from ..mxnet.loss_scaler import (
    is_amp_initialized,
    largest_scale,
    num_without_overflow,
    set_loss_scale,
    updates_until_growth,
)
from ..mxnet.trainers import (
    compression_of,
    loss_scaler_of,
    parameters_of,
    scale_of,
    scale_without_loss_scaling,
    set_loss_scaler,
    set_scale,
    store_of,
)
from ..nn.blocks import blocks_of
from ..split import as_devices

PRECISIONS = ("float32", "bfloat16", "float16")
_SMALLEST_SCALE = 2.0**-24  # MXNet's largest one is 2**24; gradients that overflow even here are not finite at all
_ARRAYS_AT_ONCE = 200  # that `multi_all_finite` checks in one call

_WITHOUT_INPUTS = "_arange _eye _full _linspace _ones _zeros _zeros_without_dtype normal uniform _sample_unique_zipfian"
_NO_FLOAT16 = (
    "MXNet 1.9.1 has no float16 matrix product on CPUs, which dense, convolutional and recurrent layers need. Use "
    "bfloat16 there (gp.set_precision('bfloat16', devices); it needs AVX-512), or train on GPUs"
)
_NO_BFLOAT16 = (
    "MXNet 1.9.1 computes dense and convolutional layers in bfloat16 only on CPUs with AVX-512, which this one lacks. "
    "Use float32 there"
)


def set_precision(precision: str, devices: Sequence[mx.Context]) -> None:
    """Have MXNet compute matrix products and convolutions in this type, in the whole process and for good.

    Weights, their gradients, batch norm's statistics, losses and updates stay float32. It calls MXNet's
    ``mxnet.contrib.amp.init``, which replaces operators: call it before the net is made. For float16 a
    :class:`DataParallel` that is made afterwards scales its loss dynamically.

    Args:
        precision: ``"float32"`` (which changes nothing), ``"bfloat16"`` or ``"float16"``.
        devices: list of ``mx.Context`` to train on.

    Raises:
        PrecisionUnsupported: there is no such type; float16 on a CPU, bfloat16 on a CPU without AVX-512; or another
            type has been set in this process.

    Example:
        >>> set_precision("float32", [mx.cpu()])
    """
    if precision not in PRECISIONS:
        raise PrecisionUnsupported(f"precision is {precision!r}; expected one of {', '.join(PRECISIONS)}")
    before = active_precision()
    if before not in (None, precision):
        raise PrecisionUnsupported(
            f"precision {precision!r}: this process computes in {before} already, and MXNet's amp.init cannot be "
            "undone; set it in a new process"
        )
    _refuse_on_cpus(precision, as_devices(devices), f"precision {precision!r}")
    if precision == "float32" or before is not None:
        return
    from mxnet.contrib import amp  # here: a process without mixed precision does not need it

    # Its `init`, with three of its faults worked around.
    amp_module: Any = sys.modules["mxnet.contrib.amp.amp"]
    in_float32 = amp_module.list_fp32_ops(BFLOAT16 if precision == "bfloat16" else np.dtype(precision))
    cast, multicast = amp_module._cast_symbol_NDArray, mx.sym.amp_multicast

    @stands_for(cast, amp_module, "_cast_symbol_NDArray")
    def cast_unless_float32(s: mx.sym.Symbol | mx.nd.NDArray, dtype: DTypeLike) -> mx.sym.Symbol | mx.nd.NDArray:
        # Parameters are float32 already. Behind a cast that does nothing, Deconvolution on a CPU fails in oneDNN.
        already = isinstance(s, mx.sym.Symbol) and dtype == np.float32 and s.get_children() is None
        return s if already else cast(_apart(s, dtype), dtype)

    @stands_for(multicast, mx.sym, "amp_multicast")
    def multicast_apart(*data: mx.sym.Symbol, **options: Any) -> mx.sym.Symbol:
        return multicast(*(_apart(one, precision) for one in data), **options)

    amp_module._cast_symbol_NDArray = cast_unless_float32
    mx.sym.amp_multicast = multicast_apart
    # Operators without inputs, such as the zeros that a recurrent layer begins with, have nothing to be cast.
    random = [name for name in in_float32 if name.lstrip("_").startswith("random_") and not name.endswith("_like")]
    amp.init(precision, fp32_ops=[name for name in in_float32 if name not in (*_WITHOUT_INPUTS.split(), *random)])


def _apart(array: mx.sym.Symbol | mx.nd.NDArray, dtype: DTypeLike) -> mx.sym.Symbol | mx.nd.NDArray:
    """A parameter, or an input, behind an operator that adds to its gradient, which MXNet's cast on CPUs does not."""
    if dtype not in (BFLOAT16, "bfloat16"):
        return array
    if isinstance(array, mx.sym.Symbol):
        return mx.sym.identity(array) if array.get_children() is None else array
    return mx.nd.identity(array) if isinstance(array, mx.nd.NDArray) and array.grad is not None else array


def active_precision() -> str | None:
    """The type that ``mxnet.contrib.amp.init`` was called with in this process; None if it was not.

    Example:
        >>> active_precision()
    """
    if not is_amp_initialized():
        return None
    probe = mx.sym.FullyConnected(mx.sym.var("x"), num_hidden=1, no_bias=True)  # MXNet keeps the type nowhere else
    nodes = json.loads(probe.tojson(remove_amp_cast=False))["nodes"]
    return next((node["attrs"]["dtype"] for node in nodes if node["op"] == "amp_cast"), None)


@functools.cache
def has_bfloat16_on_cpus() -> bool:
    """Whether MXNet's dense and convolutional layers run in bfloat16 on this machine's CPUs."""
    processors = Path("/proc/cpuinfo")  # of Linux
    text = processors.read_text(encoding="utf-8") if processors.exists() else ""
    flags = re.search(r"^flags\s*:.*$", text, re.MULTILINE)
    if flags and "avx512bw" not in flags[0]:
        return False  # without the line that oneDNN prints where it cannot
    with mx.autograd.pause():
        one = mx.nd.amp_cast(mx.nd.ones((1, 1)), dtype=BFLOAT16)
        try:
            mx.nd.FullyConnected(one, one, num_hidden=1, no_bias=True).wait_to_read()
        except mx.base.MXNetError:
            return False
    return True


def _refuse_on_cpus(precision: str | None, devices: Sequence[mx.Context], what: str) -> None:
    """Refuse a type that MXNet cannot compute in on the CPUs among `devices`."""
    cpus = [str(device) for device in devices if device.device_type != "gpu"]
    if cpus and precision == "float16":
        raise PrecisionUnsupported(f"{what} on {', '.join(cpus)}: {_NO_FLOAT16}")
    if cpus and precision == "bfloat16" and not has_bfloat16_on_cpus():
        raise PrecisionUnsupported(f"{what} on {', '.join(cpus)}: {_NO_BFLOAT16}")


def refuse_unsupported(
    net: mx.gluon.Block, trainer: mx.gluon.Trainer, devices: Sequence[mx.Context], accumulates: bool
) -> None:
    """Refuse what MXNet would refuse in the middle of a step, or would compute wrongly."""
    active = active_precision()
    if active == "bfloat16" and accumulates and not hasattr(mx.sym.amp_multicast, "__wrapped__"):
        raise PrecisionUnsupported(
            "amp.init('bfloat16'), and gradients that are added up: MXNet's casts on CPUs would leave them zero. Call "
            "gp.set_precision('bfloat16', devices), which replaces these casts, in the place of amp.init"
        )
    if active is not None and mx.util.is_np_array():
        raise PrecisionUnsupported(
            f"amp.init({active!r}) in NumPy mode: MXNet's automatic mixed precision knows no mx.np operator, so that "
            "nothing would be computed in that type; leave out mx.npx.set_np(), or mixed precision"
        )
    refuse_16_bits_on_cpus(net, devices)
    for parameter in parameters_of(trainer):
        if np.dtype(parameter.dtype) == BFLOAT16:
            raise PrecisionUnsupported(
                f"parameter {parameter.name} is bfloat16, which MXNet's optimizers do not know; leave net.cast out and "
                "call gp.set_precision('bfloat16', devices) before the net is made: its weights stay float32"
            )
    if loss_scaler_of(trainer) and (compression_of(trainer) or {}).get("type") == "2bit":
        raise PrecisionUnsupported(
            "loss scaling with compression_params of 2 bits: an overflow would be sent as the threshold, and stay in "
            "the residual for good; use {'type': 'fp16'}, or none"
        )


def refuse_16_bits_on_cpus(net: mx.gluon.Block, devices: Sequence[mx.Context]) -> None:
    """Refuse matrix products in 16 bits where MXNet has none: layers with such weights, and automatic precision."""
    nn, rnn = mx.gluon.nn, mx.gluon.rnn
    layers = (nn.Dense, nn.conv_layers._Conv, rnn.rnn_layer._RNNLayer, rnn.RecurrentCell)
    _refuse_on_cpus(active_precision(), devices, f"amp.init({active_precision()!r})")
    for block in blocks_of(net):
        if isinstance(block, layers) and any(
            np.dtype(one.dtype) == np.float16 for one in own_parameters(block).values()
        ):
            _refuse_on_cpus("float16", devices, f"layer {block.name} with float16 weights")


class LossScaling:
    """MXNet's loss scale of one trainer, as ``amp.init_trainer(trainer)`` made it; a scale of 1 without.

    The loss is multiplied by the scale before the backward pass, so that small gradients do not vanish in float16, and
    the update divides by it. If a gradient of any device of any process overflows, all processes leave the update out
    and halve the scale; after 2000 updates in a row it doubles.

    Attributes:
        num_skipped: updates that were left out.
    """

    def __init__(self, trainer: mx.gluon.Trainer) -> None:
        self._trainer = trainer
        self._sum: NumberSum | None = None
        self.num_skipped = 0
        if self._scaler is None and active_precision() == "float16":
            from mxnet.contrib import amp  # float16 without a scale loses small gradients in silence

            amp.init_trainer(trainer)

    @property
    def _scaler(self) -> Any:
        """MXNet's, or None."""
        return loss_scaler_of(self._trainer)

    def restart(self) -> None:
        """Agree anew with the processes that are left after a loss."""
        self._sum = None

    @property
    def scale(self) -> float:
        """What the loss is multiplied by now."""
        return 1.0 if self._scaler is None else self._scaler.loss_scale

    @contextlib.contextmanager
    def unscaling(self) -> Iterator[None]:
        """Within this block the trainer divides gradients by the scale; it does not look for overflows by itself."""
        trainer, scaler = self._trainer, self._scaler
        before = scale_of(trainer)
        set_scale(trainer, scale_without_loss_scaling(trainer) / scaler.loss_scale)
        set_loss_scaler(trainer, None)  # its own check sees one device, and gradients of earlier steps
        try:
            yield
        finally:
            set_scale(trainer, before)
            set_loss_scaler(trainer, scaler)

    def overflowed(self, gradients: Sequence[mx.nd.NDArray]) -> bool:
        """Whether to leave this update out, which all processes agree on; moves the scale.

        Waits for the gradients, summed over all. NotFinite: they overflow at the smallest scale as well.
        """
        scaler = self._scaler
        # Processes may have reached different parameters, so each has looked at gradients that others have not.
        if self._sum is None:
            self._sum = NumberSum(contract(store_of(self._trainer)), OVERFLOW, 1)
        overflow = bool(self._sum.start(1 - all_finite(gradients)).wait()[0])
        scale, count = scaler.loss_scale, 0 if overflow else num_without_overflow(scaler) + 1
        if overflow:
            self.num_skipped += 1
            scale /= 2
        elif count == updates_until_growth(scaler):
            scale, count = min(scale * 2, largest_scale(scaler)), 0
        if scale < _SMALLEST_SCALE:
            raise NotFinite(
                f"the gradients are not finite, even with the loss multiplied by {2 * scale:g}: {self.num_skipped} "
                "updates were left out. NaN among the inputs is the usual cause, or a learning rate that is too large"
            )
        set_loss_scale(scaler, scale, count)
        return overflow


def all_finite(gradients: Iterable[mx.nd.NDArray]) -> mx.nd.NDArray:
    """(1,) float64 on the CPU: 1 if no value of any array is infinite or NaN, else 0."""
    groups: dict[tuple[str, np.dtype], list[mx.nd.NDArray]] = {}
    for gradient in gradients:
        legacy = as_legacy(gradient)
        legacy = legacy if legacy.stype == "default" else legacy.data
        groups.setdefault((str(legacy.ctx), np.dtype(legacy.dtype)), []).append(legacy)  # of one type per call
    result = mx.nd.ones(1, ctx=mx.cpu())
    with mx.autograd.pause():
        for arrays in groups.values():
            finite = mx.nd.ones(1, ctx=arrays[0].ctx)
            for begin in range(0, len(arrays), _ARRAYS_AT_ONCE):
                some = arrays[begin : begin + _ARRAYS_AT_ONCE]
                mx.nd.multi_all_finite(*some, num_arrays=len(some), init_output=False, out=finite)
            result = result * finite.as_in_context(mx.cpu())
        return result.astype("float64")
