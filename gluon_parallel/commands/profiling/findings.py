"""What a profile says in plain words: a table of activities, and findings with what to do, the costliest first."""

import collections
import statistics
import textwrap

from . import activities

# From which share of the step on an activity is worth a sentence, how that begins, and what to do.
_LONG = {
    activities.READING: (
        0.05,
        "The devices wait for data",
        "read ahead in more processes or threads (DataLoader(num_workers=...)), or prepare the data once",
    ),
    activities.SCRIPT: (
        0.05,
        "The devices wait for the script between two steps",
        "look at what the loop does between two steps; reading a result, with asnumpy or a metric, waits for it",
    ),
    activities.LAUNCHING: (
        0.1,
        "The devices wait for Python to launch operators",
        "write net.hybridize(static_alloc=True), or make the batch larger",
    ),
    activities.UPDATE: (
        0.15,
        "The update takes",
        "make the batch larger, or update less often: DataParallel(accumulate=...)",
    ),
    activities.SUM: (0.1, "Adding up the gradients of the devices takes", "use fewer devices, or a larger batch"),
    activities.ENGINE: (
        0.1,
        "The devices wait for MXNet's engine to start what is launched",
        "leave a core to each device (OMP_NUM_THREADS, other programs), or make the batch larger",
    ),
}
# The same where the loop is written by hand: what it launches is not told from what else it does.
_LAUNCHING_BY_HAND = (
    0.1,
    "The devices wait for the loop, which launches operators or does something else,",
    "write net.hybridize(static_alloc=True), make the batch larger, and look at what else the loop does; reading a "
    "result, with asnumpy or a metric, waits for it",
)
_WAITING = 0.08  # from which share of the step on the waiting for devices or processes, and the transfer, are named
_SLOWER = 1.15  # from which factor on a process or a device is called slower
_OPERATOR = 0.1  # from which share of its pass on an operator that convert_for_cpu replaces is named
_LEAST = 0.02  # and from which share of the step on
_IDLE = 0.25  # from which share of idle cores on that is said
_OTHERS = 0.15  # the same for cores that other programs take
_UNEVEN = 1.5  # from which factor on the slowest step is named
_FEWEST = 3  # steps from which anything follows
# What `gp.nn.would_convert` calls what it replaces, and which operators that is about.
_CONVERTED = {
    "global average pooling": ("Pooling", "pooling"),
    "pooling of channels that fill no blocks": ("Pooling", "pooling"),
    "ReLU6 behind a batch norm": ("clip", "clip (ReLU6)"),
    "batch norm between two layouts": ("BatchNorm", "batch norm"),
}


def findings(analysis):
    """Sentences about an :class:`.Analysis`, with what costs most first."""
    if analysis.num_steps < _FEWEST:
        return [
            f"Too few steps were measured for findings: {analysis.num_steps}, after those that were skipped. Measure "
            f"{_FEWEST} or more in a longer loop, or skip fewer: --skip 1 of gluon-parallel profile, or skip=1 of "
            "gp.profile."
        ]
    sources = (_slow, _long_activities, _devices, _exchange, _operators, _cores, _uneven)
    found = [one for source in sources for one in source(analysis)]
    if not found:
        share = analysis.seconds(*activities.COMPUTING) / analysis.seconds()
        found = [(0, f"The devices compute {share:.0%} of the time, and nothing stands out.")]
    return [sentence for _, sentence in sorted(found, key=lambda one: -one[0])]


def _ms(seconds):
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def _slow(analysis):
    """(seconds per step, sentence), as from all functions below."""
    ranks: dict = collections.defaultdict(dict)  # -> seconds of each device
    for timeline in analysis.timelines:
        name = timeline.device + f" of rank {timeline.rank}" * (len(analysis.recordings) > 1)
        ranks[timeline.rank][name] = timeline.seconds(*activities.COMPUTING)
    yield from _slower({f"Rank {rank}": max(times.values()) for rank, times in ranks.items()}, "the other processes")
    for times in ranks.values():
        yield from _slower(times, "the other devices")


def _slower(times, others):
    if len(times) < 2:
        return
    name, slowest = max(times.items(), key=lambda one: one[1])
    rest = statistics.median(seconds for one, seconds in times.items() if one != name)
    if rest > 0 and slowest / rest >= _SLOWER:
        yield (
            slowest - rest,
            f"{name} is {slowest / rest:.1f} times slower: it computes {_ms(slowest)} per step, {others} {_ms(rest)}. "
            "All wait for it; look at its cores (other programs, OMP_NUM_THREADS) and at the size of its shard.",
        )


def _long_activities(analysis):
    by_hand = {activities.LAUNCHING: _LAUNCHING_BY_HAND} if analysis.recordings[0].is_by_hand else {}
    for activity, (notable, begin, advice) in {**_LONG, **by_hand}.items():
        seconds = analysis.seconds(activity)
        share = seconds / analysis.seconds()
        if share >= notable:
            yield seconds, f"{begin} {share:.0%} of the step ({_ms(seconds)}): {advice}."


def _devices(analysis):
    seconds = analysis.seconds(activities.DEVICES)
    share = seconds / analysis.seconds()
    if share < _WAITING:
        return
    in_layers = sum(layer.devices for layer in analysis.layers)
    where = "before the gradients are summed"
    if in_layers > seconds / 2:
        worst = max(analysis.layers, key=lambda one: one.devices)
        where = f"in SyncBatchNorm layers, most in {worst.name} ({_ms(worst.devices)})"
    yield (
        seconds,
        f"The devices wait {share:.0%} of the step ({_ms(seconds)}) for each other {where}: give them equal shards and "
        "a core each.",
    )


def _exchange(analysis):
    late, transfer, step = analysis.seconds(activities.LATE), analysis.seconds(activities.TRANSFER), analysis.seconds()
    if late / step >= _WAITING:
        waited: collections.Counter = collections.Counter()  # for each rank
        for one in (one for found in analysis.exchanges for one in found):
            waited[one.last_rank] += one.all_ready - one.ready
        rank, most = waited.most_common(1)[0]
        yield (
            late,
            f"The processes wait {late / step:.0%} of the step ({_ms(late)}) for the one that comes last, which is "
            f"rank {rank} in {most / sum(waited.values()):.0%} of this time; a faster exchange would not help.",
        )
    exchanged = sum(timeline.exchanged for timeline in analysis.timelines)
    hidden = sum(timeline.hidden for timeline in analysis.timelines) / exchanged if exchanged else 0
    statistics_too = sum(layer.processes for layer in analysis.layers) > (late + transfer) / 4
    what = "gradients, and of statistics of SyncBatchNorm layers," if statistics_too else "gradients"
    if transfer / step >= _WAITING:
        yield (
            transfer,
            f"The exchange of {what} with other processes takes {transfer / step:.0%} of the step ({_ms(transfer)}), "
            f"and {hidden:.0%} of that of the gradients is hidden behind computing: "
            "make the batch larger, accumulate=..., or send fewer bytes: communication_hook=....",
        )


def _operators(analysis):
    patterns = {name for one in analysis.recordings for name in one.would_convert}
    operators = analysis.operators()
    for activity in (activities.FORWARD, activities.BACKWARD):
        whole = analysis.seconds(activity)
        for pattern in sorted(patterns & set(_CONVERTED)):
            operator, title = _CONVERTED[pattern]
            names = {operator, f"_backward_{operator}"}
            seconds = sum(time for (where, name), time in operators.items() if where == activity and name in names)
            if seconds >= max(_OPERATOR * whole, _LEAST * analysis.seconds()):
                yield (
                    seconds,
                    f"{title[0].upper()}{title[1:]} takes {seconds / whole:.0%} of the {activity} pass "
                    f"({_ms(seconds)}), and the net has {pattern}, which MXNet runs slowly on CPUs: "
                    "gp.nn.convert_for_cpu(net).",
                )


def _cores(analysis):
    for cores in analysis.cores():
        others = 1 - cores.busy - cores.idle
        if cores.idle >= _IDLE:
            idle = "Half" if abs(cores.idle - 0.5) < 0.05 else f"{cores.idle:.0%}"
            if cores.num_devices < cores.number:
                advice = f"use more devices (--devices cpu:{cores.number}), or more threads for each (OMP_NUM_THREADS)"
            else:
                advice = "there is a device for each, but the devices wait"
            yield 0, f"{idle} of the {cores.number} cores are idle: {advice}."
        if others >= _OTHERS:
            yield (
                analysis.seconds() * others,
                f"Other programs take {others:.0%} of the {cores.number} cores: end them, and measure again.",
            )


def _uneven(analysis):
    steps = [max(times) for times in zip(*(timeline.durations() for timeline in analysis.timelines))]
    usual = statistics.median(steps)
    slowest = max(steps)
    if slowest / usual >= _UNEVEN:
        yield (
            (slowest - usual) / len(steps),
            f"Steps differ: step {steps.index(slowest) + 1} of {len(steps)} took {_ms(slowest)}, a usual one "
            f"{_ms(usual)}.",
        )


def head(analysis):
    """The first line: how many steps, how long, on what."""
    num_processes, num_devices = len(analysis.recordings), len(analysis.timelines)
    words = [
        f"{analysis.num_steps} step{'s' * (analysis.num_steps != 1)} of {analysis.seconds() * 1e3:.1f} ms",
        f"{num_devices} device{'s' * (num_devices != 1)} in {num_processes} process{'es' * (num_processes != 1)}",
    ]
    if analysis.samples_per_second:
        words.append(f"{analysis.samples_per_second:,.0f} samples/s")
    return ", ".join(words)


def rows(analysis):
    """(activity, ms per step of each timeline) of those that take a thousandth of a step anywhere; last, of all."""
    for activity in activities.ACTIVITIES:
        values = [timeline.seconds(activity) * 1e3 for timeline in analysis.timelines]
        if max(values) >= analysis.seconds():
            yield activity, values
    yield "together", [timeline.seconds() * 1e3 for timeline in analysis.timelines]


def summary(analysis, sentences):
    """The text that is printed of an :class:`.Analysis` and sentences about it."""
    names = [analysis.name(timeline) for timeline in analysis.timelines]
    width = max(12, *(len(name) + 2 for name in names))
    lines = [head(analysis), f"{'ms per step':28}" + "".join(f"{name:>{width}}" for name in names)]
    lines += [
        f"{activity:28}" + "".join(f"{value:{width}.2f}" for value in values) for activity, values in rows(analysis)
    ]
    shares = ["-" if not one.exchanged else f"{one.hidden / one.exchanged:.0%}" for one in analysis.timelines]
    if any(share != "-" for share in shares):
        lines.append(f"{'exchange that is hidden':28}" + "".join(f"{share:>{width}}" for share in shares))
    for sentence in sentences:
        lines += textwrap.wrap(sentence, 110, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)
