"""What a detector and a segmenter might say about images, alike on every process."""

import numpy as np

from mxnet import nd

CLASSES = ["a", "b", "c"]


def images(number, repeated=True):
    """For each image: predicted boxes, labels and scores, true boxes, labels and difficulties, as GluonCV's metrics
    take them, (1, N, 4) or (1, N, 1); some images have no true box, some predictions share a score if `repeated`."""
    made = []
    for index in range(number):
        random = np.random.RandomState(index)
        truth = _boxes(random, index % 4)
        kinds = random.randint(0, 3, len(truth))
        found = np.concatenate([truth + random.randint(-4, 5, truth.shape), _boxes(random, random.randint(3)),
                                np.full((2, 4), -1)])  # fmt: skip
        labels = np.concatenate([np.where(random.rand(len(kinds)) < 0.8, kinds, 0),
                                 random.randint(0, 3, len(found) - len(kinds) - 2), [-1, -1]])  # fmt: skip
        scores = np.round(random.rand(len(found)), 1 if repeated and index % 2 else 9)
        arrays = (found, labels[:, None], scores[:, None], truth, kinds[:, None], random.rand(len(kinds), 1) < 0.1)
        made.append(tuple(nd.array(array[None]) if array.size else np.zeros((1, *array.shape)) for array in arrays))
    return made


def _boxes(random, number):
    corner = random.randint(0, 60, (number, 2))
    return np.hstack([corner, corner + random.randint(8, 40, (number, 2))]).astype(np.float64)


def annotations(made):
    """The true boxes of images in COCO's form; image i has the id i, class k the category 10 * (k + 1)."""
    boxes = []
    for index, (_, _, _, truth, kinds, _) in enumerate(made):
        for (xmin, ymin, xmax, ymax), kind in zip(_host(truth)[0].tolist(), _host(kinds).ravel().tolist()):
            box = [xmin, ymin, xmax - xmin + 1, ymax - ymin + 1]
            boxes.append({"id": len(boxes) + 1, "image_id": index, "category_id": 10 * (int(kind) + 1), "bbox": box,
                          "area": box[2] * box[3], "iscrowd": 0})  # fmt: skip
    return {
        "images": [{"id": index, "width": 100, "height": 100} for index in range(len(made))],
        "categories": [{"id": 10 * (kind + 1), "name": name} for kind, name in enumerate(CLASSES)],
        "annotations": boxes,
    }


def masks(index):
    """The true mask (1, H, W), of which -1 does not count, and a net's output (1, 3, H, W)."""
    random = np.random.RandomState(index)
    return nd.array(random.randint(-1, 3, (1, 6, 7))), nd.array(random.rand(1, 3, 6, 7))


def _host(array):
    return array.asnumpy() if isinstance(array, nd.NDArray) else array
