"""What vLLM's speculators 0.9.0 answers (`speculators.losses.eager`, `speculators.models.dflash.attention`).

Importing the package itself would import its servers and trainers; the two parts need torch alone.
"""

import sys
from importlib.machinery import PathFinder
from types import ModuleType

import torch
from torch import Tensor

from tests.parity.peers.exchange import answer

for _name in ("speculators", "speculators.models", "speculators.models.dflash"):
    _parent = sys.modules.get(_name.rpartition(".")[0])
    _package = ModuleType(_name)
    _spec = PathFinder.find_spec(_name, _parent.__path__ if _parent else None)
    _package.__path__ = list(_spec.submodule_search_locations)
    sys.modules[_name] = _package

from speculators.losses import eager  # noqa: E402
from speculators.losses.utils import dpace_loss_decay  # noqa: E402
from speculators.models.dflash.attention import create_anchor_block_mask_mod  # noqa: E402

LOSSES = {
    "kl": eager.kl_div_loss,
    "tv": eager.tv_loss,
    "lk_alpha": eager.neg_log_acceptance_loss,
    "lk_lambda": eager.lk_hybrid_loss,
}


def mask(tensors: dict[str, Tensor], block_size: int) -> dict[str, Tensor]:
    """The mask of a pack: documents [context], anchors [blocks]."""
    documents = tensors["documents"]
    visible, rows, keys = create_anchor_block_mask_mod(documents, len(documents), tensors["anchors"], block_size)
    return {"mask": visible(torch.tensor(0), torch.tensor(0), torch.arange(rows)[:, None], torch.arange(keys)[None])}


def losses(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each loss by row [rows] and the gradient of its weighted sum with respect to the draft's logits."""
    answers = {}
    for name, loss in LOSSES.items():
        logits = tensors["draft"].clone().requires_grad_()
        values = loss(logits[None], tensors["target"][None])[0]
        (answers[f"{name}.gradient"],) = torch.autograd.grad((values * tensors["weights"]).sum(), logits)
        answers[name] = values.detach()
    return answers


def dpace(tensors: dict[str, Tensor], block_size: int, alpha: float) -> dict[str, Tensor]:
    """D-PACE weights [blocks * block_size] of cross entropies and a 0/1 label mask of the same shape."""
    weights = dpace_loss_decay(None, tensors["labelled"], block_size, alpha, tensors["cross_entropy"][None])
    return {"weights": weights[0]}


answer(mask, losses, dpace)
