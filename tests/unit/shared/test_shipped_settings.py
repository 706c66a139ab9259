"""The configurations that are shipped are valid, and say what they should."""

import re
from pathlib import Path

import yaml

from services.settings import check_settings, load_settings

CONFIG = Path(__file__).parents[3] / "config"
PRODUCTION = CONFIG / "qwen3.6-27b.yaml"


def test_the_six_sources_are_193_010_prompts() -> None:
    quotas = {source.name: source.quota for source in load_settings(PRODUCTION).sources}
    assert sum(quotas.values()) == 193_010
    rounded = [round(quota, -3) for quota in list(quotas.values())[:4]]
    assert rounded == [99_000, 40_000, 29_000, 24_000]
    assert (quotas["hermes"], quotas["agent-training"]) == (1_200, 553)


def test_either_agent_training_can_be_chosen() -> None:
    content = yaml.safe_load(PRODUCTION.read_text())
    for source in content["sources"]:
        if source["name"].startswith("agent"):
            source["enabled"] = not source.get("enabled", True)
    sources = check_settings(content, "switched").sources
    assert [source.name for source in sources if source.name.startswith("agent")] == ["agentinstruct"]
    assert sum(source.quota for source in sources) == 193_010


def test_every_data_set_has_a_revision() -> None:
    settings = load_settings(PRODUCTION)
    rows = [*settings.sources, *settings.prepare.decontaminate.against]
    assert all(shape.dataset and shape.revision and shape.data_files for shape in rows)


def test_one_producer_keeps_the_slots_of_all_cards_full() -> None:
    servers = set(re.findall(r"http://sglang-\d+:30000", (CONFIG.parent / "compose.yaml").read_text()))
    assert load_settings(PRODUCTION).generate.concurrency >= 72 * len(servers)
