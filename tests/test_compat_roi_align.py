"""Regions of no image in ``contrib.ROIAlign``, of which GluonCV's feature pyramids make many."""

import numpy as np
import pytest

import gluon_parallel as gp  # noqa: F401  (mends the operator)
import mxnet as mx
from mxnet import autograd, nd

OPTIONS = {"pooled_size": (3, 3), "spatial_scale": 0.5, "sample_ratio": 2}


class Align(mx.gluon.HybridBlock):
    def hybrid_forward(self, F, data, rois):
        return F.contrib.ROIAlign(data, rois, **OPTIONS)


@pytest.mark.parametrize("hybridize", [False, True])
def test_a_region_of_no_image_is_zero_and_leaves_the_others_alone(rng, hybridize):
    align = Align()
    if hybridize:
        align.hybridize()
    data = nd.array(rng.normal(size=(2, 4, 16, 16)))
    data.attach_grad()
    rois = np.array([[1, 2, 3, 20, 25], [-1, -1, -1, -1, -1], [0, 0, 0, 31, 31], [-1, 4, 4, 9, 9]], np.float32)
    real = rois[:, 0] >= 0
    heads = nd.array(rng.normal(size=(4, 4, 3, 3)))
    values, gradients = [], []
    for chosen in (real, slice(None)):
        freed = [nd.full((4, 4, 3, 3), np.nan) for _ in range(50)]  # what memory that nothing is written to may hold
        nd.waitall()
        del freed
        with autograd.record():
            out = align(data, nd.array(rois[chosen]))
        out.backward(nd.array(heads.asnumpy()[chosen]))
        values.append(out.asnumpy())
        gradients.append(data.grad.asnumpy())
    np.testing.assert_array_equal(values[1][real], values[0])
    assert (values[1][~real] == 0).all() and (np.abs(values[0]) > 0).all()
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=1e-6, atol=1e-6)
