"""A store over another transport is one file and one row of the table of stores."""

import re
from pathlib import Path

import file_store
import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.launch import launching
from gluon_parallel.store_table import STORES, load


@pytest.fixture(autouse=True)
def _the_table_has_the_row(monkeypatch):  # for these tests alone: others look at the table, too
    monkeypatch.setitem(STORES, "files", file_store.ROW)


def test_a_store_over_files_takes_less_than_100_lines_and_trains_two_processes_as_one(tmp_path, capfd, monkeypatch):
    assert len(Path(file_store.__file__).read_text("utf-8").splitlines()) < 100
    folder = tmp_path / "exchanged"
    folder.mkdir()
    monkeypatch.setenv(file_store.FOLDER, str(folder))
    result = launching.launch(
        file_store.__file__, num_workers=2, engine="files", timeout=60.0, logs=str(tmp_path / "logs")
    )
    output = capfd.readouterr().out
    assert result.exit_code == 0, output
    found = [[*map(float, words.split())] for words in re.findall(r"type files weights (.+)", output)]

    net = mx.gluon.nn.Dense(1, in_units=2)
    net.initialize(mx.init.One())
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    step, x = gp.DataParallel(net, mx.gluon.loss.L2Loss(), trainer), mx.nd.arange(10).reshape((5, 2)) / 10
    for _ in range(3):
        step(x, x.sum(axis=1))
    assert len(found) == 2
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0], net.weight.data().asnumpy().ravel(), rtol=1e-6, atol=1e-7)


def test_each_row_of_the_table_names_a_store_and_the_engine_that_starts_its_processes():
    for name, row in STORES.items():
        assert load(row.started_by).kvstore == name
        assert name in gp.kvstore.factory.names()
    assert {type(store).__name__ for store in map(gp.kvstore.factory.kind_of, STORES)} == {"type"}
