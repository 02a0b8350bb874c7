"""In which order each stage runs the forward and backward passes of its micro-batches."""

from __future__ import annotations

import itertools
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"


class Task(NamedTuple):
    """One pass of one micro-batch through one stage."""

    stage: int
    kind: str  # FORWARD or BACKWARD
    micro_batch: int


def gpipe(stage, num_stages, num_micro_batches):
    """All forward passes, then all backward passes, the last micro-batch first.

    Example:
        >>> [task.kind[0] + str(task.micro_batch) for task in gpipe(0, 2, 3)]
        ['f0', 'f1', 'f2', 'b2', 'b1', 'b0']
    """
    numbers = range(num_micro_batches)
    forward = [Task(stage, FORWARD, number) for number in numbers]
    return forward + [Task(stage, BACKWARD, number) for number in reversed(numbers)]


def one_forward_one_backward(stage, num_stages, num_micro_batches):
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


def launching_order(order, num_stages, num_micro_batches):
    """The tasks of all stages in an order in which each comes after those whose results it needs.

    Args:
        order: a word of :data:`ORDERS`.
        num_stages, num_micro_batches: how many.

    Example:
        >>> [f"{task.stage}{task.kind[0]}{task.micro_batch}" for task in launching_order("1f1b", 2, 2)]
        ['0f0', '1f0', '0f1', '1b0', '0b0', '1f1', '1b1', '0b1']
    """
    waiting = [ORDERS[order](stage, num_stages, num_micro_batches) for stage in range(num_stages)]
    launched: dict[Task, None] = {}
    while any(waiting):
        for tasks in waiting:
            if tasks and _needs(tasks[0], num_stages) <= launched.keys():
                launched[tasks.pop(0)] = None
    return list(launched)


def _needs(task, num_stages):
    """The tasks whose results `task` works on."""
    stage, kind, number = task
    if kind == FORWARD:
        return {Task(stage - 1, FORWARD, number)} if stage else set()
    return {Task(stage + 1, BACKWARD, number)} if stage + 1 < num_stages else {Task(stage, FORWARD, number)}


def most_held(order, stage, num_stages, num_micro_batches):
    """Of how many micro-batches a stage has run the forward pass and not yet the backward pass, at most at a time.

    Example:
        >>> most_held("1f1b", 0, 2, 8), most_held("gpipe", 0, 2, 8)
        (2, 8)
    """
    steps = [1 if task.kind == FORWARD else -1 for task in ORDERS[order](stage, num_stages, num_micro_batches)]
    return max(itertools.accumulate(steps))


def bubble(num_stages, num_micro_batches):
    """The share of a step in which a device is idle, where all passes take equally long.

    Example:
        >>> bubble(2, 1), bubble(2, 3), bubble(4, 9)
        (0.5, 0.25, 0.25)
    """
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def simulated(order, forward, backward, num_micro_batches):
    """When each pass of a step begins and ends, if devices do nothing else and sending takes no time.

    Args:
        order: a word of :data:`ORDERS`.
        forward, backward: seconds of a micro-batch's pass through each stage.
        num_micro_batches: how many.

    Returns:
        {task: (begin, end)} in seconds from the first one's begin.

    Example:
        >>> max(end for _, end in simulated("gpipe", [1, 1], [2, 2], 3).values())
        12.0
    """
    num_stages = len(forward)
    free = [0.0] * num_stages
    times: dict[Task, tuple[float, float]] = {}
    for task in launching_order(order, num_stages, num_micro_batches):
        begin = max([free[task.stage], *(times[other][1] for other in _needs(task, num_stages))])
        free[task.stage] = begin + (forward if task.kind == FORWARD else backward)[task.stage]
        times[task] = begin, free[task.stage]
    return times
