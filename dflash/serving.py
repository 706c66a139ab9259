"""What a running SGLang server makes of a drafter: its answers, and how many verifications they took."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import Request, urlopen

from dflash.errors import DflashError

TIMEOUT = 600.0  # seconds for one answer


class Served(NamedTuple):
    """One answer of the server as token ids, and the verifications that it took."""

    prompt_ids: list[int]
    tokens: list[int]
    verifications: int


def ask_server(url: str, prompts: list[list[int]], max_new_tokens: int, at_once: int) -> list[Served]:
    """Have the server at `url` answer every prompt greedily, `at_once` of them at a time.

    Raises DflashError when it cannot be reached, refuses, or does not decode with a drafter.
    """
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(partial(_ask, url.rstrip("/"), max_new_tokens), prompts))


def _ask(url: str, max_new_tokens: int, prompt: list[int]) -> Served:
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens}}
    try:
        request = Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=TIMEOUT) as response:
            answer: Any = json.load(response)
        tokens, facts = [int(token) for token in answer["output_ids"]], answer["meta_info"]
    except (OSError, URLError, ValueError, KeyError, TypeError) as error:
        raise DflashError(f"{url}: no usable answer from /generate ({error})") from error
    if "spec_verify_ct" not in facts:
        raise DflashError(
            f"{url}: the server decodes without a drafter: start it with --speculative-algorithm DFLASH "
            "--speculative-draft-model-path DRAFTER"
        )
    return Served(prompt, tokens, int(facts["spec_verify_ct"]))
