"""The frozen target model: features at tapped layers, embedding and output head.

Feature of layer i is transformers' `hidden_states[i + 1]`: the residual stream after decoder layer i, before
any further norm. Works with any decoder that transformers loads; nothing here knows a model family.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from dflash.errors import DflashError
from dflash.files import read_json
from dflash.placement import check_device, place


@dataclass(frozen=True)
class TargetEnds:
    """What a drafter uses of its target. `head` is [vocabulary, hidden]; `embedding` maps ids to [.., hidden]."""

    embedding: nn.Embedding
    head: Tensor
    path: Path

    @property
    def device(self) -> torch.device:
        """Where embedding and head are, input and output."""
        return self.embedding.weight.device


@dataclass(frozen=True)
class Target(TargetEnds):
    """A loaded target."""

    model: PreTrainedModel
    layers: nn.ModuleList
    end_token_ids: frozenset[int]

    @property
    def text_config(self) -> Any:
        """The transformers configuration of the decoder."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def fit(self) -> TargetFit:
        """What a drafter has to fit."""
        return TargetFit(self.path, self.embedding.weight, len(self.layers))


class TargetFit(NamedTuple):
    """What a drafter has to fit: the embedding's weight [rows, hidden] of the target at `path`, and its layers."""

    path: Path
    embedding: Tensor
    layers: int


class TargetOutput(NamedTuple):
    """Features [batch, length, taps * hidden] (empty without taps) and logits [batch, length, vocabulary]."""

    features: Tensor
    logits: Tensor


class _DeepestTapReached(Exception):  # noqa: N818 - not an error: it ends a forward pass early
    pass


def load_target(path: Path, dtype: torch.dtype, *devices: str) -> Target:
    """Load the Hugging Face folder `path`, frozen, in eval mode, on `devices`: by default the CPU; several: by layers.

    Onto one CUDA device the weights go straight from the files; for several they are in the host's memory first.

    Raises DflashError when the folder is missing or unreadable, a weight of the model is not in it (it would
    be random), the model has no plain embedding and output head, or a device is not there.
    """
    if not (path / "config.json").is_file():
        raise DflashError(f"{path}: no target model here (config.json is missing)")
    for device in devices:
        check_device(device)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # transformers annotates the call without loading info, which returns a pair.
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, loading = load(
            path, dtype=dtype, local_files_only=True, output_loading_info=True, **_straight_to(devices)
        )
    except torch.cuda.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DflashError(f"{path}: cannot be loaded as a causal language model ({_one_line(error)})") from error
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise DflashError(f"{path}: {len(missing)} weights are missing, for example {missing[0]}")
    if len(devices) > 1:
        place(model, decoder_layers(model, path), [torch.device(device) for device in devices])
    elif devices:
        model.to(devices[0])
    return wrap_target(model, path)


def _straight_to(devices: tuple[str, ...]) -> dict[str, Any]:
    """Return what has transformers load onto the device; over several it would put hooks of its own between layers."""
    if len(devices) != 1 or torch.device(devices[0]).type != "cuda":
        return {}
    return {"device_map": {"": torch.device(devices[0])}}


def wrap_target(model: PreTrainedModel, path: Path) -> Target:
    """Make a Target of a model in memory; `path` is where it came from."""
    model.requires_grad_(False).train(False)
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise DflashError(f"{path}: the model has no plain input embedding and output head")
    if getattr(head, "bias", None) is not None:
        raise DflashError(f"{path}: the output head has a bias, which a drafter cannot share")
    if model.config.get_text_config(decoder=True).tie_word_embeddings and not torch.equal(
        head.weight, embedding.weight
    ):
        raise DflashError(f"{path}: the head is tied to the embedding by config.json but differs from it")
    return Target(embedding, head.weight, path, model, decoder_layers(model, path), _end_token_ids(model))


def capture(target: Target, input_ids: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
    """Return the features of `input_ids` [batch, length] as [batch, length, taps * hidden].

    The pass stops after the deepest tap; neither later layers nor the head run.
    """
    with torch.no_grad(), _taps(target, layer_ids, stop=True) as outputs, suppress(_DeepestTapReached):
        target.model(input_ids=input_ids, use_cache=False)
    return _features(target, outputs, layer_ids)


def capture_with_final(target: Target, input_ids: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the features as `capture` does, and the last hidden states [batch, length, hidden] after the final norm.

    All layers run; the head does not: the logits are the last hidden states times the head.
    """
    decoder: Any = target.model.get_decoder()  # type: ignore[no-untyped-call]
    with torch.no_grad(), _taps(target, layer_ids, stop=False) as outputs:
        final: Tensor = decoder(input_ids=input_ids, use_cache=False).last_hidden_state
    return _features(target, outputs, layer_ids), final


def forward_with_cache(
    target: Target, input_ids: Tensor, cache: Any, layer_ids: tuple[int, ...], **options: Any
) -> TargetOutput:
    """Run the whole target on `input_ids` [batch, length] after `cache`, which grows by them.

    `options` go to the model's forward: such as logits_to_keep, or a mask and positions of the caller's own.
    """
    with torch.no_grad(), _taps(target, layer_ids, stop=False) as outputs:
        logits = target.model(input_ids=input_ids, past_key_values=cache, use_cache=True, **options).logits
    features = _features(target, outputs, layer_ids) if layer_ids else logits.new_empty(0)
    return TargetOutput(features, logits)


def head_logits(target: TargetEnds, hidden: Tensor) -> Tensor:
    """Return the logits [.., vocabulary] of hidden states [.., hidden], in the head's dtype."""
    # As one matrix: on a CPU a batch of rows that are apart in memory takes ten times as long.
    rows = hidden.to(target.head.dtype).flatten(0, -2)
    return (rows @ target.head.T).view(*hidden.shape[:-1], -1)


def resolve_mask_token(target: Target, explicit: int | None) -> int:
    """Return the mask token id: `explicit`, or the mask token that the target's tokenizer names.

    Raises DflashError when there is none, or `check_mask_token` refuses it.
    """
    mask_token_id = explicit
    if mask_token_id is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(target.path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise DflashError(f"{target.path}: no mask_token_id given and no tokenizer here to name one") from error
        mask_token_id = tokenizer.mask_token_id
    if mask_token_id is None:
        raise DflashError(f"{target.path}: the tokenizer has no mask token: set mask_token_id to an unused token's id")
    check_mask_token(target.fit, mask_token_id)
    return mask_token_id


def check_mask_token(target: TargetFit, mask_token_id: int) -> None:
    """Raise DflashError unless the token owns an embedding row that carries a signal.

    A row of almost zero gives every guess slot the same empty input: drafters trained on it accept almost
    nothing.
    """
    weight = target.embedding
    if not 0 <= mask_token_id < len(weight):
        raise DflashError(f"mask token {mask_token_id} has no embedding row: {target.path} has {len(weight)} rows")
    # Summed in float32 without a copy in it, which would be gigabytes on a card.
    norms = torch.linalg.vector_norm(weight, dim=-1, dtype=torch.float32)
    if norms[mask_token_id] < 0.01 * norms.median():
        raise DflashError(
            f"mask token {mask_token_id}: its embedding row in {target.path} is almost zero "
            f"(norm {norms[mask_token_id]:.2g}, median {norms.median():.2g}): choose a trained, unused token"
        )


@contextmanager
def _taps(target: Target, layer_ids: tuple[int, ...], stop: bool) -> Iterator[dict[int, Tensor]]:
    outputs: dict[int, Tensor] = {}
    deepest = max(layer_ids, default=-1)

    def keep(layer_id: int, output: Any) -> None:
        outputs[layer_id] = output[0] if isinstance(output, tuple) else output
        if stop and layer_id == deepest:
            raise _DeepestTapReached

    handles = [
        target.layers[i].register_forward_hook(lambda _module, _inputs, output, i=i: keep(i, output)) for i in layer_ids
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _features(target: Target, outputs: dict[int, Tensor], layer_ids: tuple[int, ...]) -> Tensor:
    # Layers may be on other cards than the embedding, where the features are wanted.
    return torch.cat([outputs[i].to(target.device) for i in layer_ids], dim=-1)


def decoder_layers(model: PreTrainedModel, path: Path) -> nn.ModuleList:
    """Return the decoder's list of layers. Raises DflashError where there is none."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not found:
        raise DflashError(f"{path}: no list of {count} decoder layers found in {type(model).__name__}")
    # Experts of a layer may be as many as there are layers: the list that is least deep is the decoder's.
    return min(found, key=lambda item: item[0].count("."))[1]


def _end_token_ids(model: PreTrainedModel) -> frozenset[int]:
    generation = model.generation_config
    ids = generation.eos_token_id if generation is not None else None
    if ids is None:
        ids = model.config.get_text_config(decoder=True).eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or [])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def target_identity(path: Path) -> dict[str, str]:
    """Return a digest of the folder's config.json and of the names and sizes of its weight files."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return {"sha256": digest.hexdigest()}


def template_identity(path: Path) -> str | None:
    """Return a digest of the folder's chat template; None where it has none."""
    file, settings = path / "chat_template.jinja", path / "tokenizer_config.json"
    if file.is_file():
        return hashlib.sha256(file.read_bytes()).hexdigest()
    template = read_json(settings).get("chat_template") if settings.is_file() else None
    return None if template is None else hashlib.sha256(json.dumps(template).encode()).hexdigest()
