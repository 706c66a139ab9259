"""Starts SGLang on a machine with no GPU; the CPU image's entry point, and the demo's.

    serve.py --model DIR [--served-model-name NAME] [--host ADDRESS] [--port PORT] [any option of SGLang's server]

What follows the known options goes to the server as it is. The process becomes the server.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a folder: nothing is fetched
    # A waiting thread that spins takes a core from the very thread that it waits for, once anything else runs here.
    "OMP_WAIT_POLICY": "passive",
    # sgl_kernel and sitecustomize, for the server and each process that it spawns.
    "PYTHONPATH": str(HERE / "path"),
}

OPTIONS = [
    "--device=cpu",
    "--attention-backend=torch_native",
    # Processors without AVX512-bf16 are faster in float32, and greedy answers equal transformers' own.
    "--dtype=float32",
    "--enable-metrics",
    # On two cores the overlapping scheduler only competes with the model.
    "--disable-overlap-schedule",
    # Every prompt of a run is asked for once: a prefix cache would only cost.
    "--disable-radix-cache",
    # An idle scheduler would take most of a core.
    "--sleep-on-idle",
    # Otherwise the cache of keys and values takes most of the memory.
    "--max-total-tokens=16384",
    "--max-running-requests=48",
]


def fault(model: Path, host: str, port: int) -> str | None:
    """What keeps the server from starting, in one line, or None."""
    if not (model / "config.json").is_file():
        return f"{model} is no model folder (it has no config.json): give one that transformers can load to --model"
    if unreadable := [file.name for file in model.iterdir() if not os.access(file, os.R_OK)]:
        return f"{model}/{unreadable[0]} cannot be read by user {os.getuid()}: chmod a+r it"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            return f"cannot listen on {host}:{port} ({error}): stop what listens there or give another --port"
    return None


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description="Serve a model with SGLang on the CPU.", allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--served-model-name", help="name under /v1/models; the folder's by default")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    known, further = parser.parse_known_args()
    if message := fault(known.model, known.host, known.port):
        sys.exit(f"serve: {message}")
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        f"--model-path={known.model}",
        f"--served-model-name={known.served_model_name or known.model.resolve().name}",
        f"--host={known.host}",
        f"--port={known.port}",
        *OPTIONS,
        *further,
    ]
    os.execve(sys.executable, command, os.environ | ENVIRONMENT)


if __name__ == "__main__":
    main()
