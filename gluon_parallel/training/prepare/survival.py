"""`survive` lets a loop of the caller's own go on without lost processes, as `prepare` does."""

from __future__ import annotations

from typing import Any, Callable

from ... import kvstore
from ...kvstore.clients import opened_store
from ...kvstore.contract import contract
from ...mxnet.compat import mx
from ...mxnet.trainers import has_made_store, want_store
from ...step.first_step import broadcast_others
from ...survive.survival import Survival
from ..checkpoint import restore, state
from .loaders import shard_loader
from .unpacked import UnpackedStep


def survive(
    step: Callable[..., Any], net: mx.gluon.Block, trainer: mx.gluon.Trainer, *loaders: Any, seed: int = 0,
    batch_axis: int = 0,
) -> Any:  # fmt: skip
    """Let a loop of your own go on without processes that are lost, under ``gluon-parallel launch --min-processes``.

    ``gp.prepare`` does it by itself. After a loss, the step that was under way is called again, with the same batch
    divided among the processes that are left. So the weights are those of an undisturbed run, to rounding. Call it on
    all processes, before the first step; without ``--min-processes`` the loop runs as it would, with the same checks.

    Args:
        step: function of one batch, or of its parts, that trains on it: ``parallel.step`` of a ``gp.DataParallel``, or
            one of your own that ends with ``parallel.step(...)``, ``trainer.step(...)`` or ``trainer.update(...)`` at
            most once. It may be called again, so it counts nothing. Divide by the samples of the whole batch, which
            ``parallel.step`` does: ``trainer.step(64)``.
        net, trainer: what it trains. The trainer has the store.
        loaders: as of ``gp.prepare``: ``gluon.data.DataLoader`` or ``gp.datasets.batches``, of the whole data, or of
            this process's part by ``gp.sampler.BatchSampler(..., rank, num_workers)``. A DataLoader is changed.
        seed: of the order of the samples of shuffled loaders without an order of their own.
        batch_axis: the axis that counts samples, for batches with fewer samples than there are processes.

    Returns:
        What is called in the place of `step`, a :class:`Survival`, and then the loaders in the order given. The arrays
        that it is called with are those of the batch as a loader has yielded it, all or some of them; change them in
        `step`. ``survival.together(function)`` repeats what else takes all processes.

    Raises:
        TypeError: a loader cannot be divided.
        BatchMismatch: by a step: an array is not one of the batch.
        GradientUnavailable: the trainer updates outside of the step, or a second time in it.

    Example:
        >>> import gluon_parallel as gp
        >>> net = mx.gluon.nn.Dense(1, in_units=3)
        >>> net.initialize()
        >>> trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        >>> parallel = gp.DataParallel(net, mx.gluon.loss.L2Loss(), trainer)
        >>> data = mx.gluon.data.ArrayDataset(mx.nd.ones((5, 3)), mx.nd.ones((5, 1)))
        >>> step, train = gp.survive(parallel.step, net, trainer, mx.gluon.data.DataLoader(data, 4))
        >>> for x, y in train:
        ...     loss = step(x, y)
        >>> step.num_steps
        2
    """
    store = opened_store(trainer)
    if isinstance(store, str):
        store = want_store(trainer, kvstore.create(store))
    store = contract(store)
    if not has_made_store(trainer):
        broadcast_others(net, trainer, store)
    shards = [shard_loader(loader, store.rank, store.num_workers, seed, batch_axis) for loader in loaders]
    survival = Survival(step, net, trainer, shards, store, state, restore)
    survival.join()
    return UnpackedStep((survival, *shards))
