"""VOC's reader: equal to GluonCV's on sound folders, and what it says about broken ones."""

import numpy as np
import pytest
from pictures_files import ANNOTATION, annotation, photograph, write_voc
from PIL import Image, ImageFile

import gluon_parallel as gp
from gluon_parallel.datasets import voc
from gluon_parallel.errors import DatasetCorrupt, DatasetUnavailable

gluoncv = pytest.importorskip("gluoncv", reason="GluonCV is an optional dependency")

SOUND = {
    "000005": (40, 50, [("chair", 11, 12, 30, 35, 0), ("person", 1, 1, 50, 40, 1)]),
    "000007": (30, 60, [("Car ", 5, 6, 20, 22.5, 0)]),
    "000009": (48, 32, []),
}


@pytest.fixture
def folder(tmp_path):
    """A folder such as VOC2007 with three sound images."""
    write_voc(tmp_path / "VOC2007", SOUND)
    return tmp_path / "VOC2007"


def xml(folder, name, *boxes):
    (folder / f"Annotations/{name}.xml").write_text(annotation(name, 60, 30, *boxes))


def test_images_and_boxes_are_those_that_gluoncv_reads(folder):
    ours = voc.Detection(folder.parent, [(2007, "train")])
    theirs = gluoncv.data.VOCDetection(folder.parent, [(2007, "train")])
    assert len(ours) == len(theirs) == 3 and ours.classes == theirs.classes
    for (image, label), (their_image, their_label) in zip(ours, theirs):
        assert np.array_equal(label, their_label.reshape(-1, 6))
        assert image.dtype == np.uint8 and label.dtype == np.float32
        assert np.abs(image.astype(int) - their_image.asnumpy()).max() <= 3  # two JPEG decoders round differently


def test_masks_are_those_that_gluoncv_reads(tmp_path):
    write_voc(tmp_path / "VOC2012", SOUND, split="val")
    ours = voc.Segmentation(tmp_path, [(2012, "val")])
    theirs = gluoncv.data.VOCSegmentation(tmp_path, split="val", mode="testval")
    assert len(ours) == len(theirs) == 3 and len(ours.classes) == 21
    for (image, mask), (their_image, their_mask) in zip(ours, theirs):
        assert np.array_equal(mask, their_mask.asnumpy()) and mask.dtype == np.int32 and mask.min() == -1
        assert np.array_equal(image, their_image.asnumpy())


def test_an_item_has_its_boxes_from_zero_and_may_have_none(folder):
    data = voc.Detection(folder, "train")
    assert data[0][1].tolist() == [[10, 11, 29, 34, 8, 0], [0, 0, 49, 39, 14, 1]]
    assert data[1][1].tolist() == [[4, 5, 19, 21.5, 6, 0]]
    assert data[2][1].shape == (0, 6)
    assert str(data.report) == f"{folder} (train): 3 images, 3 boxes" and data.max_boxes == 2
    assert [len(label) for _, label in data.with_boxes()] == [2, 1]
    assert len(data.first(1)) == 1 and len(data.first(9)) == 3 and len(data) == 3


@pytest.mark.parametrize("reader", [voc.Detection, voc.Segmentation])
def test_what_is_kept_in_memory_is_what_lies_in_the_files_and_nobody_can_change_it(folder, reader):
    there, kept = reader(folder, "train"), reader(folder, "train", in_memory=True)
    before = [[array.copy() for array in item] for item in there]
    for path in [*folder.glob("JPEGImages/*"), *folder.glob("SegmentationClass/*")]:
        path.unlink()
    for item, expected in zip(kept, before):
        assert all(np.array_equal(array, wanted) for array, wanted in zip(item, expected))
        with pytest.raises(ValueError, match="read-only"):
            item[0][0] = 0
    with pytest.raises(DatasetCorrupt, match="000005.jpg: the image cannot be read"):
        there[0]


def test_lists_follow_each_other_and_may_have_a_second_column_and_blank_lines(tmp_path):
    write_voc(tmp_path / "VOC2007", SOUND)
    write_voc(tmp_path / "VOC2012", {"2008_000001": (20, 20, [("dog", 2, 2, 9, 9, 0)])})
    (tmp_path / "VOC2007/ImageSets/Main/chair_train.txt").write_text("000005  1\n000007 -1\n\n  \n")
    data = voc.Detection(tmp_path, [(2007, "chair_train"), ("VOC2012", "train")])
    assert len(data) == 3 and data[2][1].tolist() == [[1, 1, 8, 8, 11, 0]]


def drop(folder, name):
    (folder / name).unlink()


def cut_off(folder, name):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])


def overwrite(folder, name, content=b"<html>404</html>"):
    (folder / name).write_bytes(content)


def other_size(folder, name):
    Image.fromarray(photograph(31, 60)[..., 0]).save(folder / name)


def colours(folder, name):
    Image.fromarray(photograph(30, 60)).save(folder / name)


JPG, XML, PNG = "JPEGImages/000007.jpg", "Annotations/000007.xml", "SegmentationClass/000007.png"
BROKEN = [
    (voc.Detection, drop, JPG, "missing image"),
    (voc.Detection, cut_off, JPG, "unreadable image"),
    (voc.Detection, overwrite, JPG, "unreadable image"),
    (voc.Detection, drop, XML, "missing annotation"),
    (voc.Detection, cut_off, XML, "unreadable annotation"),
    (voc.Detection, lambda folder, name: overwrite(folder, name, b""), XML, "unreadable annotation"),
    (voc.Detection, other_size, JPG, "annotation for another size"),
    (voc.Segmentation, drop, JPG, "missing image"),
    (voc.Segmentation, drop, PNG, "missing mask"),
    (voc.Segmentation, cut_off, PNG, "unreadable mask"),
    (voc.Segmentation, overwrite, PNG, "unreadable mask"),
    (voc.Segmentation, colours, PNG, "unreadable mask"),
    (voc.Segmentation, other_size, PNG, "mask of another size"),
]


@pytest.mark.parametrize(("reader", "damage", "name", "kind"), BROKEN)
def test_what_cannot_be_read_stops_the_program_before_training_or_is_left_out_and_counted(
    folder, reader, damage, name, kind
):
    damage(folder, name)
    with pytest.raises(DatasetCorrupt, match=rf"1 images cannot be used.*broken='skip'.*\n  {kind}: 1 \(.*000007"):
        reader(folder, "train")
    data = reader(folder, "train", broken="skip")
    assert data.report.counts == {kind: 1} and data.report.num_samples == len(data) == 2
    assert f"{kind}, image left out: 1 (" in str(data.report) and "/000007." in str(data.report)
    for image, _ in data:  # nothing fails later
        assert image.shape[0] in (40, 48)


def test_a_file_that_is_damaged_later_is_told_when_it_is_read_also_where_pillow_was_told_to_fill_it(
    folder, monkeypatch
):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)  # as importing GluonCV does
    boxes, masks = voc.Detection(folder, "train"), voc.Segmentation(folder, "train")
    cut_off(folder, JPG)
    for data in (boxes, masks):
        assert len(data[0]) == 2
        with pytest.raises(DatasetCorrupt, match=r"000007.jpg: the image cannot be read .*replace it"):
            data[1]
    data = voc.Detection(folder, "train", broken="skip", in_memory=True)
    assert data.report.counts == {"unreadable image": 1}
    cut_off(folder, "SegmentationClass/000005.png")
    with pytest.raises(DatasetCorrupt, match="the mask cannot be read"):
        masks[0]
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


@pytest.mark.parametrize(
    ("box", "kind", "kept"),
    [
        (("unicorn", 1, 1, 9, 9, 0), "unknown class", None),
        (("", 1, 1, 9, 9, 0), "unknown class", None),
        (("car", 9, 5, 9, 8, 0), "box without area", None),
        (("car", 9, 5, 3, 8, 0), "box without area", None),
        (("car", 70, 5, 80, 8, 0), "box outside the image", None),
        (("car", -20, 5, 0, 8, 0), "box outside the image", None),
        (("car", "nan", 5, 9, 8, 0), "unreadable box", None),
        (("car", "ten", 5, 9, 8, 0), "unreadable box", None),
        (("car", "", 5, 9, 8, 0), "unreadable box", None),
        (("car", 1, 1, "inf", 9, 0), "unreadable box", None),
        (("car", 51, -3, 70, 45, 0), "box cut at the edge of the image", [50, 0, 59, 29, 6, 0]),
        (("car", 51, 3, 60.4, 9, 0), None, [50, 2, 59, 8, 6, 0]),
        (("CAR", 2, 3, 4, 9, "Unspecified"), None, [1, 2, 3, 8, 6, 0]),
    ],
)
def test_a_box_that_cannot_be_learnt_from_is_left_out_and_counted_and_the_others_stay(folder, box, kind, kept):
    xml(folder, "000007", ("dog", 2, 3, 10, 20, 0), box)
    data = voc.Detection(folder, "train")
    assert len(data) == 3
    assert data[1][1].tolist() == [[1, 2, 9, 19, 11, 0]] + ([kept] if kept else [])
    assert data.report.counts == ({kind: 1} if kind else {})


def test_a_report_names_three_examples_of_each_kind_and_counts_the_rest(folder):
    xml(folder, "000007", *[("unicorn", 1, 1, 9, 9, 0)] * 5, ("car", 3, 3, 3, 3, 1))
    report = voc.Detection(folder, "train").report
    assert report.counts == {"unknown class": 5, "box without area": 1} and report.num_boxes == 2
    words = str(report).splitlines()
    assert words[1].startswith("  unknown class: 5 (") and words[1].endswith("'unicorn'; and 2 more)")
    assert words[1].count("000007.xml") == 3
    assert words[2] == f"  box without area: 1 ({folder / XML}: box 6: (2, 2, 2, 2))"


def test_a_file_without_size_or_with_zero_is_measured_by_its_image(folder):
    text = ANNOTATION.format(name="000007", width=0, height=0, objects="")
    (folder / XML).write_text(text)
    (folder / "Annotations/000009.xml").write_text("<annotation></annotation>")
    data = voc.Detection(folder, "train")
    assert len(data) == 3 and data.report.counts == {}


def test_classes_that_no_box_has_are_an_error_that_names_them(folder):
    with pytest.raises(DatasetCorrupt, match=r"no box is of a known class \(0, 1\); pass classes=") as told:
        voc.Detection(folder, "train", classes=("0", "1"))
    assert "unknown class: 3" in str(told.value) and "'chair'" in str(told.value)


def test_pixels_of_an_unknown_class_do_not_count(folder):
    data = voc.Segmentation(folder, "train", classes=("aeroplane",))
    assert data.report.counts == {"unknown class in the mask, counted as void": 3}
    assert data[0][1][0, 0] == -1 and set(np.unique(data[0][1])) == {-1, 0, 1}


@pytest.mark.parametrize(("reader", "kind"), [(voc.Detection, "Main"), (voc.Segmentation, "Segmentation")])
def test_a_list_that_is_not_there_or_empty_and_a_folder_of_which_nothing_is_left_are_errors(folder, reader, kind):
    with pytest.raises(DatasetUnavailable, match=r"trainval\.txt: there is no such list of images; there are train"):
        reader(folder, "trainval")
    with pytest.raises(DatasetUnavailable, match="is this the right folder"):
        reader(folder / "nowhere", [(2007, "train")])
    with pytest.raises(ValueError, match="broken='ignore' is none of 'raise', 'skip'"):
        reader(folder, "train", broken="ignore")
    (folder / f"ImageSets/{kind}/none.txt").write_text("\n")
    with pytest.raises(DatasetCorrupt, match=r"none\.txt: the list names no image"):
        reader(folder, "none")
    for path in folder.glob("JPEGImages/*"):
        path.unlink()
    with pytest.raises(DatasetCorrupt, match="no image is left.*\n  missing image, image left out: 3"):
        reader(folder, "train", broken="skip")


def test_voc_is_found_by_name_in_a_devkit(tmp_path, monkeypatch):
    for year, split in ((2007, "trainval"), (2012, "trainval"), (2007, "test"), (2012, "train"), (2012, "val")):
        write_voc(tmp_path / f"VOC{year}", SOUND, split)
    data = gp.datasets.detection.load("voc", tmp_path, num_train=3)
    assert (len(data.train), len(data.test), len(data.classes)) == (3, 3, 20)
    masks = gp.datasets.segmentation.load("voc", tmp_path, num_test=2)
    assert (len(masks.train), len(masks.test), len(masks.classes)) == (3, 2, 21)
    monkeypatch.setenv("GLUON_PARALLEL_DATA", str(tmp_path / "elsewhere"))
    for load in (gp.datasets.detection.load, gp.datasets.segmentation.load):
        with pytest.raises(DatasetUnavailable, match=r"voc: .*elsewhere.voc, and nothing of this size.*\"scenes\""):
            load("voc")
        with pytest.raises(DatasetUnavailable, match="there is no data set 'vok'"):
            load("vok")


def damaged(content, rng):
    """Some bytes altered, dropped or put in; or the end cut off."""
    content = bytearray(content)
    for _ in range(rng.integers(1, 6)):
        offset = int(rng.integers(len(content)))
        length = int(rng.integers(1, 40))
        kind = rng.integers(4)
        if kind == 0:
            content[offset : offset + length] = rng.bytes(min(length, len(content) - offset))
        elif kind == 1:
            del content[offset : min(offset + length, len(content) - 1)]
        elif kind == 2:
            content[offset:offset] = rng.bytes(length)
        elif rng.random() < 0.3:
            del content[max(1, offset) :]
    return bytes(content)


@pytest.mark.parametrize("kind", ["JPEGImages", "Annotations", "SegmentationClass"])
def test_whatever_bytes_the_files_hold_nothing_fails_once_the_index_is_built(folder, rng, kind):
    path = next(folder.glob(f"{kind}/000007.*"))
    sound, outcomes = path.read_bytes(), set()
    for _ in range(60):
        path.write_bytes(damaged(sound, rng))
        for reader in (voc.Detection, voc.Segmentation):
            data = reader(folder, "train", broken="skip")
            for image, target in data:
                assert image.ndim == 3 and (target.ndim == 2)
            outcomes.add(len(data))
    assert outcomes == {2, 3}  # some damage does not matter, some does
