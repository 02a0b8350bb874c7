"""Results of a function for every batch, computed on all devices in prediction mode."""

import numpy as np

from ..compat import mx
from ..compat.array_types import as_class_of
from ..device_threads import parallel_apply
from ..errors import DeviceUnavailable
from ..split import split_and_load


def run(function, batches, devices):
    """Yield the results of ``function(*shard)`` for each batch, a list by device, while the next one is computed.

    Args:
        function: called for each shard, from the thread of its device, without recording.
        batches: iterable of tuples, nested, of at least one sample each.
        devices: list of ``mx.Context``. A batch with fewer samples than devices uses as many devices as it has samples.
    """
    waiting = None
    for batch in batches:
        shards = split_and_load(batch, devices)
        with mx.autograd.pause(train_mode=False):
            results = parallel_apply(function, shards)
        if waiting is not None:
            yield waiting
        waiting = results
    if waiting is not None:
        yield waiting


def joined(shards):
    """One array of the devices' arrays, of their class; the array itself if there is one."""
    if len(shards) == 1:
        return shards[0]
    whole = np.concatenate([shard.asnumpy() for shard in shards])
    return as_class_of(mx.nd.array(whole, dtype=whole.dtype), shards[0])


def check_devices(net, devices, where):
    """Refuse devices that the net's parameters are not on; `where` is the function that was handed them."""
    parameters = net.collect_params().values() if isinstance(net, mx.gluon.Block) else ()
    for parameter in parameters:
        if parameter._data is None and not parameter._deferred_init:  # not initialised: an error only if it is used
            continue
        there = parameter.list_ctx()
        if missing := [device for device in devices if device not in there]:
            raise DeviceUnavailable(
                f"{where}: parameter {parameter.name} is on {there} but not on {missing}; hand over the devices that "
                "the net is on, or write net.collect_params().reset_ctx(devices)"
            )
