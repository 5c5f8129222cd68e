"""The configuration: one strict tree of sections; ``config_file.py`` reads it.

Unknown keys, wrong types and contradictory values are errors that name key and remedy.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from easyrl.config.checks import contradictions
from easyrl.config.recipe import RecipeConfig

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
FilePath = Annotated[Path, Field(strict=False), AfterValidator(Path.expanduser)]


# Memory that trainer and endpoints of one host share; elsewhere than on Linux a folder on disk.
SHARED_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, no type is guessed, values stay as loaded."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, strict=True, allow_inf_nan=False
    )


class RunConfig(Section):
    """Where the run writes, its seed, and its mode."""

    name: str = "easyrl"
    output_dir: FilePath = Path("runs/easyrl")
    seed: NonNegativeInt = 0
    mode: Literal["async", "sync"] = "async"
    determinism: Literal["none", "strict"] = "none"  # strict: the same bits in every weight and
    # metric, however groups arrive; needs endpoints whose responses do not depend on batching
    trackers: list[Literal["tensorboard", "wandb"]] = ["tensorboard"]
    wandb_project: str = "easyrl"
    console: bool = True
    event_log: bool = True

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str) -> str:
        # part of run:attempt:v, and of the name of a folder that is removed at the end
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", value):
            raise ValueError("use letters, digits, '_', '-' and '.' only, as in my-run_2")
        return value


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021): only they are trained, the model itself is frozen."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0  # the adapters' product is scaled by alpha / rank
    target_modules: Annotated[list[str], Field(min_length=1)] = [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ]  # names of linear layers


class ModelConfig(Section):
    """The policy, a Hugging Face causal language model on disk."""

    path: FilePath
    tokenizer: FilePath | None = None  # default: path
    dtype: Literal["bf16", "fp32"] = "bf16"
    attention: Literal["auto", "reference", "merged", "flex", "varlen", "npu"] = "auto"  # of packed
    # rows; auto: the fastest that the device has
    activation_checkpointing: Literal["none", "layer", "selective"] = "none"  # what is computed
    # again in the backward pass: nothing, whole decoder layers, or all of them but matrix products
    # and attention
    checkpoint_every: PositiveInt = 1  # n: every n-th decoder layer only
    logprob_chunk_size: PositiveInt = 512  # positions projected to the vocabulary at a time
    logprob_backward: Literal["auto", "same_pass", "recompute"] = "auto"  # auto: the gradient of
    # the projection is formed with its values where the recipe's loss is a sum over tokens
    lora: LoraConfig | None = None

    @property
    def tokenizer_path(self) -> Path:
        return self.tokenizer or self.path


class FieldsConfig(Section):
    """Names of the dataset's fields."""

    prompt: str = "prompt"
    answer: str | None = "answer"


class DatasetConfig(Section):
    """Prompt files (.jsonl, .json array, .parquet) and how a record becomes a tokenised prompt."""

    files: list[FilePath] = Field(min_length=1)
    fields: FieldsConfig = FieldsConfig()
    answer_pattern: str | None = None  # regular expression; its first group is the answer
    system_prompt: str | None = None
    prompt_template: str = "{prompt}"  # the user message
    apply_chat_template: bool = True
    chat_template: FilePath | None = None  # a Jinja file; default: the tokenizer's own
    chat_template_kwargs: dict[str, Any] = {}  # e.g. enable_thinking
    max_prompt_tokens: PositiveInt = 1024
    on_long_prompt: Literal["skip", "fail"] = "skip"
    on_bad_record: Literal["fail", "skip"] = "fail"
    max_records: PositiveInt | None = None

    @field_validator("prompt_template")
    @classmethod
    def _has_placeholder(cls, value: str) -> str:
        if "{prompt}" not in value:
            raise ValueError("must contain {prompt}")
        return value

    @field_validator("answer_pattern")
    @classmethod
    def _is_regex_with_group(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            groups = re.compile(value).groups
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from None
        if groups < 1:
            raise ValueError("needs one group, such as '#### (.+)'")
        return value

    @model_validator(mode="after")
    def _chat_keys(self) -> Self:
        for key in ("system_prompt", "chat_template", "chat_template_kwargs"):
            if not self.apply_chat_template and getattr(self, key):
                raise ValueError(f"{key}: has no effect without a chat template; remove it")
        return self


class DataConfig(DatasetConfig):
    """The training prompts."""

    shuffle: bool = True
    epochs: PositiveInt = 1


class SamplingConfig(Section):
    """Sampling parameters, named as vLLM names them."""

    max_tokens: PositiveInt = 512
    temperature: NonNegativeFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1  # -1: all
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: PositiveFloat = 1.0
    min_tokens: NonNegativeInt = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False

    @field_validator("top_k")
    @classmethod
    def _top_k(cls, value: int) -> int:
        if value == 0 or value < -1:
            raise ValueError("must be -1 (all tokens) or at least 1")
        return value

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens: {self.min_tokens} is more than max_tokens, which is "
                f"{self.max_tokens}; lower it"
            )
        return self


class RolloutConfig(SamplingConfig):
    """How the training responses are sampled."""

    num_generations: Annotated[int, Field(ge=1)] = 8  # G
    allow_off_policy_sampling: bool = False  # top_p, penalties, ...: the ratios are biased
    queue_size: PositiveInt = 64  # groups that may wait between producer and trainer

    @model_validator(mode="after")
    def _on_policy(self) -> Self:
        if self.temperature == 0:
            raise ValueError(
                "temperature: 0 is greedy, a group's responses would all be equal; use 1.0"
            )
        return self


class LaunchConfig(Section):
    """Inference servers that the run starts, watches and restarts itself, on its own machine."""

    engine: Literal["vllm", "embedded"] = "vllm"
    count: PositiveInt = 1
    tensor_parallel: PositiveInt = 1  # devices per server (vllm)
    devices: list[list[int]] | None = (
        None  # per server; default: consecutive ones from 0; [] on CPU
    )
    python: FilePath | None = None  # interpreter of vLLM's environment; embedded: this one
    options: list[
        str
    ] = []  # further options of the server's command line, e.g. --max-model-len=4096
    env: dict[str, str] = {}  # further environment variables of the servers
    restart: bool = True  # start a server again that has ended

    @model_validator(mode="after")
    def _fits_engine(self) -> Self:
        if self.engine == "embedded" and self.tensor_parallel > 1:
            raise ValueError("tensor_parallel: the embedded engine runs on one device; use vllm")
        if self.engine == "vllm" and self.python is None:
            raise ValueError(
                "python: is required for engine vllm, the interpreter of the environment that vLLM "
                "is installed in, for instance .venv-vllm/bin/python"
            )
        if self.devices is not None and len(self.devices) != self.count:
            raise ValueError(f"devices: {len(self.devices)} lists for count={self.count} servers")
        for given in self.devices or []:
            if given and len(given) != self.tensor_parallel:
                raise ValueError(
                    f"devices: {given} are not tensor_parallel={self.tensor_parallel} devices"
                )
        return self


class InferenceConfig(Section):
    """The inference endpoints (``vllm serve`` or ``easyrl serve``)."""

    endpoints: list[str] = []  # base URLs of servers that somebody else runs
    launch: LaunchConfig | None = None  # servers of our own, beside or instead of them
    api_key_env: str | None = None  # name of the environment variable that holds the bearer token
    max_inflight: PositiveInt = 256  # requests at a time per endpoint
    dispatch: Literal["shortest_first", "prompt_order"] = "shortest_first"  # which groups go first
    num_fetchers: PositiveInt = 1  # processes that talk to the endpoints and decode responses
    max_retries: NonNegativeInt = 10  # per request, each on another endpoint where there is one
    progress_timeout_s: PositiveFloat = 600.0  # an endpoint silent for so long is set aside
    health_interval_s: PositiveFloat = 5.0  # between two health probes of an endpoint
    startup_timeout_s: PositiveFloat = 300.0
    max_outage_s: PositiveFloat = 1800.0  # without any endpoint; then checkpoint and stop

    @field_validator("endpoints")
    @classmethod
    def _urls(cls, value: list[str]) -> list[str]:
        cleaned = [endpoint_url(url) for url in value]
        if len(set(cleaned)) != len(cleaned):
            raise ValueError("names an endpoint twice")
        return cleaned

    @model_validator(mode="after")
    def _some_endpoint(self) -> Self:
        if not self.endpoints and self.launch is None:
            raise ValueError(
                "endpoints: is empty; name the base URL of at least one server, or let the run "
                "start its own with inference.launch"
            )
        return self


def endpoint_url(url: str) -> str:
    """``url`` without a trailing slash. Raises ``ValueError`` if it is none."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not an http:// or https:// URL")
    url = url.rstrip("/")
    if url.endswith("/v1"):
        raise ValueError(f"{url!r}: leave off /v1, other routes of the server are used too")
    if "@" in url:
        raise ValueError("a URL with a user name; name the key's variable in inference.api_key_env")
    return url


class RewardConfig(Section):
    """One reward: a built-in by ``name`` or a user's ``function`` in ``file``."""

    name: Literal["exact", "math", "format"] | None = None
    file: FilePath | None = None
    function: str = "reward_func"
    weight: float = 1.0
    scope: Literal["sample", "group"] | None = None  # built-ins: sample; files: group
    timeout_s: PositiveFloat = 30.0
    kwargs: dict[str, Any] = {}  # passed to the function

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.name is None) == (self.file is None):
            raise ValueError("give either name (exact, math, format) or file")
        if self.file is not None and not self.file.is_file():
            raise ValueError(f"file: {self.file} does not exist")
        return self

    @property
    def label(self) -> str:
        return self.name or self.function


class ScoringConfig(Section):
    """How responses are scored, and the worker processes that decode and score them."""

    num_workers: PositiveInt = 2
    on_reward_error: Literal["fail", "zero", "retry"] = "fail"  # retry: again, then fail
    max_reward_retries: PositiveInt = 2  # calls after the first, with on_reward_error: retry
    truncated_reward: float | None = None  # of a response cut off at max_tokens; null: as scored
    shuffle_rewards: bool = False  # control experiment: permute rewards inside each group


class TrainerConfig(Section):
    """Batch, micro-batch, optimizer, ZeRO."""

    batch_size: PositiveInt = 32  # prompts between two weight syncs, over all ranks
    updates_per_batch: PositiveInt = 1  # optimizer steps on a batch, each on its slice of prompts
    old_policy: Literal["auto", "lagged"] = "auto"  # of the ratio; auto: the policy before the
    # batch's first update; lagged: the one before the previous update
    max_steps: PositiveInt | None = None  # default: the dataset's epochs
    packing: Literal["prompt", "tree"] = "prompt"  # a group shares its prompt; tree: all beginnings
    # that responses and prompts have in common
    max_tokens_per_micro_batch: PositiveInt = 8192  # packed
    look_ahead: bool = True  # while no group is complete: reference and old log-probabilities of
    # finished responses; not in strict or sync mode, with offload_reference, or with ZeRO 2 or 3
    # over several ranks
    learning_rate: PositiveFloat = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    weight_decay: NonNegativeFloat = 0.0
    adam_betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.999)
    adam_eps: PositiveFloat = 1e-8
    max_grad_norm: NonNegativeFloat = 1.0  # 0: no clipping
    zero_stage: Literal[0, 1, 2, 3] = 1
    offload_optimizer: bool = False
    offload_reference: bool = False
    max_bad_steps: PositiveInt = 3  # steps with a non-finite loss or gradient before the run stops
    grace_s: PositiveFloat = 60.0  # from SIGTERM until the run has to have saved and ended


class WeightSyncConfig(Section):
    """How weights reach the endpoints, and how much proof is asked for."""

    transport: Literal["auto", "file", "http", "nccl", "hccl"] = "auto"  # auto: files where the
    # endpoint sees the directory, else http; nccl, hccl: broadcast between devices
    directory: FilePath = SHARED_MEMORY  # of the weights: shared memory, or a disk that is shared
    chunk_bytes: PositiveInt = 16 * 2**20
    advertise_host: str | None = None  # name under which endpoints reach this machine for http
    port: NonNegativeInt = 0  # of the http stream; 0: a free one
    timeout_s: PositiveFloat = 600.0
    prove: bool = True  # every endpoint proves the bits of what it serves after each sync
    probe: bool = True
    canary: bool = True
    canary_tolerance: PositiveFloat | None = None  # mean |Δ log-prob|; default 1e-3 fp32, 5e-2 bf16


class EvaluationConfig(Section):
    """Evaluation on held-out prompts: pass@k and avg@k."""

    data: DatasetConfig
    every_steps: NonNegativeInt = 50  # 0: only where asked for below
    at_start: bool = True
    at_end: bool = True
    num_samples: PositiveInt = 1
    pass_at: Annotated[list[PositiveInt], Field(min_length=1)] = [1]
    sampling: SamplingConfig = SamplingConfig()
    threshold: float = 0.5  # a sample is correct if its first reward reaches this

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if max(self.pass_at) > self.num_samples:
            raise ValueError(f"pass_at: {max(self.pass_at)} needs num_samples of at least as many")
        if self.sampling.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                "num_samples: sampling.temperature of 0 is greedy, all samples would be equal; "
                "use 1, or a temperature above 0"
            )
        return self


class CheckpointConfig(Section):
    """Checkpoints in ``<output_dir>/checkpoints``, the exported model in ``<output_dir>/model``."""

    every_steps: NonNegativeInt = 0  # 0: none but on SIGTERM and in an outage
    keep: PositiveInt = 2
    background: bool = True  # written while training goes on
    export_at_end: bool = True


class JournalConfig(Section):
    """Finished groups in ``<output_dir>/journal``, for resume in mid-batch, verify and replay."""

    fsync: Literal["group", "batch", "never"] = "batch"  # a killed process loses nothing with any;
    # what a machine that goes down may lose: nothing, groups of the open batch, more
    keep: Literal["resumable", "all"] = "resumable"  # resumable: back to the oldest checkpoint


class WatchdogConfig(Section):
    """Ends a run that makes no progress, with all stacks in the log."""

    window_s: NonNegativeFloat = 3600.0  # 0: no watchdog
    min_tokens_per_s: NonNegativeFloat = 0.0  # generated and trained tokens of this rank, mean over
    # the window; 0: a run with any progress at all goes on


class Config(Section):
    """The whole tree."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    inference: InferenceConfig
    rewards: list[RewardConfig] = Field(min_length=1)
    scoring: ScoringConfig = ScoringConfig()
    recipe: RecipeConfig = RecipeConfig()
    trainer: TrainerConfig = TrainerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    evaluation: EvaluationConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    journal: JournalConfig = JournalConfig()
    watchdog: WatchdogConfig = WatchdogConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = contradictions(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self
