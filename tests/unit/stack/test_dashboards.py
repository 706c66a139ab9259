"""What every dashboard, alert and runbook has to have."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from monitoring.grafana.write import DASHBOARDS, FOLDER, texts

MONITORING = Path(__file__).parents[3] / "monitoring"
FILES = sorted(FOLDER.glob("*.json"))
# Ids of Grafana's units that the dashboards use; a wrong one is shown as text behind the number.
UNITS = {"short", "percentunit", "s", "bytes", "decgbytes", "Bps", "sci", "watt", "celsius"}
SECTIONS = ["Meaning", "Impact", "Diagnosis", "Mitigation"]


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


def alerts() -> list[dict[str, Any]]:
    content = yaml.safe_load((MONITORING / "prometheus/rules/alerts.yml").read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


def test_the_dashboards_are_what_their_source_writes() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in FILES}
    assert written == texts(), "write them anew: python -m monitoring.grafana.write"


def test_no_two_dashboards_have_the_same_id() -> None:
    assert len({load(path)["uid"] for path in FILES}) == len(FILES) == len(DASHBOARDS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_panel_says_what_it_shows_in_which_unit(path: Path) -> None:
    dashboard = load(path)
    assert dashboard["description"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    titles = [panel["title"] for panel in panels(dashboard)]
    assert len(titles) == len(set(titles))
    for panel in panels(dashboard):
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["legendFormat"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_two_panels_overlap_and_none_is_wider_than_the_screen(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in load(path)["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_run_image_and_source_are_variables(path: Path) -> None:
    dashboard = load(path)
    names = {variable["name"]: variable["type"] for variable in dashboard["templating"]["list"]}
    assert names == {"datasource": "datasource", "run": "query", "image": "query"}
    used = set(re.findall(r"\$(\w+)", json.dumps([panel["targets"] for panel in panels(dashboard)])))
    assert used <= {*names, "__rate_interval"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_thresholds_rise_from_a_base(path: Path) -> None:
    for panel in panels(load(path)):
        values = [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
        assert values[0] is None
        assert values[1:] == sorted(values[1:])


def test_every_alert_has_a_severity_a_summary_a_runbook_and_a_test() -> None:
    tested = {
        case["alertname"]: None
        for path in sorted((MONITORING / "prometheus/tests").glob("*.yml"))
        for test in yaml.safe_load(path.read_text())["tests"]
        for case in test.get("alert_rule_test", [])
        if case["exp_alerts"]
    }
    assert len(alerts()) == len({rule["alert"] for rule in alerts()})
    for rule in alerts():
        name = rule["alert"]
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["runbook_url"] == f"monitoring/runbooks/{name}.md"
        text = (MONITORING / "runbooks" / f"{name}.md").read_text()
        assert text.startswith(f"# {name}\n")
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
        assert name in tested, f"no rule test lets {name} fire"


def test_no_runbook_is_of_an_alert_that_is_not_there() -> None:
    assert {path.stem for path in (MONITORING / "runbooks").glob("*.md")} == {rule["alert"] for rule in alerts()}
