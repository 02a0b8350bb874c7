"""COCO's reader: equal to GluonCV's on sound folders, what it says about broken ones, and COCO's average precision."""

import json
import sys

import numpy as np
import pytest
from pictures_files import CATEGORIES, coco_box, photograph, write_coco
from PIL import Image

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.datasets import coco
from gluon_parallel.errors import DatasetCorrupt, DatasetUnavailable

gluoncv = pytest.importorskip("gluoncv", reason="GluonCV is an optional dependency")
pytest.importorskip("pycocotools", reason="pycocotools is an optional dependency")

SIZES = {139: (40, 50), 7: (30, 60), 632: (48, 32)}
BOXES = [
    coco_box(1, 139, 90, (10.5, 11.25, 20.5, 8.75)),
    coco_box(2, 7, 1, (0, 0, 60, 30)),
    coco_box(3, 139, 18, (3, 4, 20, 30), iscrowd=1),
    coco_box(4, 139, 1, (20.13, 5, 29.87, 34.99)),
]


@pytest.fixture
def folder(tmp_path):
    write_coco(tmp_path / "coco", SIZES, BOXES)
    return tmp_path / "coco"


def rewrite(folder, change):
    path = folder / "annotations/instances_val2017.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


class ThreeClasses(gluoncv.data.COCODetection):
    CLASSES = [category["name"] for category in CATEGORIES]


def test_images_and_boxes_are_those_that_gluoncv_reads(folder, capsys):
    ours = coco.Detection(folder, "val2017")
    theirs = ThreeClasses(folder, "instances_val2017", skip_empty=False)
    assert len(ours) == len(theirs) == 3 and list(ours.classes) == theirs.classes
    assert ours.image_ids == [7, 139, 632] and ours.category_ids == [1, 18, 90]
    for (image, label), (their_image, their_label) in zip(ours, theirs):
        expected = their_label[their_label[:, 4] >= 0] if len(their_label) else their_label
        assert np.allclose(label[:, :5], expected.reshape(-1, 5), atol=1e-5)
        assert np.abs(image.astype(int) - their_image.asnumpy()).max() <= 3  # two JPEG decoders round differently


def test_an_item_has_edges_and_dense_classes_and_says_which_box_is_a_crowd(folder):
    data = coco.Detection(folder, "instances_val2017")
    expected = [[10.5, 11.25, 30, 19, 2, 0], [3, 4, 22, 33, 1, 1], [20.13, 5, 49, 38.99, 0, 0]]
    assert np.allclose(data[1][1], expected, atol=1e-5) and data[1][1].dtype == np.float32
    assert data[0][1].tolist() == [[0, 0, 59, 29, 0, 0]] and data[2][1].shape == (0, 6)
    assert str(data.report) == f"{folder} (val2017): 3 images, 4 boxes"
    training = data.with_boxes()
    assert training.image_ids == [7, 139] and len(training) == 2 and data.image_ids == [7, 139, 632]
    assert training.first(1).image_ids == [7]


@pytest.mark.parametrize("images", ["{split}", "images/{split}", "images", "."])
def test_images_are_found_where_people_put_them(tmp_path, images):
    write_coco(tmp_path, SIZES, BOXES, images=images)
    assert len(coco.Detection(tmp_path, "val2017", in_memory=True)) == 3


def test_some_of_the_classes_can_be_chosen_in_another_order(folder):
    data = coco.Detection(folder, "val2017", classes=("toothbrush", "person"))
    assert data.category_ids == [90, 1] and [label[:, 4].tolist() for _, label in data] == [[1], [0, 1], []]
    assert data.report.counts == {}
    with pytest.raises(DatasetCorrupt, match=r"unicorn is not among its categories \(person, dog, toothbrush\)"):
        coco.Detection(folder, "val2017", classes=("unicorn",))


@pytest.mark.parametrize(
    ("box", "kind"),
    [
        (coco_box(5, 139, 44, (1, 1, 5, 5)), "unknown class"),
        (coco_box(5, 8, 1, (1, 1, 5, 5)), "box of an unknown image"),
        (coco_box(5, 139, 1, (1, 1, 0, 5)), "box without area"),
        (coco_box(5, 139, 1, (1, 1, 5, -5)), "box without area"),
        (coco_box(5, 139, 1, (60, 1, 5, 5)), "box outside the image"),
        ({**coco_box(5, 139, 1, (1, 1, 5, 5)), "bbox": [1, 2, 3]}, "unreadable box"),
        ({**coco_box(5, 139, 1, (1, 1, 5, 5)), "bbox": None}, "unreadable box"),
        ({**coco_box(5, 139, 1, (1, 1, 5, 5)), "bbox": [1, 2, float("nan"), 4]}, "unreadable box"),
    ],
)
def test_a_box_that_cannot_be_learnt_from_is_left_out_and_counted_and_the_others_stay(folder, box, kind):
    sound = coco.Detection(folder, "val2017")
    rewrite(folder, lambda content: content["annotations"].append(box))
    data = coco.Detection(folder, "val2017")
    assert data.report.counts == {kind: 1} and data.report.num_boxes == 4
    assert all(np.array_equal(label, wanted) for (_, label), (_, wanted) in zip(data, sound))


def test_a_box_that_reaches_beyond_the_image_is_cut_and_counted_unless_by_rounding(folder):
    def grow(content):
        content["annotations"][1]["bbox"] = [-5, 10, 70, 30]
        content["annotations"][3]["bbox"] = [20, 5, 30.3, 35.2]

    rewrite(folder, grow)
    data = coco.Detection(folder, "val2017")
    assert data[0][1].tolist() == [[0, 10, 59, 29, 0, 0]] and data[1][1][2].tolist() == [20, 5, 49, 39, 0, 0]
    assert data.report.counts == {"box cut at the edge of the image": 1}


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda path: path.unlink(), "missing image"),
        (lambda path: path.write_bytes(path.read_bytes()[:400]), "unreadable image"),
        (lambda path: Image.fromarray(photograph(50, 60)).save(path), "annotation for another size"),
    ],
)
def test_an_image_that_cannot_be_used_stops_the_program_or_is_left_out_and_counted(folder, damage, kind):
    damage(folder / "val2017/000000000139.jpg")
    with pytest.raises(DatasetCorrupt, match=f"1 images cannot be used.*\n  {kind}: 1 "):
        coco.Detection(folder, "val2017")
    data = coco.Detection(folder, "val2017", broken="skip")
    assert data.report.counts == {kind: 1} and data.image_ids == [7, 632]
    assert [len(label) for _, label in data] == [1, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((text, "not a file of COCO's annotations") for text in ("", "{", "[]", "3")),
        ('{"images": [], "annotations": []}', "not a file of COCO's annotations"),
        ('{"images": [{"id": 1}], "annotations": [], "categories": []}', "not a file of COCO's annotations"),
        ('{"images": 1, "annotations": 2, "categories": 3}', "not a file of COCO's annotations"),
        ('{"images": [], "annotations": [], "categories": []}', "it names no image"),
    ],
)
def test_a_file_that_is_no_annotation_or_has_no_image_is_named(folder, content, message):
    (folder / "annotations/instances_val2017.json").write_text(content)
    with pytest.raises(DatasetCorrupt, match=rf"instances_val2017\.json: {message}"):
        coco.Detection(folder, "val2017")


def test_annotations_that_are_not_there_are_told(folder):
    with pytest.raises(DatasetUnavailable, match="there are no such annotations; there are val2017"):
        coco.Detection(folder, "train2017")
    with pytest.raises(DatasetUnavailable, match="is this the right folder"):
        coco.Detection(folder / "nowhere", "val2017")


def test_coco_is_found_by_name(tmp_path):
    for split in ("train2017", "val2017"):
        write_coco(tmp_path / "coco", SIZES, BOXES, split)
    data = gp.datasets.detection.load("coco", tmp_path)
    assert (len(data.train), len(data.test), data.classes) == (2, 3, ("person", "dog", "toothbrush"))
    with pytest.raises(DatasetUnavailable, match="coco: annotations and train2017 and val2017 are not in"):
        gp.datasets.detection.load("coco", tmp_path / "elsewhere")


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


def test_average_precision_is_what_gluoncv_computes(folder, tmp_path, rng, capsys):
    data, reference = coco.Detection(folder, "val2017"), ThreeClasses(folder, "instances_val2017", skip_empty=False)
    theirs = gluoncv.utils.metrics.COCODetectionMetric(
        reference, str(tmp_path / "found"), use_time=False, score_thresh=0
    )
    ours = gp.metrics.COCOMeanAP(data.annotations, data.category_ids)
    for image_id, (boxes, labels, scores) in zip(data.image_ids, predictions(data, rng)):
        theirs.update(*(mx.nd.array(array) for array in (boxes, labels, scores)))
        ours.update([image_id], *(mx.nd.array(array) for array in (boxes, labels, scores)))
    names, values = ours.get()
    coco_eval = theirs._update()
    coco_eval.summarize()
    wanted = [value if value >= 0 else np.nan for value in coco_eval.stats]
    assert names == list(gp.metrics.coco.NAMES)
    assert np.allclose(values, wanted, equal_nan=True, atol=1e-9) and 0 < values[0] < 1
    capsys.readouterr()
    ours.get()
    assert capsys.readouterr().out == ""  # it says nothing on its own


def average_precision(data):
    """Of predictions that are the true boxes, without crowds."""
    metric = gp.metrics.COCOMeanAP(data.annotations, data.category_ids)
    for image_id, (_, label) in zip(data.image_ids, data):
        label = label[label[:, 5] == 0]
        metric.update([image_id], label[None, :, :4], label[None, :, 4], np.ones((1, len(label))))
    return dict(metric.get_name_value())


def test_the_true_boxes_have_an_average_precision_of_one_whatever_else_is_in_the_file(folder):
    values = average_precision(coco.Detection(folder, "val2017"))
    assert values["AP"] == pytest.approx(1) and values["AP50"] == pytest.approx(1) and np.isnan(values["AP large"])
    broken = [{**coco_box(number, 139, 90, (1, 1, 5, 5)), "bbox": box} for number, box in enumerate([None, [1, 2]], 5)]
    rewrite(folder, lambda content: content["annotations"].extend(broken))
    assert average_precision(coco.Detection(folder, "val2017", classes=("toothbrush",)))["AP"] == pytest.approx(1)


def test_only_images_that_were_seen_count_and_each_of_them_once(folder):
    data = coco.Detection(folder, "val2017")
    metric = gp.metrics.COCOMeanAP(json.loads(data.annotations.read_text()), data.category_ids)
    assert all(np.isnan(value) for _, value in metric.get_name_value())
    label = data[0][1]
    for _ in range(2):  # as a last batch that is filled up with images that were there already
        metric.update([7], label[None, :, :4], label[None, :, 4], np.ones((1, 1)))
    assert dict(metric.get_name_value())["AP"] == pytest.approx(1)
    metric.update([139], np.empty((1, 0, 4)), np.empty((1, 0)), np.empty((1, 0)))  # nothing is found there
    # Of the person's two boxes one is found, at every precision: 51 of 101 recalls; of the toothbrush none.
    assert dict(metric.get_name_value())["AP"] == pytest.approx(51 / 101 / 2)
    metric.reset()
    assert np.isnan(metric.get()[1][0])


def test_predictions_that_belong_to_nothing_are_refused(folder):
    data = coco.Detection(folder, "val2017")
    metric = gp.metrics.COCOMeanAP(data.annotations, data.category_ids)
    with pytest.raises(ValueError, match="image 8 is not in the annotations"):
        metric.update([8], np.zeros((1, 1, 4)), np.zeros((1, 1)), np.ones((1, 1)))
    with pytest.raises(ValueError, match="label 3 is none of 3 classes"):
        metric.update([7], np.zeros((1, 1, 4)), np.full((1, 1), 3), np.ones((1, 1)))


def test_a_missing_pycocotools_is_told_before_training(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pycocotools", None)  # Python's own way to say that a module is not there
    data = coco.Detection(folder, "val2017")  # reading does not need it
    with pytest.raises(ImportError, match=r"pip install pycocotools.*VOC07MApMetric"):
        gp.metrics.COCOMeanAP(data.annotations, data.category_ids)
