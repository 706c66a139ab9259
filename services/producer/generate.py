"""One chunk: its prompts go out, each outcome goes to the journal at once, and the whole is published once."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import structlog
from structlog.contextvars import bound_contextvars

from services.errors import UserError
from services.ledger import check_balance
from services.producer.client import AskError, Pace, Servers
from services.producer.journal import appending, journaled
from services.producer.outcome import judge
from services.records import Chunk, Completion, Prompt, read_prompts, write_completions
from services.runs import Run, publish, read_json
from services.settings import Settings


async def generate_chunk(
    run: Run, chunk: Chunk, settings: Settings, urls: Sequence[str], pace: Pace | None = None
) -> None:
    """Publish the chunk's completions, in the order of its prompts; what its journal holds is not asked again.

    Nothing is done when they are published already. Two workers on the same chunk at once ask some prompts
    twice, and the first to finish publishes.

    Raises:
        UserError: the prompts or the servers are not what the run needs; see `Servers`.
        ServersUnavailableError: no server was healthy for too long; what was answered stays in the journal.
    """
    with bound_contextvars(run=run.name, chunk=chunk.chunk):
        if not run.completions(chunk.chunk).exists():
            await _generate_and_publish(run, chunk, settings, urls, pace)
        run.journal(chunk.chunk).unlink(missing_ok=True)


def read_vocabulary_size(settings: Settings) -> int:
    """Rows of the target's embedding, from its config.json; multimodal configurations nest the text model's."""
    path = settings.target.path / "config.json"
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"target {path}: {error}; correct target.path") from error
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise UserError(f"target {path} has no vocab_size; correct target.path")
    return size


def _read_chunk(run: Run, chunk: Chunk) -> list[Prompt]:
    path = run.prompts(chunk.source)
    if not path.is_file():
        raise UserError(f"prompts {path} are missing; prepare the run again with `dflash-stack prepare`")
    prompts = read_prompts(path, chunk.first, chunk.count)
    check_balance(f"chunk {chunk.chunk}", chunk.count, {f"prompts in {path}": len({p.prompt_id for p in prompts})})
    return prompts


async def _generate_and_publish(
    run: Run, chunk: Chunk, settings: Settings, urls: Sequence[str], pace: Pace | None
) -> None:
    log = structlog.get_logger()
    prompts = _read_chunk(run, chunk)
    finished = journaled(run.journal(chunk.chunk))
    missing = [prompt for prompt in prompts if prompt.prompt_id not in finished]
    log.info("chunk_started", prompts=len(prompts), journaled=len(prompts) - len(missing))
    with appending(run.journal(chunk.chunk)) as append:

        def keep(completion: Completion) -> None:
            append(completion)
            finished[completion.prompt_id] = completion

        await _complete(missing, settings, urls, pace, keep)
    completions = [finished[prompt.prompt_id] for prompt in prompts]
    statuses: Counter[str] = Counter(completion.status for completion in completions)
    check_balance(f"chunk {chunk.chunk}", chunk.count, statuses)
    first = publish(run.completions(chunk.chunk), lambda path: write_completions(path, completions))
    tokens = sum(len(completion.output_ids) for completion in completions if completion.status == "completed")
    log.info("chunk_published" if first else "chunk_published_by_another", output_tokens=tokens, **statuses)


async def _complete(
    prompts: Sequence[Prompt],
    settings: Settings,
    urls: Sequence[str],
    pace: Pace | None,
    keep: Callable[[Completion], None],
) -> None:
    """Hand every prompt's completion to `keep`, with at most `generate.concurrency` requests in flight."""
    if not prompts:
        return
    log = structlog.get_logger()
    vocabulary = read_vocabulary_size(settings)
    waiting = iter(prompts)

    async def work(servers: Servers) -> None:
        for prompt in waiting:
            with bound_contextvars(prompt=prompt.prompt_id):
                completion = await _complete_one(prompt, servers, settings, vocabulary)
                keep(completion)
                if completion.status != "completed":
                    log.warning(f"prompt_{completion.status}", reason=completion.reason, detail=completion.detail)

    async with Servers(urls, settings, pace) as servers:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(settings.generate.concurrency, len(prompts))):
                    group.create_task(work(servers))
        except ExceptionGroup as failures:
            # Each worker of the group meets the same trouble: one of them tells it.
            raise failures.exceptions[0] from None


async def _complete_one(prompt: Prompt, servers: Servers, settings: Settings, vocabulary: int) -> Completion:
    # One id outside the vocabulary ends an SGLang server's process.
    if not prompt.input_ids or min(prompt.input_ids) < 0 or max(prompt.input_ids) >= vocabulary:
        detail = f"{len(prompt.input_ids)} ids, the vocabulary has {vocabulary}"
        return Completion(prompt.prompt_id, "failed", "ids outside the vocabulary", None, [], 0, 0.0, None, detail)
    reply = await servers.ask(prompt.input_ids)
    seconds = round(reply.seconds, 3)
    answer = reply.answer
    if isinstance(answer, AskError):
        return Completion(
            prompt.prompt_id, "failed", answer.reason, None, [], reply.attempts, seconds, answer.server, answer.detail
        )
    outcome = judge(answer, settings.generate)
    return Completion(
        prompt_id=prompt.prompt_id,
        status=outcome.status,
        reason=outcome.reason,
        finish_reason=answer.finish_reason.get("type"),
        output_ids=outcome.output_ids,
        attempts=reply.attempts,
        seconds=seconds,
        server=answer.server,
        detail=answer.finish_reason.get("message"),
    )
