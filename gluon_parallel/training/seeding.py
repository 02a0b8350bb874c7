"""Seeds of a training step as a function of its number: MXNet cannot save the state of its random number generators."""

import random

import numpy as np

from ..mxnet.compat import mx
from ..mxnet.device_threads.seeds import derive_seed


def reseed(seed: int, epoch: int = 0, step: int = 0) -> None:
    """Start the random numbers of every MXNet device, of NumPy and of Python anew, from the number of a step.

    Call it before each step of a training loop, on several processes with ``seed + store.rank`` once the weights are
    there. MXNet takes about a millisecond, which this call does not wait for. (MXNet's CPU devices share one generator,
    which operators use in the order in which they were called.)

    Example:
        >>> reseed(0, epoch=3, step=14); first = mx.nd.random.uniform(shape=3).asnumpy()
        >>> reseed(0, epoch=3, step=14); second = mx.nd.random.uniform(shape=3).asnumpy()
        >>> bool((first == second).all())
        True
    """
    number = derive_seed(seed, epoch, step)
    mx.random.seed(number)
    np.random.seed(number)  # noqa: NPY002 (the generator that MXNet's initializers use)
    random.seed(number)
