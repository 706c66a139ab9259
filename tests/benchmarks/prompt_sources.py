"""Synthetic files in the schemas of the six data sets of config/qwen3.6-27b.yaml, with the dirt that these hold.

    .envs/tokenizer/bin/python tests/benchmarks/prompt_sources.py FOLDER [--scale 0.1]

Every row is drawn from a seed. At scale 1 the files have the rows of the real ones (2.3 M of WebInstructSub), and the
shares of dirt are guesses, written down in `DIRT`. Nothing is taken from the data sets themselves.
"""

# ruff: noqa: T201, SIM905  (a command: what it prints is for the one who called it; lists of words read best as text)
import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# Rows of the real data sets.
ROWS = {
    "infinity": 660_000,
    "webinstruct": 2_335_000,
    "codefeedback": 157_000,
    "metamath": 395_000,
    "hermes": 1_893,
    "agent-training": 64_813,
    "agentinstruct": 1_866,
}
FILES = {
    "infinity": "infinity.parquet",
    "webinstruct": "webinstruct.parquet",
    "codefeedback": "codefeedback.jsonl",
    "metamath": "metamath.json",
    "hermes": "hermes.json",
    "agent-training": "agent-training.jsonl",
    "agentinstruct": "agentinstruct.parquet",
}
# Shares of rows, by what is wrong with them.
DIRT = {
    "empty": 0.002,
    "broken_alternation": 0.002,
    "copied": 0.02,
    "rewritten": 0.02,
    "long": 0.001,
    "torn": 0.0002,
    "other_language": 0.03,
    "bad_tools": 0.01,
    "only_system": 0.002,
    "evaluated": 0.0005,
}
PARQUET_ROWS = 1000

SUBJECTS = (
    "binary tree,hash table,matrix,random walk,prime number,linked list,triangle,vector field,polynomial,compiler,"
    "chemical bond,planet,cell membrane,supply curve,treaty,poem,recipe,train,garden,violin,contract,river,budget,"
    "queue,scheduler,cache,rate of interest,regular expression,web server,database index,thread pool,parser"
).split(",")
VERBS = (
    "Explain,Compare,Derive,Implement,Summarise,Criticise,Estimate,Prove,Describe,Design,Test,Simplify,Translate,"
    "Rewrite,Measure,List,Classify,Debug,Optimise,Visualise"
).split(",")
DETAILS = (
    "in plain words,step by step,for a beginner,with two examples,without recursion,in one paragraph,as a table,"
    "using only the standard library,and name its limits,and give the complexity,for a class of students,"
    "as if to a lawyer,with a counterexample,and check the result,in terms of energy,under heavy load,for large inputs"
).split(",")
PHRASE = (
    "the first value that we observe depends on how the second one was chosen and nobody has yet found a simple rule "
    "that would tell which of both comes earlier when a third is added after every even step of a longer sequence"
).split()
SYLLABLES = "ba,den,fi,gor,hul,jam,kes,lom,mir,nat,pol,rus,sev,tam,vin,wex,yor,zel".split(",")
WORDS = [
    first + second + third for first in SYLLABLES for second in SYLLABLES[:9] for third in ("", "a", "in")
] + PHRASE
# What a prompt that overlaps an evaluation set says; the set itself is evaluation.jsonl.
EVALUATED = [f"Evaluation task {number}: " + " ".join(PHRASE[number : number + 12]) + "?" for number in range(20)]


class Writer:
    """Draws questions, and decides which dirt a row gets."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.written: list[str] = []

    def dirty(self, kind: str) -> bool:
        return self.random.random() < DIRT[kind]

    def question(self) -> str:
        """A question; now and then one that was asked, or nearly asked, before, or one of an evaluation set."""
        if self.dirty("evaluated"):
            return f"Please solve this. {self.random.choice(EVALUATED)}"
        if self.written and self.dirty("copied"):
            return self.random.choice(self.written)
        if self.written and self.dirty("rewritten"):
            return self.random.choice(self.written) + " Thanks"
        draw = self.random.choice
        length = int(self.random.lognormvariate(3.2, 0.7))
        words = " ".join(self.random.choices(WORDS, k=length))
        number = self.random.randrange(10**6)
        text = f"{draw(VERBS)} the {draw(SUBJECTS)} number {number} {draw(DETAILS)}: {words} {draw(SUBJECTS)}."
        if self.dirty("long"):
            text += f" {words}" * 400
        if len(self.written) < 5000:
            self.written.append(text)
        return text

    def answer(self) -> str:
        return " ".join(self.random.choices(WORDS, k=60))


def infinity(count: int) -> Iterator[dict[str, Any]]:
    """ShareGPT turns; one in ten is a row of another source, as in the real data set."""
    write, other = Writer("infinity"), codefeedback(count)
    for number in range(count):
        question = next(other)["query"] if number % 10 == 0 else write.question()
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": write.answer()}]
        if number % 4 == 0:
            turns += [{"from": "human", "value": write.question()}, {"from": "gpt", "value": write.answer()}]
        if number % 9 == 0:
            turns.insert(0, {"from": "system", "value": "You are a careful assistant."})
        if write.dirty("empty"):
            turns[-2]["value"] = " "
        if write.dirty("broken_alternation"):
            turns.insert(-2, {"from": "human", "value": "And another thing."})
        if write.dirty("only_system"):
            turns = [{"from": "system", "value": "You are a careful assistant."}]
        names = {"ability_en": ["reasoning"], "cate_ability_en": ["logic"]}
        yield {
            "id": f"{number:032x}",
            "conversations": turns,
            "label": None if number % 50 == 0 else names,
            "langdetect": "pt" if write.dirty("other_language") else "zh-cn" if number % 12 == 0 else "en",
            "source": "demo",
        }


def webinstruct(count: int) -> Iterator[dict[str, Any]]:
    write = Writer("webinstruct")
    for number in range(count):
        question = "" if write.dirty("empty") else write.question()
        site = ("mathstackexchange", "stackexchange", "socratic")[number % 3]
        yield {
            "orig_question": question,
            "orig_answer": write.answer(),
            "source": site,
            "question": question,
            "answer": write.answer(),
            "index": number,
        }


def codefeedback(count: int) -> Iterator[dict[str, Any]]:
    write = Writer("codefeedback")
    for _ in range(count):
        question = f"{write.question()}\n\n```python\ndef solve(values):\n    return sorted(values)\n```"
        yield {"query": question, "answer": write.answer(), "resource": "evolinstruct", "lang": "python"}


def metamath(count: int) -> Iterator[dict[str, Any]]:
    """About 27 rewrites of one question, as in the real data set."""
    write = Writer("metamath")
    originals = [write.question() for _ in range(max(count // 27, 1))]
    for number in range(count):
        original = originals[number % len(originals)]
        yield {
            "type": "GSM_Rephrased",
            "query": f"{original} Say it in {2 + number % 97} ways, variant {number}.",
            "original_question": original,
            "response": write.answer(),
        }


def hermes(count: int) -> Iterator[dict[str, Any]]:
    """Tools as Python literals in the system prompt and as JSON in a column, calls in the answers' text."""
    write = Writer("hermes")
    for number in range(count):
        function = {"name": f"get_{write.random.choice(SUBJECTS).replace(' ', '.')}", "description": "It's a lookup."}
        function["parameters"] = {"type": "dict", "properties": {"of": {"type": "str"}}, "required": ["of"]}  # type: ignore[assignment]
        tools = [{"type": "function", "function": function}]
        listed = "[{broken" if write.dirty("bad_tools") else str(tools)
        system = (
            "You are a function calling AI model. You are provided with function signatures within <tools></tools> XML "
            f"tags. Do not guess values.\n<tools>\n{listed}\n</tools>\nFor each function call return a json object:\n"
            "<tool_call>\n{'arguments': <args-dict>, 'name': <function-name>}\n</tool_call>"
        )
        call = str({"name": function["name"], "arguments": {"of": "x"}})
        turns = [
            {"from": "system", "value": system},
            {"from": "human", "value": write.question()},
            {"from": "gpt", "value": f"<tool_call>\n{call}\n</tool_call>"},
        ]
        if number % 3 == 0:
            turns.append({"from": "tool", "value": '<tool_response>\n{"value": 1}\n</tool_response>'})
        column = json.dumps(tools) if number % 2 else None
        yield {"id": f"{number}", "conversations": turns, "tools": column, "category": "Demo", "task": "Look up"}


def agent_training(count: int) -> Iterator[dict[str, Any]]:
    """OpenAI messages from few templates, in several languages, with content as text, parts or null."""
    write = Writer("agent-training")
    for number in range(count):
        question = write.question() if number % 2 else f"Remind me of task {number % 4000} at nine."
        if number % 6 == 0:
            question = f"Rappelle-moi demain matin la tâche {number} que je dois encore finir avant la réunion de midi."
        call = {"function": {"name": "remind", "arguments": '{"at": "09:00"}'}}
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You are an agent."},
            {"role": "user", "content": [{"type": "text", "text": question}] if number % 5 == 0 else question},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        if number % 2:
            messages.append({"role": "tool", "name": "remind", "content": "ok"})
        if number % 400 == 0:
            messages[1]["content"] = [{"type": "image_url", "image_url": {"url": "data:"}}]
        yield {"messages": messages}


def agentinstruct(count: int) -> Iterator[dict[str, Any]]:
    write = Writer("agentinstruct")
    for number in range(count):
        turns = [
            {"from": "human", "loss": None, "value": "You are in a kitchen. Think, then act, one action a turn."},
            {"from": "gpt", "loss": False, "value": "OK."},
            {"from": "human", "loss": None, "value": write.question()},
            {"from": "gpt", "loss": True, "value": "Think: I look around. Act: look"},
        ]
        yield {"conversations": turns, "id": f"os_{number}"}


GENERATORS: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
    "infinity": infinity,
    "webinstruct": webinstruct,
    "codefeedback": codefeedback,
    "metamath": metamath,
    "hermes": hermes,
    "agent-training": agent_training,
    "agentinstruct": agentinstruct,
}


def write_sources(folder: Path, rows: dict[str, int]) -> dict[str, Path]:
    """Write the named sources with so many rows, and evaluation.jsonl; files that are there stay."""
    folder.mkdir(parents=True, exist_ok=True)
    evaluation = folder / "evaluation.jsonl"
    evaluation.write_text("".join(json.dumps({"question": question}) + "\n" for question in EVALUATED))
    paths = {}
    for name, count in rows.items():
        paths[name] = folder / FILES[name]
        if not paths[name].is_file():
            _write(paths[name], GENERATORS[name](count), random.Random(name))
    return paths


def _write(path: Path, rows: Iterator[dict[str, Any]], dirt: random.Random) -> None:
    if path.suffix == ".parquet":
        _write_parquet(path, rows)
        return
    listed = path.suffix == ".json"
    with path.open("w", encoding="utf-8") as file:
        file.write("[\n" if listed else "")
        for number, row in enumerate(rows):
            line = json.dumps(row, ensure_ascii=False)
            if not listed and dirt.random() < DIRT["torn"]:
                line = line[: len(line) // 2]
            file.write((",\n" if listed and number else "") + line + ("" if listed else "\n"))
        file.write("\n]\n" if listed else "")


def _write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    writer, batch = None, []
    for row in rows:
        batch.append(row)
        if len(batch) == PARQUET_ROWS:
            writer = _write_batch(path, writer, batch)
            batch = []
    writer = _write_batch(path, writer, batch) if batch or writer is None else writer
    writer.close()


def _write_batch(path: Path, writer: pq.ParquetWriter | None, batch: list[dict[str, Any]]) -> pq.ParquetWriter:
    table = pa.Table.from_pylist(batch, schema=writer.schema if writer else None)
    writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
    writer.write_table(table)
    return writer


def main() -> None:
    parser = argparse.ArgumentParser(description="Write synthetic files in the schemas of the six data sets.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", type=float, default=0.1, help="rows, as a share of those of the real data sets")
    arguments = parser.parse_args()
    rows = {name: max(round(count * arguments.scale), 1) for name, count in ROWS.items()}
    for name, path in write_sources(arguments.folder, rows).items():
        print(f"{name}: {rows[name]:,} rows in {path} ({path.stat().st_size / 1e6:,.1f} MB)")


if __name__ == "__main__":
    main()
