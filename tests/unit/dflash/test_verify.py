"""`dflash verify` finds a sound pair sound, and each of its links fails when what it looks at is broken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import dflash.verify as chain
from dflash.architecture import read_architecture
from dflash.cli import app
from dflash.config import DraftConfig
from dflash.decode import SpeculativeOutput
from dflash.errors import DflashError
from dflash.export import load_draft, write_draft
from dflash.initialize import initialize
from dflash.model import KeysValues
from dflash.target import load_target
from tests.unit.dflash.conftest import tiny_model

PROMPTS = [np.random.default_rng(i).integers(2, 90, 7).tolist() for i in range(2)]
WINDOWED = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "use_sliding_window": True,
}
LINKS = [
    "the drafter fits the target",
    "features = hidden states after the tapped layers",
    "head x last hidden state = the target's logits",
    "training forward = cached decoding forward",
    "features with a cache = features without",
    "tokens with the drafter = the target's own",
    "acceptance on cached answers = acceptance when decoding",
]


def make_pair(family: str, folder: Path) -> tuple[Path, Path]:
    tiny_model(family, False).save_pretrained(folder / "target")
    target = load_target(folder / "target", torch.float32)
    config = DraftConfig(num_layers=2, block_size=4, mask_token_id=96, init="target" if family == "qwen3" else "random")
    write_draft(initialize(config, target, seed=0), folder / "draft", torch.float32)
    return folder / "draft", folder / "target"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair("qwen3", Path(tmp_path_factory.mktemp("pair")))


def test_every_link_of_a_sound_pair_holds(pair: tuple[Path, Path]) -> None:
    links = list(chain.verify(*pair, PROMPTS, 12))
    assert [link.name for link in links] == LINKS
    assert [link.holds for link in links] == [True] * len(LINKS), links


def test_links_that_need_a_cache_to_forget_are_left_out_for_a_hybrid_target(tmp_path: Path) -> None:
    links = list(chain.verify(*make_pair("qwen3_5", tmp_path), PROMPTS, 8))
    assert [link.holds for link in links] == [True] * 4 + [None] * 3, links
    assert "cannot be verified in blocks" in links[-1].detail


def next_layer(capture: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda target, ids, layers: capture(target, ids, tuple(i + 1 for i in layers))


def without_the_newest_feature(cached: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def block_hidden(target: Any, draft: Any, anchor: int, cache: Any) -> Tensor:
        cache.length -= 1
        cache.layers = [KeysValues(*(tensor[:, :, :-1] for tensor in layer)) for layer in cache.layers]
        return cached(target, draft, anchor, cache)

    return block_hidden


def before_the_norm(capture: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def capture_with_final(target: Any, ids: Tensor, layers: Any) -> tuple[Tensor, Tensor]:
        features, final = capture(target, ids, layers)
        return features, 2 * final

    return capture_with_final


def other_token(decode: Callable[..., SpeculativeOutput]) -> Callable[..., SpeculativeOutput]:
    def speculative_decode(*arguments: Any) -> SpeculativeOutput:
        output = decode(*arguments)
        return SpeculativeOutput([*output.tokens[:3], output.tokens[3] + 1, *output.tokens[4:]], [1])

    return speculative_decode


@pytest.mark.parametrize(
    ("name", "broken", "failing"),
    [
        ("capture", next_layer, {LINKS[1], LINKS[4], LINKS[6]}),
        ("capture_with_final", before_the_norm, {LINKS[2]}),
        ("block_hidden", without_the_newest_feature, {LINKS[3]}),
        ("speculative_decode", other_token, {LINKS[5], LINKS[6]}),
    ],
)
def test_a_broken_part_fails_its_links_and_no_others(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, name: str, broken: Any, failing: set[str]
) -> None:
    monkeypatch.setattr(chain, name, broken(getattr(chain, name)))
    links = list(chain.verify(*pair, PROMPTS, 12))
    assert {link.name for link in links if not link.holds} == failing, links


@contextmanager
def serving(target: Path, draft: Path, facts: Callable[[SpeculativeOutput], dict[str, Any]]) -> Iterator[str]:
    """A server that answers /generate as SGLang does, by decoding here; `facts` is its meta_info."""
    loaded, model, one_at_a_time = load_target(target, torch.float32), load_draft(draft), Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            limit = asked["sampling_params"]["max_new_tokens"]
            with one_at_a_time:
                output = chain.speculative_decode(loaded, model, asked["input_ids"], limit)
            body = json.dumps({"output_ids": output.tokens, "meta_info": facts(output)}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def served_links(pair: tuple[Path, Path], url: str) -> list[chain.Link]:
    return list(chain.verify(*pair, PROMPTS, 12, server=url))[len(LINKS) :]


def test_a_server_that_accepts_as_much_holds(pair: tuple[Path, Path]) -> None:
    with serving(pair[1], pair[0], lambda output: {"spec_verify_ct": len(output.acceptance_lengths)}) as url:
        alone, together = served_links(pair, url)
    assert (alone.holds, together.holds) == (True, True), (alone, together)
    assert "of 2 answers" in alone.detail
    assert "of 8 answers" in together.detail


def test_a_server_that_accepts_less_fails(pair: tuple[Path, Path]) -> None:
    with serving(pair[1], pair[0], lambda output: {"spec_verify_ct": len(output.tokens) - 1}) as url:
        links = served_links(pair, url)
    assert [link.holds for link in links] == [False, False]
    assert "1.000 served" in links[0].detail


def test_a_server_without_the_drafter_is_told(pair: tuple[Path, Path]) -> None:
    with serving(pair[1], pair[0], lambda _output: {}) as url:
        link = served_links(pair, url)[0]
    assert link.holds is False
    assert "start it with --speculative-algorithm DFLASH" in link.detail
    gone = served_links(pair, url)[0]
    assert (gone.holds, "no usable answer from /generate" in gone.detail) == (False, True)


def test_a_drafter_of_another_target_fails_the_first_link(pair: tuple[Path, Path], tmp_path: Path) -> None:
    draft, target = pair
    config = json.loads((draft / "config.json").read_text()) | {"num_target_layers": 7}
    for file in draft.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    first = next(chain.verify(tmp_path, target, PROMPTS, 8))
    assert first.holds is False
    assert "num_target_layers 7, but" in first.detail


def test_the_command_prints_a_line_a_link_and_its_exit_code_tells(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"prompt_id": str(i), "source": "s", "input_ids": ids} for i, ids in enumerate(PROMPTS)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["verify", *map(str, pair), "--prompts", str(prompts), "--max-new-tokens", "8"]
    sound = CliRunner().invoke(app, command)
    assert sound.exit_code == 0, sound.output
    assert [line.split(":")[0][10:] for line in sound.output.splitlines()] == LINKS
    monkeypatch.setattr(chain, "capture", next_layer(chain.capture))
    broken = CliRunner().invoke(app, command)
    assert broken.exit_code == 1
    assert f"FAILED    {LINKS[1]}: differ by" in broken.output


def test_without_tokenizer_or_prompts_it_says_what_to_give(pair: tuple[Path, Path]) -> None:
    with pytest.raises(DflashError, match="give a file with --prompts"):
        chain.prompts_to_verify(pair[1], None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope_scaling is .*only None is supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type is yarn"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        ({"attention_bias": True}, "attention_bias is True, and only False"),
        ({"is_causal": True}, "is_causal is True, and only full layers that look both ways"),
        ({**WINDOWED, "is_causal": False}, "is_causal is False, and only .* sliding layers that look back"),
        ({**WINDOWED, "use_sliding_window": False}, "sliding layers need use_sliding_window true"),
        ({**WINDOWED, "sliding_window": None}, "sliding_window of at least 2"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "full_attention or sliding_attention for each of 2"),
        ({"layer_types": ["full_attention"]}, "for each of 2 layers, found"),
    ],
)
def test_a_configuration_that_servers_would_follow_elsewhere_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = json.loads((pair[0] / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DflashError, match=message):
        read_architecture(tmp_path)


def test_rope_and_block_size_are_read_where_newer_files_have_them(pair: tuple[Path, Path], tmp_path: Path) -> None:
    config = json.loads((pair[0] / "config.json").read_text())
    theta, size = config.pop("rope_theta"), config.pop("block_size")
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    config["dflash_config"]["block_size"] = size
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_architecture(tmp_path) == read_architecture(pair[0])
