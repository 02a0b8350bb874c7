"""Checks of a data-parallel step: its arguments, net, trainer and store; errors for what it cannot train exactly."""

from __future__ import annotations

import numbers
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from ..allreduce.gradients import trainable
from ..errors import LOG, BatchMismatch, GradientUnavailable, StatisticsPerDevice, warn
from ..kvstore.contract import contract, is_mxnets
from ..kvstore.factory import kind_of
from ..kvstore.protocols import CompressedSums, ShardedSums, SparseSums, offers
from ..mxnet.blocks import options_of
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import Nested, leaves
from ..mxnet.parameters import gradient_storage, is_initialized, weight_storage
from ..mxnet.trainers import compression_of, devices_of, parameters_of, wanted_store
from ..nn.blocks import blocks_of
from ..nn.sync_batch_norm.graph import plain_batch_norms

# SGLD draws noise; the others keep numbers or arrays that follow from the parameters updated before.
_WITH_ALL_PARAMETERS = (mx.optimizer.SGLD, mx.optimizer.Nadam, mx.optimizer.LARS, mx.optimizer.LBSGD)

OF_SHARDS = (  # for `warn_of_statistics`
    "each device normalises by the statistics of its own shard, so results depend on the number of devices. "
    "{graph}gp.nn.convert_sync_batchnorm(net{kvstore}), before the trainer's first step, or gp.prepare(..., "
    "sync_batch_norm=True) makes them those of the whole batch. Where plain BatchNorm is meant"
)


def check_count(name: str, value: object) -> None:
    """Refuse an argument that is no whole number of at least 1; NumPy's are."""
    if not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")


def check_update(accumulate: object, clip_global_norm: object) -> None:
    """Refuse options of the update that make no sense."""
    check_count("accumulate", accumulate)
    if clip_global_norm is not None and not (
        isinstance(clip_global_norm, numbers.Real) and float(clip_global_norm) > 0
    ):
        raise ValueError(f"clip_global_norm: expected a positive number or None, got {clip_global_norm!r}")


def check_loss(loss: object, accumulate: int, reduction: str | None) -> None:
    """Refuse what is no loss, and a loss of parts with what it cannot be trained with."""
    if isinstance(loss, type):
        raise ValueError(f"loss: got the class {loss.__name__}; write {loss.__name__}()")
    if not callable(loss):
        raise ValueError(f"loss: expected a function of (output, label), such as gluon.loss.L2Loss(), got {loss!r}")
    parts = getattr(loss, "parts", ())
    if parts and reduction is not None:
        raise ValueError(
            f"reduction={reduction!r}: the loss has parts ({', '.join(parts)}), pairs of a sum and a count; leave "
            "reduction out"
        )
    if parts and accumulate > 1:
        raise ValueError(
            f"accumulate={accumulate}: the loss has parts ({', '.join(parts)}), sums that are divided by their "
            "counts over a whole batch, and the counts of later batches are not known yet; take a larger batch"
        )


def check_devices(trainer: mx.gluon.Trainer, devices: Sequence[mx.Context]) -> None:
    """Refuse parameters that are not on all devices."""
    for parameter in parameters_of(trainer):
        there = parameter.list_ctx()
        if missing := [device for device in devices if device not in there]:
            raise GradientUnavailable(
                f"parameter {parameter.name} is on {there} but not on {missing}; "
                "write net.initialize(ctx=devices), or net.collect_params().reset_ctx(devices) after loading, before "
                "DataParallel is made"
            )


def check_trainer(net: mx.gluon.Block, trainer: object, call: str) -> None:
    """Refuse what is no trainer, or holds none of the net's parameters; `call` shows its place."""
    if not isinstance(trainer, mx.gluon.Trainer):
        raise ValueError(f"trainer: expected a gluon.Trainer, got {type(trainer).__name__}; the order is {call}")
    own = net.collect_params().values()
    if new := [parameter.name for parameter in own if not is_initialized(parameter)]:
        raise GradientUnavailable(
            f"{new[0]} of this {type(net).__name__} has no values: call net.initialize(ctx=gp.devices(...)) before"
        )
    if own and not {id(parameter) for parameter in own} & {id(parameter) for parameter in parameters_of(trainer)}:
        theirs = parameters_of(trainer)[0].name if parameters_of(trainer) else "nothing"
        raise GradientUnavailable(
            f"the trainer holds {theirs}, ... and none of the parameters of this {type(net).__name__} "
            f"({next(iter(own)).name}, ...); write gluon.Trainer(net.collect_params(), ...)"
        )


def check_step(x: Nested | None, is_distributed: bool) -> None:
    """Refuse a step while MXNet records, and one without samples where there is nobody else to take part with."""
    if mx.autograd.is_recording():
        raise GradientUnavailable(
            "this step runs inside `with autograd.record():`, but it records, and goes backward, by itself; "
            "take it out of that block"
        )
    if x is None and not is_distributed:
        raise BatchMismatch(
            "step(None) takes part in the step of other processes without samples, and the trainer's store meets none; "
            "leave the step out when a loader has no batch"
        )


def refuse_no_samples() -> NoReturn:
    """Refuse an update where no process had any samples."""
    raise BatchMismatch(
        "no process had any samples in this step, so there is nothing to update with: step(None) is for a process "
        "that has run out of batches while others have not. End the epoch when all have (gp.sampler.join does)"
    )


def call_in_words(inputs: Sequence[Nested], labels: Sequence[Nested], error: object) -> str:
    """How the net and the loss were called, for an error of theirs: shapes or dtypes may be wrong, or the unpacking."""
    arrays = [[array for _, array in leaves(nested)] for nested in (inputs, labels)]

    def say(array: Any) -> str:
        dtype = np.dtype(getattr(array, "dtype", np.float32))
        return str(getattr(array, "shape", array)) + f" {dtype.name}" * (dtype != np.float32)

    said = [", ".join(map(say, of_kind)) for of_kind in arrays]
    first = next((array for array in arrays[0] if isinstance(array, mx.nd.NDArray)), None)
    where = "" if first is None else f", for a shard of the batch on {first.ctx}"
    unpacked = ": a loader's pair (x, y) is unpacked: step(x, y) or step(*batch)"
    hint = unpacked if len(inputs) > 1 and not labels else ""
    # dtypes, not shapes, which are in brackets
    if re.search(r"Incompatible attr.*: expected \w+, got \w+|This layer requires uniform type", str(error)):
        hint += ": a layer's inputs need the dtype of its weights; cast the batch, as by x.astype('float32')"
    if re.search(r"Provided = \[(\d+),\d+\], inferred shape=\[\1,1\]", str(error)):
        hint += ": labels are numbers of classes; for one-hot labels, write SoftmaxCrossEntropyLoss(sparse_label=False)"
    return (
        f"(the step called the net with {len(inputs)} input{'s' * (len(inputs) != 1)} {said[0]}, and the loss with its "
        f"outputs and {len(labels)} label{'s' * (len(labels) != 1)} {said[1]}".rstrip()
        + f"{where}{hint})"
    )


def refuse_sums(trainer: mx.gluon.Trainer) -> None:
    """Refuse row_sparse weights, and sums that the store cannot make: of row_sparse or of compressed gradients."""
    weights = [parameter.name for parameter in parameters_of(trainer) if weight_storage(parameter) != "default"]
    if weights:
        raise GradientUnavailable(
            f"{', '.join(weights)}: row_sparse weights live on the store, which must update them; train them with "
            "gluon.Trainer alone, or use a dense weight with sparse_grad=True"
        )
    gradients = [parameter.name for parameter in trainable(trainer) if gradient_storage(parameter) != "default"]
    parameters, store = compression_of(trainer), wanted_store(trainer)
    name, kind = getattr(store, "type", store), kind_of(store)
    if parameters and kind is not None and not offers(kind, CompressedSums):
        raise ValueError(
            f"compression_params={parameters!r}: over the store {name!r} the gradients' sum (MXNet's pushpull) "
            "cannot be compressed; leave compression_params out, or take the store mpi, which compresses"
        )
    within_mxnet = kind is None and (store is None or isinstance(store, str) or is_mxnets(store))
    if gradients and not (within_mxnet or offers(kind, SparseSums)):
        raise GradientUnavailable(
            f"{', '.join(gradients)}: the store {name!r} does not sum row_sparse gradients for an update on the "
            "devices; take the store mpi, build the layer with sparse_grad=False, or train with gluon.Trainer alone "
            "over dist_sync"
        )


def can_shard(trainer: mx.gluon.Trainer, kvstore: mx.kv.KVStoreBase | str | None) -> bool:
    """Whether there is something to divide the optimizer's state among; refuse what it cannot be divided with."""
    store, optimizer = contract(kvstore), trainer.optimizer
    if store.num_workers * len(devices_of(trainer)) == 1:
        LOG.warning(
            "gluon_parallel: shard_optimizer=True has no effect on one process with one device, which keeps all of the "
            "optimizer's state"
        )
        return False
    if store.num_workers > 1 and not offers(store, ShardedSums):
        raise ValueError(
            f"shard_optimizer=True: the store {store.type!r} cannot gather parts of the weights, which the processes "
            "have updated; take the store mpi, or leave shard_optimizer out"
        )
    if isinstance(optimizer, _WITH_ALL_PARAMETERS):
        raise ValueError(
            f"shard_optimizer=True: {type(optimizer).__name__} draws noise, or keeps numbers that follow from all "
            "parameters, so it cannot update a part of them; take another optimizer, or leave shard_optimizer out"
        )
    if sparse := [parameter.name for parameter in trainable(trainer) if gradient_storage(parameter) != "default"]:
        raise GradientUnavailable(
            f"shard_optimizer=True: the gradients of {', '.join(sparse)} are row_sparse, which cannot be divided; "
            "build the layer with sparse_grad=False"
        )
    if store.rank == 0 and type(optimizer).__module__.partition(".")[0] not in ("mxnet", "gluon_parallel"):
        LOG.warning(
            f"gluon_parallel: shard_optimizer=True: {type(optimizer).__name__} is no optimizer of MXNet's. Each of its "
            "parameters is updated by one device alone, so the weights are right only if an update depends on no other "
            "parameter, and on no attribute that updates change"
        )
    return True


def warn_of_statistics(net: mx.gluon.Block, num_parts: int, store: mx.kv.KVStoreBase | None, text: str) -> None:
    """Warn, on the first process, of BatchNorm layers with the statistics of one of so many parts of its batch each."""
    num_workers, rank = (1, 0) if store is None else (store.num_workers, store.rank)
    if rank or num_parts * num_workers == 1:
        return
    found, graph = [], ""
    for block in blocks_of(net):
        if type(block) is mx.gluon.nn.BatchNorm and not options_of(block)["use_global_stats"]:
            found.append(block.name)
        elif isinstance(block, mx.gluon.SymbolBlock) and (norms := plain_batch_norms(block)):
            found.extend(norms)
            graph = (
                "That graph cannot be converted: build the net that it was exported from, with its prefix, and load "
                "the graph's values by net.collect_params().load('name-0000.params'). Then "
            )
    if found:
        layers = f"{found[0]} and {len(found) - 1} more layers are" if len(found) > 1 else f"{found[0]} is"
        text = text.format(kvstore=", kvstore=store" if num_workers > 1 else "", graph=graph)
        silence = "import warnings; warnings.filterwarnings('ignore', category=gp.errors.StatisticsPerDevice)"
        warn(f"{layers} BatchNorm: {text}: {silence}", StatisticsPerDevice)


def refuse_nothing_to_train(blocks: mx.gluon.Block) -> NoReturn:
    """Say why there was nothing that the backward pass could compute."""
    if all(parameter.grad_req == "null" for parameter in blocks.collect_params().values()):
        raise GradientUnavailable(
            "all parameters of the net are frozen (grad_req='null'), so a step has nothing to train; set the grad_req "
            "of some to 'write', or compute outputs and losses without a step: gp.evaluate"
        ) from None
    raise GradientUnavailable(
        "the loss depends on no parameter that is trained: it was computed from none of the net's outputs, or through "
        "asnumpy(), detach() or an operator without a gradient, such as argmax"
    ) from None
