"""One attention call for all requests of a decode step, in place of one a request.

SGLang's torch_native backend, the one that a CPU without AMX has, loops over the requests of a batch. Here their keys
are gathered to the longest one's length and what is not a request's own is masked.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def use_in(backend: Any) -> None:
    """Let the class `backend` (torch_native's) decode in one call wherever that is possible."""
    backend._run_sdpa_forward_decode = batched(backend._run_sdpa_forward_decode)


def batched(one_by_one: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function with the arguments and result of `one_by_one`, which still takes the uncommon cases."""

    def decode(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if encoder_lens is not None or options.get("sliding_window_size") is not None:
            caches = (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens)
            return one_by_one(self, query, output, *caches, **options)
        longest = int(seq_lens.max())
        own = torch.arange(longest, device=seq_lens.device) < seq_lens[:, None]
        slots = req_to_token[req_pool_indices, :longest]
        # What a request's row holds past its end may be anybody's, and a NaN there would show through the mask.
        slots = torch.where(own, slots, slots[:, :1])
        keys, values = (_gather(cache, slots).to(query.dtype) for cache in (k_cache, v_cache))
        # Heads that share a key are rows of one query: nothing is repeated.
        requests, heads, size = query.shape
        grouped = query.view(requests, keys.shape[1], heads // keys.shape[1], size)
        mask = own[:, None, None]
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=options.get("scaling"))
        output.copy_(attended.reshape(requests, heads, -1))
        return output

    return decode


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows [slots, heads, size] of the cache as [requests, heads, longest, size]; index_select is the fast way."""
    rows = cache.flatten(1).index_select(0, slots.flatten())
    return rows.view(*slots.shape, *cache.shape[1:]).transpose(1, 2)
