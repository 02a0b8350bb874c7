"""Metrics over a whole data set, computed on every device of every process."""

from .coco import COCOMeanAP as COCOMeanAP
from .evaluation import evaluate as evaluate
from .merging import gather_rows as gather_rows
from .merging import merge as merge
