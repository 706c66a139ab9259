"""Metrics of generating, counted from a run's files: the same whoever generated, and however often it was killed."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from services.ledger import GenerateCounts
from services.runs import Run


class GenerationFamilies:
    """Filled with one run at a time, so that one that cannot be read adds to none of the others' families."""

    def __init__(self) -> None:
        by_source = ["run", "source"]
        self.prompts = GaugeMetricFamily("dflash_prompts", "Prompts cut into chunks.", labels=by_source)
        self.journaled = GaugeMetricFamily(
            "dflash_journaled_prompts", "Finished prompts of chunks that are not.", labels=by_source
        )
        self.chunks = GaugeMetricFamily("dflash_chunks", "Chunks.", labels=[*by_source, "state"])
        self.completions = CounterMetricFamily(
            "dflash_completions", "Prompts of finished chunks by what became of them.", labels=[*by_source, "status"]
        )
        self.rejections = CounterMetricFamily(
            "dflash_rejections", "Rejected answers of finished chunks.", labels=[*by_source, "reason"]
        )
        self.failures = CounterMetricFamily(
            "dflash_failures", "Prompts of finished chunks without an answer.", labels=[*by_source, "reason"]
        )
        self.attempts = CounterMetricFamily(
            "dflash_attempts", "Requests sent for finished prompts; what exceeds those is retries.", labels=by_source
        )
        self.output_tokens = CounterMetricFamily(
            "dflash_output_tokens", "Tokens of completed answers, unfinished chunks included.", labels=by_source
        )

    def all(self) -> Iterable[Metric]:
        return vars(self).values()

    def add(self, run: Run, generated: dict[str, GenerateCounts]) -> None:
        for source, counts in generated.items():
            labels = [run.name, source]
            self.prompts.add_metric(labels, counts.prompts)
            self.journaled.add_metric(labels, counts.in_journal)
            self.chunks.add_metric([*labels, "done"], counts.chunks_done)
            self.chunks.add_metric([*labels, "open"], counts.chunks - counts.chunks_done)
            self.completions.add_metric([*labels, "completed"], counts.completed)
            self.completions.add_metric([*labels, "rejected"], counts.rejected.total())
            self.completions.add_metric([*labels, "failed"], counts.failed.total())
            for reason, count in counts.rejected.items():
                self.rejections.add_metric([*labels, reason], count)
            for reason, count in counts.failed.items():
                self.failures.add_metric([*labels, reason], count)
            self.attempts.add_metric(labels, counts.attempts)
            self.output_tokens.add_metric(labels, counts.output_tokens)
