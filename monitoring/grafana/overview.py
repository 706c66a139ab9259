"""Overview: where is my run, when is it done, what is lost."""

from monitoring.grafana.model import RUN, Dashboard, Panel, Query, Row, at_least, at_most

DASHBOARD = Dashboard(
    "dflash-overview",
    "dflash 1 Overview",
    "Where each run is, when it is done, and what is lost.",
    (
        Row(
            "Now",
            (
                Panel(
                    "Prompts finished",
                    "Share of the run's prompts that have ended: with an answer, rejected or failed.",
                    "percentunit",
                    (Query(f"run:dflash_prompts_finished:sum{{{RUN}}} / run:dflash_prompts:sum", "{{run}}"),),
                    kind="stat",
                    width=5,
                    height=5,
                ),
                Panel(
                    "Time left to generate",
                    "Until the last prompt has ended, at the pace of the last half hour. Empty while nothing ends.",
                    "s",
                    (Query(f"run:dflash_generation_left:seconds{{{RUN}}}", "{{run}}"),),
                    kind="stat",
                    width=5,
                    height=5,
                ),
                Panel(
                    "Lost",
                    "Share of the ended prompts that become no sample: rejected or failed.",
                    "percentunit",
                    (
                        Query(
                            f'sum by (run) (dflash_completions_total{{{RUN}, status!="completed"}})'
                            f" / (sum by (run) (dflash_completions_total{{{RUN}}}) > 0)",
                            "{{run}}",
                        ),
                    ),
                    kind="stat",
                    thresholds=at_most(0.02, 0.05),
                    width=5,
                    height=5,
                ),
                Panel(
                    "Training",
                    "Share of the planned steps that are done.",
                    "percentunit",
                    (
                        Query(
                            f"run:dflash_training_steps:max{{{RUN}}} / max by (run) (dflash_training_steps_planned)",
                            "{{run}}",
                        ),
                    ),
                    kind="stat",
                    width=5,
                    height=5,
                ),
                Panel(
                    "Alerts",
                    "Alerts that fire; each has a runbook of its name in monitoring/runbooks.",
                    "short",
                    (Query('count(ALERTS{alertstate="firing"}) or vector(0)', "firing"),),
                    kind="stat",
                    thresholds=at_most(1, 1),
                    width=4,
                    height=5,
                ),
            ),
        ),
        Row(
            "The way of the data",
            (
                Panel(
                    "What became of every prompt",
                    "Prompts of the chosen runs by where they are. Each is in one of these.",
                    "short",
                    (
                        Query(
                            f"sum(dflash_prompts{{{RUN}}}) - sum(run:dflash_prompts_finished:sum{{{RUN}}})", "waiting"
                        ),
                        Query(f"sum(dflash_journaled_prompts{{{RUN}}})", "answered, chunk not finished"),
                        Query(f"sum by (status) (dflash_completions_total{{{RUN}}})", "{{status}}"),
                    ),
                    kind="bargauge",
                ),
                Panel(
                    "From prompts to samples",
                    "How many there are at each stage.",
                    "short",
                    (
                        Query(f"sum(dflash_prompts{{{RUN}}})", "prompts"),
                        Query(f'sum(dflash_completions_total{{{RUN}, status="completed"}})', "completed"),
                        Query(f"sum(dflash_samples_total{{{RUN}}})", "samples"),
                        Query(f'sum(dflash_merge_samples{{{RUN}, part="added"}})', "added by the merge"),
                        Query(f'sum(dflash_merge_samples{{{RUN}, part="after"}})', "in the dataset"),
                    ),
                    kind="bargauge",
                ),
                Panel(
                    "Prompts finished over time",
                    "Ended prompts over time; a flat line is a run that stands still.",
                    "short",
                    (Query(f"run:dflash_prompts_finished:sum{{{RUN}}}", "{{run}}"),),
                ),
            ),
        ),
        Row(
            "Pace and result",
            (
                Panel(
                    "Answer tokens a second",
                    "Tokens of finished answers, over five minutes. The reference run had 9,400 on eight cards.",
                    "short",
                    (Query(f"run:dflash_output_tokens:rate5m{{{RUN}}}", "{{run}}"),),
                ),
                Panel(
                    "Trained tokens a second",
                    "Tokens that the drafter was trained on, over five minutes.",
                    "short",
                    (Query(f"run:dflash_training_tokens:rate5m{{{RUN}}}", "{{run}}"),),
                ),
                Panel(
                    "Acceptance length",
                    "Tokens kept a verification on held-out prompts; 1 is the target alone.",
                    "short",
                    (
                        Query(
                            f'max by (run) (dflash_training_acceptance_length{{{RUN}, source="all"}})',
                            "{{run}} training",
                        ),
                        Query(f'dflash_evaluation_acceptance_length{{{RUN}, source="all"}}', "{{run}} {{evaluation}}"),
                    ),
                    thresholds=at_least(1, 1),
                ),
            ),
        ),
    ),
)
