"""Parts of a device's time: every moment of a step belongs to exactly one, so that the parts add up to the step."""

from typing import NamedTuple

FORWARD, BACKWARD, UPDATE, SUM = "forward", "backward", "update", "sum over devices"
DEVICES, LATE, TRANSFER = "waiting for other devices", "waiting for a late process", "transfer"
LAUNCHING, READING, SCRIPT, ENGINE = "launching", "reading data", "script", "engine"

# What each part is, and its colour. Where several things happen at the same time, the first one counts: what is hidden
# behind computing costs nothing.
_TABLE = {
    FORWARD: ("#7aa6d8", "operators of the forward pass and the loss"),
    BACKWARD: ("#3d6fb4", "operators of the backward pass"),
    UPDATE: ("#3f9c8f", "the optimizer"),
    SUM: ("#86b65a", "adding up the gradients of this process's devices"),
    DEVICES: ("#f0a23b", "SyncBatchNorm layers and the gradients' sum, until the last device of this process has come"),
    TRANSFER: ("#b07ab8", "gradients or statistics, from then on"),
    LATE: ("#d9534f", "gradients or statistics, until the last process has come"),
    LAUNCHING: ("#e8cf52", "the device is idle, because Python has not launched its next operator yet"),
    READING: ("#a5795b", "the device is idle, because the next batch is not there yet"),
    SCRIPT: ("#a9adb4", "the device is idle, and Python is in the script's own code between two steps"),
    ENGINE: ("#5f6b7a", "idle although all is launched: MXNet hands over between threads, or no core is free"),
}
PARTS = tuple(_TABLE)
COLOURS, MEANING = ({part: row[column] for part, row in _TABLE.items()} for column in range(2))
COMPUTING = (FORWARD, BACKWARD, UPDATE)


class Interval(NamedTuple):
    """What happened from `begin` to `end`."""

    part: str
    begin: int
    end: int


def cut(begin, end, intervals, otherwise):
    """Cut a step into a list of :class:`Interval` that cover it without a gap and without overlap.

    The given `intervals` may overlap and reach out of the step; moments in none of them belong to `otherwise`.

    Example:
        >>> pieces = cut(0, 10, [Interval(LATE, 2, 8), Interval(FORWARD, -3, 4)], SCRIPT)
        >>> [(part, begin, end) for part, begin, end in pieces]
        [('forward', 0, 4), ('waiting for a late process', 4, 8), ('script', 8, 10)]
    """
    changes = []
    for part, first, last in intervals:
        first, last = max(first, begin), min(last, end)
        if first < last:
            changes += [(first, 1, PARTS.index(part)), (last, -1, PARTS.index(part))]
    changes.sort()
    counts, now = [0] * len(PARTS), begin
    pieces: list[Interval] = []

    def close(until):
        part = next((PARTS[number] for number, count in enumerate(counts) if count), otherwise)
        if pieces and pieces[-1].part == part:
            pieces[-1] = pieces[-1]._replace(end=until)
        else:
            pieces.append(Interval(part, now, until))

    for time, change, number in changes:
        if time > now:
            close(time)
            now = time
        counts[number] += change
    if now < end:
        close(end)
    return pieces


def overlap(first, second):
    """How long intervals (begin, end) of both lists run at the same time; those of one list may overlap.

    Example:
        >>> overlap([(0, 4), (2, 6)], [(5, 9)])
        1
    """
    one, other, either = (
        sum(end - begin for begin, end in joined(intervals)) for intervals in (first, second, [*first, *second])
    )
    return one + other - either


def joined(intervals):
    """The same moments as intervals in order that do not overlap.

    Example:
        >>> joined([(5, 6), (0, 3), (2, 4)])
        [(0, 4), (5, 6)]
    """
    found: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif begin < end:
            found.append((begin, end))
    return found
