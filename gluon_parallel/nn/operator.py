"""The custom operator: one device's forward and backward pass, with a meeting in the middle of each."""

from __future__ import annotations

from typing import NamedTuple, Optional

import numpy as np

from ..arrays import as_legacy
from ..compat import mx
from ..errors import BarrierBroken
from . import native
from . import place as places
from .compiled import Compiled
from .operators import Operators

NAME = "gluon_parallel_sync_batch_norm"
_IN_PYTHON = f"{NAME}_in_python"
_FASTEST = {"cpu": Compiled, "gpu": Operators}


class _Forward(NamedTuple):
    """What the backward pass needs to know of its forward pass."""

    call: Optional[int]  # the number of the meeting; None if the statistics were constants
    count: int  # type: ignore[assignment]  # values per channel in the whole batch
    mean: np.ndarray  # (C,)
    rstd: np.ndarray  # (C,) 1 / sqrt(variance + epsilon)
    gamma: np.ndarray  # (C,)


class _SyncBatchNorm(mx.operator.CustomOp):
    """One call site of one layer on one device. Its callbacks run on threads of their own, so they may wait."""

    def __init__(self, settings, device):
        super().__init__()
        self.settings = settings
        self.device = str(device)
        self.place = settings.place()
        self.arithmetic = {**_FASTEST, **self.place.arithmetic}[device.device_type](settings.axis)
        self.memory = None

    def forward(self, is_train, req, in_data, out_data, aux):
        in_data, out_data, aux = _legacy(in_data, out_data, aux)
        self.memory = None  # what a failed forward pass must not leave to the backward pass
        try:
            self._forward(is_train and not self.settings.use_global_stats, req[0], *in_data, *out_data, *aux)
        except Exception as error:
            self.place.callback_failed(error, out_data)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        out_grad, in_data, in_grad = _legacy(out_grad, in_data, in_grad)
        try:
            self._backward(req, out_grad[0], in_data[0], *in_grad)
        except Exception as error:
            self.place.callback_failed(error, in_grad)

    def _forward(self, meets, req, x, gamma, beta, y, running_mean, running_var):
        arithmetic, settings = self.arithmetic, self.settings
        call, count = None, 0
        if meets:
            call = self.place.barrier.next_call(self.device)
            count, mean, m2 = whole = self.place.meet_moments(self.device, call, arithmetic.measure(x))
            variance = whole.variance
            if count:
                for parameter, value in ((running_mean, mean), (running_var, variance)):
                    kept = settings.momentum * arithmetic.read(parameter)
                    arithmetic.write(parameter, kept + (1 - settings.momentum) * value)
        else:
            mean, variance = arithmetic.read(running_mean), arithmetic.read(running_var)
        gamma = np.ones_like(mean) if settings.fix_gamma else arithmetic.read(gamma)
        rstd = 1 / np.sqrt(variance + settings.epsilon)
        self.memory = _Forward(call, count, mean, rstd, gamma)
        if req != "null":
            arithmetic.normalise(x, y, req, mean, gamma * rstd, arithmetic.read(beta))

    def _backward(self, req, dy, x, dx, dgamma, dbeta):
        arithmetic = self.arithmetic
        if self.memory is None:
            raise BarrierBroken(f"{self.place.name}: the backward pass of a forward pass that failed")
        call, count, mean, rstd, gamma = self.memory
        if call is None and req[1:] == ["null", "null"]:
            total = dot = np.zeros_like(mean)
        else:
            total, dot = arithmetic.sums(x, dy, mean)
        # Each device keeps its own shard's share of these two: whoever sums gradients over devices adds them up.
        arithmetic.write(dgamma, 0 if self.settings.fix_gamma else dot * rstd, req[1])
        arithmetic.write(dbeta, total, req[2])
        a = gamma * rstd
        b = k = np.zeros_like(mean)
        if call is not None:
            total, dot = self.place.meet_sums(self.device, call, total, dot)
            b, k = a * rstd * rstd * dot / max(count, 1), a * total / max(count, 1)
        if req[0] != "null":
            arithmetic.gradient(x, dy, dx, req[0], mean, a, b, k)


def _legacy(*lists):
    """MXNet hands over mx.np arrays where the callback's thread has called ``set_np()``, as under NaiveEngine."""
    return [[as_legacy(array) for array in arrays] for arrays in lists]


class Settings(NamedTuple):
    """The operator's attributes, which travel through MXNet as strings."""

    token: str
    axis: int = 1
    epsilon: float = 1e-5
    momentum: float = 0.9
    fix_gamma: bool = False
    use_global_stats: bool = False

    @classmethod
    def parse(cls, strings):
        """Settings from MXNet's strings.

        Example:
            >>> Settings.parse({"token": "t", "axis": "-1", "fix_gamma": "True"}).axis
            -1
        """
        kinds = {"token": str, "axis": int, "epsilon": float, "momentum": float}
        return cls(**{name: kinds[name](text) if name in kinds else text == "True" for name, text in strings.items()})

    def place(self):
        """The layer's meeting place.

        Raises:
            BarrierBroken: the layer is gone, or lived in another process.
        """
        place = places.find(self.token)
        if place is None:
            raise BarrierBroken(
                "this graph was made by a SyncBatchNorm layer that no longer exists here; keep the net alive while it "
                "is used, or use gp.nn.revert_sync_batchnorm(net) before you take its graph elsewhere"
            )
        return place


@mx.operator.register(_IN_PYTHON)
class _SyncBatchNormProperties(mx.operator.CustomOpProp):
    """Shapes and types, which MXNet asks for before it makes the operator."""

    def __init__(self, **settings):
        super().__init__(need_top_grad=True)
        self.settings = Settings.parse(settings)
        native.made.description = self

    def list_arguments(self):
        return ["data", "gamma", "beta"]

    def list_auxiliary_states(self):
        return ["moving_mean", "moving_var"]

    def infer_shape(self, in_shape):
        data = in_shape[0]
        if not data:
            return in_shape, [data], [[], []]
        channels = [data[self.settings.axis]]
        return [data, channels, channels], [[1, *data]], [channels, channels]  # the 1: see graph.plain_after

    def infer_type(self, in_type):
        data, *parameters = in_type
        wide = np.float32 if data == np.float16 else data
        parameters = [wide if kind is None else kind for kind in parameters]
        return [data, *parameters], [data], parameters

    def declare_backward_dependency(self, out_grad, in_data, out_data):
        return [out_grad[0], in_data[0]]

    def create_operator(self, ctx, in_shapes, in_dtypes):
        return _SyncBatchNorm(self.settings, ctx)


native.register(NAME, _IN_PYTHON, lambda settings: places.find(settings.token))
