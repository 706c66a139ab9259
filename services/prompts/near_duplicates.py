"""Near duplicates: prompts whose words are almost the same, found with datasketch's MinHash and LSH index."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from datasketch import MinHash, MinHashLSH

from services.prompts.text import ngrams, words
from services.settings import NearDuplicateSettings

Signature = np.ndarray[Any, np.dtype[np.uint32]]


def signature(text: str, settings: NearDuplicateSettings) -> Signature | None:
    """MinHash of the text's word shingles; [permutations], uint32. Equal texts have equal signatures anywhere.

    None for a text without a word (signs, emoji): it has nothing to be compared by, and all such would be the same.
    """
    shingles = ngrams(words(text), settings.shingle)
    if not shingles:
        return None
    minhash = _empty(settings.permutations).copy()
    minhash.update_batch([shingle.encode() for shingle in shingles])
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


class NearIndex:
    """The signatures of a corpus that is complete, asked like `NearDuplicates`: some 0.6 KB a prompt, not 4.

    The bands are datasketch's; each is a sorted list of hashes of its part of the signatures.
    """

    def __init__(self, signatures: Signature, settings: NearDuplicateSettings) -> None:
        """`signatures`: [prompts, permutations]."""
        self._threshold = settings.threshold
        self._signatures = signatures
        bands = MinHashLSH(threshold=settings.threshold, num_perm=settings.permutations)
        self._parts = [slice(band * bands.r, (band + 1) * bands.r) for band in range(bands.b)]
        # Different parts that share a hash only cost a comparison.
        self._factors = np.random.default_rng(0).integers(1, 2**63, bands.r, dtype=np.uint64) | np.uint64(1)
        hashes = [self._hash(signatures[:, part]) for part in self._parts]
        self._rows = [np.argsort(of_band).astype(np.uint32) for of_band in hashes]
        self._hashes = [of_band[rows] for of_band, rows in zip(hashes, self._rows, strict=True)]

    def has(self, signed: Signature) -> bool:
        """Whether a prompt of at least the threshold's estimated similarity is there."""
        for part, hashes, rows in zip(self._parts, self._hashes, self._rows, strict=True):
            wanted = self._hash(signed[None, part])[0]
            begin, end = np.searchsorted(hashes, wanted, "left"), np.searchsorted(hashes, wanted, "right")
            candidates = self._signatures[rows[begin:end]]
            if len(candidates) and float((candidates == signed).mean(axis=1).max()) >= self._threshold:
                return True
        return False

    def _hash(self, parts: Signature) -> np.ndarray[Any, np.dtype[np.uint64]]:
        hashed: np.ndarray[Any, np.dtype[np.uint64]] = (parts.astype(np.uint64) * self._factors).sum(axis=1)
        return hashed


@cache
def _empty(permutations: int) -> MinHash:
    """Drawing the permutations takes longer than hashing a prompt, so they are drawn once."""
    return MinHash(num_perm=permutations)
