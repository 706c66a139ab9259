"""Memory against budget: cards, ranks, containers; with image changes as annotations."""

from monitoring.grafana.model import RUN, Dashboard, Panel, Query, Row, at_most

IMAGE = 'image=~"$image"'
NO_CARD = "there is no card"
NO_CONTEXT = "a process on the CPU has no CUDA context and no allocator of torch"

DASHBOARD = Dashboard(
    "dflash-memory",
    "dflash 5 Memory",
    "What cards, ranks and containers hold, against what they may. Image changes are annotations.",
    (
        Row(
            "Cards",
            (
                Panel(
                    "Memory in use by card",
                    "By dcgm-exporter where it runs, else by NVML; all processes together.",
                    "bytes",
                    (
                        Query("gpu:memory_used:bytes", "card {{gpu}}"),
                        Query("max(gpu:memory_size:bytes)", "size of a card"),
                    ),
                    empty_without_gpu=NO_CARD,
                ),
                Panel(
                    "Share of a card's memory in use",
                    "Above 95 %, the next longer batch may not fit.",
                    "percentunit",
                    (Query("gpu:memory_used:bytes / gpu:memory_size:bytes", "card {{gpu}}"),),
                    kind="bargauge",
                    thresholds=at_most(0.9, 0.95),
                    most=1,
                    empty_without_gpu=NO_CARD,
                ),
                Panel(
                    "Cards busy",
                    "Share of the time in which a kernel ran.",
                    "percentunit",
                    (Query("gpu:busy:ratio", "card {{gpu}}"),),
                    most=1,
                    empty_without_gpu=NO_CARD,
                ),
                Panel(
                    "Power",
                    "Of each card. A card far below the others waits for them.",
                    "watt",
                    (Query("gpu:power:watts", "card {{gpu}}"),),
                    width=12,
                    empty_without_gpu=NO_CARD,
                ),
                Panel(
                    "Temperature",
                    "Of each card; from about 90 °C on, cards slow down.",
                    "celsius",
                    (Query("gpu:temperature:celsius", "card {{gpu}}"),),
                    thresholds=at_most(85, 90),
                    width=12,
                    empty_without_gpu=NO_CARD,
                ),
            ),
        ),
        Row(
            "Training processes",
            (
                Panel(
                    "Held against planned",
                    "CUDA context and what torch has reserved, by rank, and what was planned for the rank.",
                    "bytes",
                    (
                        Query(f"run_rank:dflash_training_memory_held:bytes{{{RUN}}}", "{{run}} rank {{rank}} held"),
                        Query(
                            f'max by (run, rank) (dflash_training_memory_bytes{{{RUN}, kind="planned"}})',
                            "{{run}} rank {{rank}} planned",
                        ),
                    ),
                    empty_without_gpu=NO_CONTEXT,
                ),
                Panel(
                    "CUDA context against an idle process",
                    "What another torch may cost in every process. The line was measured of an idle one of this image.",
                    "bytes",
                    (
                        Query(
                            f'max by (run, rank) (dflash_training_memory_bytes{{{RUN}, kind="context"}})',
                            "{{run}} rank {{rank}}",
                        ),
                        Query(
                            'max(dflash_memory_budget_bytes{service="trainer", device!="host", stage="kernels"})',
                            "measured of an idle process",
                        ),
                    ),
                    empty_without_gpu=NO_CONTEXT,
                ),
                Panel(
                    "Allocated, reserved, peak",
                    "By torch's allocator, the fullest rank of a run. Reserved far above allocated: fragmentation.",
                    "bytes",
                    (
                        Query(
                            "max by (run, kind) (dflash_training_memory_bytes"
                            f'{{{RUN}, kind=~"allocated|reserved|peak"}})',
                            "{{run}} {{kind}}",
                        ),
                    ),
                    empty_without_gpu=NO_CONTEXT,
                ),
                Panel(
                    "Resident by rank",
                    "Memory of the rank's process on the host.",
                    "bytes",
                    (
                        Query(
                            f'max by (run, rank) (dflash_training_memory_bytes{{{RUN}, kind="resident"}})',
                            "{{run}} rank {{rank}}",
                        ),
                    ),
                ),
                Panel(
                    "Measured of idle processes",
                    "What a service's process holds before it does anything, by stage of its start (releases.jsonl).",
                    "bytes",
                    (
                        Query(
                            "max by (service, device, stage) (dflash_memory_budget_bytes)",
                            "{{service}} {{device}} {{stage}}",
                        ),
                    ),
                    kind="bargauge",
                ),
                Panel(
                    "Servers' weights and caches",
                    "As SGLang tells them; on a machine without a card they are estimates.",
                    "decgbytes",
                    (
                        Query("max by (instance) (sglang:weight_memory_usage_gb)", "{{instance}} weights"),
                        Query("max by (instance) (sglang:kv_cache_memory_usage_gb)", "{{instance}} cache"),
                    ),
                ),
            ),
        ),
        Row(
            "Containers",
            (
                Panel(
                    "Containers' memory",
                    "What the kernel cannot take back, by container.",
                    "bytes",
                    (Query(f'dflash_container_memory_bytes{{{IMAGE}, kind="working_set"}}', "{{image}} {{instance}}"),),
                ),
                Panel(
                    "Containers' memory against their limit",
                    "At 100 % the kernel kills the process with the most memory.",
                    "percentunit",
                    (
                        Query(
                            f'max by (image, instance) (dflash_container_memory_bytes{{{IMAGE}, kind="working_set"}})'
                            f' / max by (image, instance) (dflash_container_memory_bytes{{{IMAGE}, kind="limit"}})',
                            "{{image}} {{instance}}",
                        ),
                    ),
                    kind="bargauge",
                    thresholds=at_most(0.8, 0.9),
                    most=1,
                ),
                Panel(
                    "Memory of the workers' processes",
                    "Resident memory of the process that takes jobs; a job's own process is not in it.",
                    "bytes",
                    (
                        Query(
                            'process_resident_memory_bytes{job=~"dflash|producer|tokenizer|trainer"}',
                            "{{job}} {{instance}}",
                        ),
                    ),
                ),
                Panel(
                    "What runs",
                    "Version, torch, CUDA and driver of each container.",
                    "short",
                    (
                        Query(
                            f"max by (image, version, python, torch, cuda, driver) (dflash_image_info{{{IMAGE}}})",
                            "{{image}} {{version}}: torch {{torch}}, CUDA {{cuda}}, driver {{driver}}",
                        ),
                    ),
                    kind="table",
                    width=24,
                    height=6,
                ),
            ),
        ),
    ),
)
