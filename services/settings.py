"""The one place of configuration: a YAML file, checked against these models, unknown keys forbidden.

Environment variables carry only addresses and secrets (`Addresses`). A run keeps a copy of its settings
in `run.json`, so that every later stage sees what the first one saw.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.errors import UserError
from services.section import Section
from services.training_settings import EvaluateSettings, TrainSettings

Fraction = Annotated[float, Field(ge=0, le=1)]


class TargetSettings(Section):
    """The model whose answers the drafter learns to foresee."""

    path: Path = Field(description="folder with config.json, safetensors, tokenizer and chat template")
    served_name: str = Field(description="name under which SGLang serves it (--served-model-name)")
    context_length: int = Field(gt=0, description="tokens of prompt and answer together")


class RowsSettings(Section):
    """Rows of one shape: where they are, and which columns hold the conversation and its tools."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    files: list[Path] = Field(default=[], description="local files: .jsonl, .json, .parquet, the first two also .gz")
    dataset: str | None = Field(default=None, description="in place of files: id of a data set on the hub")
    revision: str | None = Field(default=None, description="of the data set; a commit, since a branch moves")
    data_files: list[str] = Field(default=[], description="patterns of the files to take from the data set")
    adapter: Literal["messages", "sharegpt", "turns", "question"] = Field(
        description="shape of a row: OpenAI messages, ShareGPT turns, a list of user turns, or one question column"
    )
    column: str = Field(description="column that holds the conversation or the question")
    input_column: str | None = Field(default=None, description="column whose text follows the question, if any")
    tools_column: str | None = Field(default=None, description="column that holds the tools, if there is one")
    tools_in_system: bool = Field(default=False, description="<tools> in the system prompt, <tool_call> in answers")
    instruction: str = Field(default="", description="put before the question, with an empty line between")
    prompt: Literal["last_turn", "first_turn"] = Field(
        default="last_turn", description="up to the last turn that awaits an answer, or to the first user turn"
    )

    @model_validator(mode="after")
    def _says_where_the_rows_are(self) -> Self:
        if bool(self.files) == bool(self.dataset):
            raise ValueError(f"{self.name}: give either files or dataset")
        if self.dataset and not (self.revision and self.data_files):
            raise ValueError(f"{self.name}: a dataset needs revision and data_files")
        return self

    @model_validator(mode="after")
    def _options_fit_the_adapter(self) -> Self:
        if self.instruction and self.adapter not in {"question", "turns"}:
            raise ValueError(f"instruction is for adapters question and turns, and adapter is {self.adapter}")
        if self.input_column and self.adapter != "question":
            raise ValueError(f"input_column is for adapter question, and adapter is {self.adapter}")
        if self.tools_in_system and self.adapter not in {"messages", "sharegpt"}:
            raise ValueError(f"tools_in_system is for adapters messages and sharegpt, and adapter is {self.adapter}")
        return self

    def columns(self) -> list[str]:
        """The columns that the adapter reads."""
        return [column for column in (self.column, self.input_column, self.tools_column) if column]


class RejectRule(Section):
    """Rows that are not wanted for what one of their columns says."""

    column: str
    values: list[str] = Field(min_length=1, description='as text; of other values "true", "false", "null" or "5"')
    reason: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="the word that they are counted under")


class FilterSettings(Section):
    """Which rows of a source are wanted."""

    languages: list[str] = Field(default=[], description="ISO 639-1 codes of those wanted; none: every language")
    language_column: str | None = Field(default=None, description="column with the language; null: it is detected")
    reject: list[RejectRule] = Field(default=[])


class SourceSettings(RowsSettings):
    """One set of prompts."""

    enabled: bool = Field(default=True, description="false: checked, but left out, as if it were not in the file")
    domain: Literal["code", "general", "math", "tools"]
    quota: int = Field(gt=0, description="prompts to generate answers for")
    held_out: int = Field(default=0, ge=0, description="further prompts kept aside to measure acceptance on")
    group_by: str | None = Field(
        default=None,
        description="column that rewrites of one question share: one of each is taken, then a second ...; "
        "of a question that is held out none is generated for",
    )
    near_duplicates: Literal["drop", "keep"] = "drop"
    filters: FilterSettings = FilterSettings()
    on_error: Literal["reject", "fail"] = Field(
        default="reject", description="a row or file that is damaged: count it and go on, or fail the source"
    )

    def columns(self) -> list[str]:
        """The columns that the adapter, the filters and the grouping read."""
        more = [self.group_by, self.filters.language_column, *(rule.column for rule in self.filters.reject)]
        return list(dict.fromkeys([*super().columns(), *(column for column in more if column)]))


class NearDuplicateSettings(Section):
    """What counts as nearly the same: Jaccard similarity of the user turns' word shingles, estimated by MinHash."""

    threshold: float = Field(default=0.8, gt=0, le=1)
    shingle: int = Field(default=3, ge=1, description="words")
    permutations: int = Field(default=128, ge=16)


class DeduplicateSettings(Section):
    """What prompts are compared with, beside each other and the prompts of merge.base."""

    near: NearDuplicateSettings | None = Field(default=NearDuplicateSettings(), description="null: exact ones only")
    against: list[RowsSettings] = Field(default=[], description="the existing corpus as text")


class DecontaminateSettings(Section):
    """The evaluation sets whose prompts must stay unseen."""

    ngram: int = Field(default=8, ge=1, description="words in a row that are enough to drop a prompt")
    against: list[RowsSettings] = Field(default=[])


class CorpusMix(Section):
    """The existing corpus by domain, to show the mix before and after."""

    samples: int = Field(gt=0)
    percent: dict[str, Annotated[float, Field(ge=0, le=100)]] = Field(description="what lacks to 100 is 'other'")

    @model_validator(mode="after")
    def _no_more_than_all(self) -> Self:
        if (whole := sum(self.percent.values())) > 100.001:
            raise ValueError(f"percent adds up to {whole:g}, more than 100")
        return self


class PrepareSettings(Section):
    """How rows become the one set of prompts."""

    max_row_bytes: int = Field(default=16 * 2**20, gt=0, description="a longer row is rejected without parsing it")
    deduplicate: DeduplicateSettings = DeduplicateSettings()
    decontaminate: DecontaminateSettings = DecontaminateSettings()
    corpus: CorpusMix | None = None


class RenderSettings(Section):
    """How a conversation becomes token ids."""

    max_prompt_tokens: int = Field(gt=0)
    thinking: bool | None = Field(default=None, description="enable_thinking of the template; null: not passed")


class GenerateSettings(Section):
    """How answers are asked for."""

    chunk_size: int = Field(default=128, gt=0, description="prompts in a chunk: the unit of work and of publishing")
    concurrency: int = Field(default=64, gt=0, description="requests that one worker keeps in flight")
    max_new_tokens: int = Field(gt=0)
    temperature: float = Field(default=1.0, ge=0)
    top_p: Fraction = 1.0
    top_k: int = Field(default=-1, description="-1: the whole vocabulary")
    repetition_penalty: float = Field(default=1.0, gt=0)
    truncated: Literal["keep", "reject"] = Field(default="keep", description="an answer that reached max_new_tokens")
    max_repetition: Fraction = Field(
        default=1.0, description="largest share of an answer's 8-grams that may repeat an earlier one; 1: any"
    )
    unclosed_thinking: Literal["keep", "reject"] = Field(
        default="keep", description="an answer whose <think> is never closed by </think>"
    )
    tool_calls: Literal["keep", "check"] = Field(
        default="check", description="a call that does not parse, or names no tool of its prompt: rejected, or kept"
    )
    asked_again: int = Field(
        default=1, ge=0, description="times that a rejected answer is asked for again; sampled answers only"
    )
    attempts: int = Field(default=4, gt=0, description="tries of one prompt before it counts as failed")
    lost_connections: int = Field(
        default=2, gt=0, description="connections that a prompt may lose before it is quarantined as one that kills"
    )
    connect_timeout: float = Field(default=10, gt=0, description="seconds")
    request_timeout: float = Field(default=3600, gt=0, description="seconds for one whole answer")
    stall_timeout: float = Field(
        default=180, gt=0, description="seconds without progress after which a server is left out"
    )
    job_timeout: int = Field(default=6 * 3600, gt=0, description="seconds for one chunk")


class AssembleSettings(Section):
    """How prompt and answer become a sample."""

    max_length: int = Field(gt=0, description="tokens of a sample")
    over_length: Literal["drop", "keep_tail"] = Field(
        default="drop", description="a longer sample: drop it, or keep the prompt's tail and the whole answer; counted"
    )
    job_timeout: int = Field(default=3600, gt=0, description="seconds for one chunk")


class MergeSettings(Section):
    """What the new samples are merged with, and which of them are left out (and counted)."""

    base: Path | None = Field(default=None, description="Hugging Face dataset folder of the existing corpus")
    base_source: str = Field(default="existing", description="name of the existing corpus in reports")
    base_columns: dict[Literal["input_ids", "loss_mask", "seq_len"], str] = Field(
        default={}, description="the corpus' own names of input_ids, loss_mask and seq_len, where they are others"
    )
    min_supervised_tokens: int = Field(default=2, ge=1, description="an anchor needs a token to foresee after it")
    max_length: int | None = Field(default=None, ge=2, description="tokens of a sample; null: any")
    verify: bool = Field(default=False, description="read the whole dataset and compare before it is published")


class Settings(Section):
    """A whole configuration file."""

    target: TargetSettings
    sources: list[SourceSettings] = Field(min_length=1)
    prepare: PrepareSettings = PrepareSettings()
    render: RenderSettings
    generate: GenerateSettings
    assemble: AssembleSettings
    merge: MergeSettings = MergeSettings()
    train: TrainSettings
    evaluate: EvaluateSettings = EvaluateSettings()
    seed: int = 0

    @field_validator("sources")
    @classmethod
    def _enabled(cls, sources: list[SourceSettings]) -> list[SourceSettings]:
        enabled = [source for source in sources if source.enabled]
        if not enabled:
            raise ValueError("no source is enabled")
        return enabled

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [source.name for source in self.sources]
        if doubled := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two sources have the name {sorted(doubled)[0]!r}")
        if self.merge.base_source in names:
            raise ValueError(f"merge.base_source and a source both have the name {self.merge.base_source!r}")
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        longest = self.render.max_prompt_tokens + self.generate.max_new_tokens
        if longest > self.target.context_length:
            raise ValueError(
                f"render.max_prompt_tokens + generate.max_new_tokens = {longest} is more than "
                f"target.context_length = {self.target.context_length}"
            )
        return self


class Addresses(BaseSettings):
    """Where the other services are: the only thing read from environment variables."""

    model_config = SettingsConfigDict(env_prefix="DFLASH_")

    redis_url: str = "redis://127.0.0.1:6379/0"
    redis_password_file: Path | None = Field(default=None, description="read in place of a password in redis_url")
    servers: str = Field(default="http://127.0.0.1:30000", description="SGLang servers, separated by commas")
    runs: Path = Field(default=Path("var/runs"), description="folder of all runs")
    heartbeat: Path = Field(default=Path("/tmp/dflash-heartbeat"), description="file that a live worker touches")

    metrics_port: int | None = Field(
        default=None, ge=1, le=65535, description="port on which a worker serves /metrics; None: on none"
    )
    version: str = Field(default="dev", description="version of this project's images, as metrics tell it")
    versions: Path = Field(default=Path("images/versions.toml"), description="what each image must contain")
    releases: Path = Field(
        default=Path("operations/releases.jsonl"), description="the operator's record of images put in place"
    )
    grace: float = Field(default=90, ge=0, description="seconds that a stopped producer awaits answers in flight")

    def server_list(self) -> list[str]:
        return [server.strip().rstrip("/") for server in self.servers.split(",") if server.strip()]


def load_settings(path: Path) -> Settings:
    """Read and check a configuration file.

    Raises:
        UserError: the file is missing, is not YAML, or does not fit; every wrong key is named.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"configuration {path}: {error.strerror}; give an existing file with --config") from error
    except UnicodeDecodeError as error:
        raise UserError(f"configuration {path} is not YAML: it is no text in UTF-8") from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"configuration {path} is not YAML: {' '.join(str(error).split())}") from error
    return check_settings(content, where=f"configuration {path}")


def check_settings(content: object, where: str) -> Settings:
    """Validate what a file held; `where` names the file in the error."""
    try:
        return Settings.model_validate(content)
    except ValidationError as error:
        faults = "; ".join(_describe(fault["loc"], fault["type"], fault["msg"]) for fault in error.errors())
        raise UserError(f"{where}: {faults}") from error


def _describe(location: tuple[int | str, ...], kind: str, message: str) -> str:
    key = ".".join(str(part) for part in location)
    if kind == "extra_forbidden":
        return f"there is no key {key!r}"
    return f"{key}: {message}" if key else message.removeprefix("Value error, ")
