"""One implementation's training step at one shape, in its environment: IMPLEMENTATION SEQUENCE/LAYERS/BLOCK/ANCHORS.

Makes model and data, and then for each line on standard input takes one step (forward, loss, backward,
clipping, AdamW) and prints its seconds, its CPU seconds and the process' peak resident memory, as JSON.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH, HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 2, 576, 1536, 9, 3, 49_152
MASK, GAMMA = 16, 7.0
Step = Callable[[], torch.Tensor]


def data(sequence: int, layers: int) -> dict[str, torch.Tensor]:
    """Two documents whose first quarter is a prompt; features as the target's layers would give them."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(BATCH, sequence, dtype=torch.long)
    mask[:, : sequence // 4] = 0
    return {
        "ids": torch.randint(0, VOCABULARY, (BATCH, sequence), generator=generator),
        "mask": mask,
        "features": torch.randn(BATCH, sequence, layers * HIDDEN, generator=generator),
        "final": torch.randn(BATCH, sequence, HIDDEN, generator=generator),
        "embedding": torch.randn(VOCABULARY, HIDDEN, generator=generator) * 0.02,
    }


def draft_settings(layers: int) -> dict[str, Any]:
    """The drafter's shape as transformers names it."""
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "layer_types": ["full_attention"] * layers,
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }


def specforge(sequence: int, layers: int, block: int, anchors: int, chunk: int = 128) -> tuple[Step, Iterable[Any]]:
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from transformers import Qwen3Config

    given = data(sequence, layers)
    taps = {"mask_token_id": MASK, "target_layer_ids": list(range(layers))}
    config = Qwen3Config(**draft_settings(layers), block_size=block, num_target_layers=30, dflash_config=taps)
    config._attn_implementation = "sdpa"
    model = DFlashDraftModel(config)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    head.weight = torch.nn.Parameter(given["embedding"], requires_grad=False)
    online = OnlineDFlashModel(
        draft_model=model,
        target_lm_head=head,
        target_embed_tokens=torch.nn.Embedding.from_pretrained(given["embedding"]),
        mask_token_id=MASK,
        block_size=block,
        attention_backend="sdpa",
        num_anchors=anchors,
        loss_decay_gamma=GAMMA,
        objective_chunk_blocks=chunk,
    )

    def loss() -> torch.Tensor:
        value: torch.Tensor = online(given["ids"], given["features"], given["mask"].float())[0]
        value.backward()
        return value

    return loss, model.parameters()


def specforge_whole(*shape: int) -> tuple[Step, Iterable[Any]]:
    """SpecForge with all logits kept, which it recomputes by default."""
    return specforge(*shape, chunk=0)


def speculators(sequence: int, layers: int, block: int, anchors: int) -> tuple[Step, Iterable[Any]]:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses.utils import resolve_loss_config
    from speculators.models.dflash.config import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    given = data(sequence, layers)
    layer_config = Qwen3Config(**draft_settings(layers))
    layer_config._attn_implementation = "sdpa"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer_config,
        draft_vocab_size=VOCABULARY,
        block_size=block,
        aux_hidden_state_layer_ids=list(range(1, layers + 1)),
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=block - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
    )
    model = DFlashDraftModel(config)
    with torch.no_grad():
        for weight in (model.embed_tokens.weight, model.lm_head.weight, model.verifier_lm_head.weight):
            weight.copy_(given["embedding"])
        model.verifier_norm.weight.fill_(1.0)
    packed = {
        "hidden_states": given["features"].flatten(0, 1)[None],
        "input_ids": given["ids"].flatten()[None],
        "loss_mask": given["mask"].flatten()[None],
        "verifier_last_hidden_states": given["final"].flatten(0, 1)[None],
        "document_ids": torch.arange(BATCH).repeat_interleave(sequence)[None],
        "position_ids": torch.arange(sequence).repeat(BATCH)[None],
    }

    # Cross entropy of the target's likeliest token; its fused losses need a GPU.
    terms = resolve_loss_config("ce", "eager")

    def loss() -> torch.Tensor:
        value: torch.Tensor = model(**packed, gamma=GAMMA, max_anchors=BATCH * anchors, loss_config=terms)[1]
        value.backward()
        return value

    return loss, [parameter for parameter in model.parameters() if parameter.requires_grad]


def ours(sequence: int, layers: int, block: int, anchors: int) -> tuple[Step, Iterable[Any]]:
    from transformers import Qwen3Config

    from dflash.config import TrainingConfig
    from dflash.data import Sample
    from dflash.features import TargetStates
    from dflash.initialize import architecture_for
    from dflash.model import DraftModel
    from dflash.pack import build_pack
    from dflash.step import accumulate_gradient
    from dflash.target import TargetEnds

    given = data(sequence, layers)
    config = TrainingConfig.model_validate(
        {"target": "t", "dataset": "d", "output": "o", "steps": 1, "anchors": BATCH * anchors, "gamma": GAMMA}
        | {"draft": {"num_layers": layers, "block_size": block, "target_layer_ids": list(range(layers))}}
    )
    text = Qwen3Config(**draft_settings(layers) | {"num_hidden_layers": 30, "layer_types": None})
    model = DraftModel(architecture_for(config.draft, text, MASK))
    target = TargetEnds(torch.nn.Embedding.from_pretrained(given["embedding"]), given["embedding"], Path())
    samples = [
        Sample(ids.numpy(), mask.numpy().astype(np.int8)) for ids, mask in zip(given["ids"], given["mask"], strict=True)
    ]
    states = TargetStates(given["features"].flatten(0, 1), None)
    rng = np.random.default_rng(0)

    def loss() -> torch.Tensor:
        # Drawn and packed anew in each step, as the peers do.
        chosen = [
            np.sort(rng.choice(np.flatnonzero(sample.loss_mask)[:-1], anchors, replace=False)) for sample in samples
        ]
        pack = build_pack(samples, chosen, torch.device("cpu"))
        return accumulate_gradient(model, target, pack, states, config)[0].loss

    return loss, model.parameters()


def main() -> None:
    implementation, shape = sys.argv[1:3]
    torch.manual_seed(0)
    made = {"ours": ours, "specforge": specforge, "specforge_whole": specforge_whole, "speculators": speculators}
    loss, parameters = made[implementation](*map(int, shape.split("/")))
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the peers print
    for line in sys.stdin:
        if not line.strip():
            break
        begun, cpu = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        value = loss()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        found = {
            "seconds": time.perf_counter() - begun,
            "cpu": time.process_time() - cpu,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "loss": float(value.detach()),
            "parameters": sum(parameter.numel() for parameter in parameters),
        }
        out.write(json.dumps(found) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
