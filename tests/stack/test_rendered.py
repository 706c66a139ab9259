"""What the stack's files amount to: each profile is as it was reviewed, and every service is contained."""

from typing import Any

import pytest
import yaml
from rendering import FILES, PROFILES, rendered, snapshot

pytestmark = [pytest.mark.stack]
# Who may reach out of the stack's own network, and why is said in compose.services.yaml.
OUTSIDE = {"tokenizer", "prometheus", "grafana", "alertmanager"}
# One-off.
WITHOUT_CHECK = {"operator"}


@pytest.fixture(scope="module", params=FILES)
def configurations(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What Compose makes of a file, by profile."""
    return {profile: rendered(request.param, profile) for profile in PROFILES} | {"file": {"name": request.param}}


def services(configurations: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: one for profile in PROFILES for name, one in configurations[profile]["services"].items()}


@pytest.mark.parametrize("profile", PROFILES)
def test_each_profile_is_as_reviewed(configurations: dict[str, dict[str, Any]], profile: str) -> None:
    reviewed = yaml.safe_load(snapshot(configurations["file"]["name"], profile).read_text())
    assert configurations[profile] == reviewed, "if it is meant: python tests/stack/rendering.py, and review the change"


def test_every_service_is_contained(configurations: dict[str, dict[str, Any]]) -> None:
    for name, service in services(configurations).items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert int(service["mem_limit"]) > 0, name
        assert service["pids_limit"] > 0, name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
        assert service["restart"] == ("no" if name == "operator" else "unless-stopped"), name
        assert "test" in service.get("healthcheck", {}) or name in WITHOUT_CHECK, name


def test_only_those_named_reach_outside_and_ports_are_on_the_loopback(
    configurations: dict[str, dict[str, Any]],
) -> None:
    for name, service in services(configurations).items():
        assert ("outside" in service["networks"]) <= (name in OUTSIDE), name
        for port in service.get("ports", []):
            assert port["host_ip"] == "127.0.0.1", name
    assert configurations["generate"]["networks"]["default"]["internal"] is True


def test_secrets_are_files_and_no_variables(configurations: dict[str, dict[str, Any]]) -> None:
    for name, service in services(configurations).items():
        for variable in service.get("environment", {}):
            assert variable.endswith(("_FILE", "_PATH")) or not variable.endswith(("PASSWORD", "TOKEN", "SECRET")), name


def test_no_service_is_of_both_sides_of_the_cards(configurations: dict[str, dict[str, Any]]) -> None:
    for name, service in services(configurations).items():
        assert not {"generate", "train"} <= set(service.get("profiles", [])), name


def test_what_waits_for_answers_in_flight_is_given_longer_than_it_waits(
    configurations: dict[str, dict[str, Any]],
) -> None:
    producer = configurations["generate"]["services"]["producer"]
    minutes = int(producer["stop_grace_period"].partition("m")[0])
    assert minutes * 60 > float(producer["environment"]["DFLASH_GRACE"])
