"""Whether families can be written out: one that cannot would fail the whole scrape, with all that the others tell."""

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric


def renderable(families: Iterable[Metric]) -> list[Metric]:
    """The same families.

    Raises:
        ValueError, TypeError, AttributeError: a value is no number, or a label no text in UTF-8.
    """
    checked = list(families)
    for family in checked:
        for sample in family.samples:
            float(sample.value)
            for label in sample.labels.values():
                label.encode()
    return checked
