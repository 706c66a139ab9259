"""The language of a prompt, for data sets whose rows do not say it."""

from functools import cache

from py3langid.langid import MODEL_FILE, LanguageIdentifier

# Short texts and code are guessed badly, and then with little confidence: those pass.
CONFIDENT = 0.5


def is_other_language(text: str, wanted: tuple[str, ...]) -> bool:
    """Whether the text is surely in none of the wanted languages (ISO 639-1 codes)."""
    language, probability = _identifier().classify(text)
    return language not in wanted and probability >= CONFIDENT


@cache
def _identifier() -> LanguageIdentifier:
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
