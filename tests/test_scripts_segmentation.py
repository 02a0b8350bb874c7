"""The segmentation script trains, stops, continues and fails as it says, on devices and processes alike."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from pictures_files import write_voc
from PIL import Image
from script_files import assert_refused, draw_only_for, load, rates_of, rows

import gluon_parallel as gp
import mxnet as mx

pytest.importorskip("gluoncv", reason="GluonCV is an optional dependency")
REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "configs" / "segmentation"


SCRIPT = load("train_segmentation")
COMPARISON = load("studies/batch_norms")


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    """A folder for the scenes, written once for all tests."""
    return tmp_path_factory.mktemp("scenes")


@pytest.fixture
def run(request, scenes, tmp_path, monkeypatch):
    """A function that runs the script with its smoke config and some flags; runs go to a folder of their own."""
    monkeypatch.chdir(tmp_path)
    draw_only_for(request, monkeypatch)

    def start(*flags, config="smoke"):
        argv = ["--config", str(CONFIGS / f"{config}.yaml"), "--data_root", str(scenes), *flags]
        return gp.start(SCRIPT.main, SCRIPT.Config, SCRIPT.DEFAULT, argv)

    return start


def test_it_prints_a_table_and_leaves_a_checkpoint_curves_and_pictures(run, pictures, capsys):
    assert run("--num_train", "17") == 0
    out = capsys.readouterr().out
    assert "[cpu(0), cpu(1)]\n" in out and "pixel acc     mIoU" in out
    assert re.search(r"^ +1 +\d\.\d+ +\d+\.\d+% +\d+\.\d+%", out, re.M)
    paths = re.findall(r"^(?:checkpoint|curves|sheet): +(.+)$", out, re.M)
    assert len(paths) == 3 and all(Path(path).stat().st_size > 1000 for path in paths)
    folder = Path("runs/segmentation/smoke/1")
    assert [path.name for path in (folder / "pictures").iterdir()] == ["epoch-0001.png"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_complete_and_those_that_are_compared_differ_in_the_norm_alone(path):
    config = gp.config.parse(SCRIPT.Config, path, [])
    assert config.dataset in gp.datasets.segmentation.NAMES and config.model in ("small", *SCRIPT.ZOO)
    assert config.size % 16 == 0 and config.norm == ("batch_norm" if path.stem == "bn" else "sync_batch_norm")
    if path.name in COMPARISON.CONFIGS.values():
        sync = gp.config.parse(SCRIPT.Config, CONFIGS / "sync_bn.yaml", [])
        assert dataclasses.replace(config, norm="sync_batch_norm", config=sync.config) == sync
        assert config.batch_size == 2 * len(gp.devices(config.devices))


@pytest.mark.parametrize("model", ["fcn", "pspnet", "deeplab"])
def test_gluoncvs_nets_are_built_with_our_norm_and_an_auxiliary_output(model):
    defaults = gp.config.parse(SCRIPT.Config, CONFIGS / f"voc_{model}.yaml", ["--pretrained", "null", "--size", "64"])
    assert (defaults.dataset, defaults.model, defaults.optimizer) == ("voc", model, "sgd") and defaults.horizontal_flip
    devices = [mx.cpu(0), mx.cpu(1)]
    net = SCRIPT.build(defaults, 21, devices, mx.kv.create("device"))
    found = []
    net.apply(lambda block: found.append(type(block)) if isinstance(block, mx.gluon.nn.BatchNorm) else None)
    assert len(found) > 50 and set(found) == {gp.nn.SyncBatchNorm}
    assert all(parameter.list_ctx() == devices for parameter in net.collect_params().values())
    assert {parameter.lr_mult for parameter in net.head.collect_params().values()} == {10}


def test_the_learning_rate_falls_as_a_power_of_what_remains_also_in_a_run_that_is_resumed(run, monkeypatch):
    rates = rates_of(monkeypatch)
    assert run("--epochs", "2", "--num_train", "17", "--lr", "0.01") == 0
    np.testing.assert_allclose(rates, [0.01 * (1 - step / 6) ** 0.9 for step in range(6)], rtol=1e-12, atol=0)
    gp.Run(Path("runs/segmentation/smoke/1")).checkpoints()[-1].unlink()  # that of the first epoch stays
    rates.clear()
    assert run("--resume") == 0
    np.testing.assert_allclose(rates, [0.01 * (1 - step / 6) ** 0.9 for step in (3, 4, 5)], rtol=1e-12, atol=0)


@pytest.fixture
def voc(tmp_path):
    """VOC2012 with three images of other sizes; one of them is background all over, another is void."""
    folder = tmp_path / "VOCdevkit" / "VOC2012"
    images = {"2007_000001": (70, 90, []), "2007_000002": (64, 50, []), "2007_000003": (100, 64, [])}
    for split in ("train", "val"):
        write_voc(folder, images, split)
    for name, value in (("2007_000002", 0), ("2007_000003", 255)):
        mask = np.full(images[name][:2], value, np.uint8)
        Image.fromarray(mask).save(folder / "SegmentationClass" / f"{name}.png")
    return folder.parent


NOT_FROM_ZOO = ("--backbone", "null", "--pretrained", "null")


@pytest.mark.filterwarnings("ignore:.*also trained with")
def test_voc_with_images_that_are_void_or_background_all_over_trains(run, voc):
    flags = ["--data_root", str(voc), "--devices", "cpu:2", "--model", "small", "--size", "64", *NOT_FROM_ZOO]
    assert run(*flags, "--epochs", "1", "--batch_size", "2", "--test_batch_size", "2", config="voc_fcn") == 0
    assert np.isfinite(rows("runs/segmentation/voc_fcn/1")[0]["loss"])


FCN = ("--model", "fcn", "--backbone", "resnet50")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset", "coco"], "there is no data set 'coco' with masks; there are 'scenes', 'voc'"),
        (["--model", "unet"], "--model is 'unet', wanted one of small, fcn, pspnet, deeplab"),
        (["--size", "40"], "--size 40 is no multiple of 16"),
        (["--min_scale", "2"], "--min_scale 2 is above --max_scale 1"),
        (["--norm", "group"], "--norm is 'group', wanted one of sync_batch_norm, batch_norm"),
        (["--optimizer", "lamb"], "--optimizer is 'lamb', wanted one of sgd, adam"),
        ([*FCN, "--pretrained", "zoo"], r"resnet50_v1s-\w+.params is not there.*--pretrained null"),
        ([*FCN, "--pretrained", "a.params"], "--pretrained is 'a.params', wanted one of zoo"),
        (["--model", "fcn"], "the key backbone is missing"),
        (["--backbone", "resnet50"], "backbone is 'resnet50', which has no effect with model small, only with fcn or"),
        (["--momentum", "0.5"], "momentum is 0.5, which has no effect with optimizer adam, only with sgd"),
    ],
)
def test_it_refuses_what_cannot_work_in_one_message(run, flags, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MXNET_HOME", str(tmp_path))
    assert_refused(run(*flags), capsys, message)
