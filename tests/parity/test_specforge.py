"""Masks, objective and gradients are those of SpecForge's training model, given the same anchors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dflash.config import ObjectiveConfig
from dflash.data import Sample
from dflash.forward import forward_blocks
from dflash.mask import block_mask
from dflash.model import DraftModel
from dflash.objective import block_labels, chunked_block_loss
from dflash.pack import build_pack
from dflash.target import Target, capture
from tests.parity.conftest import BLOCK_SIZE, SLIDING_WINDOW
from tests.parity.peers import ask

GAMMA = 3.0


# In a window shorter than a block SpecForge still shows a row all earlier ones of its block, as no server does.
@pytest.mark.parametrize("window", [None, BLOCK_SIZE, SLIDING_WINDOW, 40])
def test_the_mask_of_one_document_is_the_same(window: int | None) -> None:
    for anchors in ([0], [0, 1, 2, 9], [3, 4, 5, 6, 7, 8], [2, 11]):
        question = {"anchors": torch.tensor(anchors)}
        theirs = ask("specforge", "mask", question, length=12, block_size=BLOCK_SIZE, sliding_window=window)
        ours = block_mask(torch.zeros(12, dtype=torch.long), torch.tensor(anchors), BLOCK_SIZE, window)
        assert torch.equal(ours, theirs["mask"])


def samples() -> tuple[list[Sample], list[np.ndarray]]:
    """Three documents with prompts, a gap in the supervision, and anchors whose blocks overlap or run past the end."""
    rng = np.random.default_rng(3)
    masks = [[0] * 4 + [1] * 9, [0] * 2 + [1] * 5 + [0] * 3 + [1] * 7, [0] * 3 + [1] * 3]
    anchors = [np.array([4, 5, 7, 11]), np.array([2, 3, 12, 15]), np.array([3])]
    return [Sample(rng.integers(2, 90, len(mask)), np.array(mask, dtype=np.int8)) for mask in masks], anchors


def padded(samples: list[Sample], anchors: list[np.ndarray], target: Target, draft: DraftModel) -> dict:
    """The same documents as SpecForge takes them: one row each, filled up to the longest."""
    length, blocks = max(len(s.input_ids) for s in samples), max(len(a) for a in anchors)
    taps = draft.architecture.target_layer_ids
    ids = torch.zeros(len(samples), length, dtype=torch.long)
    mask = torch.zeros(len(samples), length, dtype=torch.long)
    features = torch.zeros(len(samples), length, len(taps) * draft.architecture.hidden_size)
    chosen = torch.full((len(samples), blocks), -1)
    for row, (sample, positions) in enumerate(zip(samples, anchors, strict=True)):
        n = len(sample.input_ids)
        ids[row, :n] = torch.from_numpy(sample.input_ids)
        mask[row, :n] = torch.from_numpy(sample.loss_mask)
        features[row, :n] = capture(target, ids[row : row + 1, :n], taps)[0]
        chosen[row, : len(positions)] = torch.from_numpy(positions)
    weights = {"head": target.head, "embedding": target.embedding.weight}
    return {"input_ids": ids, "loss_mask": mask, "features": features, "anchors": chosen, **weights}


@pytest.mark.parametrize("loss_type", ["dflash", "dpace"])
def test_the_objective_and_every_gradient_are_the_same(
    target: Target, draft: DraftModel, draft_folder: Path, loss_type: str
) -> None:
    documents, anchors = samples()
    question = padded(documents, anchors, target, draft)
    theirs = ask(
        "specforge", "objective", question, draft=str(draft_folder), gamma=GAMMA, loss_type=loss_type, chunk_blocks=2
    )
    pack = build_pack(documents, anchors, torch.device("cpu"))
    lengths = [len(sample.input_ids) for sample in documents]
    features = torch.cat([question["features"][row, :n] for row, n in enumerate(lengths)])
    labels = block_labels(pack.input_ids, pack.loss_mask, pack.documents, pack.anchors, BLOCK_SIZE, GAMMA)
    objective = ObjectiveConfig(ce=float(loss_type == "dflash"), dpace=float(loss_type == "dpace"))
    draft.zero_grad()
    hidden = forward_blocks(draft, target, pack, features)
    result = chunked_block_loss(hidden, target.head, labels, objective, chunk_blocks=2)
    # SpecForge divides D-PACE by the number of sequences, this project by the number of blocks.
    scale = 1.0 if loss_type == "dflash" else len(pack.anchors) / len(documents)
    (scale * result.loss).backward()
    torch.testing.assert_close(scale * result.loss.detach(), theirs["loss"])
    torch.testing.assert_close(result.correct.float().mean(), theirs["accuracy"])
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None
        difference = (parameter.grad - theirs[name]).abs().max()
        assert difference <= 1e-5 + 1e-3 * theirs[name].abs().max(), name
