"""Observation of an unchanged program: methods are wrapped while a profile runs, and put back after it."""

import contextlib
import functools
import gc
import itertools
import threading
import time

from ...compat import mx
from ...data_parallel import DataParallel
from ...device_threads.thread import DeviceThread
from ...pipeline import Pipeline
from .parts import READING
from .recording import Span

_gluon = mx.gluon
_JOINED = 100_000  # nanoseconds between two calls on a device thread that count as one


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
def watched_steps(begin, end):
    """While this block runs, call ``begin()`` before each step, ``end(trainer, net, number of samples)`` after it.

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
                begin()
                inside.append(self)
                try:
                    result = original(self, *args, **kwargs)
                finally:
                    inside.clear()
                end(*details(self))
                return result

            return step

        return make

    with contextlib.ExitStack() as stack:
        for owner, name, details in (
            (DataParallel, "step", lambda one: (one.trainer, one.net, one.num_samples)),
            (DataParallel, "__call__", lambda one: (one.trainer, one.net, one.num_samples)),
            (Pipeline, "step", lambda one: (one._trainer, one.net, one.num_samples)),
            (_gluon.Trainer, "step", lambda one: (one, None, 0)),
        ):
            stack.enter_context(replaced(owner, name, watch(details)))
        yield


def net_of(trainer):
    """The block of this program that holds most of the trainer's parameters, or None."""
    own = {id(parameter) for parameter in trainer._params}
    blocks = [one for one in gc.get_objects() if issubclass(type(one), _gluon.Block)]
    held = [len(own & set(map(id, block.collect_params().values()))) for block in blocks]
    return blocks[held.index(max(held))] if any(held) else None


@contextlib.contextmanager
def recorded_launches():
    """Record when the threads of the devices launch operators; yields a list of spans, filled at the block's end."""
    found: dict[str, list[Span]] = {}  # device -> spans; each is written by that device's thread alone

    def make(original):
        def call(self, function):
            def timed():
                begin = time.monotonic_ns()
                try:
                    return function()
                finally:
                    note(str(self.device), begin, time.monotonic_ns())

            return original(self, timed)

        return call

    def note(device, begin, end):
        own = found.setdefault(device, [])
        if own and begin - own[-1].end < _JOINED:
            own[-1] = own[-1]._replace(end=end)
        else:
            own.append(Span(device, begin, end))

    spans: list[Span] = []
    with replaced(DeviceThread, "__call__", make):
        yield spans
    spans += itertools.chain(*found.values())


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
