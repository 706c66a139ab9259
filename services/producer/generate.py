"""One chunk: its prompts go out, each outcome goes to the journal at once, and the whole is published once."""

import asyncio
import errno
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import TypeVar

import structlog
from structlog.contextvars import bound_contextvars

from services.chunks import Chunk
from services.errors import UserError
from services.files import publish, publish_json
from services.ledger import check_balance
from services.producer.client import AskError, ask
from services.producer.journal import Journal, hold, journaled
from services.producer.metrics import CHUNK_SECONDS
from services.producer.outcome import ASKED_AGAIN, Answer, Question, judge
from services.producer.servers import StoppedError
from services.producer.session import Session
from services.records import Completion, Prompt, read_prompts, summarize, write_completions
from services.runs import Run

FULL_DISK = {errno.ENOSPC, errno.EDQUOT}
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
HELD_BY_ANOTHER_SECONDS = 0.5
FULL_DISK_TOLD_SECONDS = 30.0

T = TypeVar("T")


class NoSpaceError(Exception):
    """The disk stayed full for as long as a job waits; the job is retried later."""


async def generate_chunk(session: Session, chunk: Chunk, begun: Callable[[], None] = lambda: None) -> None:
    """Publish the chunk's completions and their summary; what its journal holds is not asked again.

    Nothing is done when they are published already. While another process holds the chunk, this one waits for it.
    `begun` is called when the chunk's prompts are queued, or it turned out that it has none to send.

    Raises:
        UserError: the prompts or the servers are not what the run needs, or its files may not be written.
        ServersUnavailableError, NoSpaceError: for too long; what was answered stays in the journal.
        StoppedError: the session was stopped before all prompts were sent.
    """
    run = session.run
    session.open_chunks.add(chunk.chunk)
    try:
        with bound_contextvars(run=run.name, chunk=chunk.chunk):
            while not run.summary(chunk.chunk).is_file():
                with ExitStack() as stack:
                    journal = await _hold(session, chunk, stack)
                    if journal is not None:
                        with CHUNK_SECONDS.time():
                            await _fill_and_publish(session, chunk, journal, begun)
                        break
                begun()
                if session.stopped:
                    raise StoppedError
                await asyncio.sleep(HELD_BY_ANOTHER_SECONDS)
            run.journal(chunk.chunk).unlink(missing_ok=True)
    except OSError as error:
        text = f"{error.filename or run.root}: {error.strerror}; free space or rights there"
        if error.errno in FULL_DISK:
            raise NoSpaceError(text) from error
        if error.errno in FORBIDDEN:
            raise UserError(f"{text}, then `dflash-stack reconcile {run.name}`") from error
        raise
    finally:
        begun()
        session.open_chunks.discard(chunk.chunk)


async def _hold(session: Session, chunk: Chunk, stack: ExitStack) -> Journal | None:
    async def enter() -> Journal | None:
        return stack.enter_context(hold(session.run.journal(chunk.chunk)))

    return await _when_there_is_space(session, enter)


async def _fill_and_publish(session: Session, chunk: Chunk, journal: Journal, begun: Callable[[], None]) -> None:
    run = session.run
    final = run.completions(chunk.chunk)
    if not final.is_file():
        # Its turn, before anything is awaited: chunks are served in the order in which they came.
        priority = session.next_priority()
        prompts = await asyncio.to_thread(_read_chunk, run, chunk)
        missing = [prompt for prompt in prompts if prompt.prompt_id not in journal.finished]
        structlog.get_logger().info("chunk_started", prompts=len(prompts), journaled=len(prompts) - len(missing))
        await _complete(session, missing, journal, priority, begun)
        prompt_ids = [prompt.prompt_id for prompt in prompts]
        await _when_there_is_space(session, lambda: asyncio.to_thread(_publish, session, chunk, prompt_ids))
    await _when_there_is_space(session, lambda: asyncio.to_thread(_publish_summary, run, chunk))


def _read_chunk(run: Run, chunk: Chunk) -> list[Prompt]:
    path = run.prompts(chunk.source)
    if not path.is_file():
        raise UserError(f"prompts {path} are missing; prepare the run again with `dflash-stack prepare`")
    prompts = read_prompts(path, chunk.first, chunk.count)
    check_balance(f"chunk {chunk.chunk}", chunk.count, {f"prompts in {path}": len({p.prompt_id for p in prompts})})
    return prompts


def _publish(session: Session, chunk: Chunk, prompt_ids: list[str]) -> bool:
    """Publish what the journal holds, in the order of the prompts."""
    finished = journaled(session.run.journal(chunk.chunk))
    completions = [finished[prompt_id] for prompt_id in prompt_ids]
    statuses: Counter[str] = Counter(completion.status for completion in completions)
    check_balance(f"chunk {chunk.chunk}", chunk.count, statuses)
    origin = session.origin({completion.server for completion in completions if completion.server})
    first = publish(session.run.completions(chunk.chunk), lambda path: write_completions(path, completions, origin))
    structlog.get_logger().info("chunk_published" if first else "chunk_published_by_another", **statuses)
    return first


def _publish_summary(run: Run, chunk: Chunk) -> None:
    """Counts, checksum and origin, of what was published: it may be another process's."""
    counts = summarize(run.completions(chunk.chunk))
    content = {"chunk": chunk.chunk, "source": chunk.source, "prompts": chunk.count, **counts}
    publish_json(run.summary(chunk.chunk), content)


async def _complete(
    session: Session, prompts: list[Prompt], journal: Journal, priority: int, begun: Callable[[], None]
) -> None:
    """Get every prompt's completion into the journal; a chunk of less priority fills what this one leaves."""
    stopped = False

    async def complete(prompt: Prompt) -> None:
        nonlocal stopped
        with bound_contextvars(prompt=prompt.prompt_id):
            try:
                completion = await _complete_one(session, prompt, journal, priority)
            except StoppedError:
                stopped = True
                return

            async def append() -> None:
                journal.append(completion)

            await _when_there_is_space(session, append)
            if completion.status != "completed":
                structlog.get_logger().warning(
                    f"prompt_{completion.status}", reason=completion.reason, detail=completion.detail
                )

    try:
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(complete(prompt))
            await asyncio.sleep(0)
            begun()
    except ExceptionGroup as failures:
        # Each prompt meets the same trouble: one of them tells it.
        raise failures.exceptions[0] from None
    if stopped:
        raise StoppedError


async def _complete_one(session: Session, prompt: Prompt, journal: Journal, priority: int) -> Completion:
    # One id outside the vocabulary ends an SGLang server's process.
    ids = prompt.input_ids
    if not ids or min(ids) < 0 or max(ids) >= session.vocabulary:
        detail = f"{len(ids)} ids, the vocabulary has {session.vocabulary}"
        return Completion(prompt.prompt_id, "failed", "ids outside the vocabulary", None, [], 0, 0.0, None, detail)
    settings = session.settings.generate
    # Greedy answers are the same whenever they are asked for.
    again = settings.asked_again if settings.temperature > 0 else 0
    attempts, seconds = 0, 0.0
    while True:
        reply = await ask(
            session.servers,
            ids,
            settings,
            priority,
            journal.lost[prompt.prompt_id],
            lambda server: journal.note_lost(prompt.prompt_id, server),
        )
        attempts, seconds = attempts + reply.attempts, seconds + reply.seconds
        completion = _completion(session, prompt, reply.answer, attempts, round(seconds, 3))
        if again == 0 or completion.reason not in ASKED_AGAIN:
            return completion
        again -= 1
        structlog.get_logger().info("prompt_asked_again", reason=completion.reason)


def _completion(
    session: Session, prompt: Prompt, answer: Answer | AskError, attempts: int, seconds: float
) -> Completion:
    if isinstance(answer, AskError):
        return Completion(
            prompt.prompt_id, "failed", answer.reason, None, [], attempts, seconds, answer.server, answer.detail
        )
    question = Question(prompt.input_ids, prompt.tools)
    outcome = judge(answer, session.settings.generate, question, session.thinking_ids)
    return Completion(
        prompt_id=prompt.prompt_id,
        status=outcome.status,
        reason=outcome.reason,
        finish_reason=answer.finish_reason.get("type"),
        output_ids=outcome.output_ids,
        attempts=attempts,
        seconds=seconds,
        server=answer.server,
        detail=answer.finish_reason.get("message"),
    )


async def _when_there_is_space(session: Session, write: Callable[[], Awaitable[T]]) -> T:
    """Write, and on a full disk wait for space: what is in memory is paid for."""
    pace = session.servers.pace
    began = time.monotonic()
    while True:
        try:
            return await write()
        except OSError as error:
            if error.errno not in FULL_DISK or time.monotonic() - began > pace.patience:
                raise
            if time.monotonic() - session.full_disk_told > FULL_DISK_TOLD_SECONDS:
                session.full_disk_told = time.monotonic()
                structlog.get_logger().error("disk_full", path=str(session.run.root), patience=pace.patience)
        await asyncio.sleep(pace.probe_interval)
