"""AdamW: Adam with decoupled weight decay, registered with MXNet's optimizers as ``"adamw"``."""

import math
from typing import Any

import numpy as np

from ..errors import PrecisionUnsupported
from ..mxnet.compat import mx


@mx.optimizer.register
class AdamW(mx.optimizer.Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019), for ``gluon.Trainer(params, "adamw", {...})``.

    The decay shrinks the weights directly, instead of being part of the gradient that Adam normalises. Update t of a
    weight w with gradient g::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g ** 2
        w = w * (1 - lr * wd) - lr * (m / (1 - beta1 ** t)) / (sqrt(v / (1 - beta2 ** t)) + epsilon)

    as in PyTorch's ``AdamW``, with the same defaults. A learning rate schedule therefore scales the decay, too. As with
    MXNet's other optimizers, the decay of a parameter is `wd` times its ``wd_mult``, which is 1 for all parameters of a
    Gluon net. To leave biases and normalisation layers without decay::

        net.collect_params(".*(bias|gamma|beta)$").setattr("wd_mult", 0.0)

    Sparse gradients make the same update as dense ones: all rows decay, and all rows with momentum move.

    Args:
        learning_rate: by default the schedule's if there is an ``lr_scheduler``, otherwise 0.001.
        beta1, beta2: decay rates of the estimates of the first and second moment of the gradients.
        epsilon: added to the denominator, against division by zero.
        wd: weight decay.
        options: as of every ``mx.optimizer.Optimizer``: ``lr_scheduler``, ``clip_gradient``, ``multi_precision``, ...

    Raises:
        ValueError: a number is outside its range.
        PrecisionUnsupported: at the first update of float16 weights without ``multi_precision``.

    Example:
        >>> net = mx.gluon.nn.Dense(1, in_units=2, use_bias=False)
        >>> net.initialize(mx.init.One())
        >>> trainer = mx.gluon.Trainer(net.collect_params(), "adamw", {"learning_rate": 0.1, "wd": 0.5})
        >>> with mx.autograd.record():
        ...     loss = net(mx.nd.array([[0.0, 1.0]]))
        >>> loss.backward()
        >>> trainer.step(1)  # the first weight decays by 0.1 * 0.5, the second also moves by 0.1
        >>> [f"{weight:.2f}" for weight in net.weight.data().asnumpy()[0]]
        ['0.95', '0.85']
    """

    def __init__(self, learning_rate: Any = None, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8,
                 wd: float = 0.01, **options: Any) -> None:  # fmt: skip
        if learning_rate is None and options.get("lr_scheduler") is None:
            learning_rate = 0.001
        for name, value, limit in (
            ("learning_rate", learning_rate or 0, math.inf), ("beta1", beta1, 1), ("beta2", beta2, 1),
            ("epsilon", epsilon, math.inf), ("wd", wd, math.inf),
        ):  # fmt: skip
            if not 0 <= value < limit:
                wanted = "at least 0 and below 1" if limit == 1 else "a finite number that is not negative"
                raise ValueError(f"adamw: {name} is {value}, expected {wanted}")
        super().__init__(learning_rate=learning_rate, wd=wd, **options)
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon

    def create_state(self, index: int, weight: Any) -> tuple[Any, Any]:
        """Zeros for the first and second moment, each shaped like `weight`."""
        if weight.dtype == np.float16:
            raise PrecisionUnsupported(
                "adamw cannot keep its state in float16, where squares of gradients and epsilon are 0. Write "
                'gluon.Trainer(params, "adamw", {"multi_precision": True, ...}): it is kept in float32'
            )
        return mx.nd.zeros_like(weight), mx.nd.zeros_like(weight)

    def update(self, index: int, weight: Any, grad: Any, state: tuple[Any, Any]) -> None:
        """Update one device's copy of one parameter in place."""
        self._update_count(index)
        lr, wd, count = self._get_lr(index), self._get_wd(index), self._index_update_count[index]
        if wd:
            weight *= 1 - lr * wd
        # MXNet's operator takes float32 betas, so the bias correction does. It adds epsilon to sqrt(v), not to
        # sqrt(v / correction), so epsilon is scaled.
        beta1, beta2 = float(np.float32(self.beta1)), float(np.float32(self.beta2))
        root = math.sqrt(1 - beta2**count)
        options = {} if self.clip_gradient is None else {"clip_gradient": self.clip_gradient}
        mx.nd.adam_update(
            weight, grad, *state, out=weight, lr=lr * root / (1 - beta1**count), beta1=beta1, beta2=beta2,
            epsilon=self.epsilon * root, rescale_grad=self.rescale_grad, lazy_update=False, **options,
        )  # fmt: skip
