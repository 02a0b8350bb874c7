"""Data sets by name (`labelled`, `detection`, `segmentation`, `text`), what reads their files, and batches."""

from . import coco as coco
from . import detection as detection
from . import pictures as pictures
from . import scenes as scenes
from . import segmentation as segmentation
from . import text as text
from . import voc as voc
from .dataset import Dataset as Dataset
from .dataset import Part as Part
from .labelled import NAMES as NAMES
from .labelled import load as load
from .loader import Batches

batches = Batches
