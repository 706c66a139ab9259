"""A peer's own preparation of conversations, in the peer's environment: PEER TOKENIZER CONVERSATIONS.

Prints seconds of CPU, samples and tokens that it made, as JSON.
"""

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

LONG = 1_000_000


def specforge(tokenizer: Any, conversations: list[list[dict[str, Any]]]) -> tuple[int, int]:
    from specforge.data.preprocessing import preprocess_conversations
    from specforge.data.template import TEMPLATE_REGISTRY

    template = TEMPLATE_REGISTRY.get("qwen3.5")
    tools: list[list[Any]] = [[] for _ in conversations]
    rows = preprocess_conversations(tokenizer, conversations, template, max_length=LONG, tools=tools)
    return len(rows["input_ids"]), sum(ids.numel() for ids in rows["input_ids"])


def speculators(tokenizer: Any, conversations: list[list[dict[str, Any]]]) -> tuple[int, int]:
    from speculators.data_generation import preprocessing

    def render(_endpoint: str, messages: Any, *, add_generation_prompt: bool, tools: Any = None, **_: Any) -> list[int]:
        # In process: its own way, over HTTP to a server, costs twice that.
        ids: list[int] = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
        )
        return ids

    preprocessing.render_conversation = render
    logging.disable(logging.WARNING)
    rows = preprocessing._preprocess_batch({"conversations": conversations}, False, "in process", LONG)
    return len(rows["input_ids"]), sum(map(len, rows["input_ids"]))


def speculators_ids(_tokenizer: Any, rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Ids and masks passed through."""
    from speculators.data_generation import preprocessing

    batch = {name: [row[name] for row in rows] for name in ("input_ids", "loss_mask")}
    made = preprocessing._preprocess_batch(batch, False, None, LONG)
    return len(made["input_ids"]), sum(map(len, made["input_ids"]))


def main() -> None:
    peer, folder, path = sys.argv[1:4]
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    work = {"specforge": specforge, "speculators": speculators, "speculators_ids": speculators_ids}[peer]
    tokenizer = None
    if peer != "speculators_ids":
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = [row["messages"] for row in rows]
    work(tokenizer, rows[:1])  # imports and compiles
    begun = time.process_time()
    samples, tokens = work(tokenizer, rows)
    print(json.dumps({"cpu": time.process_time() - begun, "samples": samples, "tokens": tokens}))  # noqa: T201


if __name__ == "__main__":
    main()
