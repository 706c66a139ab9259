"""Pictures of a run: its prompts, the loss over the steps, and the acceptance length by source."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

BEFORE, AFTER, LINE = "#9aa5b1", "#2f6f4f", "#2f6f4f"


def plot_prompts(prepared: Mapping[str, Any], path: Path) -> None:
    """The mix by domain before and after, and the lengths of the prompts, from the content of prepare.json."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    mix = {name: prepared["mix"][name] for name in ("before", "after") if name in prepared["mix"]}
    mix = mix or {"prompts": prepared["mix"]["prompts"]}
    domains = list(dict.fromkeys(domain for part in mix.values() for domain in part))
    width = 0.8 / len(mix)
    for index, (name, part) in enumerate(mix.items()):
        positions = [at + (index - (len(mix) - 1) / 2) * width for at in range(len(domains))]
        percents = [part.get(domain, {"percent": 0.0})["percent"] for domain in domains]
        bars = left.bar(positions, percents, width, label=name, color=BEFORE if name == "before" else AFTER)
        left.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    left.set_xticks(range(len(domains)), domains)
    left.set_ylabel("share of samples (%)")
    left.set_title("Mix by domain")
    left.legend(frameon=False)
    lengths = prepared["total"]["lengths"]
    bars = right.bar([f"≤ {length}" for length in lengths], list(lengths.values()), color=AFTER)
    right.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=8)
    right.set_xlabel("tokens")
    right.set_ylabel("prompts")
    right.set_title("Length of the kept prompts")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
    figure.savefig(path, dpi=120, format="png")


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
