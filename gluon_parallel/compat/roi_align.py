"""``contrib.ROIAlign`` as documented also for regions of no image."""

import functools


def install(mx):
    """Give regions with a negative batch index zeros on CPUs, as on GPUs.

    MXNet 1.9.1 on CPUs writes one zero, into another region's values, and leaves the rest of the region as its memory
    was. GluonCV's feature pyramids add such regions up.
    """
    for F in (mx.nd, mx.sym):
        F.contrib.ROIAlign = _masked(F, F.contrib.ROIAlign)


def _masked(F, original):
    @functools.wraps(original)
    def roi_align(data, rois, *args, out=None, **kwargs):
        index = F.slice_axis(rois, axis=-1, begin=0, end=1)
        inside = F.concat(F.relu(index), F.slice_axis(rois, axis=-1, begin=1, end=5), dim=-1)
        options = {} if out is None else {"out": out}
        mask = F.reshape(index >= 0, shape=(-1, 1, 1, 1))
        return F.broadcast_mul(original(data, inside, *args, **kwargs), mask, **options)

    return roi_align
