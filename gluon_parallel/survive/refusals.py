"""Refusal of trainings that could not go on after a loss, or that no process could join."""

from __future__ import annotations

from typing import Any

from .. import kvstore
from ..errors import StoreUnavailable
from ..mxnet.compat import mx
from ..mxnet.trainers import compression_of
from ..nn.sync_batch_norm.participants import sync_groups_of
from ..reduce.reducer import hook_of, shards_of


def refuse(net: mx.gluon.Block, trainer: mx.gluon.Trainer, store: Any) -> None:
    """Before the training, and again before its first update, by which all of it is known.

    Raises:
        ValueError: each process keeps something for itself that is lost with it.
        StoreUnavailable: layers exchange through a store that has other processes than the trainer's.
    """
    if shards_of(trainer) is not None:
        raise ValueError(
            "shard_optimizer=True: the part of the optimizer's state that a lost process had is lost with it, so "
            "training cannot go on; leave out shard_optimizer, or --min-processes of the launcher"
        )
    if hook_of(trainer) is not None:
        raise ValueError(
            "communication_hook: with --min-processes a step is repeated after a loss, and what a hook keeps cannot be "
            "taken back; use a compression by the store (float16, bfloat16), or leave --min-processes out"
        )
    if kvstore.may_join() and dict(compression_of(trainer) or {}).get("type") == "2bit":
        raise ValueError(
            "2-bit compression: of what each process keeps for itself, one that joins has nothing. Leave it out, or "
            "--max-processes of the launcher"
        )
    for group in sync_groups_of(net):
        if group.store is not None and group.store.num_workers > 1 and group.whole is not store:
            raise StoreUnavailable(
                f"{group.name}: it has the store of a group of its own, which cannot go on after a loss; give the "
                "layer the store of all processes, with group='host' or group=k, or leave out --min-processes"
            )
