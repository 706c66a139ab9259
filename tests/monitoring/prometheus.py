"""A Prometheus of the project's own configuration, with addresses and times of a test; and what one asks it."""

import json
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "monitoring" / "prometheus"
# What an hour of the rules takes here: three minutes.
FASTER = 20
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DURATION = re.compile(r"(?<=\[)(\d+)([smhd])(?=\])|(?<=for: )(\d+)([smhd])|(?<=offset )(\d+)([smhd])")
# The formats that Prometheus 2.53 asks for, in its order.
PROTOCOLS = {
    "OpenMetricsText1.0.0": "application/openmetrics-text;version=1.0.0",
    "OpenMetricsText0.0.1": "application/openmetrics-text;version=0.0.1",
    "PrometheusText0.0.4": "text/plain;version=0.0.4",
}
DISCOVERIES = ("static_configs", "dns_sd_configs")


def write_config(folder: Path, targets: Path, fast: bool) -> Path:
    """The shipped configuration and rules, whose targets are those in the files TARGETS/JOB.json.

    With `fast`, it scrapes every three seconds, and the rules' times are so much shorter.
    """
    (folder / "rules").mkdir(parents=True)
    for path in (CONFIG / "rules").glob("*.yml"):
        text = path.read_text(encoding="utf-8")
        (folder / "rules" / path.name).write_text(faster(text) if fast else text, encoding="utf-8")
    content = yaml.safe_load((CONFIG / "prometheus.yml").read_text(encoding="utf-8"))
    interval = "3s" if fast else "5s"
    content["global"] |= {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    del content["alerting"]
    for job in content["scrape_configs"]:
        for name in DISCOVERIES:
            job.pop(name, None)
        job["file_sd_configs"] = [{"files": [str(targets / f"{job['job_name']}.json")], "refresh_interval": "1s"}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def accepted(job: str) -> str:
    """The Accept header with which Prometheus scrapes a job's targets."""
    content = yaml.safe_load((CONFIG / "prometheus.yml").read_text(encoding="utf-8"))
    (of_job,) = (found for found in content["scrape_configs"] if found["job_name"] == job)
    protocols = of_job.get("scrape_protocols", PROTOCOLS)
    return ",".join(f"{PROTOCOLS[name]};q={1 - 0.1 * place:.1f}" for place, name in enumerate(protocols))


def faster(text: str) -> str:
    """The same rules with every duration divided."""

    def shorter(found: re.Match[str]) -> str:
        number, unit = (group for group in found.groups() if group)
        return f"{max(1, int(number) * UNITS[unit] // FASTER)}s"

    # A window has to hold two scrapes at least.
    return re.sub(r"\[\ds\]", "[12s]", DURATION.sub(shorter, text))


def write_targets(folder: Path, jobs: Mapping[str, list[str]]) -> None:
    """Tell Prometheus, within a second, which addresses each job has."""
    folder.mkdir(exist_ok=True)
    for job, addresses in jobs.items():
        temporary = folder / f".{job}.tmp"
        temporary.write_text(json.dumps([{"targets": addresses}]), encoding="utf-8")
        shutil.move(temporary, folder / f"{job}.json")


class Prometheus:
    """The API of a running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        result: list[dict[str, Any]] = self._get("query", query=expr)["result"]
        return result

    def query_range(self, expr: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """The series of a range query."""
        result: list[dict[str, Any]] = self._get("query_range", query=expr, start=start, end=end, step=step)["result"]
        return result

    def value(self, expr: str) -> float | None:
        """The first series' value, or None when there is none."""
        found = self.query(expr)
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        return {found["metric"]["alertname"] for found in self.query('ALERTS{alertstate="firing"}')}

    def rule_health(self) -> dict[str, str]:
        """How the last evaluation of each rule went, by its name."""
        groups = self._get("rules")["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    def _get(self, path: str, **parameters: object) -> dict[str, Any]:
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=30) as response:
            data_of: dict[str, Any] = json.load(response)["data"]
        return data_of
