"""Benchmarks write their results as rows of one format."""

import argparse
import json

import script_files

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


def row(part, values, others, **fields):
    made = {
        "part": part, "when": "", "measured": "ours", "against": "theirs", "unit": "ms", "values": values,
        "others": others, "processor": [2.0, 3.0], "work": {"flop": 1e9}, "command": "python a.py",
    }  # fmt: skip
    return {**made, **fields}


MACHINE = {
    "processor": "some <b>", "cores": 2,
    "limits": {"flops": 1e12, "bytes": 2e10, "flops of one core": 5e11, "bytes of one core": 1e10},
}  # fmt: skip


def run(*rows):
    return {
        "machine": "some <b>, 2 cores", "date": "2026-01-02", "load": 0.1, "seconds": 9, "quick": False,
        "rows": list(rows),
    }  # fmt: skip


def test_the_page_its_pictures_and_readme_are_those_of_the_results():
    writer = script_files.load("write_benchmarks")
    data, template = (
        json.loads((writer.DOCS / "benchmarks.json").read_text("utf-8")),
        writer.TEMPLATE.read_text("utf-8"),
    )
    again = writer.page(data, template)
    assert (writer.DOCS / "benchmarks.md").read_text("utf-8") == again, "run scripts/write_benchmarks.py"
    text = writer.README.read_text("utf-8")
    assert writer.readme(data, template, text) == text, "run scripts/write_benchmarks.py"
    for name in writer.PICTURES:
        picture = (writer.DOCS / "images" / f"benchmarks_{name}.svg").read_text("utf-8")
        assert writer.digest(writer.points(name, data["runs"], template)) in picture, "run scripts/write_benchmarks.py"


def test_every_row_of_the_page_has_been_measured():
    writer, bench = script_files.load("write_benchmarks"), script_files.load("bench")
    runs, template = (
        json.loads((writer.DOCS / "benchmarks.json").read_text("utf-8"))["runs"],
        writer.TEMPLATE.read_text(),
    )
    chosen = list(writer.chosen(runs, template))
    assert len(chosen) == template.count(" | ") // 3 <= 15 and sum(is_shown for is_shown, _, _ in chosen) == 3
    assert {name for _, name, _ in chosen} <= runs.keys() == bench.BENCHMARKS.keys()
    assert all(run["machine"] and run["date"] for run in runs.values())


TEMPLATE = """{{count}}
{{machines}}
{{rows
* devices | LeNet | ours | theirs
devices | a sum | ours | NumPy's add
another | was | not | measured
}}"""


def test_a_benchmark_that_fails_leaves_its_earlier_rows(monkeypatch, tmp_path):
    bench = script_files.load("bench")
    file, kept = tmp_path / "benchmarks.json", run(row("before", [1.0], [1.0]))
    elsewhere = {"some <b>, 2 cores": MACHINE, "of no run, 9 cores": MACHINE}
    file.write_text(json.dumps({"runs": {"devices": kept, "pipeline": kept}, "machines": elsewhere}))
    monkeypatch.setattr(bench.limits, "measure", lambda: MACHINE["limits"])
    done = {"devices": "raise SystemExit(3)", "sparse": "import sys; open(sys.argv[1], 'w').write('[7]')"}
    monkeypatch.setattr(bench, "command", lambda name, options, path: [bench.sys.executable, "-c", done[name], path])
    monkeypatch.setattr("sys.argv", ["bench.py", "--only", "sparse", "devices", "--output", str(file)])
    assert bench.main() == 1
    found = json.loads(file.read_text())
    assert found["runs"]["devices"] == found["runs"]["pipeline"] == kept
    assert found["runs"]["sparse"]["rows"] == [7]
    other, here = found["machines"].items()
    assert other == ("some <b>, 2 cores", MACHINE)
    assert here[0] == found["runs"]["sparse"]["machine"] and here[1]["cores"] == len(bench.os.sched_getaffinity(0))
