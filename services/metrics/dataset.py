"""Metrics of what a run's samples, its merged dataset and its evaluations are, from files published once."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from services.files import read_json
from services.runs import Run

COUNTS = ("samples", "tokens", "supervised_tokens")
COUNTED = (*COUNTS, "truncated")
EVALUATIONS = ("before", "after")


class DatasetFamilies:
    """Filled with one run at a time, so that one that cannot be read adds to none of the others' families."""

    def __init__(self) -> None:
        by_source = ["run", "source"]
        self.samples = CounterMetricFamily("dflash_samples", "Assembled samples.", labels=by_source)
        self.sample_tokens = CounterMetricFamily(
            "dflash_sample_tokens", "Tokens of assembled samples, prompts included.", labels=by_source
        )
        self.supervised_tokens = CounterMetricFamily(
            "dflash_sample_supervised_tokens", "Tokens of assembled samples with loss mask 1.", labels=by_source
        )
        self.truncated = CounterMetricFamily(
            "dflash_samples_truncated", "Assembled samples whose answer reached the token limit.", labels=by_source
        )
        self.dropped = CounterMetricFamily(
            "dflash_samples_dropped", "Completed answers that became no sample.", labels=[*by_source, "reason"]
        )
        self.merged = {
            name: GaugeMetricFamily(
                f"dflash_dataset_{name}",
                f"{name.replace('_', ' ').capitalize()} of the merged dataset by where they come from.",
                labels=["run", "source", "domain"],
            )
            for name in COUNTS
        }
        self.merge_parts = {
            name: GaugeMetricFamily(
                f"dflash_merge_{name}",
                f"{name.replace('_', ' ').capitalize()} before the merge, added by it, and after it.",
                labels=["run", "part"],
            )
            for name in COUNTS
        }
        self.lengths = GaugeMetricFamily(
            "dflash_dataset_lengths",
            "Samples of the merged dataset of at most so many tokens, and more than the next smaller bound.",
            labels=["run", "part", "up_to"],
        )
        self.agreement = GaugeMetricFamily(
            "dflash_agreement_ratio",
            "Share of answers whose sample from ids equals the one from text, by services.tokenizer.agreement.",
            labels=["run"],
        )
        self.acceptance = GaugeMetricFamily(
            "dflash_evaluation_acceptance_length",
            "Tokens kept a verification on held-out prompts, before and after training.",
            labels=["run", "evaluation", "source"],
        )

    def all(self) -> Iterable[Metric]:
        for family in vars(self).values():
            yield from family.values() if isinstance(family, dict) else [family]

    def add(self, run: Run, assembled: Iterable[dict[str, Any]], published: dict[str, dict[str, Any]]) -> None:
        """`assembled`: what assembling published, a chunk each; `published`: see `read_published`."""
        sums: dict[str, dict[str, int]] = {}
        dropped: dict[str, Counter[str]] = {}
        for chunk in assembled:
            source = chunk["source"]
            if source not in sums:
                sums[source], dropped[source] = dict.fromkeys(COUNTED, 0), Counter()
            of_source = sums[source]
            for name in COUNTED:
                of_source[name] += chunk.get(name, 0)
            if chunk["dropped"]:
                dropped[source].update(chunk["dropped"])
        for source, counts in sums.items():
            labels = [run.name, source]
            self.samples.add_metric(labels, counts["samples"])
            self.sample_tokens.add_metric(labels, counts["tokens"])
            self.supervised_tokens.add_metric(labels, counts["supervised_tokens"])
            self.truncated.add_metric(labels, counts["truncated"])
            for reason, count in dropped[source].items():
                self.dropped.add_metric([*labels, reason], count)
        if merged := published.get("merge"):
            self._add_merge(run, merged)
        if agreement := published.get("agreement"):
            self.agreement.add_metric([run.name], agreement["agree"] / 100)
        for name in EVALUATIONS:
            if report := published.get(name):
                for source, counts in {"all": report["overall"], **report["by_source"]}.items():
                    if counts["acceptance_length"] is not None:  # where nothing was verified there is none
                        self.acceptance.add_metric([run.name, name, source], counts["acceptance_length"])

    def _add_merge(self, run: Run, merged: dict[str, Any]) -> None:
        for name in COUNTS:
            for source, part in merged["sources"].items():
                self.merged[name].add_metric([run.name, source, part.get("domain", "unknown")], part[name])
            for part_name in ("before", "added", "after"):
                self.merge_parts[name].add_metric([run.name, part_name], merged[part_name][name])
        for part_name in ("before", "added", "after"):
            for bound, count in merged[part_name].get("lengths", {}).items():
                self.lengths.add_metric([run.name, part_name, bound], count)


def read_published(run: Run, known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The run's merge, agreement and evaluations, as far as they are there; `known` is what was read before."""
    paths = {"merge": run.merged, "agreement": run.agreement, **{name: run.evaluation(name) for name in EVALUATIONS}}
    for name, path in paths.items():
        if name not in known and path.is_file():
            known[name] = read_json(path)
    return known
