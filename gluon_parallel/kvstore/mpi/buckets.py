"""Buckets: small gradients that travel together between hosts."""

from collections.abc import Hashable, Sequence
from typing import Optional

_ALONE = 1 << 20  # bytes from which on an array travels by itself
_FIRST, _NEXT = 1 << 20, 25 << 20  # bytes of the first bucket, which starts early, and of those after it


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
