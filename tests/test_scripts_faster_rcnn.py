"""The Faster R-CNN script trains, measures, draws, stops and continues as it says, on devices and on processes."""

import re
from pathlib import Path

import numpy as np
import pytest
from pictures_files import coco_box, write_coco, write_voc
from script_files import assert_refused, draw_only_for, load, rows

import gluon_parallel as gp
import mxnet as mx

pytest.importorskip("gluoncv", reason="GluonCV is an optional dependency")

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "configs" / "faster_rcnn"


_ = gp.models.faster_rcnn  # imports GluonCV without its warnings
DETECT = load("train_faster_rcnn")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Where the scenes are written, once for all tests."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(autouse=True)
def _runs_go_to_a_folder_of_their_own(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw_only_for(request, monkeypatch)


def run(data, *argv):
    words = ["--config", str(CONFIGS / "smoke.yaml"), "--data_root", str(data), *argv]
    return gp.start(DETECT.main, DETECT.Config, DETECT.DEFAULT, words)


GUIDE = (REPOSITORY / "docs/howto/detector.md").read_text("utf-8")


def test_the_guide_trains_on_boxes_of_ones_own_and_finds_boxes_on_a_new_picture(tmp_path, pictures, capsys):
    scenes = gp.datasets.scenes.write(tmp_path, 8, 2, 64)
    scenes.rename("pictures")
    Path("pictures/ImageSets/Main/test.txt").rename("pictures/ImageSets/Main/val.txt")
    new = Path("pictures/ImageSets/Main/val.txt").read_text().split()[0]
    Path("pictures/JPEGImages", f"{new}.jpg").rename("new.jpg")
    for path in Path("pictures/ImageSets/Main").glob("*.txt"):
        path.write_text(path.read_text().replace(new, "").strip() + "\n")
    digits = ",".join(gp.datasets.scenes.CLASSES)

    [command] = re.findall(r"```sh\npython scripts/train_faster_rcnn.py (.*?)```", GUIDE, re.DOTALL)
    words = command.replace("\\\n", " ").replace("screw,nut", digits).split()
    words += ["--epochs", "1", "--lr_decay_epochs", "", "--evaluate_every", "1", "--devices", "cpu:2"]
    assert gp.start(DETECT.main, DETECT.Config, DETECT.DEFAULT, words) == 0
    assert "8 images" in capsys.readouterr().out

    [code] = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    exec(code.replace('["screw", "nut"]', repr(digits.split(","))), {})
    assert Path("found.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--classes", "nut"], "scenes have the digits as classes; name --dataset voc or coco"),
        (["--dataset", "voc", "--classes", "nut,nut"], "expected different names, or a file of them; got .*nut.*nut"),
    ],
)
def test_classes_that_cannot_be_are_refused(data, words, error, capsys):
    assert_refused(run(data, *words), capsys, error)


def test_the_smoke_config_trains_on_two_devices_and_leaves_numbers_and_pictures(data, pictures, capsys):
    assert run(data) == 0
    out = capsys.readouterr().out
    assert "[cpu(0), cpu(1)]" in out and "mAP" in out and "14 images" in out
    folder = Path("runs/faster_rcnn/smoke/1")
    for name in ("curves.png", "contact_sheet.png", "pictures/epoch-0001.png", "pictures/epoch-0002.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG"), name
    first, second = rows(folder)
    parts = [f"loss_{name}" for name in gp.models.faster_rcnn.Loss.parts]
    assert all(np.isfinite(first[key]) for key in [*parts, "map"])
    for row in (first, second):  # float32 adds the parts up
        assert sum(row[key] for key in parts) == pytest.approx(row["loss"], rel=1e-5, abs=1e-6)
    assert second["loss"] < first["loss"]


def coco(folder):
    """A folder as COCO's with four images of any size: ids have gaps, one shows nothing, and one a crowd."""
    sizes = {139: (80, 120), 7: (110, 90), 632: (64, 64), 25: (70, 128)}
    boxes = [
        coco_box(1, 139, 90, (10.5, 11.25, 40.5, 38.75)),
        coco_box(2, 139, 1, (60.25, 5, 39.5, 64.5)),
        coco_box(3, 7, 18, (20, 30, 50, 60)),
        coco_box(4, 25, 1, (3, 4, 60, 50), iscrowd=1),
        coco_box(5, 25, 18, (70, 8, 40, 45)),
    ]
    for split in ("train2017", "val2017"):
        write_coco(folder, sizes, boxes, split)
    return ["--dataset", "coco", "--epochs", "1", "--batch_size", "3", "--short", "96", "--longest", "160"]


@pytest.mark.filterwarnings("ignore:.*also trained with")
def test_voc_is_trained_on_with_images_of_any_size_without_boxes_and_cut_off(tmp_path, capsys):
    person, dog = ("person", 10, 10, 60, 70, 0), ("dog", 30, 20, 75, 80, 1)
    images = {"000001": (90, 120, [person, dog]), "000002": (100, 100, []), "000003": (120, 80, [dog]),
              "000004": (96, 130, [person]), "000005": (100, 100, [person])}  # fmt: skip
    for folder, split in [("VOC2007", "trainval"), ("VOC2012", "trainval"), ("VOC2007", "test")]:
        write_voc(tmp_path / folder, images, split)
    cut = tmp_path / "VOC2012/JPEGImages/000005.jpg"
    cut.write_bytes(cut.read_bytes()[:-400])
    options = ["--dataset", "voc", "--short", "96", "--longest", "160", "--crop", "0.6", "--batch_size", "3"]
    assert run(tmp_path, *options, "--horizontal_flip") == 0
    out = capsys.readouterr().out
    assert "9 images, 9 boxes" in out and "unreadable image, image left out: 1" in out
    assert all(np.isfinite(row["loss"]) and 0 <= row["map"] <= 1 for row in rows("runs/faster_rcnn/smoke/1"))


@pytest.mark.filterwarnings("ignore:.*also trained with")
def test_coco_is_trained_on_and_measured_with_its_own_metric(tmp_path, pictures, capsys):
    pytest.importorskip("pycocotools", reason="pycocotools is an optional dependency")
    options = coco(tmp_path / "coco")
    assert run(tmp_path / "coco", *options) == 0
    out = capsys.readouterr().out
    assert "coco (train2017): 4 images, 5 boxes" in out and "coco (val2017): 4 images, 5 boxes" in out
    [row] = rows("runs/faster_rcnn/smoke/1")
    assert np.isfinite(row["loss"]) and 0 <= row["map"] <= 1
    assert Path("runs/faster_rcnn/smoke/1/contact_sheet.png").stat().st_size > 1000


@pytest.mark.filterwarnings("ignore:.*also trained with")
def test_boxes_that_are_found_in_resized_images_of_coco_are_measured_in_their_own_pixels(tmp_path, monkeypatch):
    pytest.importorskip("pycocotools", reason="pycocotools is an optional dependency")
    config = gp.config.parse(DETECT.Config, CONFIGS / "smoke.yaml", [*coco(tmp_path), "--data_root", str(tmp_path)])
    _, test_set = DETECT.load(config)

    def truth(_net, images, _devices):
        resize = gp.datasets.detection.resize(config.short, config.longest)
        for (image, label), given in zip(test_set, images):
            resized, label = resize(image, label[label[:, 5] == 0], None)  # nobody looks for crowds
            assert given.shape[1:] == resized.shape[:2] != image.shape[:2]
            yield np.column_stack([label[:, :5], np.ones(len(label))]).astype(np.float32)

    monkeypatch.setattr(gp.models.faster_rcnn, "detect", truth)
    for _, label, found in DETECT.find(None, test_set, range(4), config, []):
        np.testing.assert_allclose(found[:, :5], label[label[:, 5] == 0, :5], atol=1e-3)  # float32
    metric = DETECT.make_metric(config, test_set)
    for _ in range(2):  # one epoch's predictions are gone in the next
        score, pictures = DETECT.evaluate(None, test_set, metric, config, [], mx.kv.create("local"))
        assert score == pytest.approx(1) and len(pictures) == 4


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_config_is_complete_and_right(name):
    config = gp.config.parse(DETECT.Config, CONFIGS / f"{name}.yaml", [])
    rates = rates_of(config, [0.0, config.warmup_epochs, config.epochs - 0.01])
    assert rates[0] < rates[1] == config.lr and rates[2] <= rates[1]


def rates_of(config, epochs):
    schedule = DETECT.learning_rates(config)
    return [schedule(DETECT.MILLION * epoch) for epoch in epochs]


@pytest.mark.parametrize("begin", [0, 5.37])  # a run that is resumed begins in the middle
@pytest.mark.parametrize("steps", [150, 2069, 14659])  # per epoch, of the scenes, VOC and COCO
@pytest.mark.parametrize("name", ["default", "voc", "coco"])
def test_the_learning_rate_rises_from_a_tenth_and_falls_to_a_tenth_after_each_of_the_epochs(name, steps, begin):
    config = gp.config.parse(DETECT.Config, CONFIGS / f"{name}.yaml", [])
    epochs = begin + np.arange(int((config.epochs - begin) * steps)) / steps
    wanted = config.lr * np.minimum(1, 0.1 + 0.9 * epochs / config.warmup_epochs)
    for decay in config.lr_decay_epochs.split(","):
        wanted[epochs >= int(decay)] *= 0.1
    np.testing.assert_allclose(rates_of(config, epochs), wanted, rtol=1e-9, atol=0)
    constant = gp.config.parse(DETECT.Config, CONFIGS / f"{name}.yaml", ["--lr_decay_epochs", ""])
    assert rates_of(constant, epochs[-1:]) == [config.lr]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dataset", "digits"], "no data set 'digits' with boxes; there are 'scenes', 'voc', 'coco'"),
        (["--model", "yolo", "--norm", "null", "--channels", "null"], "model: there is no 'yolo'"),
        (["--model", "faster_rcnn_resnet50_v1b_voc"], "norm is 'sync_batch_norm', which has no effect with model fa"),
        (["--norm", "null"], "the key norm is missing"),
        (["--pretrained", "zoo"], "small has no backbone with published weights"),
        (["--dataset", "voc"], "voc: looked for the folders VOC2007 and VOC2012"),
        (["--max_boxes", "1"], "boxes, more than max_boxes: 1"),
        (["--lr_decay_epochs", "4;5"], "--lr_decay_epochs is '4;5', wanted rising epochs such as 8,10"),
        (["--lr_decay_epochs", "5,4"], "--lr_decay_epochs is '5,4', wanted rising epochs"),
        (["--crop", "1.5"], "--crop 1.5: a part has at most the whole sides"),
        (["--rpn_negative", "0.9"], "--rpn_negative 0.9 is above --rpn_positive"),
        (["--short", "900"], "--short 900 is above --longest"),
        (["--short", "20"], "--short 20: scenes have 32 pixels at least"),
    ],
)
def test_what_cannot_work_is_refused_in_one_message(data, argv, message, capsys):
    assert_refused(run(data, *argv), capsys, re.escape(message))
    assert not Path("runs/faster_rcnn/smoke/1").exists()  # before training
