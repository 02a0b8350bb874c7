"""Communication hooks of ``DataParallel``: its processes sum gradients in fewer bytes, or in another way."""

from .bucket import BucketStore as BucketStore
from .bucket import GradientBucket as GradientBucket
from .bucket import StatefulHook as StatefulHook
from .power_sgd import PowerSGD as PowerSGD
from .store_compression import StoreCompression as StoreCompression
from .store_compression import bfloat16 as bfloat16
from .store_compression import float16 as float16
from .store_compression import two_bits as two_bits
