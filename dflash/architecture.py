"""The shape of a draft model, and the `config.json` and tensor names that servers load it by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash.errors import DflashError
from dflash.files import read_json

# What servers take for a configuration that names none.
DEFAULT_BLOCK_SIZE = 16

LayerType = Literal["full_attention", "sliding_attention"]
FULL: LayerType = "full_attention"
SLIDING: LayerType = "sliding_attention"
# A row that saw itself alone would need no attention.
SMALLEST_WINDOW = 2


@dataclass(frozen=True)
class Architecture:
    """Every number that decides the draft model's tensors and its forward pass."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_layers: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None  # positions that a row of a sliding layer sees, itself included

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None for a layer of full attention."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)


def build_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Return the default taps: spread evenly from the second to the third last layer (z-lab's rule)."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    return tuple(round(first + i * (last - first) / (num_taps - 1)) for i in range(num_taps))


def check_target_layer_ids(target_layer_ids: tuple[int, ...], num_target_layers: int) -> None:
    """Raise DflashError unless every tap names a target layer whose output is the plain residual stream.

    The last layer is refused: transformers reports its output after the final norm, a server before it.
    """
    last = num_target_layers - 2
    wrong = [i for i in target_layer_ids if not 0 <= i <= last]
    if wrong or not target_layer_ids or len(set(target_layer_ids)) != len(target_layer_ids):
        raise DflashError(
            f"target_layer_ids {list(target_layer_ids)}: each must be another layer in 0..{last} "
            f"(the target has {num_target_layers} layers and the last one cannot be tapped)"
        )


def tensor_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the exact tensor names and shapes of a drafter: 11 for each layer and 3 more."""
    hidden, inner, head = architecture.hidden_size, architecture.intermediate_size, architecture.head_dim
    queries, keys = architecture.num_attention_heads * head, architecture.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(architecture.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(architecture.num_layers):
        shapes |= {
            f"layers.{i}.self_attn.q_proj.weight": (queries, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (keys, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (keys, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, queries),
            f"layers.{i}.self_attn.q_norm.weight": (head,),
            f"layers.{i}.self_attn.k_norm.weight": (head,),
            f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes


def to_config_json(architecture: Architecture, dtype: str) -> dict[str, Any]:
    """Return the `config.json` that z-lab's dflash and SGLang read (the layout is SpecForge's)."""
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": architecture.block_size,
        "dflash_config": {
            "mask_token_id": architecture.mask_token_id,
            "target_layer_ids": list(architecture.target_layer_ids),
        },
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.intermediate_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_key_value_heads": architecture.num_key_value_heads,
        "head_dim": architecture.head_dim,
        "num_hidden_layers": architecture.num_layers,
        "num_target_layers": architecture.num_target_layers,
        "layer_types": list(architecture.layer_types),
        "sliding_window": architecture.sliding_window,
        # transformers' configuration drops the window where this is false.
        "use_sliding_window": architecture.sliding_window is not None,
        "max_window_layers": architecture.num_layers,
        "rope_theta": architecture.rope_theta,
        "rope_scaling": None,
        "vocab_size": architecture.vocab_size,
        "max_position_embeddings": architecture.max_position_embeddings,
        "tie_word_embeddings": False,
        "rms_norm_eps": architecture.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
    }


# What the forward pass here takes for granted; a server would follow another value.
TAKEN_FOR_GRANTED: dict[str, Any] = {
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
    "attention_bias": False,
    "hidden_act": "silu",
}


def read_architecture(folder: Path) -> Architecture:
    """Read `config.json` in `folder`. Raises DflashError for all but DFlash drafters with plain RoPE."""
    path = folder / "config.json"
    config = read_json(path)
    rope = config.get("rope_parameters") or {}
    for key, expected in TAKEN_FOR_GRANTED.items():
        found = config.get(key, rope.get(key, expected))
        if found != expected:
            raise DflashError(f"{path}: {key} is {found}, and only {expected} is supported")
    if rope.get("rope_type", "default") != "default":
        raise DflashError(f"{path}: rope_type is {rope['rope_type']}, and only default is supported")
    try:
        if config["architectures"] != ["DFlashDraftModel"]:
            raise DflashError(f"{path}: architectures is {config['architectures']}, not a DFlash drafter")
        layer_types = tuple(config["layer_types"])
        sliding_window = _check_attention(config, layer_types, path)
        return Architecture(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            num_layers=config["num_hidden_layers"],
            num_target_layers=config["num_target_layers"],
            target_layer_ids=tuple(config["dflash_config"]["target_layer_ids"]),
            block_size=config["dflash_config"].get("block_size", config.get("block_size", DEFAULT_BLOCK_SIZE)),
            mask_token_id=config["dflash_config"]["mask_token_id"],
            vocab_size=config["vocab_size"],
            max_position_embeddings=config["max_position_embeddings"],
            rope_theta=float(rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"]),
            rms_norm_eps=config["rms_norm_eps"],
            layer_types=layer_types,
            sliding_window=sliding_window,
        )
    except (KeyError, TypeError) as error:
        raise DflashError(f"{path}: not a DFlash drafter's configuration ({error!r} is missing)") from error


def _check_attention(config: dict[str, Any], layer_types: tuple[str, ...], path: Path) -> int | None:
    """Return the window of the sliding layers, None where there are none.

    Raises DflashError for layers that would attend differently here and in a server.
    """
    if len(layer_types) != config["num_hidden_layers"] or set(layer_types) - {FULL, SLIDING}:
        raise DflashError(
            f"{path}: layer_types must name {FULL} or {SLIDING} for each of {config['num_hidden_layers']} layers, "
            f"found {list(layer_types)}"
        )
    sliding = SLIDING in layer_types
    # Without the key a full layer looks both ways and a sliding one back; a value would hold for both kinds.
    causal = config.get("is_causal")
    if causal is not None and (causal or sliding):
        raise DflashError(
            f"{path}: is_causal is {causal}, and only full layers that look both ways and sliding layers that look "
            "back are supported"
        )
    if not sliding:
        return None
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if not isinstance(window, int) or window < SMALLEST_WINDOW:
        raise DflashError(
            f"{path}: sliding layers need use_sliding_window true and a sliding_window of at least {SMALLEST_WINDOW}"
        )
    return window
