"""Tiny random targets of three families, and a small dataset as `save_to_disk` writes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash.config import TrainingConfig
from dflash.target import Target, load_target

VOCABULARY = 97
MASK = 96


def tiny_model(family: str, tied: bool) -> PreTrainedModel:
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "initializer_range": 0.3,
        # Not the default: a drafter that did not take it over would be found out.
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    torch.manual_seed(7)
    if family == "qwen3_5":
        linear = {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "full_attention_interval": 3,
        }
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape, **linear))  # type: ignore[no-untyped-call]
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape))  # type: ignore[no-untyped-call]
    return Qwen3ForCausalLM(Qwen3Config(**shape))  # type: ignore[no-untyped-call]


@pytest.fixture(scope="session", params=[("llama", True), ("qwen3", False)], ids=["llama-tied", "qwen3-untied"])
def target_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, tied = request.param
    folder = tmp_path_factory.mktemp(family)
    tiny_model(family, tied).save_pretrained(folder)
    return Path(folder)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain-llama")
    tiny_model("llama", True).save_pretrained(folder)
    return Path(folder)


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Target:
    return load_target(target_folder, torch.float32)


def write_dataset(folder: Path, rows: list[dict[str, Any]]) -> Path:
    features = Features(
        {"input_ids": List(Value("int32")), "loss_mask": List(Value("int8")), "seq_len": Value("int32")}
    )
    Dataset.from_list(rows, features=features).save_to_disk(os.fspath(folder))
    return folder


def random_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        prompt, answer = int(rng.integers(3, 9)), int(rng.integers(8, 20))
        rows.append(
            {
                "input_ids": rng.integers(2, MASK, prompt + answer).tolist(),
                "loss_mask": [0] * prompt + [1] * answer,
                "seq_len": prompt + answer,
            }
        )
    return rows


def training_config(target: Path, dataset: Path, output: Path, **changes: Any) -> TrainingConfig:
    values: dict[str, Any] = {
        "target": target,
        "dataset": dataset,
        "output": output,
        "draft": {"num_layers": 2, "block_size": 4, "mask_token_id": MASK},
        "steps": 12,
        "anchors": 24,
        "anchors_per": "pack",
        "learning_rate": 3e-3,
        "token_budget": 64,
        "max_batch_size": 4,
        "max_length": 64,
        "checkpoint_every": 5,
        "log_every": 4,
        "feature_cache_bytes": 100_000,
    }
    return TrainingConfig.model_validate(values | changes)
