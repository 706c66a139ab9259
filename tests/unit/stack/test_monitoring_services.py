"""Services of the monitoring: as contained as the others, on loopback alone, and those that Prometheus looks for."""

import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
SERVICES = yaml.safe_load((ROOT / "compose.services.yaml").read_text())["services"]
MONITORING = {
    name: service for name, service in SERVICES.items() if {"monitoring", "alerting"} & {*service.get("profiles", [])}
}


def test_the_services_of_the_monitoring_are_these() -> None:
    exporters = {"exporter", "redis-exporter", "node-exporter", "dcgm-exporter"}
    assert set(MONITORING) == exporters | {"prometheus", "grafana", "alertmanager"}


@pytest.mark.parametrize("name", MONITORING)
def test_a_service_has_no_more_rights_than_it_needs(name: str) -> None:
    service: dict[str, Any] = MONITORING[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert service["logging"]["options"]["max-size"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    tag = service["image"].rpartition(":")[2]
    assert tag != "latest"
    assert tag[0] in "v1234567890" or "VERSION" in service["image"]


@pytest.mark.parametrize("name", MONITORING)
def test_a_service_is_asked_whether_it_is_healthy(name: str) -> None:
    assert MONITORING[name]["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (None, False)])
def test_the_check_without_a_client_tells_an_answer_from_none(status: int | None, healthy: bool) -> None:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" and status else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        if status:
            thread.start()
        else:
            server.socket.close()
        port = str(server.server_address[1])
        command = [part.replace("9400", port) for part in MONITORING["dcgm-exporter"]["healthcheck"]["test"][1:]]
        finished = subprocess.run([part.replace("$$", "$") for part in command], env={}, check=False, timeout=10)
        if status:
            server.shutdown()
            thread.join()
    assert (finished.returncode == 0) is healthy


def test_nobody_looks_at_grafana_without_a_password() -> None:
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
    assert environment["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/grafana_password"


@pytest.mark.parametrize("compose", ["compose.yaml", "compose.cpu.yaml"])
def test_prometheus_scrapes_services_that_there_are(compose: str) -> None:
    content = yaml.safe_load((ROOT / compose).read_text())
    known = set(content["services"])
    for service in content["services"].values():
        networks = service.get("networks")
        known |= set(networks["default"]["aliases"]) if isinstance(networks, dict) else set()
    wanted = set()
    for job in yaml.safe_load((ROOT / "monitoring/prometheus/prometheus.yml").read_text())["scrape_configs"]:
        for found in job.get("dns_sd_configs", []):
            wanted |= set(found["names"])
        for found in job.get("static_configs", []):
            wanted |= {target.partition(":")[0] for target in found["targets"]}
    optional = {"dcgm-exporter"} if compose == "compose.cpu.yaml" else set()
    assert wanted - {"localhost"} - optional <= known
