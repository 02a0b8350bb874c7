"""Faster R-CNN on GluonCV's classes, trained so that several devices do what one would do with the whole batch.

Needs GluonCV: ``pip install 'gluon-parallel[gluoncv]'`` and ``pip install --no-deps -r requirements-mxnet.txt``.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it reads MXNet's version as one did in 2018
    import gluoncv as _gluoncv  # noqa: F401

from .net import detect as detect
from .net import from_zoo as from_zoo
from .net import initialize as initialize
from .net import load_backbone as load_backbone
from .net import small as small
from .targets import Inputs as Inputs
from .targets import Labels as Labels
from .targets import Targets as Targets
from .training import Loss as Loss
from .training import Training as Training
