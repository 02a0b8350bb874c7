"""Benchmarks write their results as rows of one format."""

import argparse
import json

import script_files

import mxnet as mx

FIELDS = ["part", "when", "measured", "against", "unit", "values", "others", "processor", "work", "command"]


def test_a_row_has_the_turns_of_both_contestants_in_its_unit(monkeypatch, tmp_path, capsys):
    rows, rounds = script_files.load("benchmarks/rows"), script_files.load("benchmarks/rounds")
    script = script_files.SCRIPTS / "benchmarks" / "kvstore.py"
    file = tmp_path / "rows.json"
    words = ["--rounds", "2", "--json", str(file), "--torch-python", "/home/me/bin/python"]
    monkeypatch.setattr("sys.argv", [str(script), *words])
    results = rows.Rows(argparse.Namespace(json=str(file)))
    taken = {
        "mpi": [rounds.Turn(0.002, 0.003, 2), rounds.Turn(0.004, 0.005, 2)],
        "one": [rounds.Turn(0.003, 0.002, 1), rounds.Turn(0.002, 0.002, 1)],
        "other": [rounds.Turn(0.004, 0.002, 1), rounds.Turn(0.004, 0.002, 1)],
    }
    results.add("a step", taken, "mpi", names={"mpi": "store"}, when="late", work={"flop": 7})
    results.add("memory", {"mpi": [3e6]}, "mpi", unit="MB")
    first, second, alone = json.loads(file.read_text())
    assert list(first) == FIELDS
    assert [first["values"], first["others"]] == [[2.0, 4.0], [3.0, 2.0]]
    assert rows.ratios(first) == [1.5, 0.5]
    assert first["processor"] == [2.0, 2.0]  # milliseconds, of one of two processes and of the only one
    assert (first["measured"], first["against"], second["against"]) == ("store", "one", "other")
    assert first["command"] == ("python scripts/benchmarks/kvstore.py --rounds 2 --torch-python /path/to/python")
    assert (alone["values"], alone["others"], alone["against"], alone["processor"]) == ([3.0], [], "", None)
    assert "ratio 1.00 (0.50 to 1.50)" in capsys.readouterr().out


def test_arithmetic_of_a_step_is_three_times_that_of_the_forward_pass():
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Conv2D(6, 3, in_channels=4, groups=2), mx.gluon.nn.Dense(5))
    # 6 x 4 x 4 outputs of 2 channels of 3 x 3, and 5 outputs of 96 inputs: a multiplication and an addition of each.
    assert script_files.load("benchmarks/limits").flop(net, (4, 6, 6)) == 3 * 2 * (96 * 18 + 5 * 96)
