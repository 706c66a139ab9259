"""Draws a dashboard over a live Prometheus, as Grafana would lay it out, where no Grafana can be had."""

import math
import re
import time
from pathlib import Path
from typing import NamedTuple

from matplotlib import dates
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from PIL import Image

from monitoring.grafana.model import COLUMNS, Dashboard, Panel, to_json
from tests.monitoring.expressions import VARIABLES
from tests.monitoring.prometheus import Prometheus

POINTS = 160
COLORS_IN_FILE = 64
MOST_SERIES = 12
STALE_SECONDS = 30
INCHES_A_COLUMN, INCHES_A_LINE = 0.62, 0.38
COLORS = {"green": "#3a9d5d", "yellow": "#c99a1b", "red": "#cc3d3d"}


class Shown(NamedTuple):
    """A series as a panel names it, with its values over time or one for now."""

    name: str
    times: list[float]
    values: list[float]


def draw(dashboard: Dashboard, prometheus: Prometheus, minutes: float, path: Path) -> dict[str, str]:
    """Draw into a file; returns what each panel shows now, by "dashboard: panel"."""
    places = to_json(dashboard)["panels"]
    panels = iter(panel for row in dashboard.rows for panel in row.panels)
    lines_high = max(place["gridPos"]["y"] + place["gridPos"]["h"] for place in places)
    figure = plt.figure(figsize=(COLUMNS * INCHES_A_COLUMN, lines_high * INCHES_A_LINE + 0.5))
    figure.suptitle(dashboard.title, x=0.01, y=1 - 0.1 / figure.get_figheight(), ha="left", va="top", weight="bold")
    top = 1 - 0.45 / figure.get_figheight()
    told = {}
    for place in places:
        x, y, width, height = (place["gridPos"][name] for name in ("x", "y", "w", "h"))
        bottom = top - (y + height) / lines_high * top
        if place["type"] == "row":
            figure.text(0.01, bottom + 0.25 / lines_high, place["title"], weight="bold", color="#555555", size=9)
            continue
        panel = next(panels)
        box = (
            x / COLUMNS + 0.038,
            bottom + 1.45 / lines_high,
            width / COLUMNS - 0.046,
            (height - 2.9) / lines_high * top,
        )
        axes = figure.add_axes(box)
        axes.set_title(panel.title, loc="left", size=8)
        shown = ask(panel, prometheus, minutes)
        told[f"{dashboard.title}: {panel.title}"] = describe(panel, shown)
        _draw_panel(axes, panel, shown)
    figure.savefig(path, dpi=72)
    plt.close(figure)
    with Image.open(path) as drawn:
        few_colors = drawn.convert("RGB").quantize(COLORS_IN_FILE)
    few_colors.save(path, optimize=True)
    return told


def ask(panel: Panel, prometheus: Prometheus, minutes: float) -> list[Shown]:
    """The panel's series, those without a single number left out."""
    shown = []
    end = time.time()
    step = max(5.0, minutes * 60 / POINTS)
    for query in panel.queries:
        expr = query.expr
        for name, value in VARIABLES.items():
            expr = expr.replace(name, value)
        if panel.kind == "timeseries":
            found = prometheus.query_range(expr, end - minutes * 60, end, step)
            rows = [(series["metric"], series["values"]) for series in found]
        else:
            rows = [(series["metric"], [series["value"]]) for series in prometheus.query(expr)]
        for labels, values in rows:
            numbers = [float(value) for _, value in values]
            if not all(math.isnan(number) for number in numbers):
                shown.append(Shown(_name(query.legend, labels), [float(at) for at, _ in values], numbers))
    return shown


def describe(panel: Panel, shown: list[Shown]) -> str:
    """What the panel shows now, in a line; a series that ended a while ago is not of now."""
    newest = time.time() - STALE_SECONDS
    now = [
        f"{series.name.strip()} {format_value(series.values[-1], panel.unit)}"
        for series in shown
        if series.times[-1] > newest
    ]
    more = f" and {len(now) - 6} more" if len(now) > 6 else ""
    empty = f"empty: {panel.empty_without_gpu}" if panel.empty_without_gpu else "empty"
    return "; ".join(now[:6]) + more if now else empty


def format_value(value: float, unit: str) -> str:
    """A number with its unit, short."""
    if math.isnan(value):
        return "-"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return _seconds(value)
    if unit in {"bytes", "Bps"}:
        return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB")) + ("/s" if unit == "Bps" else "")
    suffix = {"watt": " W", "celsius": " °C", "decgbytes": " GB"}.get(unit, "")
    return (f"{value:.2e}" if unit == "sci" else _scaled(value, 1000, ("", "K", "M", "G"))) + suffix


def _seconds(value: float) -> str:
    for size, name in ((31536000, "years"), (86400, "d"), (3600, "h"), (60, "min")):
        if abs(value) >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.3g} s"


def _scaled(value: float, base: int, names: tuple[str, ...]) -> str:
    number = 0
    while abs(value) >= base and number + 1 < len(names):
        value, number = value / base, number + 1
    return f"{value:.3g} {names[number]}".strip()


def _name(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend)


def _draw_panel(axes: Axes, panel: Panel, shown: list[Shown]) -> None:
    axes.tick_params(labelsize=5.5, length=2)
    axes.spines[["top", "right"]].set_visible(False)
    if not shown:
        axes.set_xticks([])
        axes.set_yticks([])
        why = f"no data:\n{panel.empty_without_gpu}" if panel.empty_without_gpu else "no data"
        axes.text(0.5, 0.5, why, ha="center", va="center", size=7, color="#888888")
    elif panel.kind == "timeseries":
        _draw_lines(axes, panel, shown)
    elif panel.kind == "bargauge":
        _draw_bars(axes, panel, shown)
    else:
        axes.axis("off")
        for number, series in enumerate(shown[:6]):
            text = series.name if panel.kind == "table" else format_value(series.values[-1], panel.unit)
            place = (0.0, 0.78 - number * (0.9 / max(3, min(6, len(shown)))))
            size = 15 if len(shown) < 3 and panel.kind == "stat" else 8
            axes.text(*place, text, size=size, color=_color(panel, series.values[-1]), va="center")
            if panel.kind == "stat":
                axes.text(1.0, place[1], series.name, size=7, ha="right", va="center", color="#555555")


def _draw_lines(axes: Axes, panel: Panel, shown: list[Shown]) -> None:
    largest = sorted(shown, key=lambda series: -series.values[-1])[:MOST_SERIES]
    if panel.stacked:
        times = sorted({at for series in shown for at in series.times})
        at_times = [dict(zip(series.times, series.values, strict=True)) for series in largest]
        rows = [[_or_zero(known.get(at, 0.0)) for at in times] for known in at_times]
        axes.stackplot(_moments(times), rows, labels=[series.name for series in largest], alpha=0.6)
    else:
        for series in largest:
            axes.plot(_moments(series.times), series.values, lw=1, label=series.name)
    if panel.most is not None:
        axes.set_ylim(0, panel.most * 1.05)
    elif all(value >= 0 for series in shown for value in series.values if not math.isnan(value)):
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value, panel.unit)))
    axes.xaxis.set_major_locator(dates.AutoDateLocator(maxticks=5))
    axes.xaxis.set_major_formatter(dates.DateFormatter("%H:%M"))
    axes.grid(alpha=0.25)
    limit = axes.get_ylim()[1]
    for value, color in panel.thresholds[1:]:
        if value is not None and value <= limit:
            axes.axhline(value, color=COLORS[color], lw=0.8, ls="--")
    columns = 2 if panel.width < 12 else 4
    axes.legend(fontsize=5.5, ncols=columns, loc="upper left", bbox_to_anchor=(0, -0.12), frameon=False, borderpad=0)


def _draw_bars(axes: Axes, panel: Panel, shown: list[Shown]) -> None:
    largest = shown[:MOST_SERIES][::-1]
    values = [series.values[-1] for series in largest]
    names = [series.name.strip() for series in largest]
    axes.barh(range(len(largest)), values, color=[_color(panel, value) for value in values], height=0.6)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.set_xlim(0, panel.most or max(*values, 1e-9, 0) * 1.25)
    for number, (name, value) in enumerate(zip(names, values, strict=True)):
        text = f"{name}  {format_value(value, panel.unit)}"
        axes.text(0.01, number, text, va="center", size=6.5, transform=axes.get_yaxis_transform())


def _color(panel: Panel, value: float) -> str:
    reached = "#7aa6d9" if panel.kind != "stat" or not panel.thresholds else COLORS["green"]
    if panel.kind == "stat" and not panel.thresholds:
        return "#333333"
    for bound, color in panel.thresholds:
        if bound is None or value >= bound:
            reached = COLORS[color]
    return reached


def _moments(times: list[float]) -> list[float]:
    """Matplotlib counts days from 1970 on."""
    return [at / 86400 for at in times]


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
