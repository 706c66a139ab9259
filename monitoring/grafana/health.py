"""Stack health: targets, queues, Redis, disk, the machine."""

from monitoring.grafana.model import RATE, Dashboard, Panel, Query, Row, at_least, at_most

DASHBOARD = Dashboard(
    "dflash-health",
    "dflash 6 Stack health",
    "Targets, queues, Redis, disk and machine.",
    (
        Row(
            "Targets and alerts",
            (
                Panel(
                    "Targets up",
                    "1 for each target that answers Prometheus, else 0.",
                    "short",
                    (Query("sum by (job) (up) / count by (job) (up)", "{{job}}"),),
                    kind="bargauge",
                    thresholds=at_least(1, 1),
                    most=1,
                ),
                Panel(
                    "Alerts",
                    "Alerts that fire or are about to, by name.",
                    "short",
                    (Query("count by (alertname, alertstate) (ALERTS) or vector(0)", "{{alertname}} {{alertstate}}"),),
                    kind="bargauge",
                    thresholds=at_most(1, 1),
                ),
                Panel(
                    "What cannot be read",
                    "Runs, ranks' metrics and the operator's files that the exporter cannot read; its log says why.",
                    "short",
                    (
                        Query("sum(dflash_run_unreadable)", "runs"),
                        Query("sum(dflash_training_metrics_unreadable)", "ranks"),
                        Query("sum(dflash_operations_unreadable)", "operator's files"),
                    ),
                    kind="stat",
                    thresholds=at_most(1, 1),
                ),
            ),
        ),
        Row(
            "Queues",
            (
                Panel(
                    "Jobs by queue",
                    "abandoned: of a worker that shows no sign of life. scheduled: tried again later.",
                    "short",
                    (Query('sum by (queue, state) (dflash_queue_jobs{state!="failed"})', "{{queue}} {{state}}"),),
                ),
                Panel(
                    "Failed jobs",
                    "Jobs that failed for good; `dflash-stack reconcile RUN` tries again what is missing.",
                    "short",
                    (Query('sum by (queue) (dflash_queue_jobs{state="failed"})', "{{queue}}"),),
                    thresholds=at_most(1, 1),
                ),
                Panel(
                    "Workers",
                    "Live workers by queue.",
                    "short",
                    (Query("dflash_workers", "{{queue}}"),),
                ),
                Panel(
                    "Age of the oldest job that waits",
                    "Of `train`, jobs may wait for days behind another one.",
                    "s",
                    (Query("dflash_queue_oldest_waiting_seconds", "{{queue}}"),),
                ),
                Panel(
                    "Age of the oldest job that runs",
                    "How long it has been running.",
                    "s",
                    (Query("dflash_queue_oldest_running_seconds", "{{queue}}"),),
                ),
                Panel(
                    "Time-out used",
                    "The largest share of its time-out that a running job has used; at 100 % it is tried again.",
                    "percentunit",
                    (Query("dflash_queue_running_timeout_ratio", "{{queue}}"),),
                    thresholds=at_most(0.5, 0.9),
                ),
            ),
        ),
        Row(
            "Redis and disk",
            (
                Panel(
                    "Redis' memory",
                    "When it is full, no job can be enqueued.",
                    "bytes",
                    (
                        Query("redis_memory_used_bytes", "used"),
                        Query("redis_memory_max_bytes > 0", "limit"),
                    ),
                ),
                Panel(
                    "Redis writes to its disk",
                    "1 where the last write to the append-only file, its last rewrite and the last snapshot went well.",
                    "short",
                    (
                        Query("redis_aof_last_write_status", "append-only file"),
                        Query("redis_aof_last_bgrewrite_status", "its rewriting"),
                        Query("redis_rdb_last_bgsave_status", "snapshot"),
                    ),
                    kind="stat",
                    thresholds=at_least(1, 1),
                ),
                Panel(
                    "Commands a second",
                    "That Redis answers.",
                    "short",
                    (Query(f"rate(redis_commands_processed_total[{RATE}])", "commands"),),
                ),
                Panel(
                    "Free on the disk of the runs",
                    "On a full disk, work waits until there is space.",
                    "bytes",
                    (Query("dflash_disk_free_bytes", "free"), Query("dflash_disk_size_bytes", "size")),
                ),
                Panel(
                    "Until the disk is full",
                    "At the pace of the last hour; many years while it does not fill.",
                    "s",
                    (Query("disk:dflash_disk_left:seconds", "left"),),
                    kind="stat",
                    thresholds=at_least(86400, 259200),
                ),
                Panel(
                    "Written and read",
                    "Bytes a second by all disks of the machine.",
                    "Bps",
                    (
                        Query(f"sum(rate(node_disk_written_bytes_total[{RATE}]))", "written"),
                        Query(f"sum(rate(node_disk_read_bytes_total[{RATE}]))", "read"),
                    ),
                ),
            ),
        ),
        Row(
            "Machine and monitoring",
            (
                Panel(
                    "Processor",
                    "Share of all cores that is not idle.",
                    "percentunit",
                    (Query(f'1 - avg(rate(node_cpu_seconds_total{{mode="idle"}}[{RATE}]))', "busy"),),
                    most=1,
                ),
                Panel(
                    "The machine's memory",
                    "What is there, and what programs could still get.",
                    "bytes",
                    (
                        Query("node_memory_MemTotal_bytes", "total"),
                        Query("node_memory_MemAvailable_bytes", "available"),
                    ),
                ),
                Panel(
                    "Seconds a scrape",
                    "How long each target takes to answer.",
                    "s",
                    (Query("max by (job) (scrape_duration_seconds)", "{{job}}"),),
                    thresholds=at_most(1, 5),
                ),
                Panel(
                    "Series by target",
                    "Series that Prometheus keeps of each target's last scrape.",
                    "short",
                    (Query("sum by (job) (scrape_samples_post_metric_relabeling)", "{{job}}"),),
                    stacked=True,
                    width=12,
                ),
                Panel(
                    "Series in Prometheus",
                    "In memory, those that went away within the last hours included.",
                    "short",
                    (Query("prometheus_tsdb_head_series", "series"),),
                    width=12,
                ),
            ),
        ),
    ),
)
