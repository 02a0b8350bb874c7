"""Split of a batch of texts into shards of about the same number of tokens, padding included."""

import operator

import numpy as np

from ...compat import mx  # noqa: F401 - for the doctest
from ...split import map_arrays, split_and_load


def cut(lengths, num_shards: int) -> list[int]:
    """The ends of at most `num_shards` shards of texts, sorted from long to short, of which the largest costs least.

    A shard costs its number of texts times the length of its longest one, for that is what its device computes.

    Example:
        >>> cut([8, 8, 4, 4, 4, 4], 2)  # two texts of 8 cost as much as four of 4
        [2, 6]
    """

    def ends(most):
        found, at = [], 0
        while at < len(lengths):
            at = min(len(lengths), at + max(1, most // int(lengths[at])))
            found.append(at)
        return found

    low, high = int(lengths[0]), int(lengths[0]) * len(lengths)
    while low < high:
        middle = (low + high) // 2
        if len(ends(middle)) <= num_shards:
            high = middle
        else:
            low = middle + 1
    return ends(low)


def split_by_tokens(data, devices) -> list:
    """Cut a batch of texts so that every device computes about the same number of tokens.

    Long texts go to one device and short ones to another, each shard padded only to its own longest text. Pass it
    as ``gp.DataParallel(..., split=gp.datasets.text.split_by_tokens)``; the gradient is the same as with any split.

    Args:
        data: ``((tokens, lengths), labels)``: (N, T), (N,) and (N,), or more arrays beside the labels.
        devices: list of ``mx.Context``.

    Returns:
        One shard per device, nested like `data`; fewer where there are fewer texts.

    Example:
        >>> tokens, lengths = np.ones((3, 8), int), np.array([2, 8, 2])
        >>> shards = split_by_tokens(((tokens, lengths), np.array([0, 1, 0])), [mx.cpu(0), mx.cpu(1)])
        >>> [shard[0][0].shape for shard in shards]
        [(1, 8), (2, 2)]
    """
    (tokens, lengths), labels = data
    tokens, lengths = np.asarray(tokens), np.asarray(lengths)
    labels = map_arrays(np.asarray, labels)
    order = np.argsort(-lengths, kind="stable")
    shards, start = [], 0
    for end, device in zip(cut(lengths[order], len(devices)), devices):
        chosen = order[start:end]
        longest = int(lengths[chosen].max())
        own_labels = map_arrays(operator.itemgetter(chosen), labels)
        shards += split_and_load(((tokens[chosen, :longest], lengths[chosen]), own_labels), [device])
        start = end
    return shards
