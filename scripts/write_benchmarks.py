"""Write docs/benchmarks.md, its pictures and README's numbers from docs/benchmarks.json, which `make bench` writes.

    python scripts/write_benchmarks.py

scripts/benchmarks/page.md has its texts and the choice of rows; `{{...}}` in it stands for what is made here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS, README, TEMPLATE = ROOT / "docs", ROOT / "README.md", ROOT / "scripts" / "benchmarks" / "page.md"
RESULTS = DOCS / "benchmarks.json"
sys.path.insert(0, str(TEMPLATE.parent))
import rows  # noqa: E402

BETTER, WORSE, TEXT = "#3a8fc7", "#d9772b", "#808890"  # all readable on white and on black
WORSE_BELOW = 0.995  # what is written as 1.00 is neither better nor worse
NUMBERS = re.compile(r"(?<=<!-- written by scripts/write_benchmarks.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
PICTURES = ("ratios", "scaling")


def table(head, lines):
    text = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in text)


def chosen(runs, template):
    """(whether README shows it, run, row) of each line of the choice that was measured; late steps if there are any."""
    for line in re.findall(r"\{\{rows\n(.*?)\n\}\}", template, re.DOTALL)[0].splitlines():
        name, *wanted = line.removeprefix("* ").split(" | ")
        found = [
            row for row in runs.get(name, {"rows": []})["rows"]
            if [row["part"], row["measured"], row["against"]] == wanted
        ]  # fmt: skip
        if found:
            yield line.startswith("* "), name, found[-1]


def ratio(row):
    """The median of a row's ratios, marked where it is below 1."""
    median, _, _ = rows.middle(rows.ratios(row))
    return f"{median:.2f}" + "&nbsp;&#9660;" * (median < WORSE_BELOW)


def results(data, template):
    """The table of the chosen rows."""
    letters, lines = dict(zip(data["machines"], "ABCDEFGH")), []
    for _, name, row in chosen(data["runs"], template):
        run = data["runs"][name]
        when = f"`{name}` ({letters[run['machine']]}, {run['date']})"
        lines.append([row["part"], row["measured"], row["against"], ratio(row), when])
    return table(["", "measured", "compared with", "ratio", "run (machine, day)"], lines)


def readme(data, template, text):
    """README with its numbers."""
    lines = [
        [row["part"], row["measured"], row["against"], ratio(row)]
        for is_shown, _, row in chosen(data["runs"], template)
        if is_shown
    ]
    return NUMBERS.sub(lambda _: table(["", "speed of", "relative to", "is"], lines) + "\n", text)


def machines(found):
    """The machines as a table."""
    lines = []
    for letter, (name, facts) in zip("ABCDEFGH", found.items()):
        versions = ", ".join(f"{key} {facts[key]}" for key in ("python", "numpy", "openmpi", "torch") if key in facts)
        limits = facts["limits"]
        speed = f"{limits['flops'] / 1e9:.0f} GFLOPS, {limits['bytes'] / 1e9:.0f} GB/s"
        lines.append([letter, name, speed, versions])
    return table(["", "machine", "matrix product in float32, sum of arrays", "versions"], lines)


def page(data, template):
    """The text of docs/benchmarks.md."""
    made = {
        "count": lambda: str(sum(len(run["rows"]) for run in data["runs"].values())),
        "rows": lambda: results(data, template),
        "machines": lambda: machines(data["machines"]),
    }
    return re.sub(r"\{\{(\w+).*?\}\}", lambda match: made[match[1]](), template, flags=re.DOTALL)


def points(name, runs, template):
    """What a picture shows: its titles and numbers, as JSON has them."""
    if name == "ratios":
        return [
            [f"{row['part']}:\n{row['measured']} against {row['against']}".replace("`", ""),
             *rows.middle(rows.ratios(row))]
            for _, _, row in chosen(runs, template)
        ]  # fmt: skip
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
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    data, template = json.loads(RESULTS.read_text("utf-8")), TEMPLATE.read_text("utf-8")
    (DOCS / "benchmarks.md").write_text(page(data, template), encoding="utf-8")
    README.write_text(readme(data, template, README.read_text("utf-8")), encoding="utf-8")
    for name in PICTURES:
        if shown := points(name, data["runs"], template):
            draw(name, shown, DOCS / "images" / f"benchmarks_{name}.svg")


if __name__ == "__main__":
    main()
