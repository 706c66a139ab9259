import subprocess
from pathlib import Path

import pytest
import yaml

from images.sglang.doctor.flags import faults, known_options, spelled_for
from services.environments import interpreter

ROOT = Path(__file__).resolve().parents[3]
HELP = """usage: sglang serve [-h] --model-path MODEL_PATH [--attention-backend {triton,flashinfer}]

options:
  -h, --help            show this help message and exit
  --model-path MODEL_PATH, --model MODEL_PATH
                        The model; --not-an-option is named here only.
  --attention-backend {triton,flashinfer,fa3,fa4}
  --decode-attention-backend {triton,flashinfer,fa3,fa4}
  --enable-mixed-chunk  Mix --prefill and decode.
  --mamba-radix-cache-strategy {auto,no_buffer,extra_buffer}
  --speculative-draft-window-size N
"""
KNOWN = known_options(HELP)


def causes(*arguments: str) -> list[str]:
    return [fault.cause for fault in faults(arguments, KNOWN)]


def test_options_are_read_from_the_servers_help() -> None:
    assert known_options(HELP) == {
        "--help", "--model-path", "--model", "--attention-backend", "--decode-attention-backend",
        "--enable-mixed-chunk", "--mamba-radix-cache-strategy", "--speculative-draft-window-size",
    }  # fmt: skip


@pytest.mark.parametrize("backend", ["fa3", "fa4", "triton"])
@pytest.mark.parametrize("option", ["--attention-backend", "--decode-attention-backend"])
def test_attention_that_does_not_run_on_the_card_is_refused(option: str, backend: str) -> None:
    (spaced,), (joined,) = list(faults([option, backend], KNOWN)), list(faults([f"{option}={backend}"], KNOWN))
    assert spaced == joined
    assert spaced.cause.startswith(f"{option} {backend}: ")
    assert spaced.remedy == f"{option} flashinfer"


def test_attention_that_runs_is_accepted() -> None:
    assert causes("--model-path=/model", "--attention-backend=flashinfer") == []


def test_shortened_option_is_seen_through() -> None:
    assert causes("--attention", "fa3") == ["--attention-backend fa3: FlashAttention 3 has kernels for SM90 only"]


def test_mixed_chunk_with_extra_buffer_is_refused_and_with_no_buffer_is_not() -> None:
    assert causes("--enable-mixed-chunk", "--mamba-radix-cache-strategy", "extra_buffer") == [
        "--enable-mixed-chunk with --mamba-radix-cache-strategy extra_buffer: the answers come out corrupted"
    ]
    assert causes("--enable-mixed-chunk", "--mamba-radix-cache-strategy", "no_buffer") == []


def test_unknown_option_is_named_with_the_nearest() -> None:
    (fault,) = faults(["--attention-backen_d", "flashinfer"], KNOWN)
    assert (fault.cause, fault.remedy) == (
        "--attention-backen_d is no option of this server",
        "use --attention-backend",
    )


def test_option_of_another_version_is_spelled_as_this_one_does() -> None:
    given = ["--mamba-scheduler-strategy=no_buffer", "--speculative-dflash-draft-window-size", "64"]
    assert spelled_for(given, KNOWN) == (
        ["--mamba-radix-cache-strategy=no_buffer", "--speculative-draft-window-size", "64"],
        [
            "--mamba-scheduler-strategy is --mamba-radix-cache-strategy in this version of the server",
            "--speculative-dflash-draft-window-size is --speculative-draft-window-size in this version of the server",
        ],
    )
    older = KNOWN - {"--mamba-radix-cache-strategy"} | {"--mamba-scheduler-strategy"}
    assert spelled_for(["--mamba-radix-cache-strategy=auto"], older)[0] == ["--mamba-scheduler-strategy=auto"]


def test_options_that_this_version_knows_are_left_alone() -> None:
    given = ["--mamba-radix-cache-strategy", "no_buffer", "--model", "/--odd"]
    assert spelled_for(given, KNOWN) == (given, [])


@pytest.mark.slow
def test_real_server_knows_every_option_of_the_shipped_stack() -> None:
    finished = subprocess.run(
        [str(interpreter("sglang")), "-m", "doctor", "help-of-server"],
        env={"PYTHONPATH": f"{ROOT}/images/sglang:{ROOT}/images/sglang/cpu/path", "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    known = known_options(finished.stdout)
    assert len(known) > 300
    stack = yaml.safe_load((ROOT / "compose.yaml").read_text())
    command = stack["x-sglang"]["command"]
    assert spelled_for(command, known) == (command, [])
    assert list(faults(command, known)) == []
    assert list(faults(["--attention-backend=fa3"], known))
