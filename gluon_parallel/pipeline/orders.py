"""In which order each stage runs the forward and backward passes of its micro-batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"


class Task(NamedTuple):
    """One pass of one micro-batch through one stage."""

    stage: int
    kind: str  # FORWARD or BACKWARD
    micro_batch: int


def gpipe(stage: int, num_stages: int, num_micro_batches: int) -> list[Task]:
    """All forward passes, then all backward passes, the last micro-batch first.

    Example:
        >>> [task.kind[0] + str(task.micro_batch) for task in gpipe(0, 2, 3)]
        ['f0', 'f1', 'f2', 'b2', 'b1', 'b0']
    """
    numbers = range(num_micro_batches)
    forward = [Task(stage, FORWARD, number) for number in numbers]
    return forward + [Task(stage, BACKWARD, number) for number in reversed(numbers)]


def one_forward_one_backward(stage: int, num_stages: int, num_micro_batches: int) -> list[Task]:
    """Forward passes until the first gradient comes back, then one backward and one forward pass in turn.

    A stage holds the activations of no more micro-batches than there are stages from it to the last one.

    Example:
        >>> [task.kind[0] + str(task.micro_batch) for task in one_forward_one_backward(0, 2, 3)]
        ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    ahead = min(num_stages - stage, num_micro_batches)
    tasks = [Task(stage, FORWARD, number) for number in range(ahead)]
    for number in range(num_micro_batches):
        tasks.append(Task(stage, BACKWARD, number))
        if number + ahead < num_micro_batches:
            tasks.append(Task(stage, FORWARD, number + ahead))
    return tasks


ORDERS = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def tasks_of(order: str, stage: int, counts: Sequence[int]) -> list[Task]:
    """The tasks of one stage in their order.

    `counts[s]` is how many micro-batches stage s runs: all, or 1 if it takes the batch whole. Such a stage waits for
    all of them, so the stages before it cannot go backward earlier and run in GPipe's order. `order` is a key of
    :data:`ORDERS`.

    Example:
        >>> [task.kind[0] + str(task.micro_batch) for task in tasks_of("1f1b", 0, [2, 1])]
        ['f0', 'f1', 'b1', 'b0']
    """
    waits = any(count < counts[stage] for count in counts[stage + 1 :])
    return ORDERS["gpipe" if waits else order](stage, len(counts), counts[stage])


def launching_order(order: str, counts: Sequence[int]) -> list[Task]:
    """The tasks of all stages in an order in which each comes after those whose results it needs.

    Example:
        >>> [f"{task.stage}{task.kind[0]}{task.micro_batch}" for task in launching_order("1f1b", [2, 2])]
        ['0f0', '1f0', '0f1', '1b0', '0b0', '1f1', '1b1', '0b1']
    """
    waiting = [tasks_of(order, stage, counts) for stage in range(len(counts))]
    launched: dict[Task, None] = {}
    while any(waiting):
        for tasks in waiting:
            if tasks and _needs(tasks[0], counts) <= launched.keys():
                launched[tasks.pop(0)] = None
    return list(launched)


def _needs(task: Task, counts: Sequence[int]) -> set[Task]:
    """The tasks whose results `task` works on."""
    stage, kind, number = task
    other = stage - 1 if kind == FORWARD else stage + 1
    if not 0 <= other < len(counts):
        return {Task(stage, FORWARD, number)} if kind == BACKWARD else set()
    numbers = [number] if counts[other] == counts[stage] else range(counts[other])
    return {Task(other, kind, one) for one in numbers}


def most_held(order: str, stage: int, counts: Sequence[int]) -> int:
    """Of how many micro-batches a stage has run the forward pass and not yet the backward pass, at most at a time.

    Example:
        >>> most_held("1f1b", 0, [8, 8]), most_held("gpipe", 0, [8, 8])
        (2, 8)
    """
    steps = [1 if task.kind == FORWARD else -1 for task in tasks_of(order, stage, counts)]
    return max(itertools.accumulate(steps))


def bubble(order: str, counts: Sequence[int]) -> float:
    """The share of a step in which a device is idle, where all stages take equally long.

    With S stages that run m passes each it is (S - 1) / (m + S - 1), in both orders.

    Example:
        >>> bubble("1f1b", [1, 1]), bubble("1f1b", [3, 3]), bubble("gpipe", [9] * 4), bubble("gpipe", [9, 1])
        (0.5, 0.25, 0.25, 0.5)
    """
    seconds = [math.lcm(*counts) / count for count in counts]
    return 1 - math.lcm(*counts) * 2 / max(end for _, end in simulated(order, seconds, seconds, counts).values())


def simulated(
    order: str, forward: Sequence[float], backward: Sequence[float], counts: Sequence[int]
) -> dict[Task, tuple[float, float]]:
    """When each pass of a step begins and ends, if devices do nothing else and sending takes no time.

    `forward[s]` and `backward[s]` are the seconds of a pass through stage s. Times count from the first pass's begin.

    Example:
        >>> max(end for _, end in simulated("gpipe", [1, 1], [2, 2], [3, 3]).values())
        12.0
    """
    free = [0.0] * len(counts)
    times: dict[Task, tuple[float, float]] = {}
    for task in launching_order(order, counts):
        begin = max([free[task.stage], *(times[other][1] for other in _needs(task, counts))])
        free[task.stage] = begin + (forward if task.kind == FORWARD else backward)[task.stage]
        times[task] = begin, free[task.stage]
    return times
