"""Trains with SpecForge's own model, objective, optimizer and schedule: `specforge.py JOB.json`.

The reading of samples and the padding of a batch are the few lines that SpecForge's data loader would do; see
`comparison.Job`. It runs on the path of the peer's package, without this project's dflash.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import load_from_disk
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
from specforge.modeling.draft.dflash import DFlashDraftModel
from specforge.optimizer import BF16Optimizer
from torch import Tensor
from transformers import Qwen3Config

from tests.benchmarks.trainers.states import key, read_states

PROBE_STEPS, WARM_UP = 8, 3


def main(job: dict[str, Any]) -> None:
    config, output, start_folder = job["config"], Path(job["output"]), Path(job["start"])
    states = read_states(Path(job["states"]))
    samples = load_from_disk(config["dataset"]).with_format("numpy")
    batches = packs(len(samples), config["max_batch_size"], config["seed"])

    probe = trainer(job, start_folder, PROBE_STEPS)
    stamps = [time.process_time()]
    for _ in range(PROBE_STEPS):
        step(*probe, batch(samples, next(batches), config["max_length"], states))
        stamps.append(time.process_time())
    each = (stamps[PROBE_STEPS] - stamps[WARM_UP]) / (PROBE_STEPS - WARM_UP)
    steps = max(int(job["cpu_seconds"] / each), job["snapshots"])
    every = steps // job["snapshots"]

    model, optimizer = trainer(job, start_folder, every * job["snapshots"])
    batches = packs(len(samples), config["max_batch_size"], config["seed"])
    start, wall = time.process_time(), time.monotonic()
    for number in range(1, every * job["snapshots"] + 1):
        step(model, optimizer, batch(samples, next(batches), config["max_length"], states))
        if number % every == 0:
            took = {"cpu": time.process_time() - start, "wall": time.monotonic() - wall}
            folder = output / "checkpoints" / f"step-{number:08d}" / "draft"
            folder.mkdir(parents=True)
            tensors = {name: value.detach().clone() for name, value in model.draft_model.state_dict().items()}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            shutil.copy(start_folder / "config.json", folder)
            with (output / "stamps.jsonl").open("a") as file:
                file.write(json.dumps({"step": number, **took}) + "\n")


def trainer(job: dict[str, Any], start: Path, steps: int) -> tuple[OnlineDFlashModel, BF16Optimizer]:
    """SpecForge's model of the shared first weights, and its optimizer with the values of its DFlash recipes."""
    settings, config = json.loads((start / "config.json").read_text()), job["config"]
    shape = Qwen3Config(**settings)
    shape._attn_implementation = "sdpa"
    draft = DFlashDraftModel(shape)
    draft.load_state_dict(load_file(start / "model.safetensors"))
    with safe_open(Path(config["target"]) / "model.safetensors", framework="pt") as file:
        embedding = file.get_tensor("model.embed_tokens.weight").float()
    head = torch.nn.Linear(embedding.shape[1], embedding.shape[0], bias=False)
    head.weight = torch.nn.Parameter(embedding, requires_grad=False)  # tied, as the target's config.json says
    model = OnlineDFlashModel(
        draft_model=draft,
        target_lm_head=head,
        target_embed_tokens=torch.nn.Embedding.from_pretrained(embedding),
        mask_token_id=settings["dflash_config"]["mask_token_id"],
        block_size=settings["block_size"],
        attention_backend="sdpa",
        num_anchors=config["anchors"],
        loss_decay_gamma=config["gamma"],
    )
    optimizer = BF16Optimizer(
        draft, lr=config["learning_rate"], max_grad_norm=1.0, total_steps=steps, warmup_ratio=0.04
    )
    return model, optimizer


def step(model: OnlineDFlashModel, optimizer: BF16Optimizer, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    loss, *_ = model(*inputs)
    loss.backward()
    optimizer.step()


def packs(count: int, size: int, seed: int) -> Any:
    """Yield rows, in a new order each epoch."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(count).tolist()
        for first in range(0, count - size + 1, size):
            yield order[first : first + size]


def batch(samples: Any, rows: list[int], max_length: int, states: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, features and loss mask of some rows, filled up to the longest."""
    found = [samples[row] for row in rows]
    ids = [np.asarray(sample["input_ids"][:max_length], dtype=np.int64) for sample in found]
    length = max(map(len, ids))
    padded_ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length)
    width = next(iter(states.values())).shape[1]
    features = torch.zeros(len(rows), length, width)
    for row, (tokens, sample) in enumerate(zip(ids, found, strict=True)):
        padded_ids[row, : len(tokens)] = torch.from_numpy(tokens)
        mask[row, : len(tokens)] = torch.from_numpy(np.asarray(sample["loss_mask"][:max_length], dtype=np.float32))
        features[row, : len(tokens)] = states[key(tokens)]
    return padded_ids, features, mask


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    main(json.loads(Path(sys.argv[1]).read_text()))
