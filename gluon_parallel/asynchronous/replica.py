"""Mean gradient of one worker, and the replica of a net on one device, with weights and gradients as flat arrays."""

from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np

from ..allreduce.gradients import flags, mark, zero_stale
from ..errors import AsynchronousUnsupported, GradientUnavailable
from ..loss_checks import check_loss
from ..mxnet.arrays import copy_from_numpy
from ..mxnet.blocks import parameters_by_structure
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import as_tuple
from ..mxnet.parameters import is_initialized
from ..nn.blocks import blocks_of
from ..sample_loss import backward_per_sample, check_reduction
from ..split import num_samples, split_and_load
from .rules import Array, concatenate, cut


def _refuse_sync_batch_norm(net: Any) -> None:
    for block in blocks_of(net):
        if type(block).__name__ == "SyncBatchNorm":
            raise AsynchronousUnsupported(
                f"{block.name} is a SyncBatchNorm: in it all devices wait for each other, which asynchronous training "
                "is there to avoid. Take nn.BatchNorm (gp.nn.revert_sync_batchnorm), or train with gp.DataParallel"
            )


class MeanGradient:
    """What a worker computes of a batch, on the `devices` that have the net; `reduction` is that of its loss."""

    def __init__(self, net: Any, loss: Callable, devices: Sequence[Any], reduction: Optional[str]) -> None:
        _refuse_sync_batch_norm(net)
        check_reduction(reduction)
        self.net, self.loss, self.devices = net, loss, devices
        self._trained = [one for one in net.collect_params().values() if one.grad_req != "null"]
        self._reduction, self._has_checked_loss = reduction, False

    def run(self, batch: Any) -> tuple[Any, int]:
        """The mean loss over a batch and the number of its samples; the devices' gradients add up to its gradient."""
        batch = tuple(as_tuple(part) for part in batch)
        count, shards = num_samples(batch), split_and_load(batch, self.devices)
        sizes = [num_samples(shard) for shard in shards]
        calls: list[tuple[tuple, tuple]] = []  # of the loss

        def run(inputs: tuple, labels: tuple) -> Any:
            outputs = as_tuple(self.net(*inputs))
            calls.append((outputs, labels))
            return self.loss(*outputs, *labels)

        devices = self.devices[: len(shards)]
        mean = backward_per_sample(run, shards, sizes, devices, 1 / count, self._reduction)
        if not self._has_checked_loss:
            check_loss(self.loss, *calls[0], sizes[0], self._reduction, has_scale=True)
            self._has_checked_loss = True
        for parameter in self._trained:
            if not any(flags(parameter)):
                raise GradientUnavailable(
                    f"{parameter.name} got no gradient: the loss does not depend on it. Leave its layer out, or set "
                    "its grad_req to 'null'"
                )
            zero_stale(parameter, parameter.list_grad())  # of devices without samples
            mark(parameter, False)
        return mean, count


class Replica(MeanGradient):
    """A net on one device; no other replica may use the block, which is initialised there, or not at all.

    AsynchronousUnsupported: the net has layers in which devices meet, or weights that are not float32.
    """

    def __init__(self, net: Any, loss: Callable, device: Any, reduction: Optional[str] = None) -> None:
        super().__init__(net, loss, [device], reduction)
        self.device, parameters = device, net.collect_params()
        for parameter in parameters.values():
            if parameter.grad_req != "null" and np.dtype(parameter.dtype) != np.float32:
                raise AsynchronousUnsupported(
                    f"{parameter.name} is {np.dtype(parameter.dtype).name}; the shared weights are float32, because "
                    "many small updates add up there. Build the net in float32"
                )
        if any(not is_initialized(parameter) for parameter in parameters.values()):
            net.initialize(ctx=device)
        parameters.reset_ctx(device)

    def prepare(self, batch: Any) -> None:
        """Run the net once, in the caller's thread: shapes that follow from the input are known from then on."""
        [inputs] = split_and_load(as_tuple(batch[0]), [self.device])
        with mx.autograd.pause():
            self.net(*inputs)
        named = parameters_by_structure(self.net)
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._statistics = [p for p in self.net.collect_params().values() if p.grad_req == "null"]

    def get_weights(self) -> Array:
        return concatenate([parameter.data(self.device).asnumpy() for parameter in self._trained])

    def set_weights(self, weights: Array) -> None:
        for parameter, array in zip(self._trained, self._unflattened(weights)):
            copy_from_numpy(parameter.data(self.device), array)

    def get_statistics(self) -> list[Array]:
        """What layers count rather than learn, such as the running mean of BatchNorm."""
        return [parameter.data(self.device).asnumpy() for parameter in self._statistics]

    def set_statistics(self, arrays: list[Array]) -> None:
        for parameter, array in zip(self._statistics, arrays):
            copy_from_numpy(parameter.data(self.device), array)

    def named(self, weights: Array) -> dict[str, Array]:
        """The parameters by their names in the net (``features.0.weight``): flat weights, and then the statistics."""
        values = zip((*self._trained, *self._statistics), (*self._unflattened(weights), *self.get_statistics()))
        return {self._names[id(parameter)]: value for parameter, value in values}

    def gradient(self, weights: Array, batch: Any) -> tuple[float, Array, int]:
        """The mean loss over a batch at these weights, its gradient, and the number of samples; waits for them."""
        self.set_weights(weights)
        mean, count = self.run(batch)
        gradient = concatenate([parameter.grad(self.device).asnumpy() for parameter in self._trained])
        return mean.asnumpy().item(), gradient, count

    def _unflattened(self, weights: Array) -> list[Array]:
        return cut(weights, [parameter.shape for parameter in self._trained])
