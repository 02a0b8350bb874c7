"""GluonCV's metrics of boxes and masks over processes: what one process would say that has seen all images."""

import json
import sys

import numpy as np
import pytest
from checks_group import Group, checks, each_check
from detection_predictions import CLASSES, images
from pictures_files import BOXES, CATEGORIES, SIZES, coco_box, write_coco
from processes import needs_mpi, run_mpi, run_servers

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.metrics.merging import adds_up

gluoncv = pytest.importorskip("gluoncv", reason="GluonCV is an optional dependency")
pytest.importorskip("pycocotools", reason="pycocotools is an optional dependency")

from gluoncv.utils.metrics import SegmentationMetric, VOC07MApMetric, VOCMApMetric  # noqa: E402

DETECTION = checks("kvstore_metrics")[-1:]
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


@pytest.mark.parametrize(
    ("rights", "wrongs", "wanted", "apart"),
    [
        (20, 60, 20 / 80 * 20 / 80, 0.03),  # precision times recall
        (2, 1, 1 / 3 * 1 + 1 / 3 * 2 / 3, 1e-6),  # right, wrong, right
        (1, 2, 1 / 3 * 1 / 2, 1e-6),  # wrong, right, wrong
    ],
)
def test_equal_scores_for_everything_are_worth_no_more_than_their_share_of_right_ones(rights, wrongs, wanted, apart):
    box, away = np.array([[[0, 0, 9, 9]]]), np.array([[[50, 50, 59, 59]]])
    metric, zero = VOCMApMetric(class_names=["a"]), np.zeros((1, 1, 1))
    for right in (True,) * rights + (False,) * wrongs:
        metric.update(box if right else away, zero, zero + 0.5, box, zero)
    merged = gp.metrics.merge(metric, mx.kv.create("local"))
    assert merged.get()[1][0] == pytest.approx(wanted, abs=apart)


def test_a_metric_made_from_one_of_gluoncvs_is_merged_as_that_one_also_before_it_has_seen_anything():
    class Mine(SegmentationMetric):
        pass

    metric, store = Mine(2), mx.kv.create("local")
    assert gp.metrics.merge(metric, store).get() == (0, 0) and metric.total_inter.shape == (2,)
    for number in (1, 2):
        metric.update(mx.nd.zeros((1, 2, 2)), mx.nd.array(np.arange(8).reshape(1, 2, 2, 2)))
        before = metric.get()
        assert gp.metrics.merge(metric, store).get() == before and metric.total_label == 4 * number
    boxes = gp.metrics.merge(VOCMApMetric(class_names=["a", "b"]), store)
    assert not boxes._n_pos and not boxes._score


def test_a_metric_whose_update_takes_something_else_is_refused_and_one_of_a_class_around_it_is_taken(rng):
    class Mine(VOC07MApMetric):
        def update(self, labels, outputs):
            super().update(*outputs, *labels)

    data = [((boxes, kinds, scores), truth) for boxes, kinds, scores, *truth in images(7, repeated=False)]
    data = [(inputs, truth) for inputs, truth in data if truth[0].size]
    with pytest.raises(TypeError, match=r"VOC07MApMetric: its update takes \(pred_bboxes, .*super\(\).update"):
        gp.evaluate(lambda *x: x, data, VOC07MApMetric(class_names=CLASSES), [mx.cpu()])
    for names in (CLASSES, None):
        wanted = VOC07MApMetric(class_names=names)
        for inputs, truth in data:
            wanted.update(*inputs, *truth)
        got = gp.evaluate(lambda *x: x, data, Mine(class_names=names), [mx.cpu()], mx.kv.create("local"))
        assert got == [(name, pytest.approx(value, nan_ok=True)) for name, value in wanted.get_name_value()]
    masks = mx.nd.array(rng.integers(0, 2, (3, 4, 4))), mx.nd.array(rng.random((3, 2, 4, 4)))
    wanted = SegmentationMetric(2)
    wanted.update(*masks)
    got = gp.evaluate(lambda x: x, [masks[::-1]], SegmentationMetric(2), [mx.cpu(0), mx.cpu(1)])
    assert got == list(zip(["pixAcc", "mIoU"], map(pytest.approx, wanted.get())))


def test_a_metric_that_keeps_more_than_what_is_merged_is_updated_with_whole_batches():
    class Plain(SegmentationMetric):
        def update(self, labels, outputs):
            super().update(labels[0], outputs[0])

    class OfEach(SegmentationMetric):
        def get(self):
            return super().get(), self.of_each

    assert adds_up(SegmentationMetric(2)) and adds_up(Plain(2)) and not adds_up(OfEach(2))


@pytest.fixture
def data(tmp_path):
    """Three images in COCO's format."""
    write_coco(tmp_path, SIZES, BOXES)
    return gp.datasets.coco.Detection(tmp_path, "val2017")


class ThreeClasses(gluoncv.data.COCODetection):
    CLASSES = [category["name"] for category in CATEGORIES]


def predictions(data, rng, noise=2.0, more=3):
    """Boxes near the true ones, and some anywhere; padded with -1: (1, N, 4), (1, N, 1), (1, N, 1) per image."""
    for image, label in data:
        height, width = image.shape[:2]
        near = label[:, :4] + rng.normal(0, noise, (len(label), 4))
        corner = rng.random((more, 2)) * [width / 2, height / 2]
        boxes = np.concatenate([near, np.hstack([corner, corner + 8]), np.full((2, 4), -1)]).astype(np.float32)
        labels = np.concatenate([label[:, 4], rng.integers(0, 3, more), [-1, -1]])
        scores = np.round(rng.random(len(labels)), 1).astype(np.float32)  # of which some are equal
        yield boxes[None], labels[None, :, None].astype(np.float32), scores[None, :, None]


def test_average_precision_is_what_gluoncv_computes(data, tmp_path, rng, capsys):
    reference = ThreeClasses(tmp_path, "instances_val2017", skip_empty=False)
    theirs = gluoncv.utils.metrics.COCODetectionMetric(
        reference, str(tmp_path / "found"), use_time=False, score_thresh=0
    )
    ours = gp.metrics.COCOMeanAP(data.annotations, data.category_ids)
    for image_id, found in zip(data.image_ids, predictions(data, rng)):
        theirs.update(*map(mx.nd.array, found))
        ours.update([image_id], *map(mx.nd.array, found))
    coco_eval = theirs._update()
    coco_eval.summarize()
    capsys.readouterr()
    names, values = ours.get()
    assert capsys.readouterr().out == ""  # it says nothing on its own
    wanted = [value if value >= 0 else np.nan for value in coco_eval.stats]
    assert names == list(gp.metrics.coco.NAMES)
    assert np.allclose(values, wanted, equal_nan=True, atol=1e-9) and 0 < values[0] < 1


def test_only_images_and_classes_asked_for_count_and_each_image_once_whatever_else_is_in_the_file(data, tmp_path):
    content = json.loads(data.annotations.read_text())
    broken = [{**coco_box(number, 139, 90, (1, 1, 5, 5)), "bbox": box} for number, box in enumerate([None, [1, 2]], 5)]
    content["annotations"] += broken
    for classes in (None, ("toothbrush",)):
        data.annotations.write_text(json.dumps(content))
        part = gp.datasets.coco.Detection(tmp_path, "val2017", classes)
        metric = gp.metrics.COCOMeanAP(content if classes else part.annotations, part.category_ids)
        assert all(np.isnan(value) for _, value in metric.get_name_value())
        for image_id, (_, label) in [*zip(part.image_ids, part)] * 2:  # as a last batch that is filled up
            label = label[label[:, 5] == 0]  # without crowds
            metric.update([image_id], label[None, :, :4], label[None, :, 4], np.ones((1, len(label))))
        values = dict(metric.get_name_value())
        assert values["AP"] == pytest.approx(1) and values["AP50"] == pytest.approx(1) and np.isnan(values["AP large"])
    [of_first] = [box for box in content["annotations"] if box["image_id"] == 7]
    del of_first["iscrowd"], of_first["area"]  # as in files made by hand: then it is no crowd
    metric = gp.metrics.COCOMeanAP(content, data.category_ids)
    label = data[0][1]
    metric.update([7], label[None, :, :4], label[None, :, 4], np.ones((1, 1)))
    assert metric.get()[1][0] == pytest.approx(1)
    metric.update([139], np.empty((1, 0, 4)), np.empty((1, 0)), np.empty((1, 0)))  # nothing is found there
    # Of the person's two boxes one is found, at every precision: 51 of 101 recalls; of the toothbrush none.
    assert metric.get()[1][0] == pytest.approx(51 / 101 / 2)
    metric.reset()
    assert np.isnan(metric.get()[1][0])


def test_predictions_that_belong_to_nothing_and_a_missing_pycocotools_are_refused(data, monkeypatch):
    metric = gp.metrics.COCOMeanAP(data.annotations, data.category_ids)
    with pytest.raises(ValueError, match="image 8 is not in the annotations"):
        metric.update([8], np.zeros((1, 1, 4)), np.zeros((1, 1)), np.ones((1, 1)))
    with pytest.raises(ValueError, match="label 3 is none of 3 classes"):
        metric.update([7], np.zeros((1, 1, 4)), np.full((1, 1), 3), np.ones((1, 1)))
    monkeypatch.setitem(sys.modules, "pycocotools", None)  # Python's own way to say that a module is not there
    with pytest.raises(ImportError, match=r"pip install pycocotools.*VOC07MApMetric"):
        gp.metrics.COCOMeanAP(data.annotations, data.category_ids)
