"""Dashboards as Grafana keeps them, from what is different in each: panels with queries, units and thresholds."""

from dataclasses import dataclass
from typing import Any, Literal

GREEN, YELLOW, RED = "green", "yellow", "red"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
# What the dashboards' queries have in common: the chosen runs, and an interval that fits the time shown.
RUN = 'run=~"$run"'
RATE = "$__rate_interval"

Kind = Literal["timeseries", "stat", "bargauge", "table"]
Thresholds = tuple[tuple[float | None, str], ...]


@dataclass(frozen=True)
class Query:
    """PromQL, and how its series are called: with {{label}} in it."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """`unit` is one of Grafana's ids, such as s, bytes, percentunit, short. `width` is in columns of 24.

    `empty_without_gpu` says why the panel shows nothing on a machine that has none.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    thresholds: Thresholds = ()
    width: int = 8
    height: int = 8
    stacked: bool = False
    most: float | None = None
    empty_without_gpu: str | None = None


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]


def at_least(warning: float, good: float) -> Thresholds:
    """Red below `warning`, green from `good` on."""
    return ((None, RED), (warning, YELLOW), (good, GREEN))


def at_most(warning: float, bad: float) -> Thresholds:
    """Green below `warning`, red from `bad` on."""
    return ((None, GREEN), (warning, YELLOW), (bad, RED))


def to_json(dashboard: Dashboard) -> dict[str, Any]:
    """What Grafana loads."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in dashboard.rows:
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "gridPos": place,
                "collapsed": False,
                "panels": [],
            }
        )
        y += 1
        x = tallest = 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            place = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["dflash"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "",
        "links": [
            {"type": "dashboards", "title": "dflash", "tags": ["dflash"], "asDropdown": False, "includeVars": True,
             "keepTime": True}
        ],
        "templating": {"list": _variables()},
        "annotations": {"list": _annotations()},
        "panels": panels,
    }  # fmt: skip


def _panel(panel: Panel) -> dict[str, Any]:
    now = panel.kind != "timeseries"
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0 if panel.most is not None else None, "max": panel.most}
    defaults = {name: value for name, value in defaults.items() if value is not None}
    steps = [{"value": value, "color": color} for value, color in panel.thresholds or ((None, GREEN),)]
    defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    defaults["color"] = {"mode": "thresholds" if now and panel.thresholds else "palette-classic"}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 20 if panel.stacked else 0,
            "lineWidth": 1,
            "spanNulls": False,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none"},
            "thresholdsStyle": {"mode": "line" if panel.thresholds else "off"},
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": OPTIONS[panel.kind],
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "instant": now,
                "range": not now,
                "format": "table" if panel.kind == "table" else "time_series",
            }
            for number, query in enumerate(panel.queries)
        ],
    }


LAST = {"calcs": ["lastNotNull"], "fields": "", "values": False}
OPTIONS: dict[Kind, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"reduceOptions": LAST, "colorMode": "value", "graphMode": "none", "textMode": "auto"},
    "bargauge": {"reduceOptions": LAST, "orientation": "horizontal", "displayMode": "basic"},
    "table": {"showHeader": True, "cellHeight": "sm"},
}


def _variables() -> list[dict[str, Any]]:
    def from_label(name: str, description: str, metric: str) -> dict[str, Any]:
        query = f"label_values({metric}, {name})"
        return {
            "name": name,
            "label": name,
            "description": description,
            "type": "query",
            "datasource": SOURCE,
            "definition": query,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }

    return [
        {"name": "datasource", "label": "datasource", "type": "datasource", "query": "prometheus", "hide": 0},
        from_label("run", "Runs under $DFLASH_RUNS.", "dflash_run_unreadable"),
        from_label("image", "Images whose containers run.", "dflash_image_info"),
    ]


def _annotations() -> list[dict[str, Any]]:
    by = "image, version, torch, cuda, driver"
    seen = f'count by ({by}) (dflash_image_info{{image=~"$image"}})'
    return [
        {
            "name": "Image changes",
            "datasource": SOURCE,
            "enable": True,
            "iconColor": "purple",
            "expr": f"{seen} unless {seen.replace('}', '} offset 5m')}",
            "step": "60s",
            "titleFormat": "another {{image}} runs",
            "textFormat": "version {{version}}, torch {{torch}}, CUDA {{cuda}}, driver {{driver}}",
        },
        {
            "name": "Releases",
            "datasource": SOURCE,
            "enable": True,
            "iconColor": "blue",
            "expr": "dflash_release_timestamp_seconds * 1000",
            "useValueForTime": True,
            "step": "60s",
            "titleFormat": "{{service}} was swapped",
            "textFormat": "{{reference}}",
        },
    ]
