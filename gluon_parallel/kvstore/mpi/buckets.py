"""Buckets: small gradients that travel together between hosts."""

from collections.abc import Hashable, Sequence
from typing import Any, Optional

import numpy as np

_ALONE = 1 << 20  # bytes from which on an array travels by itself
_FIRST, _NEXT = 1 << 20, 25 << 20  # bytes of the first bucket, which starts early, and of those after it
_WORTH = 0.95  # buckets are made anew where less than this is left of the time for which their bytes wait


def plan(
    sizes: Sequence[float],
    kinds: Sequence[Hashable],
    order: Optional[Sequence[int]] = None,
    first: int = _FIRST,
    following: int = _NEXT,
    alone: int = _ALONE,
) -> list[list[int]]:
    """Which arrays travel together: lists of their numbers, in the order in which the backward pass finishes them.

    A list has arrays of one kind.

    Args:
        sizes: bytes of each array.
        kinds: of each, such as its dtype; None if it must travel by itself.
        order: their numbers as they become ready; by default from the last one on, as last layers come first.
        first, following: the most bytes of the first list of a kind, and of the others.
        alone: bytes from which on an array has a list of its own.

    Example:
        >>> plan([8, 3, 3, 3, 3, 3], ["a", "a", "b", "a", "a", None], first=6, following=9, alone=8)
        [[5], [4, 3], [2], [1], [0]]
    """
    found: list = []
    rooms: dict = {}  # kind -> (its last list, how many bytes still fit)
    for number in reversed(range(len(sizes))) if order is None else order:
        kind, size = kinds[number], sizes[number]
        if kind is None or size >= alone:
            found.append([number])
            continue
        members, room = rooms.get(kind, (None, 0))
        if size > room:
            room = first if members is None else following
            members = []
            found.append(members)
        members.append(number)
        rooms[kind] = members, room - size
    return found


def plan_by_times(
    sizes: Sequence[float], kinds: Sequence[Hashable], times: Sequence[float], **limits: Any
) -> list[list[int]]:
    """:func:`plan` for arrays that were seen to become ready at these `times`.

    It stays the plan by number unless buckets by time are ready clearly earlier: the times of a layer's weight and bias
    hardly differ, and other buckets need other memory.

    Example:
        >>> sizes, limits = [3, 3, 3, 3], {"first": 6, "following": 6}
        >>> plan_by_times(sizes, ["a"] * 4, [3.1, 3.0, 1.0, 1.1], **limits)
        [[3, 2], [1, 0]]
        >>> plan_by_times(sizes, ["a"] * 4, [1.0, 2.0, 3.0, 1.1], **limits)
        [[0, 3], [1, 2]]
    """

    def wait(lists: Sequence[Sequence[int]]) -> float:
        """For how long bytes wait, from the first time on, for the last ones of their bucket."""
        return sum(sum(sizes[one] for one in numbers) * (max(times[one] for one in numbers) - min(times))
                   for numbers in lists)  # fmt: skip

    order = np.argsort(times, kind="stable").tolist()
    by_number, by_time = plan(sizes, kinds, **limits), plan(sizes, kinds, order, **limits)
    return by_time if wait(by_time) < _WORTH * wait(by_number) else by_number
