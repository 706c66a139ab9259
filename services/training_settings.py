"""The parts of the configuration file that the trainer's jobs read: `train` and `evaluate`.

What `dflash.config` would refuse days later, once all prompts are answered, is refused here as the file is read. Its
rules are repeated, as who reads the file has no dflash.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from services.section import Section


class DraftSettings(Section):
    """Shape of the draft model; whether it suits the target is seen when that is read."""

    num_layers: int = Field(default=5, ge=1)
    block_size: int = Field(default=32, ge=2, description="the anchor and the positions drafted after it")
    target_layer_ids: tuple[int, ...] | None = Field(default=None, description="taps; null: spread over the target")
    mask_token_id: int | None = Field(default=None, description="must own a row in the target's embedding")
    init: Literal["random", "target"] = Field(default="random", description="fresh, or from the target's layers")
    init_layer_ids: tuple[int, ...] | None = Field(default=None, description="the target's layers to begin from")
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = Field(
        default=None, description="one for each layer; null: all full_attention"
    )
    sliding_window: int | None = Field(default=None, ge=2, description="positions that a sliding_attention layer sees")

    @model_validator(mode="after")
    def _init_layers_match(self) -> Self:
        if self.init_layer_ids is not None:
            if self.init != "target":
                raise ValueError("init_layer_ids needs init: target")
            if len(self.init_layer_ids) != self.num_layers:
                raise ValueError(f"init_layer_ids must name {self.num_layers} layers, one for each draft layer")
        return self

    @model_validator(mode="after")
    def _windows_match(self) -> Self:
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types must name {self.num_layers} types, one for each draft layer")
        if ("sliding_attention" in (self.layer_types or ())) != (self.sliding_window is not None):
            raise ValueError("sliding_window belongs to layer_types with a sliding_attention: give both or neither")
        return self


class ObjectiveSettings(Section):
    """The weight of each term of the loss, as `dflash.config.ObjectiveConfig` explains them."""

    ce: float = Field(default=1.0, ge=0)
    dpace: float = Field(default=0.0, ge=0)
    kl: float = Field(default=0.0, ge=0)
    tv: float = Field(default=0.0, ge=0)
    lk_alpha: float = Field(default=0.0, ge=0)
    lk_lambda: float = Field(default=0.0, ge=0)
    dpace_alpha: float = Field(default=0.5, ge=0, le=1)
    lk_eta: float = Field(default=3.0, gt=0)

    @model_validator(mode="after")
    def _has_a_term(self) -> Self:
        if not (self.ce or self.dpace or self.kl or self.tv or self.lk_alpha or self.lk_lambda):
            raise ValueError("every term has weight 0: give ce, dpace, kl, tv, lk_alpha or lk_lambda a weight")
        return self


class AcceptanceSettings(Section):
    """Measuring acceptance on the held-out prompts while training."""

    every: int = Field(ge=1, description="steps between measurements")
    max_new_tokens: int = Field(default=128, ge=2, description="most tokens of the target's answer to a prompt")
    feature_cache_bytes: int = Field(default=0, ge=0, description="memory for the answers' features")


class MixtureSettings(Section):
    """Which samples an epoch takes, by source."""

    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={}, description="how often an epoch takes the samples of a source; 1 where it is not named"
    )
    replay_share: float | None = Field(
        default=None, gt=0, lt=1, description="part of an epoch's tokens from the corpus that was there before"
    )

    @model_validator(mode="after")
    def _existing_is_given_once(self) -> Self:
        if self.replay_share is not None and "existing" in self.weights:
            raise ValueError("replay_share decides how much of `existing` is taken: give it no weight")
        return self


class TopologySettings(Section):
    """The processes of a training run, one a device."""

    targets: int = Field(default=0, ge=0, description="processes that run the target; 0: each drafter runs it itself")
    drafters: int = Field(default=1, ge=1, description="processes that train")
    cards_per_target: int = Field(default=1, ge=1, description="cards of each target, whose layers are split over them")
    look_ahead_bytes: int = Field(default=8 * 2**30, ge=1, description="host memory of each target for states to come")
    shard_optimizer: bool = Field(default=False, description="share AdamW's state out among the drafters")

    @property
    def cards(self) -> int:
        """Cards in all, where the device is `cuda`."""
        return self.drafters + self.targets * self.cards_per_target

    @model_validator(mode="after")
    def _only_targets_have_several_cards(self) -> Self:
        if self.cards_per_target > 1 and not self.targets:
            raise ValueError("cards_per_target needs targets: a colocated drafter has its target on its own card")
        return self


class MemorySettings(Section):
    """What a training process may use; a plan that is over it is refused before any weight is loaded."""

    limit_bytes: int | None = Field(default=None, ge=1, description="null: what is free on a CUDA device")
    baseline_bytes: int = Field(default=0, ge=0, description="held before anything is loaded, as measured")


class TrainSettings(Section):
    """How the drafter is trained. `anchors` and `block_size` carry the signal, `token_budget` only costs memory.

    Apart from `job_timeout` and `dataset`, the keys are those of `dflash.config.TrainingConfig`.
    """

    dataset: Path | None = Field(
        default=None, description="a dataset of `dflash-stack merge --to`; null: the run's own, from `merge RUN`"
    )

    draft: DraftSettings
    steps: int = Field(ge=1)
    anchors: int = Field(default=1024, ge=1)
    anchors_per: Literal["pack", "sequence"] = "pack"
    objective: ObjectiveSettings = ObjectiveSettings()
    gamma: float | None = Field(default=None, gt=0, description="decay of position weights; null: by block size")
    learning_rate: float = Field(default=6e-4, gt=0)
    warmup_ratio: float = Field(default=0.04, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    gradient_clip: float = Field(default=1.0, gt=0)
    topology: TopologySettings = TopologySettings()
    packs_per_step: int | None = Field(default=None, ge=1, description="packs of one step; null: one a drafter")
    mixture: MixtureSettings = MixtureSettings()
    token_budget: int = Field(default=49_152, ge=2, description="most tokens of a pack")
    max_batch_size: int = Field(default=64, ge=1, description="most samples of a pack")
    max_length: int = Field(default=4096, ge=2, description="longer samples are cut")
    seed: int = Field(default=0, ge=0)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    target_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    device: str = "cuda"
    threads: int | None = Field(default=None, ge=1)
    attention: Literal["auto", "flex", "sdpa"] = Field(
        default="auto", description="flex on CUDA devices, sdpa anywhere; auto: flex where it is seen to work"
    )
    max_draft_rows: int | None = Field(default=None, ge=2, description="most block rows in memory at once; null: all")
    loss_chunk_blocks: int | None = Field(
        default=None, ge=1, description="blocks whose logits are in memory at once; null: by size"
    )
    feature_cache_bytes: int = Field(default=0, ge=0, description="memory for features kept between epochs")
    memory: MemorySettings = MemorySettings()
    acceptance: AcceptanceSettings | None = Field(
        default=None, description="measure acceptance while training and keep the best checkpoint by it"
    )
    checkpoint_every: int = Field(default=500, ge=1, description="steps")
    keep: int = Field(default=3, ge=1, description="checkpoints to keep, beside the first and the best")
    log_every: int = Field(default=10, ge=1, description="steps")
    stall_seconds: float = Field(default=1800, gt=0, description="a process that does not go on for so long is hung")
    job_timeout: int = Field(default=14 * 24 * 3600, gt=0, description="seconds")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_length > self.token_budget:
            raise ValueError(f"max_length {self.max_length} does not fit into token_budget {self.token_budget}")
        if self.max_draft_rows is not None and self.max_draft_rows < self.draft.block_size:
            raise ValueError(f"max_draft_rows {self.max_draft_rows} is less than one block of {self.draft.block_size}")
        if self.packs_per_step is not None and self.packs_per_step % self.topology.drafters:
            raise ValueError(
                f"packs_per_step {self.packs_per_step} is not a multiple of topology.drafters {self.topology.drafters}"
            )
        if self.attention == "flex" and not self.device.startswith("cuda"):
            raise ValueError(f"attention: flex trains on CUDA devices only, not on {self.device}: use auto or sdpa")
        topology = self.topology
        several = max(topology.drafters, topology.targets, topology.cards_per_target) > 1
        if self.device.startswith("cuda:") and several:
            raise ValueError(
                f"device {self.device} is one card, and topology needs {topology.cards}: use device cuda, "
                "which gives each process its own"
            )
        return self


class EvaluateSettings(Section):
    """How acceptance is measured: options of `dflash evaluate`."""

    max_new_tokens: int = Field(default=256, ge=2)
    batch_size: int = Field(default=8, ge=1)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    device: str = "cuda"
    threads: int | None = Field(default=None, ge=1)
    job_timeout: int = Field(default=24 * 3600, gt=0, description="seconds")
