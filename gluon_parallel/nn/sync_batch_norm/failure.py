"""A failure inside a callback reaches whoever waits for the callback's result, with the words it had there."""

from __future__ import annotations

import itertools
import re

from ...barrier import fresh
from ...compat import mx

# MXNet keeps one exception for all custom operators: of two that fail at the same time one passes for a success, and
# its text is lost in any case. So our callbacks do not raise. They have an operator fail on their result, which every
# array computed from it inherits, and which says one number of our choosing in its message: whose failure it was.
_numbers = itertools.cycle(range(100_000, 1_000_000))  # six digits survive the way through a float32 into text
_MESSAGE = re.compile(r"Check failed: param\.scale > 0 \(-(\d{6}) vs\. 0\)")


class Reporter:
    """Remembers the failure of one layer until a user has seen it."""

    def __init__(self):
        self.number = next(_numbers)
        self.failure = None
        self.seen = True

    def fail(self, arrays, failure):
        """Spoil the results of a callback: waiting for any of them, or for what follows, raises `failure`."""
        if failure is not self.failure:
            self.failure, self.seen = failure, False
        for array in arrays:
            mx.nd.random.normal(0, -self.number, shape=array.shape, dtype=array.dtype, ctx=array.ctx, out=array)


def explain_with(failure_of):
    """Have MXNet raise ``failure_of(number)`` where an array is waited for that :meth:`Reporter.fail` spoilt."""

    def explain(message):
        found = _MESSAGE.search(message)
        failure = failure_of(int(found.group(1))) if found else None
        return mx.base.MXNetError(message) if failure is None else fresh(failure)

    mx.error.register("MXNetError", explain)
