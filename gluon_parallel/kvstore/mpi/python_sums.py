"""Sums in Python, by MPI's operations: of what the C library does not sum, such as whole bytes or 2 bits per value."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...engine import push_async, view
from .operations import CompressedSum, PlainSum

if TYPE_CHECKING:
    from .store import MPI


class PythonSums:
    """Those of one store; each array is summed through memory of its own.

    Attributes:
        residuals: {key: (n,) array}: what 2 bits have left out, of keys that are not summed yet.
    """

    def __init__(self, store: MPI) -> None:
        self._store = store
        self._operations: dict = {}  # (name, form) -> what sums
        self._two_bits: dict[Hashable, CompressedSum] = {}  # key -> what sums its arrays in 2 bits
        self._residuals: dict[Hashable, np.ndarray] = {}

    def start(self, key: Hashable, values: Sequence[Any], outs: Sequence[Any], priority: int) -> None:
        """The arrays `outs` become the sum of all processes' `values`, on CPUs, when those are ready."""
        name, form = self._store._names("s", key, outs[0])
        summing = self._operations.get((name, form)) or self._open(name, form, key, outs[0])
        if isinstance(summing, CompressedSum) and summing.has_residual and key not in self._two_bits:
            self._two_bits[key] = summing
            if key in self._residuals:
                summing.set_residual(self._residuals.pop(key))

        def ready(done: Callable[..., None]) -> None:
            out, *copies = [view(array).reshape(-1) for array in outs]
            sources = [view(array).reshape(-1) for array in values]

            def end(error: Exception | None) -> None:
                if error is not None:  # nobody must train on with half a sum
                    out.fill(np.nan if out.dtype.kind == "f" else 0)
                else:
                    summing.read(out)
                for copy in copies:
                    np.copyto(copy, out)
                done(error)

            summing.operation.call(lambda: summing.fill(sources), end)

        written = [*outs, self._store._turn(name)]
        push_async(ready, read=values, write=written, name=f"gluon_parallel.mpi {key}", priority=priority)

    def _open(self, name: bytes, form: bytes, key: Hashable, array: Any) -> PlainSum:
        everyone, codec = self._store._progress.everyone, self._store._codec(key, array)
        own = np.empty(array.size, array.dtype)
        found = (
            PlainSum(everyone, name, form, own)
            if codec is None
            else CompressedSum(everyone, name, form, own, codec)
        )  # fmt: skip
        self._operations[name, form] = found
        return found

    def residuals(self) -> dict[Hashable, np.ndarray]:
        """{key: (n,) array}: what 2 bits have left out in this process, when nothing is under way."""
        return {key: summing.residual() for key, summing in self._two_bits.items()}

    def set_residuals(self, residuals: dict[Hashable, np.ndarray]) -> None:
        """Go on from these; keys without one begin anew."""
        self._residuals = dict(residuals)
        for key, summing in self._two_bits.items():
            summing.forget_residual()
            if key in self._residuals:
                summing.set_residual(self._residuals.pop(key))

    def forget_residuals(self) -> None:
        """Leave out what has been left out."""
        for summing in self._two_bits.values():
            summing.forget_residual()
        self._two_bits.clear()
