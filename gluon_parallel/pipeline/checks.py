"""Checks of a pipeline's stages, devices, batch and trainer, and warnings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..devices import check_available
from ..errors import BatchMismatch, GradientUnavailable, PipelineMismatch, warn
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import Nested
from ..mxnet.parameters import gradient_storage, is_initialized
from ..mxnet.trainers import parameters_of
from ..split import listed
from ..step.checks import check_count
from ..step.checks import check_trainer as _check_params
from .orders import ORDERS

OF_MICRO_BATCHES = (  # for `warn_of_statistics`
    "it normalises by the statistics of each micro-batch, so results depend on the number of micro-batches, replicas "
    "and processes. {graph}gp.nn.convert_sync_batchnorm(net), before the pipeline is made, makes them those of the "
    "whole batch, which a stage then takes in one pass. Where BatchNorm is meant"
)


def replicas(devices: Iterable[mx.Context] | Iterable[Iterable[mx.Context]]) -> list[list[mx.Context]]:
    """The devices of each replica, from a list of devices or a list of such lists."""
    devices = listed(devices)
    if isinstance(devices, list):
        devices = [listed(row) for row in devices]

    def are_devices(row: object) -> bool:
        return isinstance(row, (list, tuple)) and len(row) > 0 and all(isinstance(one, mx.Context) for one in row)

    rows = [devices] if are_devices(devices) else devices
    if not isinstance(rows, (list, tuple)) or not rows or not all(map(are_devices, rows)):
        raise PipelineMismatch(
            f"devices is {devices!r}; expected a list with one device per stage, or one such list per replica: write "
            "gp.devices('cpu:2'), for instance"
        )
    rows = [list(row) for row in rows]
    if len({len(row) for row in rows}) > 1:
        raise PipelineMismatch(f"devices: replicas need equally many devices, one per stage; got {rows}")
    flat = [device for row in rows for device in row]
    twice = [str(device) for index, device in enumerate(flat) if device in flat[:index]]
    if twice:
        raise PipelineMismatch(f"devices: {', '.join(twice)} stands there more than once; each stage needs its own")
    check_available(flat, devices)
    return rows


def check_arguments(num_micro_batches: object, order: object, recompute: object) -> None:
    """Refuse numbers and words that make no sense."""
    check_count("num_micro_batches", num_micro_batches)
    if order not in tuple(ORDERS):
        raise ValueError(f"order: expected one of {', '.join(map(repr, ORDERS))}, got {order!r}")
    if not isinstance(recompute, (bool, np.bool_)):
        raise ValueError(f"recompute: expected True or False, got {recompute!r}")


def check_stages(stages: object, rows: list[list[mx.Context]]) -> None:
    """Refuse stages that are no blocks, not as many as devices, share parameters or are not initialised."""
    if not isinstance(stages, (list, tuple)):
        raise PipelineMismatch(
            f"stages is a {type(stages).__name__}; expected a list of Gluon blocks, one per device, or one Sequential, "
            "which is cut into as many"
        )
    for number, block in enumerate(stages):
        if not isinstance(block, mx.gluon.Block):
            raise PipelineMismatch(f"stages[{number}]: expected a Gluon block, got a {type(block).__name__}")
    if len(stages) != len(rows[0]):
        raise PipelineMismatch(
            f"{len(stages)} stages and {len(rows[0])} devices ({rows[0]}): a pipeline needs one device per stage. Give "
            "as many devices as stages, or a Sequential, which is cut into as many stages as there are devices; for "
            "replicas, a list of devices for each: [[d0, d1], [d2, d3]]"
        )
    owners: dict[int, int] = {}
    for number, block in enumerate(stages):
        for parameter in block.collect_params().values():
            if not is_initialized(parameter):
                raise PipelineMismatch(
                    f"parameter {parameter.name} of stage {number} is not initialised; call initialize(...) before"
                )
            if owners.setdefault(id(parameter), number) != number:
                raise PipelineMismatch(
                    f"parameter {parameter.name} belongs to stages {owners[id(parameter)]} and {number}, which are on "
                    "different devices; put the layers that share it into one stage, or give each its own"
                )


def check_trainer(net: mx.gluon.Block, trainer: object) -> None:
    """Refuse a trainer that cannot update the pipeline's parameters."""
    _check_params(net, trainer, "step(loss, trainer, x, y)")
    assert isinstance(trainer, mx.gluon.Trainer)
    sparse = [parameter.name for parameter in parameters_of(trainer) if gradient_storage(parameter) != "default"]
    if sparse:
        raise GradientUnavailable(
            f"{', '.join(sparse)}: MXNet cannot add up row_sparse gradients of micro-batches; build the layer with "
            "sparse_grad=False"
        )


def check_batch(inputs: Iterable[Nested], num: int, num_micro_batches: int, num_replicas: int) -> None:
    """Refuse inputs that are no arrays, and fewer samples than micro-batches."""
    for number, array in enumerate(inputs):
        if isinstance(array, (dict, list, tuple)):
            raise BatchMismatch(
                f"x[{number}] is a {type(array).__name__}; a stage takes arrays: step(loss, trainer, x, y)"
            )
    if num < num_micro_batches * num_replicas:
        each = f" in each of {num_replicas} replicas" if num_replicas > 1 else ""
        raise BatchMismatch(
            f"{num} samples and {num_micro_batches} micro-batches{each}: each needs a sample at least. Take fewer "
            "micro-batches, or have the loader drop or pad its last batch (last_batch='discard')"
        )


def check_samples(
    stage: int, arrays: Iterable[mx.nd.NDArray], num: int, axis: int, may_be_multiple: bool = False
) -> None:
    """Refuse outputs for `num` samples that cannot be concatenated or cut, since their axis counts no samples.

    With `may_be_multiple`, equally many entries for each sample are accepted too.
    """
    for array in arrays:
        length = array.shape[axis] if array.ndim > axis else 0
        if length != num and not (may_be_multiple and length and length % num == 0):
            raise PipelineMismatch(
                f"stage {stage} returned an array of shape {array.shape} for {num} samples, but micro-batches are "
                f"concatenated or cut along axis {axis}, which must count samples then. Keep this axis in every stage; "
                "what is computed over the whole batch belongs into the loss"
            )


def warn_of_recomputation(counts: Sequence[int], num_micro_batches: int) -> None:
    """Warn of stages that run one pass of all micro-batches, for which recomputation does nothing."""
    whole = [str(stage) for stage, count in enumerate(counts) if count < num_micro_batches]
    if whole:
        warn(
            f"recompute=True has no effect in stage {', '.join(whole)}: with SyncBatchNorm a stage runs all its "
            "micro-batches in one pass. Its device does nothing between the forward and the backward pass, and the "
            "backward pass needs all activations at once; to compute them again would take time and save no memory",
            UserWarning,
        )
