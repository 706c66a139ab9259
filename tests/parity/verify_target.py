"""The chain on a real target, served: `verify_target.py TARGET`.

A drafter learns some of the target's answers by heart, so that blocks are kept whole, in part and not at all; it is
exported, SGLang serves it, and `dflash verify` checks every link, the server's included.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset, Features, List, Value, disable_progress_bars
from transformers import AutoTokenizer

from dflash.cli import main
from dflash.config import TrainingConfig
from dflash.decode_batch import greedy_decode_batch
from dflash.export import export_draft
from dflash.target import load_target
from dflash.train import train
from tests.parity.sglang_server import sglang

# As the demo's: of use at once.
DRAFT = {"num_layers": 1, "block_size": 4, "target_layer_ids": (13,), "mask_token_id": 16, "init": "target"}
MAX_NEW_TOKENS = 48
LEARNT = 5
QUESTIONS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, there was a small fox who",
    "Three reasons to learn a second language:",
    "Water boils at",
    "SELECT name FROM customers",
    "A recipe for tomato soup:",
    "If x + 3 = 7, then x =",
)


def learn(target_folder: Path, folder: Path) -> tuple[Path, Path]:
    """Train a drafter on the answers to LEARNT of the questions; return its export and the file of all questions."""
    disable_progress_bars()
    target = load_target(target_folder, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target_folder, local_files_only=True)
    prompts = [tokenizer(question)["input_ids"] for question in QUESTIONS]
    answers = [output.tokens for output in greedy_decode_batch(target, prompts[:LEARNT], MAX_NEW_TOKENS)]
    rows = [
        {"input_ids": p + a, "loss_mask": [0] * len(p) + [1] * len(a), "seq_len": len(p) + len(a)}
        for p, a in zip(prompts, answers, strict=False)
    ]
    columns = {"input_ids": List(Value("int32")), "loss_mask": List(Value("int8")), "seq_len": Value("int32")}
    Dataset.from_list(rows, features=Features(columns)).save_to_disk(os.fspath(folder / "data"))
    config = TrainingConfig.model_validate(
        {
            "target": target_folder,
            "dataset": folder / "data",
            "output": folder / "run",
            "draft": DRAFT,
            "steps": 60,
            "anchors": 32,
            "anchors_per": "sequence",
            "learning_rate": 2e-3,
            "max_length": 128,
            "token_budget": 1024,
            "feature_cache_bytes": 100_000_000,
        }
    )
    exported = export_draft(train(config).checkpoint, folder / "draft", target.fit, torch.float32)
    lines = [{"prompt_id": str(i), "source": "questions", "input_ids": ids} for i, ids in enumerate(prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return exported, folder / "prompts.jsonl"


if __name__ == "__main__":
    # A run that is ended takes its server with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        draft, prompts = learn(target, Path(name))
        options = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
        options += ["--speculative-draft-attention-backend", "torch_native"]
        with sglang(target, Path(name) / "server.log", *options) as url:
            sys.argv[1:] = ["verify", str(draft), str(target), "--prompts", str(prompts), "--server", url]
            sys.argv += ["--max-new-tokens", str(MAX_NEW_TOKENS)]
            main()
