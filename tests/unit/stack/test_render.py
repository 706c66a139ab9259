"""compose.yaml for any number of cards, from the one for eight."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.errors import UserError
from services.stack.render import render

COMPOSE = Path(__file__).parents[3] / "compose.yaml"


@pytest.mark.parametrize("gpus", [1, 2, 8, 10])
def test_every_card_has_one_server_that_the_producer_knows(gpus: int) -> None:
    content: dict[str, Any] = yaml.safe_load(render(COMPOSE.read_text(), gpus))
    services = content["services"]
    servers = [name for name in services if name.startswith("sglang-")]
    assert servers == [f"sglang-{card}" for card in range(gpus)]
    for card, name in enumerate(servers):
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == [str(card)]
    producer = services["producer"]
    assert producer["environment"]["DFLASH_SERVERS"].split(",") == [f"http://{name}:30000" for name in servers]
    assert list(producer["depends_on"]) == ["redis", *servers]
    others = set(yaml.safe_load(COMPOSE.read_text())["services"]) - {f"sglang-{card}" for card in range(8)}
    assert set(services) - set(servers) == others


def test_the_committed_file_is_the_one_for_eight_cards() -> None:
    committed = COMPOSE.read_text()
    assert render(committed, 8) == committed
    assert render(render(committed, 2), 8) == committed


def test_another_file_is_refused() -> None:
    with pytest.raises(UserError, match="no services named sglang-0"):
        render("services: {}\n", 2)
