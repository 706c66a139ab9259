"""Typed configuration of training and evaluation; unknown keys are refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dflash.architecture import SLIDING, SMALLEST_WINDOW, LayerType

DtypeName = Literal["float32", "bfloat16"]
AttentionName = Literal["auto", "flex", "sdpa"]
# What a process of a run does; colocated: both.
Role = Literal["target", "drafter", "colocated"]

# DFlash paper, A.1: decay of the position weights by block size.
PUBLISHED_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


def default_gamma(block_size: int) -> float:
    """Return gamma for a block size: the paper's, or the same ratio as at the nearest of its sizes."""
    if block_size in PUBLISHED_GAMMA:
        return PUBLISHED_GAMMA[block_size]
    nearest = min(PUBLISHED_GAMMA, key=lambda size: abs(size - block_size))
    return block_size * PUBLISHED_GAMMA[nearest] / nearest


def role_of(rank: int, targets: int, drafters: int) -> Role:
    """Return what the process `rank` does in a run of so many: the drafters come first."""
    if rank >= drafters:
        return "target"
    return "drafter" if targets else "colocated"


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DraftConfig(_Config):
    """The draft model. Widths and head counts are the target's."""

    num_layers: int = Field(default=5, ge=1, description="Decoder layers of the drafter.")
    block_size: int = Field(default=16, ge=2, description="Rows of a block: the anchor and block_size - 1 guesses.")
    target_layer_ids: tuple[int, ...] | None = Field(
        default=None,
        description="Tapped target layers, counted from 0; default: num_layers of them, spread evenly.",
    )
    mask_token_id: int | None = Field(
        default=None,
        description="Token of the slots to guess; default: what the target's tokenizer names as its mask.",
    )
    init: Literal["random", "target"] = Field(
        default="random",
        description="random: normal weights. target: copies of target layers; the deepest tap alone.",
    )
    init_layer_ids: tuple[int, ...] | None = Field(
        default=None,
        description="With init: target, the layers to copy; default: those after the deepest tap.",
    )
    layer_types: tuple[LayerType, ...] | None = Field(
        default=None, description="full_attention or sliding_attention for each layer; default: all full."
    )
    sliding_window: int | None = Field(
        default=None,
        ge=SMALLEST_WINDOW,
        description="Positions that a row of a sliding layer sees, itself included.",
    )

    @model_validator(mode="after")
    def _init_layers_match(self) -> DraftConfig:
        if self.init_layer_ids is not None:
            if self.init != "target":
                raise ValueError("init_layer_ids needs init: target")
            if len(self.init_layer_ids) != self.num_layers:
                raise ValueError(f"init_layer_ids must name {self.num_layers} layers, one for each draft layer")
        return self

    @model_validator(mode="after")
    def _windows_match(self) -> DraftConfig:
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types must name {self.num_layers} types, one for each draft layer")
        if (SLIDING in (self.layer_types or ())) != (self.sliding_window is not None):
            raise ValueError(f"sliding_window belongs to layer_types with a {SLIDING}: give both or neither")
        return self


class ObjectiveConfig(_Config):
    """The weight of each term of the loss; `dflash.objective` defines them."""

    ce: float = Field(default=1.0, ge=0, description="Cross entropy with decaying position weights.")
    dpace: float = Field(default=0.0, ge=0, description="Cross entropy with D-PACE's position weights.")
    kl: float = Field(default=0.0, ge=0, description="Divergence of the drafter from the target.")
    tv: float = Field(default=0.0, ge=0, description="Total variation: the chance of a rejection when sampling.")
    lk_alpha: float = Field(default=0.0, ge=0, description="Minus the logarithm of the chance of acceptance.")
    lk_lambda: float = Field(default=0.0, ge=0, description="KL where acceptance is rare, TV where it is likely.")
    dpace_alpha: float = Field(default=0.5, ge=0, le=1, description="Smoothing of D-PACE's confidences.")
    lk_eta: float = Field(default=3.0, gt=0, description="How soon lk_lambda goes from KL to TV.")

    @model_validator(mode="after")
    def _has_a_term(self) -> ObjectiveConfig:
        if not (self.ce or self.dpace or self.needs_teacher):
            raise ValueError("every term has weight 0: give ce, dpace, kl, tv, lk_alpha or lk_lambda a weight")
        return self

    @property
    def needs_teacher(self) -> bool:
        """Whether a term compares with the target's distribution: a step then runs the whole target."""
        return bool(self.kl or self.tv or self.lk_alpha or self.lk_lambda)


class AcceptanceConfig(_Config):
    """Measuring acceptance while training, on prompts that are in no training sample."""

    prompts: Path = Field(description="JSONL with prompt_id, source and input_ids on each line.")
    every: int = Field(ge=1, description="Steps between measurements; the first is before step 1.")
    max_new_tokens: int = Field(default=128, ge=2, description="Most tokens of the target's answer to a prompt.")
    rollouts: Path | None = Field(
        default=None,
        description="File that keeps what the target alone answers; default: rollouts.jsonl in the run's folder.",
    )
    feature_cache_bytes: int = Field(default=0, ge=0, description="Memory for the answers' features.")


class MemoryConfig(_Config):
    """What a process may use, for the plan that is made before any weight is loaded."""

    limit_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Memory of the device; default: what is free on a CUDA device, no limit on a CPU.",
    )
    baseline_bytes: int = Field(
        default=0, ge=0, description="What a process holds before it loads anything, as measured; with limit_bytes."
    )


class MixtureConfig(_Config):
    """Which samples an epoch takes, by source; `dflash.sources` says how a sample's source is known."""

    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={},
        description="How often an epoch takes the samples of a source: 0.5 half of them, 2 all of them twice; else 1.",
    )
    replay_share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Part of an epoch's tokens that is from the corpus that was there before, the source `existing`.",
    )

    @model_validator(mode="after")
    def _existing_is_given_once(self) -> MixtureConfig:
        if self.replay_share is not None and "existing" in self.weights:
            raise ValueError("replay_share decides how much of `existing` is taken: give it no weight")
        return self


class TopologyConfig(_Config):
    """The processes of a run, one a device but for targets on several cards; drafters come first in their numbering."""

    targets: int = Field(
        default=0,
        ge=0,
        description="Processes that run the target for the drafters; 0: each drafter runs it itself (colocated).",
    )
    drafters: int = Field(default=1, ge=1, description="Processes that train, each on packs of its own.")
    cards_per_target: int = Field(
        default=1, ge=1, description="Cards of each target process; the target's layers are split over them."
    )
    look_ahead_bytes: int = Field(
        default=8 * 2**30,
        ge=1,
        description="Host memory of each target for states that no drafter has taken yet; at least one pack.",
    )
    shard_optimizer: bool = Field(default=False, description="Share AdamW's state out among the drafters.")

    @property
    def processes(self) -> int:
        """Processes in all."""
        return self.targets + self.drafters

    @property
    def cards(self) -> int:
        """Cards in all, where the device is `cuda`."""
        return self.drafters + self.targets * self.cards_per_target

    def cards_of(self, rank: int) -> list[int]:
        """Return the numbers of a rank's cards: drafters have the first, one each, and targets the next."""
        if rank < self.drafters:
            return [rank]
        first = self.drafters + (rank - self.drafters) * self.cards_per_target
        return list(range(first, first + self.cards_per_target))

    @model_validator(mode="after")
    def _only_targets_have_several_cards(self) -> TopologyConfig:
        if self.cards_per_target > 1 and not self.targets:
            raise ValueError("cards_per_target needs targets: a colocated drafter has its target on its own card")
        return self


class TrainingConfig(_Config):
    """One training run."""

    target: Path = Field(description="Hugging Face folder of the target model.")
    dataset: Path = Field(description="Folder written by `save_to_disk` with input_ids, loss_mask and seq_len.")
    output: Path = Field(description="Folder of the run: checkpoints/ and metrics.jsonl. An old run there goes on.")
    draft: DraftConfig = DraftConfig()
    steps: int = Field(ge=1, description="Optimizer steps of the whole run; the learning rate ends there.")
    anchors: int = Field(default=512, ge=1, description="Blocks to train on, counted as anchors_per says.")
    anchors_per: Literal["pack", "sequence"] = Field(
        default="pack",
        description="pack: for one step in all, shared evenly; sequence: at most for each sample.",
    )
    objective: ObjectiveConfig = ObjectiveConfig()
    gamma: float | None = Field(default=None, gt=0, description="Decay of position weights; default by block size.")
    learning_rate: float = Field(default=6e-4, gt=0, description="Peak learning rate of AdamW.")
    warmup_ratio: float = Field(default=0.04, ge=0, lt=1, description="Part of the steps with rising learning rate.")
    weight_decay: float = Field(default=0.0, ge=0)
    gradient_clip: float = Field(default=1.0, gt=0, description="Largest gradient norm.")
    topology: TopologyConfig = TopologyConfig()
    packs_per_step: int | None = Field(
        default=None,
        ge=1,
        description="Packs of one optimizer step, a multiple of the drafters; default: one a drafter.",
    )
    mixture: MixtureConfig = MixtureConfig()
    token_budget: int = Field(default=8192, ge=2, description="Most tokens of a pack.")
    max_batch_size: int = Field(default=64, ge=1, description="Most samples in one step.")
    max_length: int = Field(default=3072, ge=2, description="Longer samples are cut to this many tokens.")
    seed: int = Field(default=0, ge=0)
    dtype: DtypeName = Field(
        default="float32",
        description="Arithmetic of the drafter; its weights stay float32, the head computes in target_dtype.",
    )
    target_dtype: DtypeName = Field(default="float32", description="Weights and arithmetic of the target.")
    device: str = Field(default="cpu", description="A torch device; cuda: a card for each process.")
    threads: int | None = Field(default=None, ge=1, description="CPU threads of torch; default: torch's choice.")
    attention: AttentionName = Field(
        default="auto",
        description="flex: block-sparse flex attention, on CUDA; sdpa: by prefix; auto: flex where it is seen to work.",
    )
    max_draft_rows: int | None = Field(
        default=None,
        ge=2,
        description="Most block rows in memory at once; a step with more goes through them in groups. Same gradient.",
    )
    loss_chunk_blocks: int | None = Field(
        default=None,
        ge=1,
        description="Blocks whose logits are in memory at once; default: 64 MiB of them on a CPU, 1 GiB on CUDA.",
    )
    feature_cache_bytes: int = Field(
        default=0,
        ge=0,
        description="Memory for target features kept between epochs; for runs on little data.",
    )
    memory: MemoryConfig = MemoryConfig()
    acceptance: AcceptanceConfig | None = Field(
        default=None,
        description="Measure acceptance while training and keep the best checkpoint by it.",
    )
    checkpoint_every: int = Field(default=500, ge=1, description="Steps between checkpoints.")
    keep: int = Field(default=2, ge=1, description="Newest checkpoints to keep, beside the first and the best.")
    log_every: int = Field(default=10, ge=1, description="Steps that one line of metrics covers.")
    stall_seconds: float = Field(
        default=1800, gt=0, description="A process that does not go on for so long counts as hung, and the run ends."
    )

    @model_validator(mode="after")
    def _longest_sample_fits(self) -> TrainingConfig:
        if self.max_length > self.token_budget:
            raise ValueError(f"max_length {self.max_length} does not fit into token_budget {self.token_budget}")
        return self

    @model_validator(mode="after")
    def _a_block_fits(self) -> TrainingConfig:
        if self.max_draft_rows is not None and self.max_draft_rows < self.draft.block_size:
            raise ValueError(f"max_draft_rows {self.max_draft_rows} is less than one block of {self.draft.block_size}")
        return self

    @model_validator(mode="after")
    def _flex_has_its_device(self) -> TrainingConfig:
        if self.attention == "flex" and not self.tries_flex:
            raise ValueError(f"attention: flex trains on CUDA devices only, not on {self.device}: use auto or sdpa")
        return self

    @model_validator(mode="after")
    def _every_drafter_has_as_many_packs(self) -> TrainingConfig:
        if self.step_packs % self.topology.drafters:
            raise ValueError(
                f"packs_per_step {self.packs_per_step} is not a multiple of topology.drafters {self.topology.drafters}"
            )
        return self

    @model_validator(mode="after")
    def _every_process_has_its_card(self) -> TrainingConfig:
        topology = self.topology
        several = max(topology.drafters, topology.targets, topology.cards_per_target) > 1
        if self.device.startswith("cuda:") and several:
            raise ValueError(
                f"device {self.device} is one card, and topology needs {topology.cards}: use device cuda, "
                "which gives each process its own"
            )
        return self

    @property
    def tries_flex(self) -> bool:
        """Whether the drafter's attention may be flex attention."""
        return self.attention != "sdpa" and self.device.startswith("cuda")

    def measures_after(self, step: int) -> bool:
        """Whether acceptance is measured after `step` steps."""
        return self.acceptance is not None and (step % self.acceptance.every == 0 or step == self.steps)

    @property
    def step_packs(self) -> int:
        """Packs of one optimizer step, over all drafters."""
        return self.packs_per_step or self.topology.drafters

    @property
    def effective_gamma(self) -> float:
        """The decay of the position weights in use."""
        return self.gamma if self.gamma is not None else default_gamma(self.draft.block_size)


Guessing = Literal["greedy", "sampled"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: the names and meanings are those of SGLang's requests."""

    temperature: float  # above 0
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary
    guessing: Guessing = "greedy"


class EvaluationConfig(_Config):
    """One evaluation of one drafter on held-out prompts."""

    target: Path = Field(description="Hugging Face folder of the target model.")
    draft: Path = Field(description="An exported drafter, or the `draft` folder of a checkpoint.")
    prompts: Path = Field(description="JSONL with prompt_id, source, input_ids and maybe thinking on each line.")
    dataset: Path | None = Field(default=None, description="Training data; prompts that begin a sample are refused.")
    report: Path = Field(description="The JSON report to write.")
    rollouts: Path = Field(description="File that keeps what the target alone answers, shared by evaluations.")
    max_new_tokens: int = Field(default=256, ge=2, description="Most tokens to produce for a prompt.")
    batch_size: int = Field(default=8, ge=1, description="Prompts decoded at once.")
    temperature: float = Field(default=0.0, ge=0, description="0: greedily; above: sampled tokens.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Of sampling: the likeliest tokens of this mass.")
    top_k: int = Field(default=-1, ge=-1, description="Of sampling: so many of the likeliest tokens; -1: all.")
    guessing: Guessing = Field(
        default="greedy", description="Of sampling: guesses are the likeliest tokens (as SGLang's) or are sampled too."
    )
    seed: int = Field(default=0, ge=0, description="Of sampling.")
    tree_budget: int | None = Field(
        default=None, ge=1, description="Also decode with draft trees of so many nodes, greedily."
    )
    dtype: DtypeName = Field(default="float32", description="Weights and arithmetic of target and drafter.")
    device: str = Field(default="cpu", description="A torch device.")
    threads: int | None = Field(default=None, ge=1, description="CPU threads of torch; default: torch's choice.")
    tie_gap: float = Field(
        default=1e-3,
        ge=0,
        description="Where the target's two best logits are closer than this, either may win.",
    )

    @model_validator(mode="after")
    def _trees_are_greedy(self) -> EvaluationConfig:
        if self.tree_budget is not None and self.temperature > 0:
            raise ValueError("tree_budget: draft trees are decoded greedily, with temperature 0")
        return self

    @property
    def sampling(self) -> Sampling | None:
        """How tokens are drawn; None: greedily."""
        if self.temperature == 0:
            return None
        return Sampling(self.temperature, self.top_p, self.top_k, self.guessing)
