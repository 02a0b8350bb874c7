"""Analysis of recordings: activities of each step on each device, exchanges, layers and operators."""

import collections
import math
import re
import statistics
from typing import NamedTuple

from ...kvstore.reserved_keys import FIRST_RESERVED
from . import activities
from .activities import Interval
from .recording import OTHERS, OURS, STEP, Recording, is_exchange

_SUMS = re.compile(r"gluon_parallel\.allreduce|KVStoreReduce|KVStoreBCast")


class Timeline:
    """What one device of one process did, step by step.

    Attributes:
        rank, device: which.
        steps: for each step, a list of :class:`.Interval` that cover it.
        hidden: seconds per step in which gradients were exchanged while the device computed.
        exchanged: seconds per step in which gradients were exchanged.
        operators: {(activity, name): seconds per step}; activity: FORWARD, BACKWARD, SUM (over devices) or UPDATE.
    """

    def __init__(self, rank, device, steps, gradients, operators):
        self.rank, self.device, self.steps = rank, device, steps
        self.operators = {key: total / 1e9 / len(steps) for key, total in operators.items()}
        busy = [(piece.begin, piece.end) for step in steps for piece in step if piece.activity in activities.COMPUTING]
        whole = [(steps[0][0].begin, steps[-1][-1].end)]
        self.hidden = activities.overlap(gradients, busy) / 1e9 / len(steps)
        self.exchanged = activities.overlap(gradients, whole) / 1e9 / len(steps)

    def __str__(self):
        return f"rank {self.rank}, {self.device}"

    def seconds(self, *names):
        """Seconds per step, the mean, that belong to these activities; to all without names."""
        total = sum(
            end - begin for step in self.steps for activity, begin, end in step if not names or activity in names
        )
        return total / 1e9 / len(self.steps)

    def durations(self):
        """Seconds of each step."""
        return [(step[-1].end - step[0].begin) / 1e9 for step in self.steps]


class Layer(NamedTuple):
    """How long the devices of all processes waited in a SyncBatchNorm layer."""

    name: str
    devices: float  # seconds per step and device, for other devices
    processes: float  # for other processes


class Cores(NamedTuple):
    """What the cores of one host did."""

    number: int
    num_devices: int  # of all processes there
    busy: float  # share of their time that the training took
    idle: float


class Analysis:
    """What the recordings of all processes say.

    Args:
        recordings: list of :class:`.Recording`, by rank, on one clock, of equally many steps.

    Attributes:
        timelines: list of :class:`Timeline`.
        layers: list of :class:`Layer`, the one that waits longest first.
        exchanges: for each process a list of :class:`KeyExchange`.
    """

    def __init__(self, recordings: list[Recording]):
        self.recordings = recordings
        self.num_steps = min(len(marks) - 1 for one in recordings for marks in one.marks)
        self.exchanges = exchanges_of(recordings)
        self.timelines = [
            timeline
            for recording, found in zip(recordings, self.exchanges)
            for timeline in _timelines(recording, found, self.num_steps)
        ]
        self.layers = self._layers()

    def name(self, timeline):
        """Its device, and its process where there are several."""
        return str(timeline) if len(self.recordings) > 1 else timeline.device

    def seconds(self, *names):
        """Seconds per step that belong to these activities, the mean of all devices; to all without names."""
        return statistics.mean(timeline.seconds(*names) for timeline in self.timelines)

    @property
    def samples_per_second(self):
        """Of all processes; 0 where the number of samples is not known."""
        return sum(one.num_samples for one in self.recordings) / self.num_steps / self.seconds()

    def cores(self):
        """The :class:`Cores` of each host."""
        hosts = collections.defaultdict(list)
        for one in self.recordings:
            hosts[one.host].append(one)
        for ones in hosts.values():
            seconds = [(one.end - one.begin) / 1e9 * ones[0].num_cores for one in ones]
            busy = min(1, sum(one.processor / whole for one, whole in zip(ones, seconds)))
            idle = statistics.mean(one.idle / whole for one, whole in zip(ones, seconds))
            num_devices = sum(len(one.devices) for one in ones)
            yield Cores(ones[0].num_cores, num_devices, busy, 1 - busy if math.isnan(idle) else min(1, idle))

    def operators(self):
        """{(activity, name): seconds per step}, the mean of all devices, the longest first."""
        total: collections.Counter = collections.Counter()
        for timeline in self.timelines:
            total.update(timeline.operators)
        return {key: seconds / len(self.timelines) for key, seconds in total.most_common()}

    def _layers(self):
        total: dict = collections.defaultdict(lambda: [0, 0])
        for recording in self.recordings:
            for one in recording.passes:
                total[one.layer][0] += one.complete - one.arrived
                total[one.layer][1] += one.reduced - one.complete
        share = 1e9 * self.num_steps * len(self.timelines)
        layers = [Layer(name, devices / share, processes / share) for name, (devices, processes) in total.items()]
        return sorted(layers, key=lambda one: -one.devices - one.processes)


def _timelines(recording, found, num_steps):
    """A :class:`Timeline` for each device of a process."""
    devices = [
        [
            [one for one in recording.operators if one.device == device and begin <= one.begin < end]
            for begin, end in zip(marks[:num_steps], marks[1:])
        ]
        for device, marks in enumerate(recording.marks)
    ]
    # When each device ended its backward pass; the sum of gradients waits for the last one.
    ends = [[max((one.end for one in step if _is_backward(one)), default=0) for step in steps] for steps in devices]
    for number, steps in enumerate(devices):
        yield _timeline(recording, number, steps, ends, found)


def _timeline(recording, number, devices_steps, ends, found):
    marks, device = recording.marks[number], recording.devices[number]
    launches = [span for span in recording.spans if span.what == STEP]
    reads = [span for span in recording.spans if span.what == activities.READING]
    sums = [one for one in recording.operators if _SUMS.match(one.name) or (not found and is_exchange(one.name))]
    everywhere = [Interval(activities.SUM, one.begin, one.end) for one in sums]
    for one in found:
        everywhere += [
            Interval(activities.LATE, one.ready, one.all_ready),
            Interval(activities.TRANSFER, one.all_ready, one.end),
        ]
    totals: collections.Counter = collections.Counter()
    for one in recording.passes:
        if one.device == device:
            everywhere += [
                Interval(one.direction, one.began, one.arrived),
                Interval(activities.DEVICES, one.arrived, one.complete),
                Interval(one.direction, one.reduced, one.ended),
            ]
            if marks[0] <= one.began < marks[len(devices_steps)]:
                totals[one.direction, "SyncBatchNorm"] += one.arrived - one.began + one.ended - one.reduced
    with_gradient = _with_gradient(one for operators in devices_steps for one in operators)
    for operators in devices_steps:
        operators = [one for one in operators if not is_exchange(one.name)]
        for activity, one in zip(_phases(operators, with_gradient), operators):
            everywhere.append(Interval(activity, one.begin, one.end))
            totals[activity, one.name] += one.end - one.begin
    steps = []
    for step, (launch, begin, end) in enumerate(zip(launches, marks, marks[1:])):
        intervals = [one for one in everywhere if one.begin < end and one.end > begin]
        if ends[number][step]:
            intervals.append(
                Interval(activities.DEVICES, ends[number][step], max(of_device[step] for of_device in ends))
            )
        # After the launch an idle device waits for the engine, not for Python.
        intervals += [
            Interval(activities.LAUNCHING, launch.begin, launch.end),
            Interval(activities.ENGINE, launch.end, end),
        ]
        intervals += [Interval(activities.READING, read.begin, min(read.end, launch.begin)) for read in reads]
        steps.append(
            activities.split_step(
                begin, end, intervals, activities.LAUNCHING if recording.is_by_hand else activities.SCRIPT
            )
        )
    gradients = [(one.ready, one.end) for one in found if one.is_gradient]
    return Timeline(recording.rank, device, steps, gradients, totals)


def _is_backward(operator):
    return "_backward_" in operator.name


def _with_gradient(operators):
    """Names of operators whose backward operator is among these, of all steps: it may run before its own."""
    return {one.name.partition("_backward_")[2] for one in operators}


def _phases(operators, with_gradient):
    """The activity of each operator of one step on one device, in the order of their begins.

    An operator that has a gradient is forward, also after backward ones: those that need no values (of a mean), or of
    other micro-batches, may run first. One without a gradient goes with the operator before it.
    """
    last = max((one.end for one in operators if _is_backward(one)), default=float("inf"))
    activity = activities.FORWARD
    for one in operators:
        if _SUMS.match(one.name):
            yield activities.SUM
        elif "_update" in one.name or one.begin >= last and one.name not in with_gradient:
            yield activities.UPDATE
        elif one.begin >= last:
            yield activities.FORWARD  # of the next step, on weights that are updated before the others
        else:
            if _is_backward(one):
                activity = activities.BACKWARD
            elif one.name in with_gradient:
                activity = activities.FORWARD
            yield activity


class KeyExchange(NamedTuple):
    """One exchange, as one process sees it; nanoseconds."""

    what: str  # key of the store, or layer and direction
    is_operator: bool  # of the engine, not of a layer
    ready: int  # this process
    all_ready: int
    end: int
    is_gradient: bool
    last_rank: int = -1  # the process that was ready last; -1 where that is not known


def exchanges_of(recordings):
    """The exchanges of each process, a list of :class:`KeyExchange` per recording.

    The n-th exchange of a key is the same one in every process, because recording begins at the same step.
    """
    if len(recordings) == 1 and not any(OTHERS.match(one.name) for one in recordings[0].operators):
        return [[]]
    all_found = [list(_found(one)) for one in recordings]
    came: dict = collections.defaultdict(dict)  # what, number -> when each process was ready: its last device
    for recording, found in zip(recordings, all_found):
        for key, exchange in found:
            came[key][recording.rank] = max(exchange.ready, came[key].get(recording.rank, 0))

    def known(key, exchange):
        if len(came[key]) < len(recordings):
            return exchange
        last = max(came[key], key=came[key].__getitem__)
        return exchange._replace(all_ready=min(came[key][last], exchange.end), last_rank=last)

    return [[known(*pair) for pair in found] for found in all_found]


def _found(recording):
    """Pairs of what identifies an exchange in all processes, and the exchange."""
    numbers: collections.Counter = collections.Counter()
    for operator in recording.operators:
        name, begin, end = operator.name, operator.begin, operator.end
        ours = OURS.match(name)
        if ours:
            numbers[name] += 1
            key = ours.group(1)
            is_gradient = not key.isdigit() or int(key) < FIRST_RESERVED
            yield (name, numbers[name]), KeyExchange(f"key {key}", True, begin, begin, end, is_gradient)
        elif OTHERS.match(name):  # nobody can tell which one it is in other processes
            yield (recording.rank, id(operator)), KeyExchange(name, True, begin, begin, end, True)
    for one in recording.passes:
        if one.complete < one.reduced:
            what = f"{one.layer}, {one.direction}"
            yield (what, one.call), KeyExchange(what, False, one.complete, one.complete, one.reduced, False)
