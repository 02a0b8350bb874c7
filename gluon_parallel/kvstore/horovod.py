"""The store ``horovod``: sums this process's devices, and processes by Horovod."""

import contextlib
import importlib
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from ..allreduce import allreduce_each, sum_arrays
from ..errors import StoreUnavailable
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import as_legacy
from ..mxnet.engine import order
from ..store_table import INSTALL_HOROVOD
from .base import Store
from .handshake import compare_once

_numbers = itertools.count()


class Horovod(Store):
    """A store for ``gluon.Trainer`` over Horovod, which knows one array per process: the sum over its devices."""

    type = "horovod"

    @property
    def library(self) -> str:
        return f"Horovod {importlib.import_module('horovod').__version__}"

    def __init__(self) -> None:
        try:
            self._horovod = importlib.import_module("horovod.mxnet")
        except ImportError as error:
            raise StoreUnavailable(
                f"the store 'horovod' needs Horovod built for MXNet ({error}). {INSTALL_HOROVOD}; or choose mpi or "
                "dist_sync"
            ) from error
        self._horovod.init()
        self.rank, self.num_workers = self._horovod.rank(), self._horovod.size()
        self._last: dict[str, Any] = {}  # name -> an array that is ready when the last exchange under it is
        self._open("Horovod", next(_numbers))

    def _broadcast(self, key: Hashable, value: Any, outs: Sequence[Any], priority: int) -> None:
        value, *outs = map(as_legacy, (value, *outs))
        self._check(key, [value, *outs])
        compare_once(self, [key], [value])
        if outs[0] is not value:
            value.copyto(outs[0])
        with self._exchanges.recorded("b", key, [value], outs):
            with self._after_last(f"broadcast {key}", outs[0]) as name:
                self._horovod.broadcast_(outs[0], root_rank=0, name=name, priority=priority)
            _copy_to_others(outs)

    def _sum(self, key: Hashable, values: Sequence[Any], outs: Sequence[Any], priority: int) -> None:
        self._check(key, [*values, *outs])
        in_place = outs is values
        values, outs = (list(map(as_legacy, arrays)) for arrays in (values, outs))
        if not in_place:
            total = sum_arrays(values)
            if total is not outs[0]:
                total.copyto(outs[0])
        elif len(values) > 1:
            allreduce_each([outs], priority)
        with self._exchanges.recorded("s", key, outs[:1], outs):
            with self._after_last(str(key), outs[0]) as name:
                self._horovod.allreduce_(outs[0], average=False, name=name, priority=priority)
            _copy_to_others(outs)

    def set_gradient_compression(self, compression_params: Any) -> None:
        """Refused: Horovod would have to be told at every exchange."""
        raise ValueError(
            f"compression_params={compression_params!r}: the store 'horovod' does not compress; leave it out, or take "
            "the store mpi"
        )

    def _start_sum(self, key: Hashable, array: Any) -> None:
        with self._exchanges.recorded("g", key, [array], [array]):
            self._horovod.allreduce_(array, average=False, name=f"gluon_parallel gather {key}", priority=0)

    @contextlib.contextmanager
    def _after_last(self, name: str, array: Any) -> Iterator[str]:
        """Within this block an exchange of `array` is queued; it begins when the last one under `name` has ended.

        Horovod refuses a name under which another array is still under way.
        """
        if name not in self._last:
            self._last[name] = mx.nd.zeros(1, ctx=mx.cpu())
        last = self._last[name]
        order([last], [array])
        yield name
        order([array], [last])


def _copy_to_others(outs: Sequence[Any]) -> None:
    """Every array becomes the first one. Unlike ``gp.broadcast``, gradients stay marked as fresh for the update."""
    with mx.autograd.pause():
        for out in outs[1:]:
            outs[0].copyto(out)
