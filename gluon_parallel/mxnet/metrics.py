"""What metrics of ``mx.metric`` keep to themselves."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Callable

mcc_average: Callable[[Any], str] = attrgetter("_average")  # as F1's `average`
mcc_counts: Callable[[Any], Any] = attrgetter("_metrics")  # as F1's `metrics`
