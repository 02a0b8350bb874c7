"""Observation of an unchanged program, whose methods are wrapped while a profile runs, and of its host's cores."""

import contextlib
import functools
import gc
import math
import os
import threading
import time
from pathlib import Path

from ...cores import cpu_limit
from ...launch_engines import agent
from ...mxnet.compat import mx
from ...mxnet.trainers import parameters_of
from ...pipeline import Pipeline
from ...step import DataParallel
from .activities import READING
from .recording import Span

_gluon = mx.gluon
_TICK = 1 / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def replaced(owner, name, make):
    """While this block runs, the method, which may be inherited, is ``make(method)``."""
    original, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, functools.wraps(original)(make(original)))
    try:
        yield
    finally:
        setattr(owner, name, original) if own else delattr(owner, name)


@contextlib.contextmanager
def watched_steps(ended):
    """While this block runs, call ``ended(begin in ns, trainer, net, number of samples)`` after each step.

    A step of the calling thread is one of ``DataParallel`` or ``Pipeline``, or ``Trainer.step`` in a hand-written loop,
    and no step inside a step. The net may be None, and the number 0, where they are not known.
    """
    thread = threading.get_ident()
    inside: list = []  # what this thread is in

    def watch(details):
        def make(original):
            def step(self, *args, **kwargs):
                if inside or threading.get_ident() != thread:
                    return original(self, *args, **kwargs)
                begin = time.monotonic_ns()
                inside.append(self)
                try:
                    result = original(self, *args, **kwargs)
                finally:
                    inside.clear()
                ended(begin, *details(self))
                return result

            return step

        return make

    def of_parallel(one):
        return one.trainer, one.net, one.num_samples

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(DataParallel, "step", watch(of_parallel)))
        stack.enter_context(replaced(DataParallel, "__call__", watch(of_parallel)))
        stack.enter_context(replaced(Pipeline, "step", watch(lambda one: (one._trainer, one.net, one.num_samples))))
        stack.enter_context(replaced(_gluon.Trainer, "step", watch(lambda one: (one, None, 0))))
        yield


def net_of(trainer):
    """The block of this program that holds most of the trainer's parameters, or None."""
    own = {id(parameter) for parameter in parameters_of(trainer)}
    blocks = [one for one in gc.get_objects() if issubclass(type(one), _gluon.Block)]
    kept = [len(own & set(map(id, block.collect_params().values()))) for block in blocks]
    return blocks[kept.index(max(kept))] if any(kept) else None


@contextlib.contextmanager
def recorded_reading(owners):
    """Record when the calling thread waits for a batch of MXNet's loaders or of `owners`; yields a list of spans."""
    spans: list[Span] = []
    thread = threading.get_ident()
    inside: list = []  # what this thread is in

    def note(read):
        if inside or threading.get_ident() != thread:  # of a loader that reads from another loader, the outer one
            return read()
        begin = time.monotonic_ns()
        inside.append(read)
        try:
            return read()
        finally:
            inside.clear()
            spans.append(Span(READING, begin, time.monotonic_ns()))

    class Timed:
        def __init__(self, batches):
            self._batches = batches

        def __iter__(self):
            return self

        def __len__(self):
            return len(self._batches)

        def __next__(self):
            return note(self._batches.__next__)

    def noted(original):
        return lambda self: note(functools.partial(original, self))

    def timed(original):
        return lambda self: Timed(iter(noted(original)(self)))

    with contextlib.ExitStack() as stack:
        for owner in (_gluon.data.DataLoader, *owners):
            stack.enter_context(replaced(owner, "__iter__", timed))
        stack.enter_context(replaced(mx.io.DataIter, "__next__", noted))
        stack.callback(inside.append, None)  # iterators that are in use then note nothing more
        yield spans


def processor_seconds():
    """Processor time of this process and of those that it started, such as a DataLoader's workers."""
    ticks = [sum(map(int, agent.status(process)[11:15])) for process in agent.descendants(os.getpid())]
    of_ended = os.times().children_user + os.times().children_system
    return time.process_time() + of_ended + _TICK * sum(ticks)


def idle_seconds():
    """How long the cores of this process's affinity mask have been idle, added up; NaN in a container with a limit.

    There, other containers may use the cores too, and what is idle is not for this process.
    """
    cores = os.sched_getaffinity(0)
    if cpu_limit() < len(cores):
        return math.nan
    own = {f"cpu{number}" for number in cores}
    lines = [line.split() for line in Path("/proc/stat").read_text("ascii").splitlines()]
    return _TICK * sum(int(line[4]) + int(line[5]) for line in lines if line[0] in own)
