"""SGLang serves an exported drafter with the acceptance measured here, and taps the target at the same places."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dflash.decode import speculative_decode
from dflash.export import export_draft, load_draft
from dflash.target import Target, capture, load_target
from dflash.train import train
from tests.parity.conftest import LAYER_TYPES
from tests.parity.sglang_server import generate, sglang
from tests.parity.test_zlab import answered
from tests.unit.dflash.conftest import MASK, tiny_model, training_config, write_dataset

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

MAX_NEW_TOKENS = 40
TAPS = (1, 3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = Path(tmp_path_factory.mktemp("target"))
    tiny_model("llama", True).save_pretrained(folder)
    return load_target(folder, torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of different lengths: requests that run together must not disturb each other."""
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(2, 90, (5 + 2 * i,), generator=generator).tolist() for i in range(8)]


def test_an_exported_drafter_is_accepted_as_here_alone_and_with_eight_requests_at_once(
    target: Target, prompts: list[list[int]], tmp_path: Path
) -> None:
    # Half of the answers are learnt by heart, so that blocks are kept whole, in part and not at all.
    dataset = write_dataset(tmp_path / "data", [answered(target, prompt) for prompt in prompts[:4]])
    # Layers of both kinds; most answers are longer than the window.
    shape = {"num_layers": 2, "block_size": 4, "mask_token_id": MASK}
    shape |= {"layer_types": LAYER_TYPES, "sliding_window": 12}
    changes = {"steps": 120, "learning_rate": 6e-3, "anchors": 64, "token_budget": 256}
    config = training_config(target.path, dataset, tmp_path / "run", draft=shape, **changes)
    exported = export_draft(train(config).checkpoint, tmp_path / "draft", target.fit, torch.float32)
    draft = load_draft(exported)
    ours = [speculative_decode(target, draft, prompt, MAX_NEW_TOKENS) for prompt in prompts]
    assert max(max(output.acceptance_lengths) for output in ours) == config.draft.block_size

    options = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(exported)]
    options += ["--speculative-draft-attention-backend", "torch_native"]
    sampling = {"max_new_tokens": MAX_NEW_TOKENS, "stop_token_ids": sorted(target.end_token_ids)}
    with sglang(target.path, tmp_path / "server.log", *options) as url, ThreadPoolExecutor(8) as pool:
        alone = [generate(url, prompt, sampling_params=sampling) for prompt in prompts]
        together = list(pool.map(lambda prompt: generate(url, prompt, sampling_params=sampling), prompts))
    verifications = sum(len(output.acceptance_lengths) for output in ours)
    for answers in (alone, together):
        assert [answer["output_ids"] for answer in answers] == [output.tokens for output in ours]
        served = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
        assert served == pytest.approx(verifications, rel=0.03)
    # The server's own number counts the token from the prompt's pass too.
    tokens = sum(len(output.tokens) for output in ours)
    lengths = sum(a["meta_info"]["spec_accept_length"] * a["meta_info"]["spec_verify_ct"] for a in together)
    assert lengths == pytest.approx(tokens)


def test_the_servers_auxiliary_hidden_states_are_the_features(
    target: Target, prompts: list[list[int]], tmp_path: Path
) -> None:
    options = ["--speculative-algorithm", "DFLASH", "--enable-return-aux-hidden-states"]
    options += ["--return-aux-hidden-state-layer-ids", *(str(i) for i in TAPS)]
    with sglang(target.path, tmp_path / "server.log", *options) as url:
        answer = generate(url, prompts[3], sampling_params={"max_new_tokens": 1}, return_hidden_states=True)
    theirs = torch.tensor(answer["meta_info"]["hidden_states"][0])
    torch.testing.assert_close(theirs, capture(target, torch.tensor([prompts[3]]), TAPS)[0], atol=2e-4, rtol=1e-3)
