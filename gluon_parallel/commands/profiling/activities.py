"""Time categories of a step on one device: each moment belongs to one, so they add up to the step's time."""

from typing import NamedTuple

FORWARD, BACKWARD, UPDATE, SUM = "forward", "backward", "update", "sum over devices"
DEVICES, LATE, TRANSFER = "waiting for other devices", "waiting for a late process", "transfer"
LAUNCHING, READING, SCRIPT, ENGINE = "launching", "reading data", "script", "engine"

# Colour and meaning of each activity, in order of priority: a moment in several intervals belongs to the first one, so
# communication while the device computes is not counted.
_TABLE = {
    FORWARD: ("#7aa6d8", "operators of the forward pass and the loss"),
    BACKWARD: ("#3d6fb4", "operators of the backward pass"),
    UPDATE: ("#3f9c8f", "the optimizer"),
    SUM: ("#86b65a", "adding up the gradients of this process's devices"),
    DEVICES: ("#f0a23b", "SyncBatchNorm or the gradients' sum waits for the other devices of this process"),
    TRANSFER: ("#b07ab8", "gradients or statistics between processes, once all have begun to exchange them"),
    LATE: ("#d9534f", "gradients or statistics wait until the slowest process begins to exchange them"),
    LAUNCHING: ("#e8cf52", "the device is idle, because Python has not launched its next operator yet"),
    READING: ("#a5795b", "the device is idle, because the next batch is not there yet"),
    SCRIPT: ("#a9adb4", "the device is idle, and Python is in the script's own code between two steps"),
    ENGINE: ("#5f6b7a", "idle although operators are launched: MXNet changes threads, or no core is free"),
}
ACTIVITIES = tuple(_TABLE)
COLOURS = {activity: colour for activity, (colour, _) in _TABLE.items()}
MEANING = {activity: meaning for activity, (_, meaning) in _TABLE.items()}
COMPUTING = (FORWARD, BACKWARD, UPDATE)


class Interval(NamedTuple):
    """An activity and its range of time, in ns."""

    activity: str
    begin: int
    end: int


def split_step(begin, end, intervals, otherwise):
    """Cut a step into a list of :class:`Interval` that cover it without a gap and without overlap.

    The given `intervals` may overlap and reach out of the step; moments in none of them belong to `otherwise`.
    """
    changes = []
    for activity, first, last in intervals:
        first, last = max(first, begin), min(last, end)
        if first < last:
            changes += [(first, 1, ACTIVITIES.index(activity)), (last, -1, ACTIVITIES.index(activity))]
    changes.sort()
    counts, now = [0] * len(ACTIVITIES), begin
    pieces: list[Interval] = []

    def close(until):
        activity = next((ACTIVITIES[number] for number, count in enumerate(counts) if count), otherwise)
        if pieces and pieces[-1].activity == activity:
            pieces[-1] = pieces[-1]._replace(end=until)
        else:
            pieces.append(Interval(activity, now, until))

    for time, change, number in changes:
        if time > now:
            close(time)
            now = time
        counts[number] += change
    if now < end:
        close(end)
    return pieces


def overlap(first, second):
    """Total time in which intervals (begin, end) of both lists run; those of one list may overlap."""
    lists = first, second, [*first, *second]
    one, other, either = (sum(end - begin for begin, end in merge_intervals(intervals)) for intervals in lists)
    return one + other - either


def merge_intervals(intervals):
    """Merge overlapping intervals (begin, end); sorted."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif begin < end:
            found.append((begin, end))
    return found
