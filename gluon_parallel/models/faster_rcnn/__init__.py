"""Faster R-CNN on GluonCV's classes, trained so that several devices do what one would do with the whole batch.

Needs GluonCV: ``pip install 'gluon-parallel[gluoncv]'`` and ``pip install --no-deps -r requirements-mxnet.txt``.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it reads MXNet's version as one did in 2018
    import gluoncv as _gluoncv  # noqa: F401

from .inference import detect
from .loss import Loss
from .net import from_zoo, initialize, load_backbone, small
from .targets import Inputs, Labels, Targets
from .training import Training

__all__ = [
    "Inputs",
    "Labels",
    "Loss",
    "Targets",
    "Training",
    "detect",
    "from_zoo",
    "initialize",
    "load_backbone",
    "small",
]
