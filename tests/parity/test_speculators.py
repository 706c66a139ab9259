"""Masks over packed documents are those of vLLM's speculators."""

from __future__ import annotations

import torch

from dflash.mask import block_mask
from tests.parity.conftest import BLOCK_SIZE
from tests.parity.peers import ask


def test_the_mask_of_packed_documents_is_the_same() -> None:
    documents = torch.tensor([0] * 7 + [1] * 2 + [2] * 9 + [-1] * 3)
    anchors = torch.tensor([0, 5, 6, 7, 9, 12, 13, 17])
    theirs = ask("speculators", "mask", {"documents": documents, "anchors": anchors}, block_size=BLOCK_SIZE)
    assert torch.equal(block_mask(documents, anchors, BLOCK_SIZE), theirs["mask"])
