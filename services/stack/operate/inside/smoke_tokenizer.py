"""Whether this image tokenizes: the target's tokenizer gives text back as it was, and its jobs can be imported."""

import importlib
import sys
from typing import Any

TEXT = "def half(x):\n    return x / 2  # ½ of x, 一半\n"

if __name__ == "__main__":
    for module in ("services.prompts.jobs", "services.tokenizer.jobs"):
        importlib.import_module(module)
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained("/model", local_files_only=True)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    if (back := tokenizer.decode(ids)) != TEXT:
        sys.exit(f"the target's tokenizer gives {back!r} back for {TEXT!r}")
    sys.stdout.write(f"transformers {transformers.__version__} tokenizes with the target's tokenizer\n")
