"""Metrics over a whole data set, computed on every device of every process."""

from .coco import COCOMeanAP
from .evaluation import evaluate
from .merging import gather, merge

__all__ = ["COCOMeanAP", "evaluate", "gather", "merge"]
