"""What the existing corpus (merge.base) holds already: its prompts, of which only the token ids are left."""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from services.dataset_folder import describe, open_dataset, read_batches
from services.errors import UserError
from services.prompts.near_duplicates import NearIndex, Signature
from services.prompts.tasks import IndexedTokens, TokenIds, hash_of
from services.sample_rows import LARGEST_VOCABULARY, RowFaultError
from services.settings import MergeSettings, NearDuplicateSettings

PROMPTS_AT_ONCE = 512


class TokenizedPrompts:
    """Hashes of a corpus' prompts, 8 bytes each, and their signatures where near duplicates are looked for."""

    def __init__(self, indexed: Iterable[IndexedTokens], near: NearDuplicateSettings | None) -> None:
        hashes, signatures = [np.zeros(0, np.uint64)], []
        for some in indexed:
            hashes.append(some.hashes)
            signatures.append(some.signatures)
        self.hashes = np.unique(np.concatenate(hashes))
        self._near = NearIndex(np.concatenate(signatures), near) if near is not None and signatures else None

    def has(self, input_ids: TokenIds) -> bool:
        if not len(self.hashes):
            return False
        hashed = np.uint64(hash_of(input_ids))
        at = int(np.searchsorted(self.hashes, hashed))
        return at < len(self.hashes) and self.hashes[at] == hashed

    def has_nearly(self, signed: Signature) -> bool:
        return self._near is not None and self._near.has(signed)


def tokenized_prompts(merge: MergeSettings) -> Iterator[list[TokenIds]]:
    """The corpus' prompts, some at a time: what stands before each sample's first reply.

    Raises:
        UserError: it is no dataset folder, lacks a column of lists of integers for input_ids or loss_mask, or has an id
            that is no token's; the row is named.
    """
    if merge.base is None:
        return
    folder = open_dataset(merge.base)
    ids, mask = merge.base_columns.get("input_ids", "input_ids"), merge.base_columns.get("loss_mask", "loss_mask")
    for name in (ids, mask):
        if name not in folder.schema.names or not _is_integers(folder.schema.field(name).type, or_bool=name == mask):
            raise UserError(
                f"corpus {merge.base}: no column of lists of integers {name!r}; its columns are "
                f"{describe(folder.schema)}: name them in merge.base_columns"
            )
    for shard in folder.shards:
        first = 0
        for batch in read_batches(shard):
            try:
                prompts = list(_prompts(batch.column(ids), batch.column(mask)))
            except RowFaultError as fault:
                raise UserError(f"{shard} row {first + fault.row}: {fault}; remove or mend such rows") from fault
            first += batch.num_rows
            for begin in range(0, len(prompts), PROMPTS_AT_ONCE):
                yield prompts[begin : begin + PROMPTS_AT_ONCE]


def _prompts(ids: pa.Array, mask: pa.Array) -> Iterator[TokenIds]:
    """A row without a supervised token has no reply, and so no prompt; merging refuses it by name.

    Raises:
        RowFaultError: an id is null, negative or beyond every vocabulary, which no tokenizer decodes.
    """
    _check_ids(ids)
    id_values, mask_values = (column.values.to_numpy(zero_copy_only=False) for column in (ids, mask))
    id_offsets, mask_offsets = (column.offsets.to_numpy().tolist() for column in (ids, mask))
    for begin, mask_begin, mask_end in zip(id_offsets[:-1], mask_offsets[:-1], mask_offsets[1:], strict=True):
        supervised = mask_values[mask_begin:mask_end] == 1
        if reply := int(np.argmax(supervised)) if len(supervised) else 0:
            yield id_values[begin : begin + reply].astype(np.int32)


def _check_ids(ids: pa.Array) -> None:
    are_ids = pc.and_(pc.greater_equal(ids.values, 0), pc.less(ids.values, LARGEST_VOCABULARY)).fill_null(False)
    if not pc.all(are_ids).as_py():
        place = pc.index(are_ids, False).as_py()
        row = int(np.searchsorted(ids.offsets.to_numpy(), place, side="right")) - 1
        raise RowFaultError(row, f"id {ids.values[place]} is outside every vocabulary")


def _is_integers(kind: pa.DataType, or_bool: bool) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    return bool(pa.types.is_integer(kind.value_type) or (or_bool and pa.types.is_boolean(kind.value_type)))
