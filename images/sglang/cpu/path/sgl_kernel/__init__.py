"""Stands in for SGLang's compiled kernels on a machine with no GPU. Never on the path of a GPU image.

The real package loads libcuda when it is imported. SGLang names many kernels at import and, on a CPU without AMX,
calls three of them: those are here in plain torch. Any other name imports, and raises when it is called. SGLang
asks for submodules to learn what a build can do, so only the two that it needs exist.
"""

import ctypes

import torch

from sgl_kernel._absent import absent_kernels

__all__ = ["assign_extend_cache_locs_cpu", "assign_req_to_token_pool_cpu", "copy_all_layer_kv_cache_cpu"]

__getattr__ = absent_kernels(__name__)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """In each buffer, copies the rows at `src_loc` to `tgt_loc`, as if all at once.

    data_ptrs, strides: addresses of the buffers and their bytes a row, integers, shape (buffers,).
    tgt_loc, src_loc: row numbers, integers, shape (rows,).
    """
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + source * stride, stride) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(address + target * stride, row, stride)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int | None = None,  # noqa: ARG001  (part of the kernel's signature)
) -> None:
    """Writes each request's cache slots from start to end, one request after another, to `out_cache_loc`.

    req_pool_indices, start_offset, end_offset: integers, shape (requests,).
    req_to_token: slots by request and position, shape (pool, positions). out_cache_loc: shape (sum of end - start,).
    """
    for request, start, end, begin in _spans(req_pool_indices, start_offset, end_offset):
        out_cache_loc[begin : begin + end - start] = req_to_token[request, start:end].to(out_cache_loc.dtype)


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int | None = None,  # noqa: ARG001  (part of the kernel's signature)
) -> None:
    """The inverse of assign_extend_cache_locs_cpu: notes the slots in `out_cache_loc` as each request's own."""
    for request, start, end, begin in _spans(req_pool_indices, start_offset, end_offset):
        req_to_token[request, start:end] = out_cache_loc[begin : begin + end - start].to(req_to_token.dtype)


def _spans(requests: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """(request, start, end, where it begins in the concatenation) for each request."""
    spans, begin = [], 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        spans.append((request, start, end, begin))
        begin += end - start
    return spans
