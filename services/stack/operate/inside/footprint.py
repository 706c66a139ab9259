"""Holds what an idle process of an image holds, stage by stage, while whoever started it reads the cards' memory.

Arguments: the modules to import, separated by commas, and "model" where /model holds one. For each stage a JSON line
tells the stage and this process's resident bytes; the next one begins when a line comes in.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no VmRSS in /proc/self/status")


def tell(stage: str) -> None:
    sys.stdout.write(json.dumps({"stage": stage, "resident": resident()}) + "\n")
    sys.stdout.flush()
    if not sys.stdin.readline():
        raise SystemExit("whoever started this is gone")


def devices(torch: Any) -> list[str]:
    return [f"cuda:{card}" for card in range(torch.cuda.device_count())] or ["cpu"]


def open_contexts(torch: Any) -> list[Any]:
    return [torch.zeros(1, device=device) for device in devices(torch)]


def run_kernels(torch: Any) -> None:
    """One step of a small transformer block on every device: products, attention, loss, gradient, optimizer."""
    functional = torch.nn.functional
    for device in devices(torch):
        weight = torch.nn.Parameter(torch.randn(256, 256, device=device, dtype=torch.bfloat16) * 0.05)
        optimizer = torch.optim.AdamW([weight])
        hidden = torch.randn(4, 8, 128, 256, device=device, dtype=torch.bfloat16) @ weight
        attended = functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
        loss = functional.cross_entropy(functional.layer_norm(attended, (256,)).flatten(0, 2).float(),
                                        torch.zeros(4 * 8 * 128, dtype=torch.long, device=device))  # fmt: skip
        loss.backward()
        optimizer.step()
        loss.item()
        if device != "cpu":
            torch.cuda.empty_cache()


def load_model(torch: Any, path: Path) -> list[Any]:
    """The model's weights, spread over the devices as they are stored."""
    load: Any = importlib.import_module("safetensors.torch").load_file
    names = devices(torch)
    return [load(file, device=names[n % len(names)]) for n, file in enumerate(sorted(path.glob("*.safetensors")))]


def main(modules: list[str], model: bool) -> None:
    for module in modules:
        importlib.import_module(module)
    tell("import")
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    held: list[Any] = open_contexts(torch)
    tell("context")
    run_kernels(torch)
    tell("kernels")
    if model:
        held += load_model(torch, Path("/model"))
        tell("model")


if __name__ == "__main__":
    main(sys.argv[1].split(","), "model" in sys.argv[2:])
