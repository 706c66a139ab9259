"""The compact index of a corpus finds what datasketch's finds."""

import random

import numpy as np

from services.prompts.near_duplicates import NearDuplicates, NearIndex, signature
from services.settings import NearDuplicateSettings


def test_the_index_of_a_corpus_agrees_with_that_of_the_prompts_taken() -> None:
    settings = NearDuplicateSettings()
    drawn = random.Random(0)
    words = [f"word{number}" for number in range(400)]
    corpus = [[drawn.choice(words) for _ in range(60)] for _ in range(150)]
    asked = []
    for text in corpus:
        changed = list(text)
        # From the same to quite another: their similarity lies on both sides of the threshold.
        for _ in range(drawn.randrange(8)):
            changed[drawn.randrange(len(changed))] = drawn.choice(words)
        asked.append(changed)
    signatures = [signature(" ".join(text), settings) for text in corpus]
    of_corpus, taken = NearIndex(np.stack(signatures), settings), NearDuplicates(settings)
    for signed in signatures:
        taken.add(signed)
    questions = [signature(" ".join(text), settings) for text in asked]
    answers = [of_corpus.has(signed) for signed in questions]
    assert answers == [taken.has(signed) for signed in questions]
    assert 30 < sum(answers) < 120
