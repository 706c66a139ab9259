"""Shows that the parity chain can fail: breaks one line at a time in a copy of dflash, and runs the test of that link.

    python -m tests.parity.broken_lines [FILE ...]     (only lines of these files of dflash)

Exit code 1 when a test passes although its line is broken.
"""

# ruff: noqa: T201  (a command: what it prints is for the one who called it)
from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Break(NamedTuple):
    """One line of `file` changed from `old` to `new`, and the test that must fail."""

    what: str
    file: str
    old: str
    new: str
    test: str


UNIT, PARITY = "tests/unit/dflash", "tests/parity"
BLOCK = f"{PARITY}/test_zlab.py::test_a_block_after_its_context_gives_the_same_hidden_states"
DECODING = f"{PARITY}/test_zlab.py::test_greedy_decoding_gives_the_same_tokens_and_acceptance_lengths"
OBJECTIVE = f"{PARITY}/test_specforge.py::test_the_objective_and_every_gradient_are_the_same"
SAMPLED = f"{UNIT}/test_sampling.py::test_the_answers_are_distributed_as_the_targets_own"
TREE = f"{UNIT}/test_tree.py::test_decoding_with_trees_gives_the_targets_own_tokens_in_fewer_passes"
CHUNKED = f"{UNIT}/test_objective.py::test_chunked_equals_the_reference"
BREAKS = [
    Break(
        "taps one layer late",
        "target.py",
        "target.layers[i].register_forward_hook(",
        "target.layers[i + 1].register_forward_hook(",
        f"{UNIT}/test_target.py::test_features_are_the_hidden_states_after_the_tapped_layers",
    ),
    Break(
        "no early stop",
        "target.py",
        "if stop and layer_id == deepest:",
        "if layer_id is stop:",
        f"{UNIT}/test_target.py::test_layers_after_the_deepest_tap_and_the_head_do_not_run",
    ),
    Break("no norm of keys", "model.py", "self.k_norm(self._split_heads", "(self._split_heads", BLOCK),
    Break("no norm of the context", "model.py", "self.hidden_norm(self.fc(features))", "self.fc(features)", BLOCK),
    Break("another rope in config.json", "architecture.py", "architecture.rope_theta,", "10_000.0,", BLOCK),
    Break(
        "the anchor's own feature is seen",
        "mask.py",
        "keys < anchors[:, None, None]",
        "keys <= anchors[:, None, None]",
        f"{PARITY}/test_specforge.py::test_the_mask_of_one_document_is_the_same",
    ),
    Break(
        "other documents are seen",
        "mask.py",
        "context = same_document[:, None] & ",
        "context = ",
        f"{PARITY}/test_speculators.py::test_the_mask_of_packed_documents_is_the_same",
    ),
    Break(
        "a window one position too long",
        "mask.py",
        "keys > rows[..., None] - window",
        "keys >= rows[..., None] - window",
        f"{PARITY}/test_specforge.py::test_the_mask_of_one_document_is_the_same",
    ),
    Break("a sliding layer sees later rows of its block", "mask.py", "visible.tril().triu(", "visible.triu(", BLOCK),
    Break(
        "windows left out in training",
        "attention.py",
        "plan_of(window),",
        "plan_of(None),",
        f"{UNIT}/test_parity.py::test_training_forward_equals_cached_inference_forward",
    ),
    Break("labels off by one", "objective.py", "Labels(input_ids[rows],", "Labels(input_ids[rows - 1],", OBJECTIVE),
    Break("another decay", "objective.py", ".float() / gamma)", ".float() / gamma / 2)", OBJECTIVE),
    Break("a wrong slope", "objective.py", "scatter_add_(-1, ids, -c[", "scatter_add_(-1, ids, -2 * c[", CHUNKED),
    Break(
        "the teacher off by one",
        "objective.py",
        "labels.rows[part] - 1]",
        "labels.rows[part]]",
        CHUNKED,
    ),
    Break(
        "KL the other way round",
        "objective.py",
        "kl = (p * log_p.sub_(log_q)).sum(-1)",
        "kl = (q * log_q.sub(log_p)).sum(-1)",
        f"{PARITY}/test_speculators.py::test_teacher_losses_and_their_gradients_are_the_same",
    ),
    Break(
        "block positions off by one in training",
        "pack.py",
        "pack.positions[pack.anchors][:, None] + offsets[None]",
        "pack.positions[pack.anchors][:, None] + offsets[None] + 1",
        f"{UNIT}/test_parity.py::test_training_forward_equals_cached_inference_forward",
    ),
    Break(
        "features of accepted guesses missing",
        "decode.py",
        "verified.features[:, : accepted + 1]",
        "verified.features[:, :1]",
        DECODING,
    ),
    Break(
        "the bonus token counted twice",
        "acceptance.py",
        "min(run + 1,",
        "min(run + 2,",
        f"{UNIT}/test_acceptance.py::test_the_lengths_are_those_of_greedy_decoding",
    ),
    Break(
        "a refused guess replaced from the target's whole distribution",
        "sampling.py",
        "rest = (p_there - q_there).clamp(min=0)",
        "rest = p_there",
        SAMPLED,
    ),
    Break(
        "a guess kept as if the drafter had been sure of it",
        "sampling.py",
        "uniforms[:, :slots] * q_guess < p_guess",
        "uniforms[:, :slots] < p_guess",
        SAMPLED,
    ),
    Break("siblings in a tree see each other", "tree.py", "seen[node] |= seen[parent]", "seen[node] |= True", TREE),
    Break("a tree's nodes one position late", "tree.py", "position_ids=start +", "position_ids=start + 1 +", TREE),
    Break(
        "another path kept in the cache",
        "tree.py",
        "start + node for node in path",
        "start + i for i, _ in enumerate(path)",
        TREE,
    ),
    Break(
        "a server's acceptance is not compared",
        "verify.py",
        "abs(served - counted) >",
        "abs(served - served) >",
        f"{UNIT}/test_verify.py::test_a_server_that_accepts_less_fails",
    ),
    Break(
        "prompts of the training data pass as held out",
        "held_out.py",
        "np.isin(starts, lengths)",
        "np.isin(starts, lengths - 1)",
        f"{UNIT}/test_export_and_evaluate.py::test_prompts_of_the_training_data_are_refused",
    ),
]


def is_found(broken: Break, folder: Path) -> bool:
    """Whether the test fails when the line is broken, in a copy of the project at `folder`."""
    for name in ("dflash", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in (".envs", "var", "services", "images"):
        (folder / name).symlink_to(ROOT / name)
    file = folder / "dflash" / broken.file
    text = file.read_text()
    if text.count(broken.old) != 1:
        raise SystemExit(f"broken_lines: {broken.file} has {broken.old!r} {text.count(broken.old)} times, not once")
    file.write_text(text.replace(broken.old, broken.new))
    command = [sys.executable, "tests/run_in.py", "-q", "-x", "-p", "no:cacheprovider", broken.test]
    status = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if status.returncode not in (0, 1):  # pytest: 0 passed, 1 failed, else it could not run
        raise SystemExit(f"broken_lines: {broken.test} did not run:\n{status.stdout[-2000:]}")
    return status.returncode == 1


def main() -> int:
    missed = 0
    chosen = [broken for broken in BREAKS if not sys.argv[1:] or broken.file in sys.argv[1:]]
    for broken in chosen:
        with tempfile.TemporaryDirectory() as folder:
            found = is_found(broken, Path(folder))
        print(f"{'found' if found else 'MISSED':6}  {broken.what} ({broken.file})", flush=True)
        missed += not found
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
