"""Linear interpolation of many arrays towards others, in place and in the background."""

from ..compat import mx
from ..engine import make_plain, push, view

_BLOCK = 1 << 14  # values, which stay in the cache


def interpolate(arrays: list[mx.nd.NDArray], targets: list[mx.nd.NDArray], weight: float) -> None:
    """Add `weight` times ``target - array`` to each array; it does not wait.

    Values that equal the target stay as they are: MXNet's operators for it, such as ``sgd_update`` with a weight decay
    of 1, compute ``(1 - weight) * array + weight * target``, whose rounded factors do not add up to 1.

    Args:
        arrays: on any devices, float32 or float64.
        targets: as many, of the same devices, shapes and dtypes.
        weight: from 0 to 1.

    Example:
        >>> array = mx.nd.array([1.0, 5.0])
        >>> interpolate([array], [mx.nd.array([3.0, 5.0])], 0.25)
        >>> array.asnumpy().tolist()
        [1.5, 5.0]
    """
    by_device: dict = {}
    for array, target in zip(arrays, targets):
        if array.context.device_type == "gpu":
            array += weight * (target - array)
        else:
            by_device.setdefault(array.context, []).append((array, target))
    for pairs in by_device.values():
        _push(pairs, weight)


def _push(pairs, weight):
    written, read = map(list, zip(*pairs))
    make_plain(*written, *read)

    def run():
        for pair in pairs:
            array, target = (view(one).reshape(-1) for one in pair)
            for begin in range(0, array.size, _BLOCK):
                block = slice(begin, begin + _BLOCK)
                step = target[block] - array[block]
                step *= weight
                array[block] += step

    push(run, read=read, write=written, name="interpolation")
