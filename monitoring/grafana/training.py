"""Training: pace, loss, accuracy and acceptance, from every rank."""

from monitoring.grafana.model import RATE, RUN, Dashboard, Panel, Query, Row, at_least, at_most

DASHBOARD = Dashboard(
    "dflash-training",
    "dflash 4 Training",
    "Pace, loss, accuracy and acceptance, from every rank.",
    (
        Row(
            "Pace",
            (
                Panel(
                    "Trained tokens a second",
                    "Tokens that the drafter was trained on, over five minutes.",
                    "short",
                    (Query(f"run:dflash_training_tokens:rate5m{{{RUN}}}", "{{run}}"),),
                ),
                Panel(
                    "Steps",
                    "Optimizer steps done, and planned.",
                    "short",
                    (
                        Query(f"run:dflash_training_steps:max{{{RUN}}}", "{{run}} done"),
                        Query(f"max by (run) (dflash_training_steps_planned{{{RUN}}})", "{{run}} planned"),
                    ),
                ),
                Panel(
                    "Time of a step by part",
                    "Share of all ranks' time. A drafter's data_wait is waiting for targets: split cards otherwise.",
                    "percentunit",
                    (
                        Query(
                            f"sum by (role, part) (rate(dflash_training_part_seconds_total{{{RUN}}}[{RATE}]))"
                            " / on () group_left ()"
                            f" (sum(rate(dflash_training_part_seconds_total{{{RUN}}}[{RATE}])) > 0)",
                            "{{role}} {{part}}",
                        ),
                    ),
                    stacked=True,
                    most=1,
                ),
                Panel(
                    "Rows and samples a second",
                    "Rows of draft blocks, and samples, that the drafter was trained on.",
                    "short",
                    (
                        Query(
                            f'sum by (run) (rate(dflash_training_draft_rows_total{{{RUN}, role!="target"}}[{RATE}]))',
                            "{{run}} rows",
                        ),
                        Query(
                            f'sum by (run) (rate(dflash_training_samples_total{{{RUN}, role!="target"}}[{RATE}]))',
                            "{{run}} samples",
                        ),
                    ),
                ),
                Panel(
                    "Since the last step",
                    "By rank. One that stands out is the one that the others wait for.",
                    "s",
                    (
                        Query(
                            "clamp_min(time() - max by (run, rank)"
                            f" (dflash_training_last_step_timestamp_seconds{{{RUN}}}), 0)",
                            "{{run}} rank {{rank}}",
                        ),
                    ),
                    thresholds=at_most(300, 900),
                ),
                Panel(
                    "Since the last checkpoint",
                    "What a fault now would cost.",
                    "s",
                    (
                        Query(
                            "clamp_min(time() - max by (run)"
                            f" (dflash_training_checkpoint_timestamp_seconds{{{RUN}}}), 0)",
                            "{{run}}",
                        ),
                    ),
                    thresholds=at_most(3600, 7200),
                ),
            ),
        ),
        Row(
            "What is learnt",
            (
                Panel(
                    "Loss",
                    "Mean over the ranks, of the last log interval.",
                    "short",
                    (Query(f"avg by (run) (dflash_training_loss{{{RUN}}})", "{{run}}"),),
                ),
                Panel(
                    "Learning rate",
                    "Of the last step.",
                    "sci",
                    (Query(f"max by (run) (dflash_training_learning_rate{{{RUN}}})", "{{run}}"),),
                ),
                Panel(
                    "Epoch",
                    "Passes over the dataset, from 0.",
                    "short",
                    (Query(f"max by (run) (dflash_training_epoch{{{RUN}}})", "{{run}}"),),
                ),
                Panel(
                    "Accuracy by position",
                    "Share of right guesses by slot of the block, on training batches. Later slots are harder.",
                    "percentunit",
                    (
                        Query(
                            f"avg by (run, position) (dflash_training_accuracy{{{RUN}}})",
                            "{{run}} {{position}}",
                        ),
                    ),
                ),
                Panel(
                    "Acceptance",
                    "As the accuracies on training batches suggest, and as measured on held-out prompts.",
                    "short",
                    (
                        Query(f"avg by (run) (dflash_training_acceptance_estimate{{{RUN}}})", "{{run}} estimate"),
                        Query(
                            f'max by (run) (dflash_training_acceptance_length{{{RUN}, source="all"}})',
                            "{{run}} measured",
                        ),
                    ),
                    thresholds=at_least(1, 1),
                ),
                Panel(
                    "Acceptance by source",
                    "Of the last measurement in training. One source far below the others lacks data of its kind.",
                    "short",
                    (
                        Query(
                            f"max by (run, source) (dflash_training_acceptance_length{{{RUN}}})",
                            "{{run}} {{source}}",
                        ),
                    ),
                    kind="bargauge",
                ),
                Panel(
                    "Acceptance before and after training",
                    "Of the evaluations of the run, by source.",
                    "short",
                    (
                        Query(
                            f"max by (run, evaluation, source) (dflash_evaluation_acceptance_length{{{RUN}}})",
                            "{{run}} {{source}} {{evaluation}}",
                        ),
                    ),
                    kind="bargauge",
                    width=12,
                ),
                Panel(
                    "Settings stepped down",
                    "How often a setting was lowered after out of memory. Anything above 0 slows training down.",
                    "short",
                    (
                        Query(
                            f"sum by (run, setting) (dflash_training_step_downs_total{{{RUN}}})"
                            f" or sum by (run) (dflash_training_steps_planned{{{RUN}}} * 0)",
                            "{{run}} {{setting}}",
                        ),
                    ),
                    kind="bargauge",
                    thresholds=at_most(1, 1),
                    width=12,
                ),
            ),
        ),
    ),
)
