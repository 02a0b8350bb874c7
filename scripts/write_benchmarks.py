"""Write docs/benchmarks.md and its pictures from docs/benchmarks.json, which `make bench` writes.

    python scripts/write_benchmarks.py

The texts are those of scripts/benchmarks/page.md, in which `{{...}}` stands for what is made here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS, TEMPLATE = ROOT / "docs", ROOT / "scripts" / "benchmarks" / "page.md"
sys.path.insert(0, str(TEMPLATE.parent))
import rows  # noqa: E402

BETTER, WORSE, TEXT = "#3a8fc7", "#d9772b", "#808890"  # all readable on white and on black
SLOWER = "&#9660;"
WORSE_BELOW = 0.995  # what is written as 1.00 is neither better nor worse
OTHERS = re.compile("(MPI|MXNet|GluonCV|NumPy)'s |Horovod|PyTorch|store `device`|BatchNorm")  # not of this package


def table(head, lines):
    text = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in text)


def ratio(row):
    """Median and quartiles of a row's ratios, marked where it is below 1."""
    median, low, high = rows.middle(rows.ratios(row))
    mark = f" {SLOWER}" if median < WORSE_BELOW else ""
    return f"{median:.2f}{mark}" + (f" ({low:.2f} to {high:.2f})" if len(row["values"]) > 1 else "")


def share(row, machine):
    """The part of the machine's limit that a turn's work reaches, or ""."""
    if not row["work"]:
        return ""
    [(kind, amount)] = row["work"].items()
    seconds = statistics.median(row["values"]) / rows.UNITS[row["unit"]]
    return f"{amount / seconds / machine['limits']['flops' if kind == 'flop' else 'bytes']:.0%} of {kind}"


def joined(cells):
    """Cells of early and late steps as one."""
    return " / ".join(cells) if any(cells) else ""


def merged(run):
    """(part, measured, against) -> its rows of a run, which are of early and of late steps."""
    found: dict[tuple, list] = {}
    for row in run["rows"]:
        found.setdefault((row["part"], row["measured"], row["against"]), []).append(row)
    return found


def results(run, machine):
    """The table of one benchmark, with when and how it was run."""
    lines, last = [], None
    for (part, measured, against), times in merged(run).items():
        took = rows.quantity([statistics.median(row["values"]) for row in times], times[0]["unit"])
        used = joined([", ".join(map(rows.number, row["processor"] or ())) for row in times])
        compared = joined([ratio(row) for row in times]) if against else ""
        shares = joined([share(row, machine) for row in times])
        title = "" if part == last else part
        lines.append([title, measured, took, against, compared, used, shares])
        last = part
    head = [
        "",
        "measured",
        "it takes",
        "compared with",
        "ratio (quartiles)",
        "processor time per process, ms",
        "share of the limit",
    ]
    commands = list(dict.fromkeys(row["command"] for row in run["rows"]))
    note = f"{run['date']}, {run['machine']}, load average {run['load']:g} at the start, {run['seconds']} s"
    note += ", a quick run" if run["quick"] else ""
    return "\n".join([*(f"`{command}`  " for command in commands), f"({note})", "", table(head, lines)])


def losses(runs, to_others):
    """Where another library, or something else of this package, is better early or late; from the largest loss on."""
    found = []
    for run in runs.values():
        for (part, measured, against), times in merged(run).items():
            if against and (OTHERS.match(against) is not None) == to_others:
                worst = min(statistics.median(rows.ratios(row)) for row in times)
                if worst < WORSE_BELOW:
                    found.append((worst, [part, measured, against, joined([ratio(row) for row in times])]))
    found.sort(key=lambda pair: pair[0])
    lines = [line for _, line in found]
    return table(["", "measured", "better is", "ratio (quartiles)"], lines) if lines else "Nothing in these runs."


def facts(machine):
    """What a machine is, as words."""
    limits = machine["limits"]
    found = {name: str(value) for name, value in machine.items() if name not in ("processor", "cores", "limits")}
    found["floating point peak, float32 (NumPy's matrix product)"] = (
        f"{limits['flops'] / 1e9:.0f} GFLOPS, one core {limits['flops of one core'] / 1e9:.0f}"
    )
    found["memory bandwidth (NumPy's sum of arrays)"] = (
        f"{limits['bytes'] / 1e9:.1f} GB/s, one core {limits['bytes of one core'] / 1e9:.1f}"
    )
    return found


def describe(machines):
    """The machines as a table, each in a column."""
    if not machines:
        return "Not measured yet: `make bench` does it."
    columns = list(map(facts, machines.values()))
    names = dict.fromkeys(name for column in columns for name in column)
    return table(["", *machines], [[name, *(column.get(name, "") for column in columns)] for name in names])


def page(data, template):
    """The text of docs/benchmarks.md."""
    runs, machines = data["runs"], data.get("machines", {})

    def made(match):
        kind, _, name = match[1].partition(" ")
        if kind == "results":
            command = "make bench-peers" if name.startswith("peers_") else "make bench"
            if name not in runs:
                return f"Not measured yet: `{command}` does it."
            return results(runs[name], machines[runs[name]["machine"]])
        if kind == "picture":
            return f"![{name}](images/{picture_name(name)})" if points(name, runs) else ""
        return {
            "machines": lambda: describe(machines),
            "losses": lambda: losses(runs, name == "libraries"),
        }[kind]()

    return re.sub(r"\{\{(.*?)\}\}", made, template)


def picture_name(name):
    return f"benchmarks_{name.replace(' ', '_')}.svg"


PICTURES = ("ratios", "scaling")
AT_A_GLANCE = ("devices", "sync_batch_norm", "processes", "for_cpu", "pipeline", "peers")  # how these runs begin


def points(name, runs):
    """What a picture shows: its title's words and numbers, as JSON has them."""
    if name == "ratios":
        chosen = [
            row for run, found in runs.items() for row in found["rows"]
            if run.startswith(AT_A_GLANCE) and row["against"] and (row["work"] or {}).get("flop")
            and row["when"] != "steps 3 to 12"
        ]  # fmt: skip
        titled: dict[str, list] = {}
        for row in chosen:  # what a run with other libraries measures again is shown once
            title = f"{row['part']}:\n{row['measured']} against {row['against']}".replace("`", "")
            titled.setdefault(title, [title, *rows.middle(rows.ratios(row))])
        return list(titled.values())
    found: dict[str, dict] = {}
    for row in runs.get("scaling", {"rows": []})["rows"]:
        match = re.fullmatch(r"(.*), (\d+) process(?:es)?, .*", row["part"])
        if match and row["processor"]:
            # Late steps follow early ones, and replace them.
            found.setdefault(match[1], {})[int(match[2])] = row["processor"][0]
    return [[title, [*map(list, pairs.items())]] for title, pairs in found.items() if len(pairs) > 1]


def digest(shown):
    """What a picture says about the numbers that it was made from."""
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def draw(name, shown, path):
    """Write a picture as SVG, with the digest of what it shows."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: Any = {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9}
    style |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), TEXT)
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8.6, 0.7 + 0.36 * len(shown) if name == "ratios" else 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        if name == "ratios":
            draw_ratios(axes, shown)
        else:
            draw_scaling(axes, shown)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        metadata = {"Date": None, "Creator": None, "Description": digest(shown)}
        figure.savefig(path, format="svg", transparent=True, metadata=metadata)


def draw_ratios(axes, shown):
    for number, (_, median, low, high) in enumerate(reversed(shown)):
        colour = BETTER if median >= WORSE_BELOW else WORSE
        axes.plot([low, high], [number, number], color=colour, linewidth=2)
        axes.plot([median], [number], "o", color=colour, markersize=5)
        axes.annotate(f"{median:.2f}", (high, number), (5, 0), textcoords="offset points", va="center", fontsize=8)
    axes.axvline(1, color=TEXT, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(shown)), [title for title, *_ in reversed(shown)], fontsize=7.5)
    axes.set_xlabel("ratio: above 1 is faster")


def draw_scaling(axes, shown):
    markers, lines = "osD^v", ("-", "--", ":", "-.")
    for number, (title, pairs) in enumerate(shown):
        axes.plot(*zip(*pairs), color=(BETTER, WORSE, TEXT)[number % 3], marker=markers[number % 5],
                  linestyle=lines[number % 4], markersize=4, label=title)  # fmt: skip
    ticks = sorted({num for _, pairs in shown for num, _ in pairs})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("processes of one machine")
    axes.set_ylabel("processor time per process, ms")
    axes.legend(frameon=False, fontsize=8)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of benchmarks.json and of the page (docs)")
    options = parser.parse_args()
    data = json.loads((options.docs / "benchmarks.json").read_text("utf-8"))
    (options.docs / "benchmarks.md").write_text(page(data, TEMPLATE.read_text("utf-8")), encoding="utf-8")
    for name in PICTURES:
        if shown := points(name, data["runs"]):
            draw(name, shown, options.docs / "images" / picture_name(name))


if __name__ == "__main__":
    main()
