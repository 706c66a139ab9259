"""Pictures of a run: the loss over the steps, and the acceptance length by source."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

BEFORE, AFTER, LINE = "#9aa5b1", "#2f6f4f", "#2f6f4f"


def plot_loss(steps: list[dict[str, Any]], path: Path) -> None:
    """The training loss by step, from the lines of metrics.jsonl."""

    def draw(axes: Axes) -> None:
        axes.plot([step["step"] for step in steps], [step["loss"] for step in steps], color=LINE, linewidth=1.5)
        axes.set_xlabel("step")
        axes.set_ylabel("loss (weighted cross-entropy, nats)")
        axes.set_title("Training loss")

    _draw(draw, path)


def plot_acceptance(before: dict[str, float], after: dict[str, float], path: Path) -> None:
    """Acceptance length by source before and after training; 1 is the target alone."""
    sources = list(after)

    def draw(axes: Axes) -> None:
        width = 0.38
        for offset, values, label, color in (
            (-width / 2, before, "before training", BEFORE),
            (width / 2, after, "after training", AFTER),
        ):
            positions = [index + offset for index in range(len(sources))]
            bars = axes.bar(positions, [values[source] for source in sources], width, label=label, color=color)
            axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(sources)), sources)
        axes.set_ylabel("acceptance length (tokens per target call)")
        axes.set_ylim(bottom=0)
        axes.margins(y=0.15)
        axes.set_title("Acceptance length on held-out prompts")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False)

    _draw(draw, path)


def _draw(draw: Callable[[Axes], None], path: Path) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes)
    figure.savefig(path, dpi=120, format="png")
