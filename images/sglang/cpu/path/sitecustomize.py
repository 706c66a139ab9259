"""Mends three things of SGLang on a CPU, in each process of the server; Python imports this module as each starts.

- torchvision, which SGLang imports for image models only, registers shapes for `nms` and `qnms`. The wheel's operators
  are linked to CUDA and cannot be loaded here, so the two are declared before it is imported.
- the attention backend decodes a batch in one call once it has been imported: see batched_decode.
- DFlash drafters are accepted: see dflash_on_cpu.

Nothing is done, and torch is not imported, until the one or the other is asked for.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from dflash_on_cpu import AfterImport

BACKEND = "sglang.srt.layers.attention.torch_native_backend"


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare_operators()
        return None  # the real package is found as ever


class _AfterBackend(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002
        if name != BACKEND:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenBatched(spec.loader)
        return spec


class _ThenBatched(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        import batched_decode

        batched_decode.use_in(module.TorchNativeAttnBackend)


def _declare_operators() -> None:
    import torch

    if torch.version.cuda is not None:
        return  # a GPU image that is tried on the CPU: its torch has CUDA's libraries, and the operators load
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path[:0] = [_BeforeTorchvision(), AfterImport(), _AfterBackend()]
