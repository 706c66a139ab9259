"""What SpecForge 0.2.0 answers (`specforge.algorithms.common.dflash_family_model`)."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel, create_dflash_sdpa_mask
from specforge.modeling.draft.dflash import DFlashDraftModel
from torch import Tensor
from transformers import Qwen3Config

from tests.parity.peers.exchange import answer


class _WithAnchors(OnlineDFlashModel):
    """SpecForge's training model with given anchors in place of drawn ones."""

    anchors: Tensor  # [rows, blocks], -1 where a row has fewer

    def _sample_anchor_positions(self, *_: object) -> tuple[Tensor, Tensor]:
        return self.anchors.clamp(min=0), self.anchors >= 0


def mask(tensors: dict[str, Tensor], length: int, block_size: int, sliding_window: int | None) -> dict[str, Tensor]:
    """The mask [blocks * block_size, length + blocks * block_size] of one sequence."""
    anchors = tensors["anchors"][None]
    keep = torch.ones_like(anchors, dtype=torch.bool)
    visible = create_dflash_sdpa_mask(anchors, keep, length, block_size, torch.device("cpu"), sliding_window)
    return {"mask": visible[0, 0]}


def objective(
    tensors: dict[str, Tensor], draft: str, gamma: float, loss_type: str, chunk_blocks: int
) -> dict[str, Tensor]:
    """Loss and the gradient of every parameter on padded rows: input_ids, loss_mask, features, anchors, head."""
    settings = json.loads((Path(draft) / "config.json").read_text())
    config = Qwen3Config(**settings)
    config._attn_implementation = "sdpa"
    model = DFlashDraftModel(config)
    model.load_state_dict(load_file(Path(draft) / "model.safetensors"))
    head = torch.nn.Linear(tensors["head"].shape[1], tensors["head"].shape[0], bias=False)
    head.weight = torch.nn.Parameter(tensors["head"], requires_grad=False)
    online = _WithAnchors(
        draft_model=model,
        target_lm_head=head,
        target_embed_tokens=torch.nn.Embedding.from_pretrained(tensors["embedding"]),
        mask_token_id=settings["dflash_config"]["mask_token_id"],
        block_size=settings["block_size"],
        attention_backend="sdpa",
        loss_decay_gamma=gamma,
        objective_chunk_blocks=chunk_blocks,
        loss_type=loss_type,
    )
    online.anchors = tensors["anchors"]
    loss, accuracy, _ = online(tensors["input_ids"], tensors["features"], tensors["loss_mask"].float())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), "accuracy": accuracy.detach(), **gradients}


answer(mask, objective)
