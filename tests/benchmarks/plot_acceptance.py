"""Draws the curves that `bench_acceptance` measured: `plot_acceptance.py curves.json` writes curves.png beside it."""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure


def main(path: Path) -> None:
    curves = json.loads(path.read_text())["curves"]
    sources = sorted(next(iter(curves.values()))[-1]["by_source"])
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    over_time, by_source = figure.subplots(1, 2)
    width = 0.8 / len(curves)
    for index, (name, curve) in enumerate(curves.items()):
        lengths = [point["acceptance_length"] for point in curve]
        over_time.plot([point["cpu"] for point in curve], lengths, marker="o", label=name)
        last = [curve[-1]["by_source"][source]["acceptance_length"] for source in sources]
        by_source.bar([at + index * width for at in range(len(sources))], last, width, label=name)
    over_time.set_xlabel("CPU seconds of training")
    over_time.set_ylabel("acceptance length (tokens per verification)")
    over_time.set_title("Over training, held-out prompts")
    over_time.legend(frameon=False)
    by_source.set_xticks(range(len(sources)), sources, rotation=30, ha="right")
    by_source.set_ylim(bottom=1)
    by_source.set_title("By source, at the end")
    for axes in (over_time, by_source):
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path.with_suffix(".png"), dpi=120, format="png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
