"""What z-lab's dflash 0.1.0 answers (`dflash.model`)."""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dflash.model import DFlashDraftModel, build_target_layer_ids, dflash_generate
from tests.parity.peers.exchange import answer


def _draft(folder: str) -> DFlashDraftModel:
    model, loading = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not loading["missing_keys"], loading
    assert not loading["unexpected_keys"], loading
    return model.eval()


def forward(tensors: dict[str, Tensor], draft: str) -> dict[str, Tensor]:
    """Hidden states of one block after its context: features [1, context, ..], inputs [1, block, hidden]."""
    model = _draft(draft)
    length = tensors["features"].shape[1] + tensors["inputs"].shape[1]
    with torch.no_grad():
        hidden = model(
            position_ids=torch.arange(length)[None],
            noise_embedding=tensors["inputs"],
            target_hidden=tensors["features"],
        )
    return {"hidden": hidden}


def generate(tensors: dict[str, Tensor], draft: str, target: str, max_new_tokens: int) -> dict[str, Tensor]:
    """Greedy decoding of each prompt [count, length]: tokens and acceptance lengths, one row each, -1 after the end."""
    model, big = _draft(draft), AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    # return_stats is the only way to the acceptance lengths, and synchronizes CUDA to take times.
    torch.cuda.synchronize = lambda: None
    answers = {}
    for row, prompt in enumerate(tensors["prompts"]):
        stop = [int(i) for i in tensors["stop"]]
        output = dflash_generate(model, big, prompt[None], max_new_tokens, stop, return_stats=True)
        answers[f"tokens.{row}"] = output.output_ids[0, len(prompt) :].clone()
        answers[f"lengths.{row}"] = torch.tensor(output.acceptance_lengths)
    return answers


def taps(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The default taps of each pair (layers of the target, layers of the drafter)."""
    return {str(row): torch.tensor(build_target_layer_ids(*pair.tolist())) for row, pair in enumerate(tensors["pairs"])}


answer(forward, generate, taps)
