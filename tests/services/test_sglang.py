"""A chunk answered by the real SGLang server on the CPU."""

import asyncio
import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.chunks import Chunk
from services.errors import UserError
from services.ledger import count_generated
from services.producer import session
from services.records import read_completions
from services.runs import Run
from services.settings import Settings
from tests.monitoring.expressions import used_metrics
from tests.monitoring.prometheus import accepted
from tests.services.conftest import serving_sglang
from tests.services.fake_sglang import FakeSglang, Fault
from tests.services.generating import generate_once

MakeRun = Callable[..., tuple[Run, Chunk, Settings]]

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

# Questions in the chat format of the demo's target: <|im_start|>user ... <|im_end|> <|im_start|>assistant.
USER, TURN_END = [1, 4093, 198], [2, 198, 1, 520, 9531, 198]
END = 2
QUESTIONS = {
    "Say hello in one word.": [36218, 33662, 281, 582, 2229, 30],
    "What is 2 + 2?": [1780, 314, 216, 34, 1232, 216, 34, 47],
    "Is the sky blue?": [4182, 260, 6376, 4461, 47],
    "Write a long story about a fox.": [19161, 253, 986, 1977, 563, 253, 16438, 30],
    "Capital of France?": [39832, 282, 4649, 47],
}
PROMPTS = [[*USER, *question, *TURN_END] for question in QUESTIONS.values()]
MAX_NEW_TOKENS = 40


def test_a_chunk_is_answered_end_to_end(sglang_url: str, target_path: Path, make_run: MakeRun) -> None:
    run, chunk, settings = make_run(PROMPTS, target_path, max_new_tokens=MAX_NEW_TOKENS, temperature=0)
    asyncio.run(generate_once(run, chunk, settings, [sglang_url]))

    completions = read_completions(run.completions("s-0"))
    counts = count_generated(run)["s"]
    assert counts.completed == len(PROMPTS)
    assert counts.output_tokens == sum(len(completion.output_ids) for completion in completions)
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        if completion.finish_reason == "stop":
            assert completion.output_ids.index(END) == len(completion.output_ids) - 1
        else:
            assert len(completion.output_ids) == MAX_NEW_TOKENS
            assert END not in completion.output_ids


def test_the_server_itself_includes_the_end_token(sglang_url: str) -> None:
    request = {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 0}}
    asked = urllib.request.Request(
        f"{sglang_url}/generate", json.dumps(request).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=300) as response:
        answer = json.load(response)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": END}
    assert answer["meta_info"]["prompt_tokens"] == len(PROMPTS[0])
    assert answer["output_ids"][-1] == END


def test_what_the_server_refuses_is_a_failure_with_its_words(
    sglang_url: str, target_path: Path, make_run: MakeRun
) -> None:
    run, chunk, settings = make_run([[1] * 9000], target_path, max_new_tokens=8, temperature=0)
    asyncio.run(generate_once(run, chunk, settings, [sglang_url]))
    (completion,) = read_completions(run.completions("s-0"))
    assert (completion.status, completion.reason, completion.attempts) == ("failed", "http 400", 1)
    assert "9000 tokens" in str(completion.detail)


def test_it_exposes_every_metric_that_dashboards_and_alerts_use_of_it(
    sglang_url: str, target_path: Path, make_run: MakeRun
) -> None:
    run, chunk, settings = make_run(PROMPTS, target_path, max_new_tokens=4, temperature=0)
    asyncio.run(generate_once(run, chunk, settings, [sglang_url]))
    # In OpenMetrics, other names: their colons become underscores.
    request = urllib.request.Request(f"{sglang_url}/metrics", headers={"Accept": accepted("sglang")})
    with urllib.request.urlopen(request, timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
        exposed = {sample.name for family in families for sample in family.samples}
    used = {name for name in used_metrics() if name.startswith("sglang:")}
    assert used
    assert used - exposed == set()


def test_a_server_of_another_model_is_refused(sglang_url: str, target_path: Path, make_run: MakeRun) -> None:
    run, chunk, settings = make_run(PROMPTS, target_path)
    other = settings.model_copy(update={"target": settings.target.model_copy(update={"served_name": "other"})})
    with pytest.raises(UserError, match="serves target, not other"):
        asyncio.run(generate_once(run, chunk, other, [sglang_url]))
    assert not run.completions("s-0").exists()


def test_a_prompt_that_kills_the_server_is_quarantined_and_the_others_are_answered(
    target_path: Path, tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One id outside the vocabulary ends the process; without our own check, it is sent."""
    poison = [10_000_000, 1, 2]
    run, chunk, settings = make_run([*PROMPTS, poison], target_path, max_new_tokens=8, temperature=0)
    monkeypatch.setattr(session, "vocabulary_size", lambda _target: 1 << 30)

    def fault(first: int, _asked: int) -> Fault:
        return "drop" if first == poison[0] else None

    with serving_sglang(target_path, tmp_path) as (url, server), FakeSglang(fault=fault) as other:
        asyncio.run(generate_once(run, chunk, settings, [url, other.url]))
        assert server.wait(60) != 0
    completions = read_completions(run.completions("s-0"))
    assert [completion.status for completion in completions] == [*["completed"] * len(PROMPTS), "failed"]
    assert completions[-1].reason == "quarantined"
    assert other.asked[poison[0]] <= 1
