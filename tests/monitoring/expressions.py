"""Every expression of panels and rules, and the metrics that they name."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import yaml

from monitoring.grafana.model import Panel
from monitoring.grafana.write import DASHBOARDS
from tests.monitoring.prometheus import CONFIG

# What Grafana puts in for its variables.
VARIABLES = {"$__rate_interval": "1m", "$run": ".*", "$image": ".*"}
METRIC = re.compile(
    r"\b((?:dflash|redis|node|prometheus|process|scrape)_\w+|sglang:\w+|DCGM_\w+|up(?=[{)\s])|ALERTS"
    r"|(?:run|run_rank|run_status|instance|gpu|disk):[\w:]+)"
)


class Expression(NamedTuple):
    where: str
    expr: str
    panel: Panel | None


def panel_expressions() -> Iterator[Expression]:
    """Of all dashboards, with the variables filled in."""
    for dashboard in DASHBOARDS:
        for row in dashboard.rows:
            for panel in row.panels:
                for query in panel.queries:
                    expr = query.expr
                    for name, value in VARIABLES.items():
                        expr = expr.replace(name, value)
                    yield Expression(f"{dashboard.title}: {panel.title} ({query.legend})", expr, panel)


def rule_expressions() -> Iterator[Expression]:
    """Of recording rules and alerts."""
    for path in sorted((CONFIG / "rules").glob("*.yml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                yield Expression(rule.get("alert") or rule["record"], rule["expr"], None)


def metrics_of(expr: str) -> set[str]:
    """Names of the metrics and recorded series in an expression."""
    # Label matchers and what is grouped by hold no metric's name.
    return set(METRIC.findall(re.sub(r"\{[^}]*\}", "", re.sub(r"\b(by|on|without) \([^)]*\)", "", expr))))


def used_metrics() -> set[str]:
    """Every metric that an exporter has to expose."""
    named = {name for found in (*panel_expressions(), *rule_expressions()) for name in metrics_of(found.expr)}
    recorded = {found.where for found in rule_expressions() if found.panel is None}
    return named - recorded - {"ALERTS"}
