"""Scenes of digits: written once and whole, alike for the same seed, and with boxes and masks that fit exactly."""

import hashlib
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

import gluon_parallel as gp
from gluon_parallel.datasets import scenes, voc
from gluon_parallel.datasets.labelled import stratified_split
from gluon_parallel.errors import DatasetUnavailable


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return scenes.write(tmp_path_factory.mktemp("data"), num_train=24, num_test=12)


def checksums(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def masks(folder, kind):
    return {path.stem: np.array(Image.open(path)) for path in sorted(folder.glob(f"Segmentation{kind}/*.png"))}


def test_the_folder_has_the_layout_of_voc_and_its_readers_find_nothing_wrong(folder):
    assert folder.parent.name == "scenes" and folder.name == "128px-24-12-seed0"
    assert len(checksums(folder)) == 36 * 4 + 4
    for split, number in (("train", 24), ("test", 12)):
        boxes = voc.Detection(folder, split, scenes.CLASSES)
        pixels = voc.Segmentation(folder, split, scenes.CLASSES)
        assert len(boxes) == len(pixels) == number
        assert boxes.report.counts == pixels.report.counts == {}
        assert all(image.shape == (128, 128, 3) and 1 <= len(label) <= 5 for image, label in boxes)
    xml = ElementTree.parse(folder / "Annotations/train_000000.xml").getroot()
    assert xml.findtext("filename") == "train_000000.jpg" and xml.findtext("size/depth") == "3"


def test_boxes_are_as_tight_as_masks_and_objects_are_drawn_where_their_mask_says(folder):
    data = voc.Detection(folder, "train", scenes.CLASSES)
    objects, classes = masks(folder, "Object"), masks(folder, "Class")
    for number, (image, label) in enumerate(data):
        mask, kinds = objects[f"train_{number:06d}"], classes[f"train_{number:06d}"]
        assert set(np.unique(mask)) - {0, 255} == set(range(1, len(label) + 1))
        for index, (xmin, ymin, xmax, ymax, kind, difficult) in enumerate(label, 1):
            rows, columns = np.nonzero(mask == index)
            assert (columns.min(), rows.min(), columns.max(), rows.max()) == (xmin, ymin, xmax, ymax)
            assert set(np.unique(kinds[mask == index])) - {255} == {kind + 1} and difficult == 0
            # A digit has one colour, which the soft edge mixes with the photograph: inside, pixels hardly differ.
            inside = image[(mask == index) & (kinds != 255)].astype(float)
            assert (np.abs(inside - np.median(inside, axis=0)).max(1) < 40).mean() > 0.75, (number, index)


def test_digits_have_many_sizes_overlap_and_are_mostly_visible():
    from sklearn.datasets import load_digits, load_sample_images

    source = load_digits()
    photographs = load_sample_images().images
    drawn = [
        scenes.draw(photographs, source.images / 16, source.target, 128, np.random.RandomState(seed))
        for seed in range(60)
    ]
    heights = np.concatenate([scene.boxes[:, 3] - scene.boxes[:, 1] + 1 for scene in drawn])
    assert heights.min() < 30 and heights.max() > 50
    assert np.mean([scene.occluded.any() for scene in drawn]) > 0.1
    assert {len(scene.boxes) for scene in drawn} == {1, 2, 3, 4, 5}
    assert set(np.concatenate([scene.labels for scene in drawn])) == set(range(10))
    assert all((scene.boxes >= 0).all() and (scene.boxes < 128).all() for scene in drawn)


def test_no_test_scene_shows_a_digit_that_a_training_scene_shows(tmp_path, monkeypatch):
    given = {}

    def remember(photographs, digits, labels, size, random):
        given.setdefault(len(digits), digits)
        return draw(photographs, digits, labels, size, random)

    draw = scenes.draw
    monkeypatch.setattr(scenes, "draw", remember)
    scenes.write(tmp_path, num_train=2, num_test=2)
    train, test = stratified_split(gp.datasets.load("digits").train.labels)
    assert sorted(given) == [359, 1438] and len(train) > len(test)
    seen = {digit.tobytes() for digit in given[1438]}
    # The source holds no image twice, so bytes tell.
    assert not seen & {digit.tobytes() for digit in given[359]}


def test_the_same_seed_gives_the_same_files_another_seed_others_and_a_second_call_touches_nothing(folder, tmp_path):
    wanted = checksums(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert scenes.write(folder.parent, num_train=24, num_test=12) == folder  # also told the folder of all scenes
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    fewer = checksums(scenes.write(tmp_path / "fewer", num_train=3, num_test=1))
    assert {name for name in fewer if fewer[name] != wanted[name]} == {name for name in fewer if "ImageSets" in name}
    other = scenes.write(tmp_path / "other", num_train=3, num_test=1, seed=1)
    assert other.name == "128px-3-1-seed1"
    assert {name for name, checksum in checksums(other).items() if checksum == fewer[name]} == {
        name for name in fewer if "ImageSets" in name
    }


def test_a_call_that_fails_half_way_leaves_nothing_and_the_next_one_writes_all(tmp_path, monkeypatch):
    save, calls = scenes._save, []

    def interrupted(folder, name, scene):
        calls.append(name)
        if len(calls) == 5:
            raise KeyboardInterrupt
        save(folder, name, scene)

    monkeypatch.setattr(scenes, "_save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scenes.write(tmp_path, num_train=8, num_test=2, size=32)
    assert list((tmp_path / "scenes").iterdir()) == []
    monkeypatch.setattr(scenes, "_save", save)
    written = scenes.write(tmp_path, num_train=8, num_test=2, size=32)
    assert len(voc.Detection(written, "train", scenes.CLASSES)) == 8


def test_a_process_that_is_slower_than_another_takes_what_the_other_wrote(tmp_path, monkeypatch):
    write_all = scenes._write_all

    def overtaken(folder, *arguments):
        write_all(folder, *arguments)
        other = tmp_path / "scenes/32px-2-1-seed0"
        other.mkdir()
        (other / "theirs").write_text("")

    monkeypatch.setattr(scenes, "_write_all", overtaken)
    written = scenes.write(tmp_path, num_train=2, num_test=1, size=32)
    assert [path.name for path in written.iterdir()] == ["theirs"]
    assert list((tmp_path / "scenes").iterdir()) == [written]


@pytest.mark.parametrize("arguments", [{"num_train": 0}, {"num_test": 0}, {"size": 31}])
def test_a_number_that_is_too_small_or_a_folder_that_cannot_be_made_is_refused(tmp_path, arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]}; expected at least"):
        scenes.write(tmp_path, **arguments)
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetUnavailable, match=r"not possible \(.*root= \(--data_root\) or GLUON_PARALLEL_DATA"):
        scenes.write(tmp_path / "file")


def test_scenes_are_found_by_name(tmp_path):
    data = gp.datasets.detection.load("scenes", tmp_path, num_train=4, num_test=3, in_memory=True)
    assert (len(data.train), len(data.test), data.classes) == (4, 3, scenes.CLASSES)
    pixels = gp.datasets.segmentation.load("scenes", tmp_path, num_train=4, num_test=3)
    assert (len(pixels.train), len(pixels.test), pixels.classes) == (4, 3, ("background", *scenes.CLASSES))
