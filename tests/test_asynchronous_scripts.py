"""The scripts on texts and on stragglers do what they say, and the study shows what is known of these methods."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from script_files import load

import gluon_parallel as gp

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs" / "text_lstm"


train_text_lstm = load("train_text_lstm")
compare = load("studies/sync_async")


def train(folder, *flags, config="default"):
    argv = ["--config", str(CONFIGS / f"{config}.yaml"), "--devices", "cpu:2", "--output", str(folder), *flags]
    return gp.start(train_text_lstm.main, train_text_lstm.Config, train_text_lstm.DEFAULT, argv)


def rows(folder):
    told = [json.loads(line) for line in (folder / "1" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in told if "step" not in row]  # of the epochs


@pytest.mark.parametrize("config", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_config_is_of_the_schema_and_names_a_mode_and_a_data_set_that_there_are(config):
    values = gp.config.parse(train_text_lstm.Config, CONFIGS / f"{config}.yaml", [])
    assert gp.asynchronous.parse_mode(values.mode)
    assert values.dataset in gp.datasets.text.NAMES


@pytest.mark.slow
def test_the_script_reaches_95_percent_where_a_bag_of_words_reaches_50(tmp_path, seed):
    assert train(tmp_path, "--seed", str(seed % 1000)) == 0
    assert rows(tmp_path)[-1]["test_accuracy"] >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        "ssp:2", "async", "local:4",
        *(pytest.param(mode, marks=pytest.mark.exhaustive) for mode in ("dc:0.04", "backup:1", "elastic:0.9")),
    ],
)  # fmt: skip
def test_so_it_does_in_the_other_modes(tmp_path, mode):
    assert train(tmp_path, "--mode", mode, "--epochs", "12", config="async") == 0
    assert rows(tmp_path)[-1]["test_accuracy"] >= 0.95


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "ssp:1"])
def test_a_run_is_continued_where_it_was_stopped_and_logs_each_epochs_staleness(tmp_path, mode, capsys):
    options = ("--mode", mode, "--hidden_size", "8")
    assert train(tmp_path, *options, "--epochs", "1") == 0
    assert train(tmp_path, *options, "--epochs", "2", "--resume") == 0
    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2]
    assert ("staleness" in capsys.readouterr().out) == (mode != "sync")
    for row in rows(tmp_path) if mode != "sync" else ():
        assert 0 <= row["staleness_median"] <= row["staleness_90_percent"] <= row["staleness_most"] <= 3
        assert 0 < row["staleness"] <= row["staleness_most"]  # of two workers that are at most a step apart


@pytest.mark.parametrize(("mode", "size"), [("sync", 24), ("async", 12), ("local:2", 12)])
def test_a_round_of_all_devices_has_batch_size_texts_in_every_mode(tmp_path, monkeypatch, mode, size):
    batches, sizes = gp.datasets.text.batches, []

    def watched(texts, labels, batch_size, *args, **options):
        if options.get("shuffle"):
            sizes.append(batch_size)
        return batches(texts[:96], labels[:96], batch_size, *args, **options)

    monkeypatch.setattr(gp.datasets.text, "batches", watched)
    assert train(tmp_path, "--mode", mode, "--batch_size", "24", "--epochs", "1", "--hidden_size", "4") == 0
    assert sizes == [size]


def launched(folder, engine, *flags, num=2):
    """The script as processes of the launcher; returns its arrays after the last epoch."""
    words = ["--hidden_size", "8", "--output", str(folder), *flags]
    script, logs = ROOT / "scripts" / "train_text_lstm.py", folder.parent / "logs"
    done = gp.launch.launch(script, words, num, engine, devices="cpu:1", logs=logs, live=False)
    assert done.exit_code == 0, [path.read_text() for path in sorted(logs.glob("rank-*.log"))]
    return gp.archive.read(gp.Run(folder / "1").checkpoints()[-1])[0]


@pytest.mark.slow
def test_the_same_script_is_asynchronous_over_mxnets_servers_and_continues_from_its_weights(tmp_path):
    flags = ("--mode", "async", "--kvstore", "dist_async")
    before = launched(tmp_path / "runs", "ps", *flags, "--epochs", "3")
    told = rows(tmp_path / "runs")
    assert len(told) == 3 and all(0 <= row["staleness"] <= row["staleness_most"] for row in told)
    assert any(row["staleness"] > 0 for row in told)  # the server counted it
    after = launched(tmp_path / "runs", "ps", *flags, "--epochs", "4", "--resume", "--lr", "1e-9")
    for name in before:
        # 88 steps of Adam, each no longer than its learning rate
        np.testing.assert_allclose(after[name], before[name], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "mode"), [("mpi", "sync"), ("mpi", "local:3"), ("ps", "sync"), ("ps", "local:3")])
def test_the_same_script_runs_over_any_summing_store(tmp_path, engine, mode):
    size = ("--epochs", "1", "--batch_size", "933")  # of 2,800 texts: in the last batch two of the processes have none
    trained = launched(tmp_path / "runs", engine, "--mode", mode, *size, num=3)
    assert all(np.isfinite(array).all() for array in trained.values())
    if mode == "sync":
        assert train(tmp_path / "alone", "--hidden_size", "8", *size) == 0
        alone = gp.archive.read(gp.Run(tmp_path / "alone" / "1").checkpoints()[-1])[0]
        for name in trained:
            # float32, four steps of Adam, which makes roundings of small gradients larger
            np.testing.assert_allclose(trained[name], alone[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--batch_size", "25", "--mode", "async"), "no multiple of 2 devices"),
        (("--reject_above", "3"), "in mode sync nothing is rejected"),
        (("--mode", "asinc"), "Did you mean async"),
        (("--mode", "backup:2"), "backup:2 with 2 workers leaves no gradient"),
        (("--dataset", "yelp"), "no data set 'yelp' of texts"),
        (("--mode", "local:2", "--reject_above", "3"), "no gradient is applied late"),
    ],
)
def test_what_cannot_be_is_one_sentence_before_training(tmp_path, capsys, flags, message):
    assert train(tmp_path, *flags) == 2
    assert message in capsys.readouterr().err


def options(**values):
    return argparse.Namespace(**{"workers": 8, "slow": 4.0, "epochs": 8, "seeds": 3, "numbers": [1, 8], **values})


@pytest.mark.slow
def test_the_whole_study_shows_all_that_is_known_and_ends_with_a_table_and_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["sync_async.py", "--quick", "--output", str(tmp_path)])
    assert compare.main() == 0
    record = json.loads((tmp_path / "sync_async.json").read_text())
    facts = record["facts"]
    del facts["the real run has the simulator's order"]  # a pause of one mode's run would change that
    assert len(facts) == 8 and all(facts.values()), facts
    assert record["real"].keys() == {"sync", "ssp:1", "backup:1", "async"}
    measured, simulated = record["real"]["sync"]
    assert 0 < measured < 1.001 * simulated  # which has the delays alone
    assert (tmp_path / "sync_async.png").read_bytes().startswith(b"\x89PNG")
    assert "mode" in capsys.readouterr().out
