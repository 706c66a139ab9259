"""A run's standing: prompts from its files, jobs and servers from Redis."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from rich.console import Group, RenderableType
from rich.table import Table
from rq import Worker

from services.chunks import Chunk
from services.control import read_control, submitted_chunks
from services.ledger import GenerateCounter, GenerateCounts, count_assembled, total
from services.live import read_live
from services.queues import job_id, job_states, queue
from services.runs import Run
from services.stack.number_table import number_table


class StatusView:
    """Shown once, or again and again: what was counted before is not read anew."""

    def __init__(self, run: Run, connection: Redis | None) -> None:
        self._run = run
        self._connection = connection
        self._counter = GenerateCounter(run)
        self._assembled: dict[str, dict[str, Any]] = {}

    def render(self) -> RenderableType:
        counts = self._counter.count()
        assembled = count_assembled(self._run, self._assembled)
        parts: list[RenderableType] = [_prompts_table(self._run, counts, assembled), *_reasons(counts)]
        control = read_control(self._run)
        if control.paused:
            parts.append(f"[yellow]paused: {control.paused}; go on with `dflash-stack resume {self._run.name}`[/]")
        try:
            if self._connection is not None and counts:
                chunks = submitted_chunks(self._run)
                left = total(self._counter.count({chunk.chunk for chunk in chunks}).values()).waiting
                time_left = partial(_time_left, left, total(counts.values()))
                parts += _from_redis(self._run, chunks, time_left, self._connection)
        except RedisError as error:
            parts.append(f"[yellow]Redis does not answer ({error}): jobs, servers and rates are not known[/]")
        return Group(*parts)


def _prompts_table(run: Run, counts: dict[str, GenerateCounts], assembled: dict[str, dict[str, Any]]) -> Table:
    columns = ("prompts", "completed", "rejected", "failed", "in journals", "waiting", "tokens out", "samples")
    table = number_table("source", *columns, title=f"run {run.name}", gap=1)
    samples: Counter[str] = Counter()
    for of_chunk in assembled.values():
        samples[of_chunk["source"]] += of_chunk["samples"]
    for source, of_source in counts.items():
        table.add_row(source, *_cells(of_source, samples[source]))
    table.add_section()
    table.add_row("all", *_cells(total(counts.values()), samples.total()))
    return table


def _from_redis(
    run: Run, chunks: list[Chunk], time_left: Callable[[float], str], connection: Redis
) -> list[RenderableType]:
    done = sum(run.summary(chunk.chunk).is_file() for chunk in chunks)
    names = [
        job_id("generate", "generate", run.name, chunk.chunk)
        for chunk in chunks
        if not run.summary(chunk.chunk).is_file()
    ]
    states = Counter(job_states("generate", names, connection).values())
    lost = states["missing"] + states["finished"]
    live = read_live(connection, run.name)
    servers = _servers(live)
    rate = sum(server["tokens_per_second"] for server in servers.values())
    workers = Worker.count(queue=queue("generate", connection))
    line = (
        f"chunks: {len(chunks):,} submitted, {done:,} done, {states['running']:,} running, "
        f"{states['waiting']:,} waiting, {states['failed']:,} failed, {lost:,} in no queue; "
        f"{workers} workers, {sum(worker['chunks'] for worker in live)} chunks open in them"
    )
    parts: list[RenderableType] = [line]
    if states["failed"] or lost:
        parts.append(f"[yellow]`dflash-stack reconcile {run.name}` enqueues what failed or is in no queue[/]")
    if servers:
        parts.append(_servers_table(servers))
        parts.append(f"{rate:,.0f} tok/s in all; {time_left(rate)}")
    return parts


def _servers(live: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What all workers together see of each server."""
    servers: dict[str, dict[str, Any]] = {}
    for worker in live:
        for url, seen in worker["servers"].items():
            known = servers.setdefault(url, {**seen, "in_flight": 0, "tokens_per_second": 0.0})
            known["in_flight"] += seen["in_flight"]
            known["tokens_per_second"] += seen["tokens_per_second"]
            if seen["state"] != "ready":
                known.update(state=seen["state"], trouble=seen["trouble"])
    return dict(sorted(servers.items()))


def _servers_table(servers: dict[str, dict[str, Any]]) -> Table:
    table = Table("server", "state", "in flight", "tok/s", "version", "trouble")
    for url, seen in servers.items():
        rate = f"{seen['tokens_per_second']:,.0f}"
        table.add_row(url, seen["state"], str(seen["in_flight"]), rate, seen["version"] or "-", seen["trouble"])
    for column in table.columns[2:4]:
        column.justify = "right"
    return table


def _time_left(prompts: int, counts: GenerateCounts, rate: float) -> str:
    """For so many prompts, were their answers as long as those that the run has so far."""
    answered = counts.finished + counts.in_journal
    if not prompts:
        return "nothing is left to generate"
    if not rate or not answered:
        return "the time left is not known yet"
    seconds = prompts * counts.output_tokens / answered / rate
    return (
        f"about {seconds / 3600:.1f} h left for {prompts:,} prompts"
        if seconds > 3600
        else (f"about {seconds / 60:.0f} min left for {prompts:,} prompts")
    )


def _cells(counts: GenerateCounts, samples: int) -> list[str]:
    return [
        f"{counts.prompts:,}",
        f"{counts.completed:,}",
        f"{counts.rejected.total():,}",
        f"{counts.failed.total():,}",
        f"{counts.in_journal:,}",
        f"{counts.waiting:,}",
        f"{counts.output_tokens:,}",
        f"{samples:,}",
    ]


def _reasons(counts: dict[str, GenerateCounts]) -> list[str]:
    """A line for the rejected and one for the failed, where there are any: how many for which reason."""
    of_all = total(counts.values())
    found = (("rejected", of_all.rejected), ("failed", of_all.failed))
    return [
        f"{what}: {', '.join(f'{reason} {count:,}' for reason, count in reasons.most_common())}"
        for what, reasons in found
        if reasons
    ]
