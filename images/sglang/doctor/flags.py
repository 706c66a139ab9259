"""The server's options: those that cannot work on the card are refused, those of another version are spelled anew."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from .installation import Fault

ATTENTION = (
    "--attention-backend", "--prefill-attention-backend", "--decode-attention-backend",
    "--speculative-draft-attention-backend",
)  # fmt: skip


class Refusal(NamedTuple):
    """Values of some options that cannot work on SM120."""

    options: tuple[str, ...]
    values: tuple[str, ...]
    why: str
    instead: str


REFUSALS = (
    Refusal(ATTENTION, ("fa3",), "FlashAttention 3 has kernels for SM90 only", "flashinfer"),
    Refusal(ATTENTION, ("fa4",), "FlashAttention 4 has no kernels for SM120", "flashinfer"),
    Refusal(ATTENTION, ("triton",), "Triton's attention needs more shared memory than SM120 has", "flashinfer"),
    Refusal(ATTENTION, ("trtllm_mha", "trtllm_mla"), "TensorRT-LLM's attention is for SM100 only", "flashinfer"),
    Refusal(("--mm-attention-backend",), ("fa3", "fa4"), "FlashAttention 3 and 4 have no kernels for SM120", "sdpa"),
    Refusal(("--fp8-gemm-backend",), ("deep_gemm", "flashinfer_deepgemm"), "DeepGEMM is not for SM120", "triton"),
    Refusal(("--moe-runner-backend",), ("deep_gemm",), "DeepGEMM is not for SM120", "triton"),
    Refusal(
        ("--linear-attn-backend", "--linear-attn-prefill-backend", "--linear-attn-decode-backend"),
        ("flashinfer",), "flashinfer's gated delta net has no kernels for SM120", "triton",
    ),
)  # fmt: skip

RENAMED = (
    ("--mamba-scheduler-strategy", "--mamba-radix-cache-strategy"),
    ("--speculative-dflash-draft-window-size", "--speculative-draft-window-size"),
    ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"),
    ("--cuda-graph-bs", "--cuda-graph-bs-decode"),
    ("--nsa-prefill-backend", "--dsa-prefill-backend"),
    ("--nsa-decode-backend", "--dsa-decode-backend"),
    ("--stream-output", "--incremental-streaming-output"),
)
"""Options that mean the same, as one version or another of the server spells them."""

STRATEGY = ("--mamba-scheduler-strategy", "--mamba-radix-cache-strategy")
EXTRA_BUFFER = ("extra_buffer", "extra_buffer_lazy")


def asked_of_server() -> str:
    """What the server's own --help prints. Takes as long as importing the server: half a minute."""
    command = [sys.executable, "-m", "sglang.launch_server", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if not known_options(result.stdout):
        last = (result.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise RuntimeError(f"the server's --help gives no options: {last}")
    return result.stdout


def known_options(help_text: str) -> frozenset[str]:
    """The options that a `--help` lists."""
    lines = re.findall(r"^  (-\S.*?)(?:  .*)?$", help_text, flags=re.MULTILINE)
    return frozenset(option for line in lines for option in re.findall(r"(?<![\w-])--[\w-]+", line))


def spelled_for(arguments: Sequence[str], known: frozenset[str]) -> tuple[list[str], list[str]]:
    """The same arguments as this server spells them, and a line for each one that was changed."""
    spelled, changes = [], []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        other = next((name for names in RENAMED if option in names for name in names if name in known), option)
        if option not in known and other != option:
            changes.append(f"{option} is {other} in this version of the server")
            argument = f"{other}{equals}{value}"
        spelled.append(argument)
    return spelled, changes


def faults(arguments: Sequence[str], known: frozenset[str]) -> Iterator[Fault]:
    """What this server does not know, and what cannot work on the card. `arguments` as `spelled_for` returns them."""
    given = list(_pairs(arguments, known))
    for option, value in given:
        if option not in known:
            near = get_close_matches(option, known, n=1)
            yield Fault(f"{option} is no option of this server", f"use {near[0]}" if near else "see its --help")
        for refusal in REFUSALS:
            if option in refusal.options and value in refusal.values:
                yield Fault(f"{option} {value}: {refusal.why}", f"{option} {refusal.instead}")
    options = dict(given)
    strategy = next((f"{name} {options[name]}" for name in STRATEGY if options.get(name) in EXTRA_BUFFER), None)
    if "--enable-mixed-chunk" in options and strategy:
        yield Fault(
            f"--enable-mixed-chunk with {strategy}: the answers come out corrupted",
            f"{strategy.split()[0]} no_buffer, or no --enable-mixed-chunk",
        )


def _pairs(arguments: Sequence[str], known: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Each option with its first value, "" where it has none; a shortened option, as argparse takes it, in full."""
    for number, argument in enumerate(arguments):
        if not argument.startswith("--"):
            continue
        option, equals, value = argument.partition("=")
        following = arguments[number + 1] if number + 1 < len(arguments) else "--"
        longer = [name for name in known if name.startswith(option)]
        whole = longer[0] if option not in known and len(longer) == 1 else option
        yield whole, value if equals else ("" if following.startswith("--") else following)
