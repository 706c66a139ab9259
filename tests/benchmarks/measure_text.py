"""Conversations to samples in this process: WAY TOKENIZER CONVERSATIONS; ours, or the reference: render and encode."""

import json
import sys
from pathlib import Path
from typing import Any

from services import chat
from services.tokenizer.replies import ReplyFinder
from tests.benchmarks.measured import measured_here, tell


def main() -> None:
    way, folder, path = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    tokenizer = chat.load_tokenizer(folder)
    conversations = [json.loads(line)["messages"] for line in path.open(encoding="utf-8")]

    def ours() -> list[list[int]]:
        finder = ReplyFinder(tokenizer)
        return [row.input_ids for messages in conversations for row in finder.rows(messages)]

    def reference() -> list[list[int]]:
        return [chat.render(tokenizer, messages, add_generation_prompt=False) for messages in conversations]

    work: Any = {"ours": ours, "reference": reference}[way]
    reference()[:1]  # compiles
    measured = measured_here(work)
    tell(measured._replace(result={"samples": len(measured.result), "tokens": sum(map(len, measured.result))}))


if __name__ == "__main__":
    main()
