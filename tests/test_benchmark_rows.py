"""Benchmarks write their results as rows of one format."""

import argparse
import json
import os
import select
import sys

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


def test_quantities_have_three_digits_and_a_unit_of_their_size():
    rows = script_files.load("benchmarks/rows")
    assert rows.quantity([62830.0], "us") == "62.8 ms"
    assert rows.quantity([1276.0, 999.0], "ms") == "1,276 / 999 ms"
    assert rows.quantity([1e6 * 1234.5], "us") == "1,234 s"
    assert rows.quantity([0.01943, 10.0], "ms") == "0.0194 / 10 ms"
    assert rows.quantity([4567.8], "MB") == "4,568 MB"


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


def test_the_page_shows_the_late_steps_and_marks_a_loss():
    writer = script_files.load("write_benchmarks")
    early = row("LeNet", [1.0], [20.0], when="steps 3 to 12")
    late = row("LeNet", [10.0] * 5, [20.0, 20.0, 18.0, 22.0, 40.0], when="steps 100 to 150")
    lost = row("a sum", [12.0], [6.0], against="NumPy's add")
    runs = {"devices": run(early, late, lost)}
    data = {"machines": {"another, 1 core": MACHINE, "some <b>, 2 cores": MACHINE}, "runs": runs}
    page = writer.page(data, TEMPLATE)
    assert page.startswith("3\n") and "| B | some <b>, 2 cores | 1000 GFLOPS, 20 GB/s |" in page
    assert "| LeNet | ours | theirs | 2.00 | `devices` (B, 2026-01-02) |" in page
    assert page.endswith("| a sum | ours | NumPy's add | 0.50&nbsp;&#9660; | `devices` (B, 2026-01-02) |")
    readme = writer.readme(
        data, TEMPLATE, "before\n<!-- written by scripts/write_benchmarks.py -->\nold\n<!-- end -->\n"
    )
    assert "| LeNet | ours | theirs | 2.00 |\n<!-- end -->\n" in readme
    assert "old" not in readme and "a sum" not in readme


def test_pictures_tell_from_which_results_they_were_made(tmp_path):
    writer = script_files.load("write_benchmarks")
    runs = {
        "devices": run(row("LeNet", [10.0], [9.0])),
        "scaling": run(*(row(f"a sum, {num} processes, shared memory", [1.0], [1.0], work=None) for num in (2, 8))),
    }
    shown = {name: writer.points(name, runs, TEMPLATE) for name in writer.PICTURES}
    assert shown["ratios"] == [["LeNet:\nours against theirs", 0.9, 0.9, 0.9]]
    assert shown["scaling"] == [["a sum", [[2, 2.0], [8, 2.0]]]]
    for name, points in shown.items():
        writer.draw(name, points, tmp_path / "a.svg")
        assert writer.digest(points) in (tmp_path / "a.svg").read_text("utf-8")


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


def test_a_benchmark_that_is_not_finished_in_time_ends_with_the_processes_it_has_started(monkeypatch, tmp_path, capfd):
    bench, pipe = script_files.load("bench"), tmp_path / "pipe"
    os.mkfifo(pipe)
    child = f"import time; file = open({str(pipe)!r}, 'w'); print('here', file=file, flush=True); time.sleep(60)"
    waits = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    monkeypatch.setattr(bench, "command", lambda *_: [sys.executable, "-c", waits])
    monkeypatch.setitem(bench.BENCHMARKS, "sparse", bench.BENCHMARKS["sparse"]._replace(limit=3))
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        assert bench.run("sparse", argparse.Namespace(quick=True)) is None
        assert file.read() == b"here\n"
        assert select.select([file], [], [], 20.0)[0] == [file]  # the end of the file: the child has ended
    assert "sparse has failed (not finished after 3 s)" in capfd.readouterr().err


def test_other_libraries_take_part_only_where_they_are_asked_for(monkeypatch, tmp_path):
    bench, asked = script_files.load("bench"), []
    monkeypatch.setattr(bench.limits, "measure", lambda: MACHINE["limits"])
    monkeypatch.setattr(bench, "run", lambda name, options: asked.append((name, bench.command(name, options, "a"))))
    for words in [], ["--peers"]:
        monkeypatch.setattr("sys.argv", ["bench.py", *words, "--output", str(tmp_path / "benchmarks.json")])
        bench.main()
    assert [name for name, _ in asked] == list(bench.BENCHMARKS)
    peers = {name: " ".join(command) for name, command in asked if any(word.endswith("-python") for word in command)}
    assert all(name.startswith("peers_") for name in peers)
    for name in ("processes", "hosts"):
        assert "--horovod-python .venv-horovod/bin/python" in peers[f"peers_{name}"]
    assert all("--torch-python .venv-torch/bin/python" in peers[f"peers_{name}"] for name in ("devices", "for_cpu"))
