"""The configuration: one strict tree, from YAML and dotted overrides, checked before a model loads.

``load_config`` is the only entry. Unknown keys, wrong types and contradictory values raise
``ConfigError``, which lists every problem as ``key.path: what is wrong; what would be right``.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from yaml import YAMLError

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
FilePath = Annotated[Path, Field(strict=False), AfterValidator(Path.expanduser)]


# Memory that trainer and endpoints of one host share; elsewhere than on Linux a folder on disk.
SHARED_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


class ConfigError(ValueError):
    """The user's configuration cannot be used; the message names each key and the remedy."""


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


class ModelConfig(Section):
    """The policy, a Hugging Face causal language model on disk."""

    path: FilePath
    tokenizer: FilePath | None = None  # default: path
    dtype: Literal["bf16", "fp32"] = "bf16"
    gradient_checkpointing: bool = False
    logprob_chunk_size: PositiveInt = 1024  # positions projected to the vocabulary at a time

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


# Sampling with any other value draws from another distribution than the policy's.
_ON_POLICY_SAMPLING = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


class RolloutConfig(SamplingConfig):
    """How the training responses are sampled."""

    num_generations: Annotated[int, Field(ge=1)] = 8  # G
    truncated: Literal["keep", "mark", "mask"] = "keep"  # keep: as any other; mark: reward is
    # truncated_reward; mask: not trained, though its reward counts in the group's mean
    truncated_reward: float = 0.0
    allow_off_policy_sampling: bool = False  # top_p, penalties, ...: the ratios are biased
    queue_size: PositiveInt = 64  # groups that may wait between producer and trainer

    @model_validator(mode="after")
    def _on_policy(self) -> Self:
        if self.temperature == 0:
            raise ValueError(
                "temperature: 0 is greedy, a group's responses would all be equal; use 1.0"
            )
        return self


class InferenceConfig(Section):
    """The inference endpoints (``vllm serve`` or ``easyrl serve``)."""

    endpoints: list[str] = Field(min_length=1)
    api_key_env: str | None = None  # name of the environment variable that holds the bearer token
    progress_timeout_s: PositiveFloat = 600.0  # a request unanswered for so long goes elsewhere
    startup_timeout_s: PositiveFloat = 300.0
    max_retries: NonNegativeInt = 5  # per request, each on another endpoint where there is one
    max_inflight: PositiveInt = 256  # requests at a time per endpoint

    @field_validator("endpoints")
    @classmethod
    def _urls(cls, value: list[str]) -> list[str]:
        for url in value:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is not an http:// or https:// URL")
        cleaned = [url.rstrip("/") for url in value]
        if len(set(cleaned)) != len(cleaned):
            raise ValueError("names an endpoint twice")
        return cleaned


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
    """The worker processes that decode responses and score them."""

    num_workers: PositiveInt = 2
    on_reward_error: Literal["fail", "zero", "retry"] = "fail"  # retry: again, then fail
    max_reward_retries: PositiveInt = 2  # calls after the first, with on_reward_error: retry


class ObjectiveConfig(Section):
    """The policy-gradient objective (GRPO and its relatives)."""

    advantage: Literal["group_std", "group_mean"] = "group_std"  # divide by the std, or only centre
    aggregation: Literal["sequence", "token", "constant"] = "token"  # GRPO, DAPO, Dr. GRPO
    clip_eps_low: PositiveFloat = 0.2
    clip_eps_high: PositiveFloat = 0.2
    kl_coef: NonNegativeFloat = 0.0
    kl_estimator: Literal["k3", "k2"] = "k3"
    kl_in_reward_coef: NonNegativeFloat = 0.0
    entropy_coef: float = 0.0
    old_policy: Literal["auto", "lagged"] = "auto"
    shuffle_rewards: bool = False  # control experiment: permute rewards inside each group

    @property
    def has_reference(self) -> bool:
        """Whether a frozen reference model is kept."""
        return self.kl_coef > 0 or self.kl_in_reward_coef > 0

    @field_validator("kl_estimator", mode="before")
    @classmethod
    def _no_k1(cls, value: Any) -> Any:
        if value == "k1":
            raise ValueError("k1 has a zero expected gradient as a loss; use k3 or k2")
        return value


class TrainerConfig(Section):
    """Batch, micro-batch, optimizer, ZeRO."""

    batch_size: PositiveInt = 32  # prompts between two weight syncs, over all ranks
    max_steps: PositiveInt | None = None  # default: the dataset's epochs
    max_tokens_per_micro_batch: PositiveInt = 8192
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


class WeightSyncConfig(Section):
    """How weights reach the endpoints, and how much proof is asked for."""

    directory: FilePath = SHARED_MEMORY  # of the weights, seen by trainer and endpoints
    chunk_bytes: PositiveInt = 256 * 2**20
    timeout_s: PositiveFloat = 600.0
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

    every_steps: NonNegativeInt = 0  # 0: none
    keep: PositiveInt = 2
    export_at_end: bool = True


class Config(Section):
    """The whole tree."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    inference: InferenceConfig
    rewards: list[RewardConfig] = Field(min_length=1)
    scoring: ScoringConfig = ScoringConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    trainer: TrainerConfig = TrainerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    evaluation: EvaluationConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = [
            *_rollout_contradictions(self.rollout),
            *_objective_contradictions(self.objective),
            *_trainer_contradictions(self.trainer),
        ]
        if self.model.dtype == "bf16" and self.trainer.zero_stage == 0:
            problems.append(
                "trainer.zero_stage: 0 cannot accumulate bf16 gradients in fp32 (DeepSpeed refuses "
                "it); use 1, 2 or 3, or model.dtype=fp32"
            )
        if self.trainer.offload_reference and not self.objective.has_reference:
            problems.append(
                "trainer.offload_reference: has no effect without a reference model; remove it, or "
                "set objective.kl_coef or objective.kl_in_reward_coef above 0"
            )
        labels = [reward.label for reward in self.rewards]
        if len(set(labels)) != len(labels):
            problems.append(f"rewards: two are called the same ({labels}); rename a function")
        if problems:
            raise ValueError("\n".join(problems))
        return self


# ---- values that contradict each other ---------------------------------------------------------
# A value set to its default is never refused: a dumped tree names every key and must load again.


def _is_set(section: Section, key: str) -> bool:
    """Whether ``key`` has another value than its default."""
    return bool(getattr(section, key) != type(section).model_fields[key].default)


def _rollout_contradictions(rollout: RolloutConfig) -> list[str]:
    problems = []
    if rollout.num_generations < 2:
        problems.append("rollout.num_generations: a baseline needs at least 2 responses per group")
    if _is_set(rollout, "truncated_reward") and rollout.truncated != "mark":
        problems.append(
            f"rollout.truncated_reward: has no effect with truncated={rollout.truncated}; remove "
            "it, or set rollout.truncated=mark"
        )
    if not rollout.allow_off_policy_sampling:
        problems += [
            f"rollout.{key}: {getattr(rollout, key)} samples from another distribution than the "
            f"policy that is trained, its ratios are biased; use {neutral}, or set "
            "rollout.allow_off_policy_sampling=true"
            for key, neutral in _ON_POLICY_SAMPLING.items()
            if getattr(rollout, key) != neutral
        ]
    return problems


def _objective_contradictions(objective: ObjectiveConfig) -> list[str]:
    problems = []
    if objective.old_policy == "auto":
        problems += [
            f"objective.{key}: never acts with one update per batch (the ratio is 1); "
            "remove it, or set objective.old_policy=lagged"
            for key in ("clip_eps_low", "clip_eps_high")
            if _is_set(objective, key)
        ]
    if _is_set(objective, "kl_estimator") and objective.kl_coef == 0:
        problems.append(
            "objective.kl_estimator: has no effect without a KL term in the loss; remove it, or "
            "set objective.kl_coef above 0"
        )
    return problems


def _trainer_contradictions(trainer: TrainerConfig) -> list[str]:
    problems = []
    if trainer.zero_stage == 0 and trainer.offload_optimizer:
        problems.append("trainer.offload_optimizer: needs trainer.zero_stage of 1, 2 or 3")
    if trainer.max_steps and trainer.warmup_steps >= trainer.max_steps:
        problems.append("trainer.warmup_steps: must be below trainer.max_steps")
    if trainer.lr_schedule == "constant" and trainer.min_lr_ratio > 0:
        problems.append(
            "trainer.min_lr_ratio: has no effect with a constant lr_schedule; remove it"
        )
    return problems


# ---- reading -----------------------------------------------------------------------------------


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads ``path`` (YAML), applies ``key.path=value`` overrides and validates the result.

    Relative paths are taken from the working directory. Raises ``ConfigError``.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist")
    try:
        tree = OmegaConf.load(path)
        for override in overrides:
            _apply(tree, override)
        values = OmegaConf.to_container(tree, resolve=True)
    except InterpolationResolutionError as error:
        raise ConfigError(f"{path}: {error}\n(a literal ${{ is written \\${{)") from error
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return validate_config(values, source=str(path))


def _apply(tree: Any, override: str) -> None:
    """Sets one ``key.path=value`` in ``tree``; the value is read as YAML."""
    key, sep, value = override.partition("=")
    if not sep or not key.strip():
        raise ConfigError(f"override {override!r} is not of the form key.path=value")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)
        assert isinstance(parsed, dict)
        # Not a merge of trees: that cannot reach into a list, as in rewards[0].weight=2.
        OmegaConf.update(tree, key.strip(), parsed["value"], merge=True)
    except (YAMLError, OmegaConfBaseException, TypeError) as error:
        raise ConfigError(f"override {override!r}: {error}") from error


def validate_config(values: Any, source: str = "config") -> Config:
    """Validates a plain nested dict. Raises ``ConfigError``."""
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: expected a mapping of sections, got {type(values).__name__}")
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = [_describe(problem) for problem in error.errors()]
        raise ConfigError(f"{source}: {len(lines)} problem(s)\n" + "\n".join(lines)) from None


def check_paths(config: Config) -> None:
    """Checks what the configuration says about the machine: files, environment, packages.

    Raises ``ConfigError`` naming each key.

    Called before anything is loaded, on the machine of the trainer.
    """
    problems = [
        *_machine_problems(config),
        *_model_problems(config.model),
        *_dataset_problems("data", config.data),
    ]
    if config.evaluation is not None:
        problems += _dataset_problems("evaluation.data", config.evaluation.data)
    problems += _output_problems(config.run.output_dir)
    directory = config.weight_sync.directory
    if not directory.is_dir():
        problems.append(
            f"weight_sync.directory: {directory} does not exist; name a directory that trainer and "
            "endpoints both see"
        )
    elif not os.access(directory, os.W_OK):
        problems.append(f"weight_sync.directory: {directory} is not writable")
    if problems:
        raise ConfigError("\n".join(["this machine:", *(f"  {problem}" for problem in problems)]))


def _machine_problems(config: Config) -> list[str]:
    problems = []
    variable = config.inference.api_key_env
    if variable is not None and variable not in os.environ:
        problems.append(
            f"inference.api_key_env: the environment variable {variable} is not set; export it, or "
            "remove the key"
        )
    if "wandb" in config.run.trackers:
        found = importlib.util.find_spec("wandb")
        if found is None or found.origin is None:  # the latter is a folder of wandb's runs
            problems.append("run.trackers: wandb is not installed; pip install 'easyrl[wandb]'")
    return problems


def _model_problems(model: ModelConfig) -> list[str]:
    if not model.path.is_dir():
        return [
            f"model.path: {model.path} is not a directory; models are read from disk, download it "
            "first (hf download NAME --local-dir DIR)"
        ]
    problems = []
    if not (model.path / "config.json").is_file():
        problems.append(f"model.path: {model.path} has no config.json; is it a Hugging Face model?")
    if not model.tokenizer_path.is_dir():
        problems.append(f"model.tokenizer: {model.tokenizer_path} is not a directory")
    return problems


def _dataset_problems(key: str, data: DatasetConfig) -> list[str]:
    problems = [
        f"{key}.files[{i}]: {file} does not exist"
        for i, file in enumerate(data.files)
        if not file.is_file()
    ]
    if data.chat_template is not None and not data.chat_template.is_file():
        problems.append(f"{key}.chat_template: {data.chat_template} does not exist")
    return problems


def _output_problems(output_dir: Path) -> list[str]:
    existing = output_dir.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        return [f"run.output_dir: {output_dir} cannot be made, {existing} is a file"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"run.output_dir: {output_dir} cannot be written, no permission in {existing}"]
    return []


def dump_config(config: Config) -> str:
    """The resolved tree as YAML, readable by ``load_config``."""
    return OmegaConf.to_yaml(OmegaConf.create(_escape(config.model_dump(mode="json"))))


def _escape(value: Any) -> Any:
    """A tree whose strings OmegaConf reads back as they are, a literal ``${`` included."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value


def _describe(problem: Any) -> str:
    location, message = problem["loc"], problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = "unknown key"
        known = _known_keys(location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        message += f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known)}"
    elif problem["type"] == "missing":
        message = "is required"
    elif "input" in problem and not isinstance(problem["input"], dict | list | BaseModel):
        message += f" (got {problem['input']!r})"
    if not location:
        return "\n".join(f"  {line}" for line in message.splitlines())
    # A check of a whole section writes "key: what"; its key belongs to the path.
    own_key = re.match(r"(\w+): ", message)
    if problem["type"] == "value_error" and own_key:
        location, message = (*location, own_key[1]), message[own_key.end() :]
    return f"  {_dotted(location)}: {message}"


def _dotted(location: Sequence[str | int]) -> str:
    """``("rewards", 0, "file")`` as ``rewards[0].file``, the way overrides write it."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).removeprefix(".")


def _known_keys(location: Sequence[Any]) -> list[str]:
    model: Any = Config
    for part in location:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, Section))
    return sorted(model.model_fields)
