"""Linear scaling rule: a learning rate schedule for another batch size, with warm-up."""

import math
from typing import Union

from ..mxnet.compat import mx


class LinearScalingScheduler(mx.lr_scheduler.LRScheduler):
    """One of MXNet's learning rate schedules, scaled to a larger batch, with linear warm-up (Goyal et al., 2017).

    The rate is that of `schedule`, times ``batch_size / base_batch_size``. During the first `warmup_steps` updates it
    rises linearly from `warmup_begin_lr`. `schedule` counts its own steps from the first update on, warm-up included.
    With ``accumulate=n``, an update is n calls of ``step``, and a batch is n batches.

    ``gp.checkpoint`` saves and restores the schedule. An optimizer with a default
    ``learning_rate``, such as Adam, needs ``"learning_rate": scheduler.base_lr`` beside ``"lr_scheduler"``.

    Args:
        schedule: an ``mx.lr_scheduler.LRScheduler`` without warm-up, or a number: a constant learning rate. Tuned for
            batches of `base_batch_size`.
        batch_size: samples per update, over all devices and processes: the ``batch_size`` of ``gp.prepare``'s loaders.
        base_batch_size: samples per update for which `schedule` was tuned.
        warmup_steps: updates; 5 epochs are ``5 * len(loader)``.
        warmup_begin_lr: where warm-up begins. Goyal et al. begin at the rate of `schedule`.

    Raises:
        ValueError: an argument is out of range, or an optimizer's ``learning_rate`` contradicts the schedule.

    Example:
        >>> cosine = mx.lr_scheduler.CosineScheduler(max_update=900, base_lr=0.1)
        >>> scheduler = LinearScalingScheduler(cosine, batch_size=1024, base_batch_size=256, warmup_steps=50)
        >>> scheduler.base_lr, scheduler(25) < scheduler(50), round(scheduler(450), 3)
        (0.4, True, 0.2)
        >>> net = mx.gluon.nn.Dense(1, in_units=2)
        >>> net.initialize()
        >>> trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9, "lr_scheduler": scheduler})
    """

    def __init__(self, schedule: Union[mx.lr_scheduler.LRScheduler, float], batch_size: int, base_batch_size: int = 256,
                 warmup_steps: int = 0, warmup_begin_lr: float = 0.0) -> None:  # fmt: skip
        if not isinstance(schedule, mx.lr_scheduler.LRScheduler):
            if not isinstance(schedule, (int, float)) or not 0 < schedule < math.inf:
                raise ValueError(f"schedule is {schedule!r}, expected an mx.lr_scheduler.LRScheduler or a rate above 0")
            schedule = mx.lr_scheduler.FactorScheduler(2**62, base_lr=schedule)  # never decays
        for name, value, least in (
            ("batch_size", batch_size, 1), ("base_batch_size", base_batch_size, 1), ("warmup_steps", warmup_steps, 0),
        ):  # fmt: skip
            if value != int(value) or value < least:
                raise ValueError(f"{name} is {value}, expected a whole number, {least} or more")
        if getattr(schedule, "warmup_steps", 0):
            there = f"the {type(schedule).__name__} has warmup_steps={schedule.warmup_steps}"
            raise ValueError(f"{there}; pass them to LinearScalingScheduler alone, which warms up to the scaled rate")
        self.schedule, self.scale = schedule, batch_size / base_batch_size
        self.warmup_steps, self.warmup_begin_lr = int(warmup_steps), warmup_begin_lr
        if not 0 <= warmup_begin_lr <= self.base_lr:
            raise ValueError(f"warmup_begin_lr is {warmup_begin_lr}, expected 0 to the scaled rate, {self.base_lr}")

    @property
    def base_lr(self) -> float:
        """The schedule's own ``base_lr``, scaled."""
        return self.scale * self.schedule.base_lr

    @base_lr.setter
    def base_lr(self, value: float) -> None:  # MXNet's optimizers set it to their learning_rate where that differs
        raise ValueError(
            f"the optimizer's learning_rate is {value} (its default, if you passed none), but that of the "
            f'LinearScalingScheduler is {self.base_lr}: write "learning_rate": scheduler.base_lr beside "lr_scheduler"'
        )

    def __call__(self, num_update: int) -> float:
        """The learning rate of this update; the first one has number 1."""
        rate = self.scale * self.schedule(num_update)
        if num_update >= self.warmup_steps:
            return rate
        return self.warmup_begin_lr + (rate - self.warmup_begin_lr) * num_update / self.warmup_steps
