"""The peers' own code, to be compared with: z-lab's dflash, SpecForge and speculators, at pinned versions.

Each is installed from its wheel into a folder of its own, without what it requires: the parts that are compared need
no more than the trainer's torch and transformers. It runs as a process of its own; tensors go in and out as
safetensors.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
INSTALLED = ROOT / "var" / "peers"


def install(peer: str) -> Path:
    """Return the folder that holds `peer` as its lock names it, installing it if it is not there."""
    lock = HERE / f"{peer}.lock"
    folder = INSTALLED / f"{peer}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    if not folder.is_dir():
        INSTALLED.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{peer}.", dir=INSTALLED))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--no-compile"]
        subprocess.run([*command, "--target", str(temporary), "--requirement", str(lock)], check=True)
        try:
            temporary.rename(folder)
        except OSError:  # another run was faster
            shutil.rmtree(temporary)
    return folder


def ask(peer: str, question: str, tensors: dict[str, Tensor], **values: Any) -> dict[str, Tensor]:
    """Have `peer` answer `question` (a function in peers/<peer>.py); `values` are JSON."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Cloned: safetensors refuses two names for one memory, as a tied head and embedding are.
        save_file(
            {key: tensor.clone().contiguous() for key, tensor in tensors.items()}, folder / "question.safetensors"
        )
        (folder / "question.json").write_text(json.dumps({"question": question, "values": values}))
        process = _process(peer)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{folder}\n")
        process.stdin.flush()
        error = json.loads(process.stdout.readline() or '"the process ended"')
        if error is not None:
            raise RuntimeError(f"{peer} could not answer {question}: {error}")
        return load_file(folder / "answer.safetensors")


@cache
def _process(peer: str) -> subprocess.Popen[str]:
    """One process for each peer: importing it takes far longer than any answer."""
    # -P and the order of the path: the peer's `dflash` is meant, not this project's.
    settings = {"PYTHONPATH": f"{install(peer)}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-W", "ignore", str(HERE / f"{peer}.py")]
    process = subprocess.Popen(
        command, env=os.environ | settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.kill)
    return process
