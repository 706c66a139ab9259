"""Data: samples, masks, and the mix of the merged dataset."""

from monitoring.grafana.model import RUN, Dashboard, Panel, Query, Row, at_least, at_most

DASHBOARD = Dashboard(
    "dflash-data",
    "dflash 3 Data",
    "Samples, their masks, and the mix of the dataset.",
    (
        Row(
            "Samples",
            (
                Panel(
                    "Samples assembled",
                    "Samples of the run's own answers, by source.",
                    "short",
                    (Query(f"sum by (run, source) (dflash_samples_total{{{RUN}}})", "{{run}} {{source}}"),),
                    stacked=True,
                ),
                Panel(
                    "Tokens assembled",
                    "Tokens of these samples, prompts included.",
                    "short",
                    (Query(f"sum by (run, source) (dflash_sample_tokens_total{{{RUN}}})", "{{run}} {{source}}"),),
                    stacked=True,
                ),
                Panel(
                    "Mask share",
                    "Share of a source's tokens that carry the loss: what the target generated.",
                    "percentunit",
                    (
                        Query(
                            f"sum by (run, source) (dflash_sample_supervised_tokens_total{{{RUN}}})"
                            f" / (sum by (run, source) (dflash_sample_tokens_total{{{RUN}}}) > 0)",
                            "{{run}} {{source}}",
                        ),
                    ),
                    kind="bargauge",
                    most=1,
                ),
                Panel(
                    "Answers cut off at the limit",
                    "Share of the samples whose answer reached generate.max_new_tokens, so that it has no end.",
                    "percentunit",
                    (
                        Query(
                            f"sum by (run, source) (dflash_samples_truncated_total{{{RUN}}})"
                            f" / (sum by (run, source) (dflash_samples_total{{{RUN}}}) > 0)",
                            "{{run}} {{source}}",
                        ),
                    ),
                    kind="bargauge",
                    thresholds=at_most(0.05, 0.2),
                    most=1,
                ),
                Panel(
                    "Answers dropped",
                    "Completed answers that became no sample, by reason. 0 when there is none.",
                    "short",
                    (
                        Query(
                            f"sum by (run, reason) (dflash_samples_dropped_total{{{RUN}}})"
                            f" or sum by (run) (dflash_samples_total{{{RUN}}} * 0)",
                            "{{run}} {{reason}}",
                        ),
                    ),
                    kind="bargauge",
                ),
                Panel(
                    "Agreement of ids and text",
                    "Share of the answers whose sample from ids equals the one from text, once it was compared.",
                    "percentunit",
                    (Query(f"dflash_agreement_ratio{{{RUN}}}", "{{run}}"),),
                    kind="stat",
                    thresholds=at_least(0.9, 0.95),
                ),
            ),
        ),
        Row(
            "Dataset",
            (
                Panel(
                    "Samples before and after the merge",
                    "The existing corpus, what was added, and the result.",
                    "short",
                    (Query(f"dflash_merge_samples{{{RUN}}}", "{{run}} {{part}}"),),
                    kind="bargauge",
                ),
                Panel(
                    "Tokens before and after the merge",
                    "The same in tokens.",
                    "short",
                    (Query(f"dflash_merge_tokens{{{RUN}}}", "{{run}} {{part}}"),),
                    kind="bargauge",
                ),
                Panel(
                    "Supervised tokens before and after the merge",
                    "The same in tokens that carry the loss.",
                    "short",
                    (Query(f"dflash_merge_supervised_tokens{{{RUN}}}", "{{run}} {{part}}"),),
                    kind="bargauge",
                ),
                Panel(
                    "Mix by domain",
                    "Share of the dataset's tokens. A corpus of one domain holds acceptance back on all others.",
                    "percentunit",
                    (
                        Query(
                            f"sum by (run, domain) (dflash_dataset_tokens{{{RUN}}})"
                            f" / on (run) group_left () sum by (run) (dflash_dataset_tokens{{{RUN}}})",
                            "{{run}} {{domain}}",
                        ),
                    ),
                    kind="bargauge",
                    most=1,
                ),
                Panel(
                    "Samples by source",
                    "Samples of the dataset by where they come from.",
                    "short",
                    (Query(f"sum by (run, source) (dflash_dataset_samples{{{RUN}}})", "{{run}} {{source}}"),),
                    kind="bargauge",
                ),
                Panel(
                    "Lengths",
                    "Samples of the dataset by tokens: at most so many, and more than the next smaller bound.",
                    "short",
                    (
                        Query(
                            f'sum by (up_to) (dflash_dataset_lengths{{{RUN}, part="after"}})',
                            "up to {{up_to}}",
                        ),
                    ),
                    kind="bargauge",
                ),
            ),
        ),
    ),
)
