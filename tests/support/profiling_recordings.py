"""Recordings as a process would make them, with times that a test chooses."""

from gluon_parallel.commands.profiling import activities
from gluon_parallel.commands.profiling.activities import READING
from gluon_parallel.commands.profiling.recording import STEP, Operator, Recording, Span
from gluon_parallel.nn.sync_batch_norm.measured import Pass

MS = 1_000_000
OPERATORS = {
    activities.FORWARD: "Convolution",
    activities.BACKWARD: "_backward_Convolution",
    activities.UPDATE: "sgd_mom_update",
    activities.SUM: "gluon_parallel.allreduce",
    "pooling": "_backward_Pooling",
    "exchange": "gluon_parallel.mpi key 0",
}
USUAL = [(activities.FORWARD, 30), (activities.BACKWARD, 60), (activities.UPDATE, 10)]


def recording(*devices, num_steps=4, rank=0, busy=2.0, **more):
    """A process on two cores whose devices do, in each step, what a list of (what, milliseconds) says.

    Args:
        devices: such a list for each; one that is shorter than the longest waits for Python to launch.
        busy: how many cores it keeps busy.
        more: fields of the recording.
    """
    made = Recording(rank=rank, host="here", num_cores=2, devices=[f"cpu({i})" for i in range(len(devices))])
    lengths = [max(sum(one[1] for one in work) for work in devices)] * num_steps
    begins = [sum(lengths[:number]) * MS for number in range(num_steps + 1)]
    made.marks = [begins for _ in devices]
    made.begin, made.end = begins[0], begins[-1]
    made.processor, made.idle = (cores * (made.end - made.begin) / 1e9 for cores in (busy, 2 - busy))
    for step, start in enumerate(begins[:-1]):
        launched, ends = start, begins[step + 1]
        for device, work in enumerate(devices):
            now = start
            for what, milliseconds in work:
                begin, now = now, now + int(milliseconds * MS)
                if what == READING:
                    made.spans.append(Span(READING, begin, now))
                elif what == activities.DEVICES:
                    made.passes.append(Pass("norm0", f"cpu({device})", "forward", step, begin, begin, now, now, now))
                elif what in OPERATORS:
                    made.operators.append(Operator(device, OPERATORS[what], begin, now))
                if what in (READING, activities.SCRIPT):
                    launched = now
                if what == activities.ENGINE:
                    ends = begin
        made.spans.append(Span(STEP, launched, ends))
    made.operators.sort(key=lambda one: one.begin)
    for name, value in more.items():
        setattr(made, name, value)
    return made
