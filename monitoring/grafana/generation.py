"""Generation: what servers and producers do, and how prompts end."""

from monitoring.grafana.model import RATE, RUN, Dashboard, Panel, Query, Row, at_least, at_most


def _quantiles(histogram: str) -> tuple[Query, ...]:
    return tuple(
        Query(f"histogram_quantile({share}, sum by (le) (rate({histogram}_bucket[{RATE}])))", f"{share:.0%}")
        for share in (0.5, 0.95)
    )


DASHBOARD = Dashboard(
    "dflash-generation",
    "dflash 2 Generation",
    "Servers, producers, and how prompts end.",
    (
        Row(
            "Servers",
            (
                Panel(
                    "Tokens computed by server",
                    "Prompt and answer tokens that each server computes a second. 0 with requests running: it hangs.",
                    "short",
                    (
                        Query(
                            f"sum by (instance, mode) (rate(sglang:realtime_tokens_total[{RATE}]))",
                            "{{instance}} {{mode}}",
                        ),
                    ),
                ),
                Panel(
                    "Requests in flight by server",
                    "Requests that await an answer, as the producers count them.",
                    "short",
                    (
                        Query(
                            f"sum by (server) (dflash_producer_in_flight_requests{{{RUN}}})",
                            "{{server}}",
                        ),
                    ),
                ),
                Panel(
                    "Requests running and queued in SGLang",
                    "Queued above 0 while the producers have empty slots: the server admits fewer than they send.",
                    "short",
                    (
                        Query("sum by (instance) (sglang:num_running_reqs)", "{{instance}} running"),
                        Query("sum by (instance) (sglang:num_queue_reqs)", "{{instance}} queued"),
                    ),
                ),
                Panel(
                    "Slots in use",
                    "Share of the requests that may be in flight. Below 80 % while chunks wait, cards idle.",
                    "percentunit",
                    (
                        Query(
                            f"sum(dflash_producer_in_flight_requests{{{RUN}}}) / sum(dflash_producer_slots{{{RUN}}})",
                            "all producers",
                        ),
                    ),
                    thresholds=at_least(0.8, 0.95),
                    most=1,
                ),
                Panel(
                    "Cache in use",
                    "Share of each server's token cache, or of its state cache where that is fuller. High is good.",
                    "percentunit",
                    (Query("max by (instance) (sglang:token_usage)", "{{instance}}"),),
                    most=1,
                ),
                Panel(
                    "Servers left out",
                    "Servers to which producers send nothing: unhealthy, without progress, or of another model.",
                    "short",
                    (
                        Query(
                            f'max by (server, state) (dflash_producer_server_state{{{RUN}, state!="ready"}})',
                            "{{server}} {{state}}",
                        ),
                    ),
                    thresholds=at_most(1, 1),
                ),
            ),
        ),
        Row(
            "Requests",
            (
                Panel(
                    "Requests by outcome",
                    "Requests that ended a second. All but `answered` are tried again, or are failures in the end.",
                    "short",
                    (Query(f"sum by (outcome) (rate(dflash_producer_requests_total[{RATE}]))", "{{outcome}}"),),
                    stacked=True,
                ),
                Panel(
                    "Seconds a request",
                    "From sending a prompt to its answer: the half of them, and all but one of twenty.",
                    "s",
                    _quantiles("dflash_producer_request_seconds"),
                ),
                Panel(
                    "Seconds a chunk",
                    "From taking a chunk to publishing it.",
                    "s",
                    _quantiles("dflash_producer_chunk_seconds"),
                ),
                Panel(
                    "Tokens in and out",
                    "Prompt and answer tokens of answered requests a second.",
                    "short",
                    (
                        Query(f"sum(rate(dflash_producer_prompt_tokens_total[{RATE}]))", "in"),
                        Query(f"sum(rate(dflash_producer_output_tokens_total[{RATE}]))", "out"),
                    ),
                ),
                Panel(
                    "Tries a prompt",
                    "Requests for each finished prompt. 1 is no retry.",
                    "short",
                    (
                        Query(
                            # Not the recorded sum, which is of a moment before.
                            f"sum by (run) (dflash_attempts_total{{{RUN}}})"
                            f" / (sum by (run) (dflash_completions_total{{{RUN}}})"
                            f" + sum by (run) (dflash_journaled_prompts{{{RUN}}}) > 0)",
                            "{{run}}",
                        ),
                    ),
                    thresholds=at_most(1.05, 1.2),
                ),
                Panel(
                    "Tokens an answer",
                    "Mean length of the completed answers by source. The reference run had 2,712.",
                    "short",
                    (
                        Query(
                            f"sum by (run, source) (dflash_sample_supervised_tokens_total{{{RUN}}})"
                            f" / (sum by (run, source) (dflash_samples_total{{{RUN}}}) > 0)",
                            "{{run}} {{source}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "What ends badly",
            (
                Panel(
                    "Rejected and failed",
                    "Share of the prompts that ended within the last hour.",
                    "percentunit",
                    (
                        Query(
                            f'run_status:dflash_completions:ratio1h{{{RUN}, status!="completed"}}', "{{run}} {{status}}"
                        ),
                    ),
                    thresholds=at_most(0.01, 0.05),
                ),
                Panel(
                    "Rejections by reason",
                    "Answers that became no sample, since the run began.",
                    "short",
                    (Query(f"sum by (source, reason) (dflash_rejections_total{{{RUN}}})", "{{source}}: {{reason}}"),),
                    kind="bargauge",
                ),
                Panel(
                    "Failures by reason",
                    "Prompts without an answer, since the run began.",
                    "short",
                    (Query(f"sum by (source, reason) (dflash_failures_total{{{RUN}}})", "{{source}}: {{reason}}"),),
                    kind="bargauge",
                ),
            ),
        ),
        Row(
            "Chunks",
            (
                Panel(
                    "Chunks",
                    "Published, and still to do.",
                    "short",
                    (Query(f"sum by (run, state) (dflash_chunks{{{RUN}}})", "{{run}} {{state}}"),),
                    width=12,
                ),
                Panel(
                    "Chunks open in producers",
                    "Chunks whose prompts are being asked, by producer.",
                    "short",
                    (Query(f"sum by (instance) (dflash_producer_open_chunks{{{RUN}}})", "{{instance}}"),),
                    width=12,
                ),
            ),
        ),
    ),
)
