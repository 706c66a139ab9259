"""Lets SGLang run DFlash drafters with no GPU, by changing five of its modules as each is imported.

SGLang 0.5.23 computes everything that DFLASH needs on a CPU too, but refuses the device, lacks one case in its plain
torch attention, and assumes a GPU or bfloat16 in a line each. A server without speculative decoding stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

BACKEND = "torch_native"


class _Platform:
    """The platform as the DFLASH arguments are checked against it: any question but these goes to the real one."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_out_of_tree(self) -> bool:
        return True

    def supports_speculative_algorithm(self, name: str) -> bool:
        return name == "DFLASH"

    def supports_speculative_draft_attention_backend(self, _algorithm: str, backend: str) -> bool:
        return backend == BACKEND

    def get_default_speculative_draft_attention_backend(self, _algorithm: str) -> str:
        return BACKEND


def _accept_the_device(arguments: Any) -> None:
    arguments.current_platform = _Platform(arguments.current_platform)


def _offer_the_backend(choices: Any) -> None:
    choices.add_draft_attention_backend_choices([BACKEND])


def _attend_when_verifying(attention: Any) -> None:
    backend = attention.TorchNativeAttnBackend
    forward_extend = backend.forward_extend

    def forward_any_extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True
    ) -> Any:
        if batch.forward_mode.is_target_verify():
            # A block is an extension of what is cached by as many tokens as are drafted.
            batch, prefix = copy.copy(batch), batch.seq_lens
            batch.extend_prefix_lens = prefix
            batch.extend_seq_lens = prefix.new_full(prefix.shape, batch.spec_info.draft_token_num)
            batch.seq_lens = prefix + batch.extend_seq_lens
        return forward_extend(self, q, k, v, layer, batch, save_kv_cache)

    backend.forward_extend = forward_any_extend


def _draft_in_torch(draft: Any) -> None:
    layer, model = draft.DFlashAttention, draft.DFlashDraftModel
    initialize, forward = layer.__init__, model.forward

    def initialize_without_kernel(self: Any, *arguments: Any, **options: Any) -> None:
        initialize(self, *arguments, **options)
        self.use_table_qk_norm_rope = False  # a Triton kernel, chosen whatever the device

    def forward_in_own_dtype(self: Any, *arguments: Any, input_embeds: Any = None, **options: Any) -> Any:
        if input_embeds is not None:  # these come in bfloat16, whatever the models are in
            input_embeds = input_embeds.to(self.norm.weight.dtype)
        return forward(self, *arguments, input_embeds=input_embeds, **options)

    layer.__init__, model.forward = initialize_without_kernel, forward_in_own_dtype


def _ignore_streams(_worker: Any) -> None:
    import torch

    record_stream = torch.Tensor.record_stream

    def record_unless_cpu(self: torch.Tensor, stream: Any) -> None:
        if self.device.type != "cpu":
            record_stream(self, stream)

    torch.Tensor.record_stream = record_unless_cpu  # type: ignore[method-assign, assignment]


CHANGES: dict[str, Callable[[Any], None]] = {
    "sglang.srt.arg_groups.speculative_hook": _accept_the_device,
    "sglang.srt.arg_groups.choices": _offer_the_backend,
    "sglang.srt.layers.attention.torch_native_backend": _attend_when_verifying,
    "sglang.srt.models.dflash": _draft_in_torch,
    "sglang.srt.speculative.dflash_worker_v2": _ignore_streams,
}


class AfterImport(MetaPathFinder):
    """Applies each of CHANGES to its module once the module has been imported."""

    def __init__(self) -> None:
        self._pending = dict(CHANGES)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002
        change = self._pending.pop(name, None)  # popped first: the search below comes here again
        spec = find_spec(name) if change is not None else None
        if spec is None or spec.loader is None or change is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec
