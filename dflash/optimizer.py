"""AdamW over the drafters: gradients added up, the state whole on each or shared out among them.

The state is kept by the parameters' names, as safetensors: no version of torch has to read another's pickles, and the
number of drafters may change.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash.config import TrainingConfig
from dflash.errors import DflashError
from dflash.model import DraftModel
from dflash.world import World

STATE_NAMES = ("step", "exp_avg", "exp_avg_sq")
RANDOM_STATE = "random_state."


class ShardedAdamW:
    """AdamW whose state each drafter keeps for its own parameters, or for all of them."""

    def __init__(self, model: DraftModel, config: TrainingConfig, world: World) -> None:
        self._world, self._clip = world, config.gradient_clip
        self._parameters = dict(model.named_parameters())
        self._owners = _share_out(self._parameters, world.drafters) if config.topology.shard_optimizer else None
        self._inner = torch.optim.AdamW(
            [self._parameters[name] for name in self._own_names()],
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
        )

    def begin(self) -> None:
        """Forget the gradients of the last step."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def collect(self) -> None:
        """Add up the gradients of all drafters; one that had nothing to learn from takes part with zeros."""
        gradients = []
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self._world.add_tensors(gradients)

    def clip(self) -> float:
        """Clip the gradients to the largest norm that they may have; return the norm that they had."""
        return float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._clip))

    def step(self, learning_rate: float) -> None:
        """Update the parameters, the same on every drafter."""
        for group in self._inner.param_groups:
            group["lr"] = learning_rate
        self._inner.step()
        if self._owners is not None:
            self._world.send_out((self._owners[name], p.data) for name, p in self._parameters.items())

    def save(self, folder: Path) -> None:
        """Write this drafter's part into `folder`: its state, and the state of its random generators.

        Training draws from seed, epoch and pack alone; the generators are kept for what torch itself may draw.
        """
        tensors = {f"{RANDOM_STATE}cpu": torch.get_rng_state()}
        if next(iter(self._parameters.values())).is_cuda:
            tensors[f"{RANDOM_STATE}cuda"] = torch.cuda.get_rng_state()
        if self._owners is not None or self._world.leads:
            for name in self._own_names():
                state = self._inner.state[self._parameters[name]]
                tensors |= {f"{name}.{key}": state[key].detach().cpu().contiguous() for key in STATE_NAMES if state}
        save_file(tensors, folder / f"drafter-{self._world.rank}.safetensors")

    def load(self, folder: Path, steps: int) -> None:
        """Load what `save` wrote after `steps` steps on any number of drafters.

        Raises DflashError when a part is missing or unreadable.
        """
        wanted = self._own_names()
        found: dict[str, Tensor] = {}
        for path in sorted(folder.glob("drafter-*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    names = set(file.keys())
                    found |= {
                        full: file.get_tensor(full)
                        for name in wanted
                        for full in (f"{name}.{key}" for key in STATE_NAMES)
                        if full in names
                    }
                    if path.name == f"drafter-{self._world.rank}.safetensors":
                        self._load_random_state({name: file.get_tensor(name) for name in names & _RANDOM_STATES})
            except (OSError, SafetensorError) as error:
                raise DflashError(f"{path}: not readable as safetensors ({error}): use an older checkpoint") from error
        if steps == 0:
            return  # before the first step there is no state
        for name in wanted:
            parameter = self._parameters[name]
            try:
                self._inner.state[parameter] = {
                    key: found[f"{name}.{key}"].to("cpu" if key == "step" else parameter.device) for key in STATE_NAMES
                }
            except KeyError as error:
                raise DflashError(f"{folder}: the optimizer's state of {name} is missing: use an older one") from error

    def _own_names(self) -> list[str]:
        if self._owners is None:
            return list(self._parameters)
        return [name for name, owner in self._owners.items() if owner == self._world.rank]

    @staticmethod
    def _load_random_state(states: dict[str, Tensor]) -> None:
        if f"{RANDOM_STATE}cpu" in states:
            torch.set_rng_state(states[f"{RANDOM_STATE}cpu"])
        if f"{RANDOM_STATE}cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states[f"{RANDOM_STATE}cuda"])


_RANDOM_STATES = {f"{RANDOM_STATE}cpu", f"{RANDOM_STATE}cuda"}


def _share_out(parameters: dict[str, torch.nn.Parameter], drafters: int) -> dict[str, int]:
    """Return the owner of each parameter: the largest goes first to whoever has least."""
    load = [0] * drafters
    owners = {}
    for name in sorted(parameters, key=lambda name: (-parameters[name].numel(), name)):
        owners[name] = load.index(min(load))
        load[owners[name]] += parameters[name].numel()
    return {name: owners[name] for name in parameters}
