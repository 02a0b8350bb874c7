"""The scripts on texts and on stragglers do what they say, and the study shows what is known of these methods."""

import argparse
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

import gluon_parallel as gp

HOUSE = Path(__file__).resolve().parents[1]
CONFIGS = HOUSE / "configs" / "text_lstm"


def script(name):
    spec = importlib.util.spec_from_file_location(name, HOUSE / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for the names in their annotations
    spec.loader.exec_module(module)
    return module


train_text_lstm = script("train_text_lstm")
compare = script("compare_sync_async")


def train(folder, *flags, config="default"):
    argv = ["--config", str(CONFIGS / f"{config}.yaml"), "--devices", "cpu:2", "--output", str(folder), *flags]
    return gp.entry.start(train_text_lstm.main, train_text_lstm.Config, train_text_lstm.DEFAULT, argv)


def rows(folder):
    return [json.loads(line) for line in (folder / "1" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("config", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_config_is_of_the_schema_and_names_a_mode_and_a_data_set_that_there_are(config):
    values = gp.config.parse(train_text_lstm.Config, CONFIGS / f"{config}.yaml", [])
    assert gp.asynchronous.parse_mode(values.mode)
    assert values.dataset in gp.datasets.text.NAMES


def test_the_script_reaches_95_percent_where_a_bag_of_words_reaches_50(tmp_path, seed):
    assert train(tmp_path, "--seed", str(seed % 1000)) == 0
    assert rows(tmp_path)[-1]["test_accuracy"] >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssp:2", "async", "dc:0.04", "backup:1", "local:4", "elastic:0.9"])
def test_so_it_does_in_the_other_modes(tmp_path, mode):
    assert train(tmp_path, "--mode", mode, "--epochs", "12", config="async") == 0
    assert rows(tmp_path)[-1]["test_accuracy"] >= 0.95


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_is_continued_where_it_was_stopped(tmp_path, mode, capsys):
    options = ("--mode", mode, "--hidden_size", "8")
    assert train(tmp_path, *options, "--epochs", "1") == 0
    assert train(tmp_path, *options, "--epochs", "2", "--resume") == 0
    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2]
    assert ((tmp_path / "1" / "staleness.png").exists()) == (mode == "async")
    assert ("staleness" in capsys.readouterr().out) == (mode == "async")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mode", "asinc"), "did you mean async"),
        (("--mode", "backup:2"), "backup:2 with 2 workers leaves no gradient"),
        (("--dataset", "yelp"), "no set of texts 'yelp'"),
        (("--mode", "local:2", "--reject_above", "3"), "no gradient is applied late"),
    ],
)
def test_what_cannot_be_is_one_sentence_before_training(tmp_path, capsys, flags, message):
    assert train(tmp_path, *flags) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def problem():
    return compare.load()


def options(**values):
    return argparse.Namespace(**{"workers": 8, "slow": 4.0, "epochs": 8, "seeds": 3, "numbers": [1, 8], **values})


def test_the_studys_gradient_is_that_of_its_loss(problem, rng):
    weights = compare.initial(1).astype("float64")
    batch = problem.x[:5].astype("float64"), problem.y[:5]
    direction = rng.normal(size=weights.shape)

    def loss(weights):
        _, logits, _ = compare.forward(weights, batch[0])
        return sum(math.log(sum(math.exp(z) for z in row)) - row[label] for row, label in zip(logits, batch[1])) / 5

    slope = (loss(weights + 1e-6 * direction) - loss(weights - 1e-6 * direction)) / 2e-6
    # central differences of a loss with kinks (ReLU)
    assert compare.gradient(weights, batch)[0] @ direction == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_accuracy_at_equal_epochs_falls_with_staleness_and_dc_and_ssp_recover_part_of_it(problem):
    found = compare.compare_numbers(problem, options())
    accuracy = {mode: points[-1][2] for mode, points in found.items()}
    assert accuracy["async"] < accuracy["ssp:1"] < accuracy["sync"]
    assert accuracy["async"] < accuracy["dc:10"] < accuracy["sync"]
    assert found["async"][0][2] == pytest.approx(found["sync"][0][2])  # alone there is no staleness
    assert found["async"][-1][1] == pytest.approx(7, abs=0.2)


def test_sync_is_as_slow_as_the_slowest_and_async_is_not(problem):
    delays = {mode: dict(points) for mode, points in compare.compare_delays(problem, options()).items()}
    assert delays["sync"][16] / delays["sync"][4] == pytest.approx(4, rel=0.05)
    assert delays["async"][16] < 1.5 * delays["async"][1]
    assert compare.compare_deaths(options())["async"] == "goes on without it"


@pytest.mark.slow
def test_the_whole_study_shows_all_that_is_known_and_ends_with_a_table_and_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["compare_sync_async.py", "--quick", "--output", str(tmp_path)])
    assert compare.main() == 0
    record = json.loads((tmp_path / "sync_async.json").read_text())
    assert record["facts"] and all(record["facts"].values()), record["facts"]
    assert (tmp_path / "sync_async.png").read_bytes().startswith(b"\x89PNG")
    assert "mode" in capsys.readouterr().out
