"""One training step's input: the documents of a pack one after another, and the anchors chosen in them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash.data import Sample
from dflash.transfer import to_device


@dataclass(frozen=True)
class Pack:
    """Int64 tensors of a pack: the first four are [tokens], `anchors` is [blocks] and indexes into them.

    `documents` numbers the documents from 0; `positions` count from 0 in each document. `host` is the same pack in
    the host's memory, where a step is planned without waiting for the device; None where this one is there.
    """

    input_ids: Tensor
    loss_mask: Tensor
    documents: Tensor
    positions: Tensor
    anchors: Tensor
    host: Pack | None = None

    @property
    def on_host(self) -> Pack:
        """The pack in the host's memory."""
        return self.host or self

    def to(self, device: torch.device) -> Pack:
        """Copy a pack in the host's memory to `device`."""
        if self.input_ids.device == device:
            return self
        names = [field.name for field in fields(self) if field.name != "host"]
        return Pack(**{name: to_device(getattr(self, name), device) for name in names}, host=self)

    def with_blocks(self, blocks: slice) -> Pack:
        """Return the pack with some of its blocks only."""
        host = None if self.host is None else self.host.with_blocks(blocks)
        return replace(self, anchors=self.anchors[blocks], host=host)

    def lengths(self) -> list[int]:
        """Return the tokens of each document."""
        counts: list[int] = self.on_host.documents.bincount().tolist()
        return counts

    def starts(self) -> Tensor:
        """Return the first row of each block's document [blocks], in the host's memory."""
        host = self.on_host
        return host.anchors - host.positions[host.anchors]

    def with_documents(self, documents: slice) -> Pack:
        """Return the pack of some of its documents, by their numbers, and of the blocks in them."""
        ends = np.cumsum([0, *self.lengths()])
        first, end = int(ends[documents.start]), int(ends[documents.stop])
        blocks = slice(*np.searchsorted(self.on_host.anchors.numpy(), (first, end)).tolist())
        rows = {name: getattr(self, name)[first:end] for name in ("input_ids", "loss_mask", "documents", "positions")}
        rows["documents"] = rows["documents"] - documents.start
        host = None if self.host is None else self.host.with_documents(documents)
        return Pack(**rows, anchors=self.anchors[blocks] - first, host=host)


def build_pack(samples: list[Sample], anchors: list[NDArray[np.int64]], device: torch.device) -> Pack:
    """Lay `samples` one after another; `anchors` holds each sample's anchors as positions in it."""
    lengths = [len(sample.input_ids) for sample in samples]
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))

    def tensor(values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64))

    pack = Pack(
        input_ids=tensor(np.concatenate([sample.input_ids for sample in samples])),
        loss_mask=tensor(np.concatenate([sample.loss_mask for sample in samples])),
        documents=tensor(np.repeat(np.arange(len(samples)), lengths)),
        positions=tensor(np.concatenate([np.arange(length) for length in lengths])),
        anchors=tensor(np.concatenate([a + start for a, start in zip(anchors, starts, strict=True)])),
    )
    return pack.to(device)


def block_inputs(pack: Pack, embedding: torch.nn.Embedding, block_size: int, mask_token_id: int) -> Tensor:
    """Return the embeddings of [anchor token, MASK, ...] for each block: [blocks, block_size, hidden]."""
    ids = torch.full((len(pack.anchors), block_size), mask_token_id, device=pack.input_ids.device)
    ids[:, 0] = pack.input_ids[pack.anchors]
    rows: Tensor = embedding(ids)
    return rows


def block_positions(pack: Pack, block_size: int) -> Tensor:
    """Return the positions of block rows [blocks, block_size], counted in the anchor's document."""
    offsets = torch.arange(block_size, device=pack.positions.device)
    return pack.positions[pack.anchors][:, None] + offsets[None]
