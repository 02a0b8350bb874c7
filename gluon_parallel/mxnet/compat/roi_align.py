"""``contrib.ROIAlign`` as documented also for regions of no image."""

import contextlib
import inspect

from .replacing import named_arguments, stands_for

_ALL = 60000  # more channels than there are, and a number in float16


def install(mx):
    """Give regions with a negative batch index zeros on CPUs, as on GPUs.

    For region n of this kind, MXNet 1.9.1 on CPUs writes one zero, to the n-th value of its output, which is another
    region's, and leaves the values of region n as its memory was. GluonCV's feature pyramids add such regions up.
    """
    mx.nd.contrib.ROIAlign = _mended(mx.nd, mx.nd.contrib.ROIAlign, lambda name: (name or "roialign", _no_names()))
    mx.sym.contrib.ROIAlign = _mended(mx.sym, mx.sym.contrib.ROIAlign, lambda name: _names(mx.name.NameManager, name))


@contextlib.contextmanager
def _no_names():
    yield


def _names(manager, name):
    """The name of a symbol here, and a context in which other names stay as they are given, without a prefix again."""
    with manager() as private:  # which also makes sure that this thread has one
        outer = private._old_manager
    return outer.get(name, "roialign"), manager()


def _mended(F, original, names):
    signature = inspect.signature(original)

    @stands_for(original, F.contrib, "ROIAlign")
    def roi_align(*args, **kwargs):
        given = named_arguments(signature, args, kwargs)
        data, rois = given.pop("data", None), given.pop("rois", None)
        if F.__name__ == "mxnet.ndarray" and (data is None or rois is None):
            return original(*args, **kwargs)  # which says what is missing
        last = {option: given.pop(option) for option in ("out", "attr") if option in given}
        name, plainly = names(given.pop("name", None))
        with plainly:
            data = F.var(f"{name}_data") if data is None else data
            rois = F.var(f"{name}_rois") if rois is None else rois
            # As many regions of no image before the others receive the misplaced zeros; they are not computed.
            nowhere = F.negative(F.ones_like(rois, name=f"{name}_ones"), name=f"{name}_nowhere")
            regions = F.concat(nowhere, rois, dim=0, name=f"{name}_regions")
            found = original(data, regions, name=f"{name}_all", **given)
            found = F.split(found, num_outputs=2, axis=0, name=f"{name}_split")[1]
            # How many channels stay: of a region of no image none.
            index = F.slice_axis(rois, axis=-1, begin=0, end=1, name=f"{name}_index")
            is_there = F._internal._greater_equal_scalar(index, scalar=0, name=f"{name}_is_there")
            channels = F._internal._mul_scalar(is_there, scalar=_ALL, name=f"{name}_channels")
            channels = F.reshape(channels, shape=(-1,), name=f"{name}_length")
            return F.SequenceMask(found, channels, use_sequence_length=True, axis=1, name=name, **last)

    return roi_align
