"""Inference of Faster R-CNN, one image per device at a time."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ...compat import mx
from ...split import as_devices


def detect(net: Any, images: Iterable[np.ndarray], devices: Sequence[Any], most: int = 100) -> Iterator[np.ndarray]:
    """Find objects. While the results of some images are read, the devices work on the next.

    Args:
        net: a ``FasterRCNN``, initialised on all `devices`.
        images: (3, H, W) float32 each, normalised; of any sizes.
        devices: list of ``mx.Context``.
        most: objects per image, the surest ones.

    Yields:
        For each image, in their order, (N, 6) float32: xmin, ymin, xmax, ymax, class, score; the surest first.
    """
    devices = as_devices(devices)
    waiting: deque[tuple[tuple[int, ...], Any]] = deque()
    for number, image in enumerate(images):
        device = devices[number % len(devices)]
        with mx.autograd.pause(train_mode=False):
            outputs = net(mx.nd.array(image[None], ctx=device))
        waiting.append((image.shape[1:], outputs))
        if len(waiting) > len(devices):
            yield _read(waiting.popleft(), most)
    while waiting:
        yield _read(waiting.popleft(), most)


def _read(result, most):
    size, outputs = result
    labels, scores, boxes = (output.asnumpy()[0] for output in outputs)
    found = np.concatenate([boxes, labels, scores], axis=1)
    found = found[found[:, 4] >= 0]
    found = found[np.argsort(-found[:, 5], kind="stable")[:most]]
    found[:, 0:4:2] = found[:, 0:4:2].clip(0, size[1] - 1)
    found[:, 1:4:2] = found[:, 1:4:2].clip(0, size[0] - 1)
    return found
