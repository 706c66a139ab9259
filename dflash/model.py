"""The DFlash draft model: Qwen3-style layers whose keys and values also come from the target's features.

The block's rows are queries; keys and values are the context rows (the target's tapped features, fused once)
followed by the block's own rows. Context rows get no query, no output projection and no MLP, so a layer's
context keys and values depend on the features alone: training computes them for a whole pack, decoding keeps
them in a cache, and both run the same code below.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.architecture import Architecture


class KeysValues(NamedTuple):
    """One layer's context: keys (normed and rotated) and values, each [batch, kv_heads, length, head_dim]."""

    keys: Tensor
    values: Tensor


# Attends from queries [batch, heads, rows, head_dim] over a layer's context and over the keys and values of the block
# rows themselves, each [batch, kv_heads, .., head_dim], within the layer's window, if it has one (`dflash.mask`);
# returns the shape of the queries.
Attend = Callable[[Tensor, KeysValues, KeysValues, int | None], Tensor]


def masked_attention(mask_of: Callable[[int | None], Tensor | None]) -> Attend:
    """Attend by a mask over [context | block rows]: decoding's way, and the plain reference of training's.

    Args:
        mask_of: makes the mask of the layers with a window: bool, broadcastable to
            [batch, heads, rows, context + rows], True where visible; None where all is.
    """
    mask_of = cache(mask_of)  # layers of one window share it

    def attend(queries: Tensor, context: KeysValues, block: KeysValues, window: int | None) -> Tensor:
        return F.scaled_dot_product_attention(
            queries,
            torch.cat((context.keys, block.keys), dim=2),
            torch.cat((context.values, block.values), dim=2),
            attn_mask=mask_of(window),
            enable_gqa=queries.shape[1] != context.keys.shape[1],
        )

    return attend


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in fp32 and returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return the rotary cos and sin [batch, 1, length, head_dim] at `positions` [batch, length]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[:, None, :, None].float() * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [batch, heads, length, head_dim], pairing dimension d with d + head_dim/2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


def as_operand(rows: Tensor) -> Tensor:
    """Cast `rows` to what autocast computes in: once, not once for each projection that reads them and keeps a copy."""
    kind = rows.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return rows
    return rows.to(torch.get_autocast_dtype(kind))


class Attention(nn.Module):
    """Attention of block rows over [context rows | block rows]; one k_proj and v_proj serve both kinds."""

    def __init__(self, architecture: Architecture, window: int | None) -> None:
        super().__init__()
        self.window = window
        hidden, self.head_dim = architecture.hidden_size, architecture.head_dim
        queries = architecture.num_attention_heads * self.head_dim
        keys = architecture.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, architecture.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, architecture.rms_norm_eps)

    def keys_values(self, rows: Tensor, cos: Tensor, sin: Tensor) -> KeysValues:
        """Project `rows` [batch, length, hidden] (already normed) to rotated keys and values."""
        keys = self.k_norm(self._split_heads(self.k_proj(rows)))
        return KeysValues(rotate(keys, cos, sin), self._split_heads(self.v_proj(rows)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: KeysValues, attend: Attend) -> Tensor:
        """Attend from `x` [batch, rows, hidden] to the context and to the rows themselves, as `attend` says."""
        x = as_operand(x)
        queries = rotate(self.q_norm(self._split_heads(self.q_proj(x))), cos, sin)
        attended = attend(queries, context, self.keys_values(x, cos, sin), self.window)
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out

    def _split_heads(self, rows: Tensor) -> Tensor:
        batch, length, width = rows.shape
        return rows.view(batch, length, width // self.head_dim, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """The gated feed-forward network of Llama and Qwen layers."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, inner = architecture.hidden_size, architecture.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = as_operand(x)
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """One pre-norm decoder layer; only block rows pass through it."""

    def __init__(self, architecture: Architecture, window: int | None) -> None:
        super().__init__()
        self.self_attn = Attention(architecture, window)
        self.mlp = MLP(architecture)
        self.input_layernorm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: KeysValues, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, context, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DraftModel(nn.Module):
    """The drafter without embedding and head, which are the target's. Tensor names as in z-lab's dflash."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = architecture
        hidden = architecture.hidden_size
        self.fc = nn.Linear(len(architecture.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, architecture.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(architecture, window) for window in architecture.windows)
        self.norm = RMSNorm(hidden, architecture.rms_norm_eps)

    def context(self, features: Tensor, positions: Tensor) -> list[KeysValues]:
        """Fuse target features into every layer's context keys and values.

        Args:
            features: [batch, length, taps * hidden], the taps concatenated in the order of target_layer_ids.
            positions: [batch, length], each row's position in its own document.
        """
        cos, sin = self._angles(positions)
        rows = as_operand(self.hidden_norm(self.fc(features)))
        return [layer.self_attn.keys_values(rows, cos, sin) for layer in self._layers()]

    def forward(self, inputs: Tensor, positions: Tensor, context: list[KeysValues], attend: Attend) -> Tensor:
        """Return the final normed hidden state of block rows [batch, rows, hidden].

        Args:
            inputs: [batch, rows, hidden], the target's embeddings of [anchor, MASK, ...] for each block.
            positions: [batch, rows], positions in the document.
            context: from `context`, one entry for each layer.
            attend: attends as the mask says.
        """
        cos, sin = self._angles(positions)
        x = inputs
        for layer, keys_values in zip(self._layers(), context, strict=True):
            x = layer(x, cos, sin, keys_values, attend)
        out: Tensor = self.norm(x)
        return out

    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_angles(positions, self.architecture.head_dim, self.architecture.rope_theta)
