"""What it buys to synchronise batch norm at two images per device: the same training with and without, several seeds.

    python scripts/studies/batch_norms.py                     bn.yaml and sync_bn.yaml, three seeds of each
    python scripts/studies/batch_norms.py --seeds 0 1 -- --epochs 4 --num_train 200      flags for the training script

It leaves norms.png and norms.json in runs/segmentation/norms/<number>, and prints the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import gluon_parallel as gp

SCRIPTS = Path(__file__).resolve().parents[1]
CONFIGS = {"BatchNorm": "bn.yaml", "SyncBatchNorm": "sync_bn.yaml"}
COLOURS = {"BatchNorm": "#52606d", "SyncBatchNorm": "#c8102e"}


def train(config: str, seed: int, folder: Path, flags: list[str]) -> list[float]:
    """Train once; the mIoU after each epoch."""
    command = [sys.executable, str(SCRIPTS / "train_segmentation.py")]
    command += ["--config", str(SCRIPTS.parent / "configs" / "segmentation" / config), "--seed", str(seed)]
    subprocess.run([*command, "--output", str(folder), *flags], check=True)
    run = max((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    rows = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
    return [row["miou"] for row in rows if "step" not in row]


def draw(results: dict[str, dict[int, list[float]]], path: Path) -> None:
    """The mIoU over the epochs: a thin line for each seed, a thick one for their median."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(6.4, 3.8), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    for name, seeds in results.items():
        for number, values in enumerate(seeds.values()):
            axes.plot(range(1, len(values) + 1), values, color=COLOURS[name], linewidth=0.8, alpha=0.45,
                      label="" if number else f"{name}, each seed")  # fmt: skip
        median = [statistics.median(epoch) for epoch in zip(*seeds.values())]
        axes.plot(range(1, len(median) + 1), median, color=COLOURS[name], linewidth=2.2, label=f"{name}, median",
                  marker="o", markersize=3)  # fmt: skip
    number = len(next(iter(results.values())))
    axes.set_title(f"mIoU at two images per device, {number} seeds each", fontsize=11, loc="left", fontweight="bold")
    axes.set_xlabel("epoch", fontsize=9, color="#52606d")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.tick_params(which="both", labelsize=8, colors="#52606d", length=0)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, dpi=144)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training of each for every seed")
    parser.add_argument("--output", default="runs/segmentation/norms", help="folder of the results")
    parser.add_argument("flags", nargs="*", help="behind --, flags for scripts/train_segmentation.py")
    options = parser.parse_args()
    run = gp.Run(options.output, is_numbered=True)
    run.begin()
    folder = run.folder
    results: dict[str, dict[int, list[float]]] = {name: {} for name in CONFIGS}
    for seed in options.seeds:  # the contestants take turns
        for name, config in CONFIGS.items():
            results[name][seed] = train(config, seed, folder / Path(config).stem, options.flags)
            (folder / "norms.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    draw(results, folder / "norms.png")
    for name, seeds in results.items():
        last = [values[-1] for values in seeds.values()]
        shown = ", ".join(f"{value:.1%}" for value in last)
        print(f"{name:<14} mIoU {statistics.median(last):6.1%} (of each seed: {shown})")
    print(f"figure: {folder / 'norms.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
