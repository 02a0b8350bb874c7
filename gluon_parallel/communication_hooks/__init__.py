"""Communication hooks of ``DataParallel``: its processes sum gradients in fewer bytes, or in another way."""

from .hook import BucketStore as BucketStore
from .hook import GradientBucket as GradientBucket
from .hook import StatefulHook as StatefulHook
from .hook import StoreCompression as StoreCompression
from .hook import bfloat16 as bfloat16
from .hook import float16 as float16
from .hook import two_bits as two_bits
from .power_sgd import PowerSGD as PowerSGD
