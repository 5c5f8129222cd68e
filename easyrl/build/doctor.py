"""``easyrl doctor``: all checks before a run, from the cheapest to those that ask endpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from easyrl.build.data import load_trained
from easyrl.build.doctor_endpoints import Policy, check_endpoints
from easyrl.build.doctor_environments import check_environments
from easyrl.build.inference import open_scoring
from easyrl.build.row_settings import decide_row_settings
from easyrl.build.run_length import describe_run
from easyrl.build.same_vocabulary import check_vocabularies
from easyrl.build.steps import total_steps
from easyrl.build.tokenizer import check_chat_template, load_tokenizer, read_tokenizer
from easyrl.build.trial import try_user_code
from easyrl.build.vocabulary import policy_vocabulary, require_known_tokens
from easyrl.completion_check import Vocabulary
from easyrl.config import Config
from easyrl.dataloaders.prompts.template_values import every_variant
from easyrl.doctor.architecture import count_parameters, weight_shapes
from easyrl.doctor.batches import batch_findings, data_finding
from easyrl.doctor.devices import device_finding
from easyrl.doctor.finding import Finding, findings_of, not_checked, ok
from easyrl.doctor.given_responses import known_answers
from easyrl.doctor.memory import check_memory
from easyrl.doctor.rewards import reward_finding
from easyrl.doctor.space import disk_finding, weight_space_finding
from easyrl.doctor.versions import check_versions
from easyrl.inference_client.client import TensorShapes
from easyrl.memory_plan.remedies import Load
from easyrl.recipes.loading import load_recipe
from easyrl.rewards.functions import check_prompts, check_rewards
from easyrl.rewards.scorer import Scorer
from easyrl.schema import Progress, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_ANSWERS = 8  # prompts on which the rewards are tried


class Diagnosis:
    """All findings about a configuration, as they come; what it leaves behind is nothing.

    Args:
        load: gives ``config`` with further keys, for remedies.
        world_size: training processes; None: those of one copy of the model.
    """

    def __init__(self, config: Config, load: Load, world_size: int | None = None) -> None:
        self._config, self._load = config, load
        self._is_given = world_size is not None
        self._world_size = world_size or config.parallel.ranks_per_model
        # once they are read
        self._shapes: TensorShapes = {}
        self._num_parameters = 0
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._vocabulary: Vocabulary | None = None
        self._prompts: Sequence[Prompt] = ()

    def findings(self) -> Iterator[Finding]:
        config = self._config
        is_rollouts = config.source == "rollouts"
        yield from findings_of("versions", lambda: check_versions(config))
        yield from findings_of("devices", self._devices)
        yield from findings_of("model", self._model)
        if self._shapes:
            yield from findings_of("memory", self._memory)
            yield from findings_of("disk space", self._disk)
            if is_rollouts:
                yield from findings_of("space for weight sync", self._weight_space)
        if not is_rollouts:
            yield not_checked("data", "source: records; the run itself says what it leaves out")
            return
        yield from findings_of("data", self._data)
        if self._prompts:
            yield from findings_of("rewards", self._rewards)
        if self._vocabulary is not None and config.environments:
            yield from check_environments(config, self._vocabulary)
        yield from findings_of("endpoints", self._endpoints)

    def _devices(self) -> Iterable[Finding]:
        yield device_finding(self._config, self._world_size, is_given=self._is_given)

    def _model(self) -> Iterable[Finding]:
        load_recipe(self._config)
        self._config, said = decide_row_settings(self._config)
        model = self._config.model
        self._shapes = weight_shapes(model)
        self._num_parameters = count_parameters(self._shapes)
        size = self._num_parameters / 1e6
        yield ok("model", f"{model.path}: {size:,.3g} million parameters, {model.dtype}")
        for notice in said:
            yield ok("packing", notice)

    def _memory(self) -> Iterable[Finding]:
        return check_memory(self._config, self._world_size, self._load)

    def _disk(self) -> Iterable[Finding]:
        yield disk_finding(self._config, self._num_parameters)

    def _weight_space(self) -> Iterable[Finding]:
        yield weight_space_finding(self._config, self._num_parameters)

    def _data(self) -> Iterable[Finding]:
        """Tokenizer, prompts, arithmetic."""
        config = self._config
        self._tokenizer = load_tokenizer(config)
        check_chat_template(config, self._tokenizer)
        self._vocabulary = policy_vocabulary(config, self._tokenizer)
        check_vocabularies(config, self._tokenizer, read_tokenizer)
        prompts = load_trained(config, self._tokenizer)
        possible = [prompt.token_ids for prompt in every_variant(prompts)]
        require_known_tokens(config, possible, self._vocabulary.size)
        self._prompts = prompts
        yield data_finding(config, prompts)
        rejects = load_recipe(config).rejects
        num_steps = total_steps(config, len(prompts), rejects=rejects)
        described = describe_run(config, len(prompts), num_steps, Progress())
        yield from batch_findings(config, len(prompts), described)

    def _rewards(self) -> Iterable[Finding]:
        config, tokenizer = self._config, self._tokenizer
        if not config.rewards:
            yield not_checked("rewards", "the configuration has none")
            return
        assert tokenizer is not None
        check_rewards(config.rewards)
        check_prompts(config.rewards, every_variant(self._prompts))

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        known = known_answers(self._prompts, encode, tokenizer.eos_token_id, NUM_ANSWERS)
        with ExitStack() as opened:
            scoring = open_scoring(config, opened)
            try_user_code(config, self._prompts[0], scoring)
            scorer = Scorer(config.rewards, config.scoring, scoring.workers)
            yield scoring.thread.run(reward_finding(config, scorer, known))

    def _endpoints(self) -> Iterable[Finding]:
        if not self._prompts or not self._shapes:
            yield not_checked("endpoints", "model and data have to be right first")
            return
        assert self._tokenizer is not None and self._vocabulary is not None
        policy = Policy(self._shapes, self._tokenizer, self._vocabulary, self._prompts)
        yield from check_endpoints(self._config, policy)
