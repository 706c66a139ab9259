"""The drafter before training: its shape, taken from the target, and its first weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dflash.architecture import (
    FULL,
    Architecture,
    build_target_layer_ids,
    check_target_layer_ids,
)
from dflash.config import DraftConfig
from dflash.errors import DflashError
from dflash.model import DraftModel
from dflash.target import Target, resolve_mask_token

DEFAULT_ROPE_THETA = 10_000.0
INITIALIZER_STD = 0.02


def design(config: DraftConfig, target: Target) -> Architecture:
    """Return the drafter's architecture for `target`. Raises DflashError for wrong taps or mask token."""
    architecture = architecture_for(config, target.text_config, resolve_mask_token(target, config.mask_token_id))
    return replace(architecture, vocab_size=target.embedding.num_embeddings)


def architecture_for(config: DraftConfig, text: Any, mask_token_id: int) -> Architecture:
    """Return the drafter's architecture for a target of transformers' configuration `text` (the decoder's).

    Raises DflashError for wrong taps.
    """
    heads, hidden, layers = text.num_attention_heads, text.hidden_size, text.num_hidden_layers
    taps = config.target_layer_ids or build_target_layer_ids(layers, config.num_layers)
    check_target_layer_ids(taps, layers)
    rope = getattr(text, "rope_parameters", None) or {}
    return Architecture(
        hidden_size=hidden,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        num_layers=config.num_layers,
        num_target_layers=layers,
        target_layer_ids=taps,
        block_size=config.block_size,
        mask_token_id=mask_token_id,
        vocab_size=text.vocab_size,
        max_position_embeddings=text.max_position_embeddings,
        rope_theta=float(rope.get("rope_theta", DEFAULT_ROPE_THETA)),
        rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
        layer_types=config.layer_types or (FULL,) * config.num_layers,
        sliding_window=config.sliding_window,
    )


def initialize(config: DraftConfig, target: Target, seed: int) -> DraftModel:
    """Build the drafter with its first weights, fp32, in the host's memory.

    Raises DflashError when a warm start is asked for and the target has no layers of the drafter's kind.
    """
    architecture = design(config, target)
    model = DraftModel(architecture)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, INITIALIZER_STD, generator=generator)
        if config.init == "target":
            _copy_target_layers(model, target, config.init_layer_ids)
    return model


def _copy_target_layers(model: DraftModel, target: Target, layer_ids: tuple[int, ...] | None) -> None:
    """Copy target layers and the norms around them; the fused features start as the deepest tap alone.

    Without the target's final norm the logits would start far too large, and most of a short run would go
    into shrinking them.
    """
    architecture = model.architecture
    total = architecture.num_target_layers
    deepest = max(architecture.target_layer_ids)
    # Right after the tap, a copied layer makes the same keys and values of the features as in the target.
    first = min(deepest + 1, total - architecture.num_layers)
    chosen = layer_ids or tuple(range(first, first + architecture.num_layers))
    if any(not 0 <= i < total for i in chosen):
        raise DflashError(f"init_layer_ids {list(chosen)}: the target has layers 0..{total - 1}")
    model.norm.weight.copy_(_final_norm(target))
    for layer, source_id in zip(model.layers, chosen, strict=True):
        _copy_layer(layer, target.layers[source_id], f"{target.path}: layer {source_id}")
    model.hidden_norm.weight.copy_(target.layers[chosen[0]].get_parameter("input_layernorm.weight"))
    tap = architecture.target_layer_ids.index(deepest)
    hidden = architecture.hidden_size
    model.fc.weight.zero_()
    model.fc.weight[:, tap * hidden : (tap + 1) * hidden] = torch.eye(hidden)


def _copy_layer(layer: nn.Module, source: nn.Module, name: str) -> None:
    available = dict(source.named_parameters())
    for key, parameter in layer.named_parameters():
        if key in available and available[key].shape == parameter.shape:
            parameter.copy_(available[key])
        elif "_norm." not in key:
            # Only the norms of queries and keys are Qwen3's own; without the rest this is no start at all.
            raise DflashError(f"{name} has no {key} of shape {tuple(parameter.shape)}: use init: random")


def _final_norm(target: Target) -> torch.Tensor:
    """Return the weight of the norm before the head: the only norm beside the list of layers."""
    decoder: Any = target.model.get_decoder()  # type: ignore[no-untyped-call]
    size = target.embedding.embedding_dim
    found = [
        child.weight
        for child in decoder.children()
        if isinstance(getattr(child, "weight", None), nn.Parameter) and child.weight.shape == (size,)
    ]
    if len(found) != 1:
        raise DflashError(f"{target.path}: the norm before the head was not found: use init: random")
    weight: torch.Tensor = found[0]
    return weight
