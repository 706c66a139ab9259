"""Whether this image trains: a few optimizer steps on each device, and the newest checkpoint of any run loads."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any


def train_a_little(torch: Any, device: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 32)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(256, 64, device=device)
    labels = inputs[:, :32].argmax(dim=1)
    losses = []
    for _step in range(20):
        with torch.autocast(device.partition(":")[0], dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if not losses[-1] < 0.5 * losses[0]:
        sys.exit(f"{device}: the loss of a model that must learn went from {losses[0]:.3f} to {losses[-1]:.3f}")


def check_product(torch: Any, device: str) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(256, 256, dtype=torch.float64), torch.randn(256, 256, dtype=torch.float64)
    product = (left.to(device, torch.float32) @ right.to(device, torch.float32)).cpu().double()
    error = (product - left @ right).abs().max().item()
    if not error < 0.1:
        sys.exit(f"{device}: a matrix product is wrong by {error:.3g}")


def load_newest_checkpoint(runs: Path) -> str:
    whole = [path for path in runs.glob("*/train/checkpoints/step-*") if (path / "state.json").is_file()]
    if not whole:
        return "no checkpoint to load"
    newest = max(whole, key=lambda path: (path / "state.json").stat().st_mtime)
    importlib.import_module("dflash.export").load_draft(newest / "draft")
    safe_open = importlib.import_module("safetensors").safe_open
    for path in newest.glob("*.safetensors"):  # the optimizer's state, a tensor at a time: it may be large
        with safe_open(path, framework="pt") as states:
            for name in states.keys():  # noqa: SIM118 - it is no dictionary
                states.get_tensor(name)
    return f"{newest.relative_to(runs)} loads"


if __name__ == "__main__":
    torch: Any = importlib.import_module("torch")
    importlib.import_module("dflash.train")
    cards = torch.cuda.device_count()
    if "cuda" in sys.argv[1:] and cards == 0:
        sys.exit("no card is visible in this container: torch.cuda.device_count() is 0")
    for device in [f"cuda:{card}" for card in range(cards)] or ["cpu"]:
        check_product(torch, device)
        train_a_little(torch, device)
    loaded = load_newest_checkpoint(Path(os.environ["DFLASH_RUNS"]))
    sys.stdout.write(f"torch {torch.__version__} trains on {cards or 'no'} cards; {loaded}\n")
