"""The readers of VOC and COCO: equal to GluonCV's on sound folders, and what they say about broken ones."""

import functools
import json

import numpy as np
import pytest
from pictures_files import (
    ANNOTATION,
    BOXES,
    CATEGORIES,
    SIZES,
    annotation,
    coco_box,
    photograph,
    write_coco,
    write_voc,
)
from PIL import Image, ImageFile

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.datasets import coco, voc
from gluon_parallel.errors import DatasetCorrupt, DatasetUnavailable

gluoncv = pytest.importorskip("gluoncv", reason="GluonCV is an optional dependency")
pytest.importorskip("pycocotools", reason="pycocotools is an optional dependency")

SOUND = {
    "000005": (40, 50, [("chair", 11, 12, 30, 35, 0), ("person", 1, 1, 50, 40, 1)]),
    "000007": (30, 60, [("Car ", 5, 6, 20, 22.5, 0)]),
    "000009": (48, 32, []),
}
JPG, XML, PNG = "JPEGImages/000007.jpg", "Annotations/000007.xml", "SegmentationClass/000007.png"
PHOTO, JSON = "val2017/000000000139.jpg", "annotations/instances_val2017.json"


@pytest.fixture
def folder(tmp_path):
    """A folder such as VOC2007 with three sound images, which is one such as COCO's too."""
    write_voc(tmp_path / "VOC2007", SOUND)
    write_coco(tmp_path / "VOC2007", SIZES, BOXES)
    return tmp_path / "VOC2007"


def boxes(folder, split="train", **options):
    return voc.Detection(folder, split, **options)


def masks(folder, split="train", **options):
    return voc.Segmentation(folder, split, **options)


def of_coco(folder, split="val2017", **options):
    return coco.Detection(folder, split, **options)


def rewrite(folder, change):
    content = json.loads((folder / JSON).read_text())
    change(content)
    (folder / JSON).write_text(json.dumps(content))


class ThreeClasses(gluoncv.data.COCODetection):
    CLASSES = [category["name"] for category in CATEGORIES]


def test_images_boxes_and_masks_are_those_that_gluoncv_reads(folder, capsys):
    write_voc(folder.parent / "VOC2012", SOUND, split="val")
    pairs = [
        (boxes(folder.parent, [(2007, "train")]), gluoncv.data.VOCDetection(folder.parent, [(2007, "train")])),
        (of_coco(folder), ThreeClasses(folder, "instances_val2017", skip_empty=False)),
        (masks(folder.parent, [(2012, "val")]), gluoncv.data.VOCSegmentation(folder.parent, "val", mode="testval")),
    ]
    assert all(list(ours.classes) == list(theirs.classes) for ours, theirs in pairs[:2])
    for ours, theirs in pairs:
        assert len(ours) == len(theirs) == 3 and len(ours.classes) in (3, 20, 21)
        for (image, target), (their_image, their_target) in zip(ours, theirs):
            assert image.dtype == np.uint8 and target.dtype in (np.float32, np.int32)
            assert np.abs(image.astype(int) - their_image.asnumpy()).max() <= 3  # two JPEG decoders round differently
            if target.ndim == 2 and target.shape[1] == 6:
                wanted = [row for row in their_target if row[4] >= 0]  # COCO's rows have no sixth value
                assert len(target) == len(wanted)
                assert all(
                    np.allclose(row[: len(their_row)], their_row, atol=1e-5) for row, their_row in zip(target, wanted)
                )
            else:
                assert np.array_equal(target, their_target.asnumpy()) and target.min() == -1


def test_items_have_boxes_from_zero_dense_classes_and_say_what_is_difficult_or_a_crowd(folder):
    data, crowded = boxes(folder), of_coco(folder, "instances_val2017")
    expected = [[[10, 11, 29, 34, 8, 0], [0, 0, 49, 39, 14, 1]], [[4, 5, 19, 21.5, 6, 0]], []]
    assert [label.tolist() for _, label in data] == expected and data[2][1].shape == (0, 6)
    expected = [
        [[0, 0, 59, 29, 0, 0]],
        [[10.5, 11.25, 30, 19, 2, 0], [3, 4, 22, 33, 1, 1], [20.13, 5, 49, 38.99, 0, 0]],
    ]
    assert all(np.allclose(label, wanted, atol=1e-5) for (_, label), wanted in zip(crowded, expected))
    assert str(data.report) == f"{folder} (train): 3 images, 3 boxes" and data.max_boxes == 2
    assert str(crowded.report) == f"{folder} (val2017): 3 images, 4 boxes" and crowded.max_boxes == 3
    assert [len(label) for _, label in data.with_boxes()] == [2, 1]
    assert len(data.first(1)) == 1 and len(data.first(9)) == 3 and len(data) == 3
    training = crowded.with_boxes()
    assert crowded.image_ids == [7, 139, 632] and training.image_ids == [7, 139] and training.first(1).image_ids == [7]


@pytest.mark.parametrize("reader", [boxes, masks, of_coco])
def test_what_is_kept_in_memory_is_what_lies_in_the_files_and_nobody_can_change_it(folder, reader):
    there, kept = reader(folder), reader(folder, in_memory=True)
    before = [[array.copy() for array in item] for item in there]
    for path in folder.rglob("*.[jp][pn]g"):
        path.unlink()
    for item, expected in zip(kept, before):
        assert all(np.array_equal(array, wanted) for array, wanted in zip(item, expected))
        with pytest.raises(ValueError, match="read-only"):
            item[0][0] = 0
    with pytest.raises(DatasetCorrupt, match=r"0\.jpg|5\.jpg|7\.jpg: missing image.*replace it"):
        there[0]


def test_lists_follow_each_other_and_may_have_a_second_column_and_blank_lines(folder):
    write_voc(folder.parent / "VOC2012", {"2008_000001": (20, 20, [("dog", 2, 2, 9, 9, 0)])})
    (folder / "ImageSets/Main/chair_train.txt").write_text("000005  1\n000007 -1\n\n  \n")
    data = boxes(folder.parent, [(2007, "chair_train"), ("VOC2012", "train")])
    assert len(data) == 3 and data[2][1].tolist() == [[1, 1, 8, 8, 11, 0]]


@pytest.mark.parametrize("images", ["images/{split}", "images", "."])
def test_images_of_coco_are_found_where_people_put_them(tmp_path, images):
    write_coco(tmp_path, SIZES, BOXES, images=images)
    assert len(of_coco(tmp_path, in_memory=True)) == 3


def test_some_of_the_classes_can_be_chosen_in_another_order(folder):
    data = of_coco(folder, classes=("toothbrush", "person"))
    assert data.category_ids == [90, 1] and [label[:, 4].tolist() for _, label in data] == [[1], [0, 1], []]
    assert data.report.counts == {}
    with pytest.raises(DatasetCorrupt, match=r"unicorn is not among its categories \(person, dog, toothbrush\)"):
        of_coco(folder, classes=("unicorn",))
    with pytest.raises(DatasetCorrupt, match=r"(?s)no box is of a known class \(0, 1\).*unknown class: 3 .*'chair'"):
        boxes(folder, classes=("0", "1"))
    data = masks(folder, classes=("aeroplane",))
    assert data.report.counts == {"unknown class in the mask, counted as void": 3}
    assert data[0][1][0, 0] == -1 and set(np.unique(data[0][1])) == {-1, 0, 1}


def drop(path):
    path.unlink()


def cut_off(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def empty(path):
    path.write_bytes(b"")


def other_size(path):
    Image.fromarray(photograph(31, 61)[..., 0]).save(path)


def colours(path):
    Image.fromarray(photograph(30, 60)).save(path)


BROKEN = [
    (boxes, drop, JPG, "missing image"),
    (boxes, cut_off, JPG, "unreadable image"),
    (boxes, drop, XML, "missing annotation"),
    (boxes, cut_off, XML, "unreadable annotation"),
    (boxes, empty, XML, "unreadable annotation"),
    (boxes, other_size, JPG, "annotation for another size"),
    (masks, drop, PNG, "missing mask"),
    (masks, cut_off, PNG, "unreadable mask"),
    (masks, colours, PNG, "unreadable mask"),
    (masks, other_size, PNG, "mask of another size"),
    (of_coco, drop, PHOTO, "missing image"),
    (of_coco, cut_off, PHOTO, "unreadable image"),
    (of_coco, other_size, PHOTO, "annotation for another size"),
]


@pytest.mark.parametrize(("reader", "damage", "name", "kind"), BROKEN)
def test_what_cannot_be_read_stops_the_program_before_training_or_is_left_out_and_counted(
    folder, reader, damage, name, kind
):
    damage(folder / name)
    with pytest.raises(DatasetCorrupt, match=rf"1 images cannot be used.*broken='skip'.*\n  {kind}: 1 \(.*(007|139)"):
        reader(folder)
    data = reader(folder, broken="skip")
    assert data.report.counts == {kind: 1} and data.report.num_samples == len(data) == 2
    assert f"{kind}, image left out: 1 (" in str(data.report)
    assert len({image.shape for image, _ in data}) == 2  # nothing fails later


def test_a_file_that_is_damaged_later_is_told_when_it_is_read_also_where_pillow_was_told_to_fill_it(
    folder, monkeypatch
):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)  # as importing GluonCV does
    there, drawn = boxes(folder), masks(folder)
    cut_off(folder / JPG)
    for data in (there, drawn):
        assert len(data[0]) == 2
        with pytest.raises(DatasetCorrupt, match=r"000007.jpg: unreadable image .*replace it"):
            data[1]
    assert boxes(folder, broken="skip", in_memory=True).report.counts == {"unreadable image": 1}
    cut_off(folder / "SegmentationClass/000005.png")
    with pytest.raises(DatasetCorrupt, match="000005.png: unreadable mask"):
        drawn[0]
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


NO_AREA = "box without area in the image"


@pytest.mark.parametrize(
    ("box", "kind", "kept"),
    [
        (("unicorn", 1, 1, 9, 9, 0), "unknown class", None),
        (("car", 9, 5, 9, 8, 0), NO_AREA, None),
        (("car", 9, 5, 3, 8, 0), NO_AREA, None),
        (("car", 70, 5, 80, 8, 0), NO_AREA, None),
        (("car", -20, 5, 0, 8, 0), NO_AREA, None),
        (("car", "nan", 5, 9, 8, 0), "unreadable box", None),
        (("car", 1, 1, "inf", 9, 0), "unreadable box", None),
        (("car", 51, -3, 70, 45, 0), "box cut at the edge of the image", [50, 0, 59, 29, 6, 0]),
        (("car", 51, 3, 60.4, 9, 0), None, [50, 2, 59, 8, 6, 0]),
        (("CAR", 2, 3, 4, 9, "Unspecified"), None, [1, 2, 3, 8, 6, 0]),
        (coco_box(5, 7, 44, (1, 1, 5, 5)), "unknown class", None),
        (coco_box(5, 8, 1, (1, 1, 5, 5)), "box of an unknown image", None),
        (coco_box(5, 7, 1, (1, 1, 5, -5)), NO_AREA, None),
        ({**coco_box(5, 7, 1, (1, 1, 5, 5)), "bbox": [1, 2, 3]}, "unreadable box", None),
        ({**coco_box(5, 7, 1, (1, 1, 5, 5)), "bbox": None}, "unreadable box", None),
        (coco_box(5, 7, 18, (-5, 10, 70, 30)), "box cut at the edge of the image", [0, 10, 59, 29, 1, 0]),
        ({**coco_box(5, 7, 18, (20, 5, 40.3, 25.2)), "iscrowd": None}, None, [20, 5, 59, 29, 1, 0]),  # not stated
    ],
)
def test_a_box_that_cannot_be_learnt_from_is_left_out_and_counted_and_the_others_stay(folder, box, kind, kept):
    if isinstance(box, tuple):
        (folder / XML).write_text(annotation("000007", 60, 30, ("dog", 2, 3, 10, 20, 0), box))
        data, number, first = boxes(folder), 1, [1, 2, 9, 19, 11, 0]
    else:
        stated = {name: value for name, value in box.items() if (name, value) != ("iscrowd", None)}
        rewrite(folder, lambda content: content["annotations"].append(stated))
        data, number, first = of_coco(folder), 0, [0, 0, 59, 29, 0, 0]
    assert len(data) == 3 and data[number][1].tolist() == [first] + ([kept] if kept else [])
    assert data.report.counts == ({kind: 1} if kind else {})


def test_a_report_names_three_examples_of_each_kind_and_counts_the_rest(folder):
    objects = [("unicorn", 1, 1, 9, 9, 0)] * 5 + [("car", 3, 3, 3, 3, 1)]
    (folder / XML).write_text(annotation("000007", 60, 30, *objects))
    report = boxes(folder).report
    assert report.counts == {"unknown class": 5, NO_AREA: 1} and report.num_boxes == 2
    words = str(report).splitlines()
    assert words[1].startswith("  unknown class: 5 (") and words[1].endswith("'unicorn'; and 2 more)")
    assert words[1].count("000007.xml") == 3
    assert words[2] == f"  {NO_AREA}: 1 ({folder / XML}: box 6: (2, 2, 2, 2))"


def test_a_file_without_size_or_with_zero_is_measured_by_its_image(folder):
    (folder / XML).write_text(ANNOTATION.format(name="000007", width=0, height=0, objects=""))
    (folder / "Annotations/000009.xml").write_text("<annotation></annotation>")
    data = boxes(folder)
    assert len(data) == 3 and data.report.counts == {}


@pytest.mark.parametrize("reader", [boxes, masks, of_coco])
def test_a_list_that_is_not_there_or_empty_and_a_folder_of_which_nothing_is_left_are_errors(folder, reader):
    with pytest.raises(DatasetUnavailable, match=r"no such (list|annotations).*; there are (train|val2017)"):
        reader(folder, "trainval")
    with pytest.raises(DatasetUnavailable, match="is this the right folder"):
        reader(folder / "nowhere", "train")
    with pytest.raises(ValueError, match="broken='ignore' is none of 'raise', 'skip'"):
        reader(folder, broken="ignore")
    for path in folder.rglob("*.jpg"):
        path.unlink()
    with pytest.raises(DatasetCorrupt, match="no image is left.*\n  missing image, image left out: 3"):
        reader(folder, broken="skip")
    for path in folder.glob("ImageSets/*/train.txt"):
        path.write_text("\n")
    rewrite(folder, lambda content: content["images"].clear())
    with pytest.raises(DatasetCorrupt, match=r"(train\.txt|val2017\.json): .*names no image"):
        reader(folder)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"images": [], "annotations": []}',
        '{"images": [{"id": 1}], "annotations": [], "categories": []}',
        '{"images": 1, "annotations": 2, "categories": 3}',
    ],
)
def test_a_file_that_is_no_annotation_of_coco_is_named(folder, content):
    (folder / JSON).write_text(content)
    with pytest.raises(DatasetCorrupt, match=r"instances_val2017\.json: not a file of COCO's annotations"):
        of_coco(folder)


@pytest.mark.filterwarnings("ignore:.*also trained with")  # the files are made alike
def test_voc_and_coco_are_found_by_name(tmp_path, monkeypatch):
    for year, split in ((2007, "trainval"), (2012, "trainval"), (2007, "test"), (2012, "train"), (2012, "val")):
        write_voc(tmp_path / f"VOC{year}", SOUND, split)
    for split in ("train2017", "val2017"):
        write_coco(tmp_path / "coco", SIZES, BOXES, split)
    load, load_masks = gp.datasets.detection.load, gp.datasets.segmentation.load
    for data, sizes in (
        (load("voc", tmp_path, num_train=3), (3, 3, 20)),
        (load_masks("voc", tmp_path, num_test=2), (3, 2, 21)),
        (load("coco", tmp_path), (2, 3, 3)),
    ):
        assert (len(data.train), len(data.test), len(data.classes)) == sizes
    monkeypatch.setenv("GLUON_PARALLEL_DATA", str(tmp_path / "elsewhere"))
    for find in (load, load_masks):
        with pytest.raises(
            DatasetUnavailable, match=r"voc: .*elsewhere.voc is not there.*\. Nothing of this size.*\"scenes\""
        ):
            find("voc")
        with pytest.raises(DatasetUnavailable, match="there is no data set 'vok'"):
            find("vok")


def test_boxes_of_ones_own_are_read_in_the_layout_of_voc_with_any_year_or_none(tmp_path):
    screw = [("screw", 3, 4, 20, 30, 0)]
    load = functools.partial(gp.datasets.detection.load, "voc", classes=["nut", "screw"])
    for folders, train, test in (
        ([tmp_path / "a"], "train", "val"),
        ([tmp_path / "b" / "VOC2031"], "trainval", "test"),
        ([tmp_path / "c" / "mine", tmp_path / "c" / "yours"], "train", "test"),
    ):
        for number, folder in enumerate(folders):
            write_voc(folder, {f"{number}1": (40, 50, screw), f"{number}2": (40, 50, screw)}, train)
            write_voc(folder, {f"{number}3": (40, 50, [])}, test)
        root = folders[0] if folders[0].parent == tmp_path else folders[0].parent
        data = load(root)
        assert (len(data.train), len(data.test), data.classes) == (2 * len(folders), len(folders), ("nut", "screw"))
        assert data.train[0][1][:, 4].tolist() == [1]
    (tmp_path / "a/JPEGImages/01.jpg").rename(tmp_path / "a/JPEGImages/01.png")
    assert len(load(tmp_path / "a").train) == 2
    (tmp_path / "a/ImageSets/Main/val.txt").unlink()
    with pytest.raises(DatasetUnavailable, match=r"a: which images .*needs train.txt and val.txt.*; there are train$"):
        load(tmp_path / "a")
    with pytest.raises(DatasetUnavailable, match=r"looked for the folders VOC2007 and VOC2012, or, .* ImageSets/Main"):
        load(tmp_path / "nothing")
    (tmp_path / "d" / "pictures").mkdir(parents=True)
    with pytest.raises(DatasetUnavailable, match=r"\. /\S+/d has pictures/; /\S+/d/voc is not there\. Nothing"):
        load(tmp_path / "d")
    with pytest.raises(DatasetCorrupt, match="no box is of a known class.*pass classes="):
        gp.datasets.detection.load("voc", tmp_path / "b")


@pytest.mark.filterwarnings("ignore:.*also trained with")  # the files are made alike
def test_boxes_of_ones_own_are_read_in_the_layout_of_coco_with_any_categories(tmp_path):
    load = functools.partial(gp.datasets.detection.load, "coco")
    for split in ("train_screws", "val_screws"):
        write_coco(tmp_path, SIZES, BOXES, split)
    data = load(tmp_path)
    assert (len(data.train), len(data.test), len(data.classes)) == (2, 3, 3)
    assert load(tmp_path, classes=["dog"]).test.classes == ("dog",)
    write_coco(tmp_path, SIZES, BOXES, "train_nuts")
    with pytest.raises(DatasetUnavailable, match=r"one file instances_train\*\.json.*there are train_nuts, train_s"):
        load(tmp_path)
    with pytest.raises(ValueError, match="scenes have the digits"):
        gp.datasets.detection.load("scenes", tmp_path, classes=["dog"])


def test_images_to_test_with_that_are_trained_with_too_are_told_with_an_example(tmp_path):
    screw = [("screw", 3, 4, 20, 30, 0)]
    voc, coco = tmp_path / "voc", tmp_path / "coco"
    write_voc(voc, dict.fromkeys(("one", "two"), (40, 50, screw)), "train")
    write_voc(voc, dict.fromkeys(("two", "three"), (40, 50, screw)), "val")
    load = gp.datasets.detection.load
    with pytest.warns(UserWarning, match=r"^1 of the 2 images to test with are also trained with, such as .*two.jpg"):
        load("voc", voc, classes=["screw"])
    for split in ("train", "val"):
        write_coco(coco, SIZES, BOXES, split)
    with pytest.warns(UserWarning, match="of the 3 images to test with are also trained with"):  # copies of them
        load("coco", coco)
    for path in coco.glob("val/*"):
        with Image.open(path) as image:
            Image.new("RGB", image.size, "red").save(path)
    load("coco", coco)


@pytest.mark.filterwarnings("ignore:Ignoring")  # what MXNet says of each file
def test_folders_without_a_picture_are_told_with_what_they_have(tmp_path):
    data_set = mx.gluon.data.vision.ImageFolderDataset
    (tmp_path / "tests").mkdir()
    with pytest.raises(FileNotFoundError, match=r"the folder .*/test is not there; .* has tests\. .*/test/cat/1\.jpg"):
        data_set(str(tmp_path / "test"))
    (tmp_path / "tests").rmdir()
    with pytest.warns(UserWarning, match=r"no picture \(.jpg, .*: it has nothing, and no folder for each class"):
        assert len(data_set(str(tmp_path))) == 0
    for name in ("cat/1.webp", "cat/2.webp", "dog/notes"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.warns(UserWarning, match=r"its folders cat, dog have 2 x .webp, 1 x no ending") as told:
        assert len(data_set(root=str(tmp_path), flag=0)) == 0
    assert [one.filename for one in told if "its folders" in str(one.message)] == [__file__]
    Image.new("RGB", (2, 2)).save(tmp_path / "dog" / "3.JPG")
    assert len(data_set(str(tmp_path))) == 1


def test_a_picture_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(b"no picture")
    pictures = mx.gluon.data.vision.ImageFolderDataset(str(tmp_path))
    for workers in (0, 1):
        with pytest.raises(mx.MXNetError, match=r"imread: .*/cat/1\.jpg cannot be read as a picture: its 10 bytes"):
            next(iter(mx.gluon.data.DataLoader(pictures, 1, num_workers=workers)))
    with pytest.raises(mx.MXNetError, match=r"none\.jpg cannot be read as a picture: it is not there"):
        mx.image.imread(str(tmp_path / "none.jpg"))
    with pytest.raises(mx.MXNetError, match=r"cat cannot be read as a picture: it is a folder"):
        mx.image.imread(str(tmp_path / "cat"))


def damaged(content, rng):
    """Up to forty bytes replaced by as many others, or by fewer, or by more, at up to five places."""
    content = bytearray(content)
    for _ in range(rng.integers(1, 6)):
        offset, length, others = map(int, rng.integers([len(content), 40, 40]))
        content[offset : offset + length] = rng.bytes(others)
    return bytes(content)


@pytest.mark.parametrize("name", [JPG, XML, PNG])
def test_whatever_bytes_the_files_hold_nothing_fails_once_the_index_is_built(folder, rng, name):
    sound, outcomes = (folder / name).read_bytes(), set()
    for _ in range(60):
        (folder / name).write_bytes(damaged(sound, rng))
        for reader in (boxes, masks):
            data = reader(folder, broken="skip")
            assert all(image.ndim == 3 and target.ndim == 2 for image, target in data)
            outcomes.add(len(data))
    assert outcomes == {2, 3}  # some damage does not matter, some does
