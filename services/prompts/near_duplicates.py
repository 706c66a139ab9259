"""Near duplicates: prompts whose words are almost the same, found with datasketch's MinHash and LSH index."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from datasketch import MinHash, MinHashLSH

from services.prompts.text import ngrams, words
from services.settings import NearDuplicateSettings

Signature = np.ndarray[Any, np.dtype[np.uint32]]


def signature(text: str, settings: NearDuplicateSettings) -> Signature:
    """MinHash of the text's word shingles; [permutations], uint32. Equal texts have equal signatures anywhere."""
    minhash = _empty(settings.permutations).copy()
    minhash.update_batch([shingle.encode() for shingle in ngrams(words(text), settings.shingle)])
    return np.asarray(minhash.hashvalues, dtype=np.uint32)


class NearDuplicates:
    """The signatures of the prompts that are taken, asked before another one is."""

    def __init__(self, settings: NearDuplicateSettings) -> None:
        self._threshold = settings.threshold
        self._empty = _empty(settings.permutations)
        self._index = MinHashLSH(threshold=settings.threshold, num_perm=settings.permutations)
        self._signatures: list[Signature] = []

    def __len__(self) -> int:
        return len(self._signatures)

    def has(self, signed: Signature) -> bool:
        """Whether a prompt of at least the threshold's estimated similarity was added."""
        candidates: Sequence[int] = self._index.query(self._minhash(signed))
        return any(float(np.mean(self._signatures[index] == signed)) >= self._threshold for index in candidates)

    def add(self, signed: Signature) -> None:
        self._index.insert(len(self._signatures), self._minhash(signed), check_duplication=False)
        self._signatures.append(signed)

    def _minhash(self, signed: Signature) -> MinHash:
        minhash = self._empty.copy()
        minhash.hashvalues = signed
        return minhash


@cache
def _empty(permutations: int) -> MinHash:
    """Drawing the permutations takes longer than hashing a prompt, so they are drawn once."""
    return MinHash(num_perm=permutations)
