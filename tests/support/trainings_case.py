"""One random training: what is trained, how, on which samples; as a short text, and from it."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any, NamedTuple, Optional


class Step(NamedTuple):
    """One batch."""

    sizes: tuple[int, ...]  # samples of each process
    used: tuple[int, ...] = (0, 1)  # branches of the net that it uses
    before: str = ""  # what happens before it, see `trainings_events`


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that a training depends on. The defaults are the simplest training."""

    # The way it is written: "DataParallel", "Pipeline", "prepare" (with loaders), "loop" (gluon.Trainer) or "Module".
    way: str = "DataParallel"
    devices: int = 2  # of each process; replicas of a pipeline
    processes: int = 1
    numpy_mode: bool = False  # after mx.npx.set_np()
    # The net.
    net: str = "dense"  # or "conv", "embedding", "lstm"
    width: int = 5  # of the layers between the first one and the last one
    dtype: str = "float64"
    activation: str = "tanh"  # or "relu", in float64: in float32 its input may have another sign after other sums
    batch_norm: bool = False
    tied: bool = False  # one layer twice
    branches: bool = False
    sparse: bool = False  # gradient of the embedding
    time_major: bool = False
    deferred: bool = False  # shapes are known at the first batch
    hybridize: str = ""  # or "graph", "static_alloc", "static_shape"
    recompute: bool = False
    convert: bool = False  # convert_for_cpu
    fixed: str = ""  # one parameter of the net: "null" (grad_req), "lr_mult" or "wd_mult"
    which: int = 0  # the number of that parameter, and of those that are frozen for a time
    # The loss.
    loss: str = "l2"  # or "ce", "weighted", "parts", "pairs" (over the whole batch)
    reduction: str = ""  # or "mean", "sum"
    form: str = "arrays"  # of a batch; or "numpy", "list" (two inputs)
    # The update.
    optimizer: str = "sgd"  # or "momentum", "nag", "adam", "adagrad", "rmsprop", "adamw"
    schedule: str = ""  # or "factor", "poly"
    wd: float = 0.0
    clip_gradient: Optional[float] = None
    clip_global_norm: Optional[float] = None
    accumulate: int = 1
    shard_optimizer: bool = False
    hook: str = ""  # or "exact", "float16"
    average: bool = False  # a moving average of the weights
    scaled: bool = False  # the loss, as in mixed precision
    store: str = "device"  # or "local", "mpi", "none"; "dist_sync" in no random one
    update_on_kvstore: Optional[bool] = None
    # A loop of gluon.Trainer.
    sums: str = "step"  # or "allreduce_grads", "gp.allreduce", and then trainer.update
    backward: str = "joint"  # or "each"; "autograd.grad", whose gradients are written and marked; or "again", after a
    # backward pass on the same device that no step uses
    add: bool = False  # grad_req="add", with zero_grad after each update
    two_trainers: bool = False  # which make the updates in turns
    # A pipeline, whose stages `recompute` may be for.
    stages: int = 2
    micro_batches: int = 2
    order: str = "1f1b"  # or "gpipe"
    # Loaders.
    samples: int = 0
    batch_size: int = 0
    epochs: int = 1
    shuffle: bool = False
    last_batch: str = "keep"  # or "discard", "rollover"
    batchify: str = ""  # or "stack", "extra" (an array that is one per batch)
    score: str = ""  # after each epoch: "loss", "predict", or a metric of `trainings_nets`

    steps: tuple[Step, ...] = (Step((4,)), Step((3,)))
    seed: int = 0  # of the samples and weights

    @property
    def batch_axis(self) -> int:
        """The axis that counts samples."""
        return int(self.time_major)

    @property
    def is_flat(self) -> bool:
        """Whether a sample has one output, and not one per word."""
        return self.net in ("dense", "conv")

    @property
    def num_inputs(self) -> int:
        """How many inputs the net has."""
        return 1 + (self.form == "list")

    @property
    def num_labels(self) -> int:
        """How many arrays of labels a batch has."""
        return 1 + (self.loss == "weighted")

    @property
    def is_of_batch(self) -> bool:
        """Whether the loss is one value of the whole batch, which no number of samples divides."""
        return self.loss in ("parts", "pairs")

    @property
    def unused(self) -> range:
        """The samples of a pass that no step uses: one for each device that the training begins with."""
        return range(1000, 1000 + self.devices)

    @property
    def plain(self) -> Case:
        """The same net as one device computes it, layer by layer; in float64, where the optimizer can."""
        dtype = "float32" if self.optimizer in ("adagrad", "rmsprop") else "float64"
        return dataclasses.replace(self, dtype=dtype, hybridize="", recompute=False, deferred=False)

    def __str__(self) -> str:
        """The fields that are not the default, as Python writes them."""
        found = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        found["steps"] = tuple(map(tuple, self.steps))
        given = {one.name: one.default for one in dataclasses.fields(self)}
        return repr({name: value for name, value in found.items() if value != given[name]})

    @classmethod
    def read(cls, text: str) -> Case:
        """From what ``str`` made of it."""
        found: dict[str, Any] = ast.literal_eval(text)
        steps = {"steps": tuple(Step(*step) for step in found["steps"])} if "steps" in found else {}
        return cls(**{**found, **steps})
