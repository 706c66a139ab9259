"""Prepares each process of the server, which Python does as the process starts: torchvision, and DFlash on a CPU.

torchvision is made importable where its compiled operators cannot be loaded.

The wheel's operators are linked to CUDA, and importing torchvision registers shapes for `nms` and `qnms`, which then
do not exist. SGLang imports torchvision for image models only, in processes that it spawns; Python imports this
module as each starts. Nothing is done, and torch is not imported, until torchvision is asked for.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from dflash_on_cpu import install


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare_operators()
        return None  # the real package is found as ever


def _declare_operators() -> None:
    import torch

    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision())
install()
