"""The interface of an RL algorithm: which groups are trained, advantages, loss, metrics.

A recipe is a frozen dataclass whose fields are the keys of the configuration's ``recipe`` section.
It knows no engine, file or endpoint, and its methods are pure: the same arguments, the same result.

Shape legend: G responses of a group, R tokens of a response, n trained tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from easyrl.schema import Completion, RolloutGroup, SampleKey

Scope = Literal["group", "batch"]
Span = Literal["token", "sequence", "group"]
Advantages = np.ndarray | Sequence[np.ndarray]  # float [G], or G arrays [R]


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model of its own architecture, and what of it a recipe's loss is given."""

    path: Path  # a folder in Hugging Face's layout, of the policy's vocabulary
    # False: its log-probabilities of the sampled tokens (``Terms.teacher_logprobs``); True: the
    # policy's divergence from it over the whole vocabulary (``Terms.teacher_kl``)
    full: bool = False


@dataclass(frozen=True, slots=True)
class Models:
    """The models, beside the policy, that a recipe is told something of."""

    reference: bool = False  # the initial policy, frozen
    old_policy: bool = False  # the policy before the batch's first update; else one forward less
    critic: bool = False  # values of the states before trained tokens; trained beside the policy
    teacher: Teacher | None = None

    @property
    def scores_with_teacher(self) -> bool:
        """Whether a teacher's log-probabilities are taken, which may be known before a row is."""
        return self.teacher is not None and not self.teacher.full


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What the sampling of a run's responses fixed; of records, what their data section says."""

    max_tokens: int  # of a response; of a record with its prompt
    num_generations: int  # G, responses of a group
    temperature: float
    seed: int
    reward_weights: Mapping[str, float] = field(default_factory=dict)  # by reward name


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What advantages may depend on beside their own groups."""

    # with scope "batch" what ``Recipe.batch_rewards`` says of each group of the optimizer step, of
    # all data-parallel ranks, in the order of the prompts; else the rewards [G] of the one group
    rewards: tuple[np.ndarray, ...]
    # What ``Recipe.before_advantages`` asks for: of each of the groups given, G arrays float32 [R],
    # filled in at the trained tokens of selected responses. Values are the critic's as the batch
    # began, of the state before each token.
    values: tuple[tuple[np.ndarray, ...], ...] = ()
    reference_logprobs: tuple[tuple[np.ndarray, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Terms:
    """What the losses of n trained tokens are made of, beside what the policy says of them.

    Floating tensors are of the log-probabilities' dtype, without gradient but for ``teacher_kl``.
    The tokens of a sequence are adjacent and in order. ``terms[rows]`` are those of a slice of the
    tokens.
    """

    advantages: Tensor  # [n]
    loss_weights: Tensor  # [n], of ``Recipe.token_weights``
    inference_logprobs: Tensor  # [n], of the server that sampled them
    old_logprobs: Tensor  # [n]; the policy's own where that is the old policy
    reference_logprobs: Tensor | None  # [n]; None unless the recipe needs a reference
    sequence_index: Tensor  # int64 [n], which of the row's sequences, not decreasing
    sequences: tuple[SampleKey, ...]  # of the row
    teacher_logprobs: Tensor | None = None  # [n]; None unless the recipe needs these of a teacher
    # [n] KL(policy || teacher), nats, over the vocabulary; carries gradient, as the loss's first
    # two arguments do; None unless the recipe needs it
    teacher_kl: Tensor | None = None

    @property
    def group_index(self) -> Tensor:
        """int64 [n], which of the row's groups."""
        return self.group_of_sequence[self.sequence_index]

    @property
    def group_of_sequence(self) -> Tensor:
        """int64 [Q], which of the row's groups each of its sequences belongs to."""
        groups: dict[tuple[int, int], int] = {}
        numbers = [groups.setdefault(key[:2], len(groups)) for key in self.sequences]
        return torch.tensor(numbers, device=self.sequence_index.device)

    def __getitem__(self, rows: slice) -> Terms:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors: dict[str, Any] = {n: v[rows] for n, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **tensors)


@dataclass(frozen=True, slots=True)
class ValueTerms:
    """What the value losses of n trained tokens are made of, beside the critic's values.

    Floating tensors are of the values' dtype, without gradient.
    """

    returns: Tensor  # [n], of ``Recipe.returns``
    old_values: Tensor  # [n], the critic's as the batch began


@dataclass(frozen=True)
class Recipe(ABC):
    """An RL algorithm. Properties may be overridden by plain class attributes.

    ``advantages`` and ``loss`` are what a recipe has to say; the rest has defaults: all responses
    are trained, all of their tokens weigh the same, and the loss is a mean over tokens.
    """

    # Fields without effect while the ratio policy / old policy is 1, as it is in the first update
    # of each batch; a run in which that is always so says it.
    ratio_keys: ClassVar[tuple[str, ...]] = ()

    # Whether the loss of sampled groups has that ratio. Without it the later updates of a batch,
    # whose responses the policy before the first one sampled, are off-policy and not corrected; a
    # run with such updates says it.
    has_ratio: ClassVar[bool] = True

    # What it trains on: groups that endpoints sample, or records whose completions are given; and
    # whether each of these is a preference pair, of which the chosen completion comes first.
    source: ClassVar[Literal["rollouts", "records"]] = "rollouts"
    pairs: ClassVar[bool] = False

    # Whether advantages are made of rewards: a run needs a reward function then. Else rewards may
    # be there to be looked at.
    uses_rewards: ClassVar[bool] = True

    # ---- what the run arranges for it ----

    @property
    def needs(self) -> Models:
        """The models that run beside the policy."""
        return Models()

    @property
    def compares_responses(self) -> bool:
        """Whether the baseline of a response is its group: equal rewards are no signal then, and a
        prompt needs two responses.
        """
        return self.uses_rewards and not self.needs.critic

    @property
    def before_advantages(self) -> Models:
        """Those of ``needs`` that the advantages are made of (``AdvantageInputs``): critic and
        reference. They run on a group's selected responses before ``advantages`` is called.
        """
        return Models(critic=self.needs.critic)

    @property
    def scope(self) -> Scope:
        """What the advantages need before the first gradient.

        ``batch``: all groups of the optimizer step, so that training cannot begin before the last
        response is there; the run says so.
        """
        return "group"

    @property
    def span(self) -> Span:
        """The tokens that one term of the loss couples.

        ``token``: any slice of the tokens may be given to ``loss``, and the projection to the
        vocabulary forms the gradient in its own pass. ``sequence`` and ``group``: ``loss`` is given
        whole rows; no sequence, or no group, is split over two.
        """
        return "token"

    @property
    def advantage_only(self) -> bool:
        """Whether a token of advantage zero has zero loss and zero gradient.

        Groups whose advantages are all zero then cost no forward and backward.
        """
        return False

    @property
    def rejects(self) -> bool:
        """Whether ``accepts`` may have another prompt's group sampled."""
        return type(self).accepts is not Recipe.accepts

    def problems(self) -> list[str]:
        """Values that contradict each other, as ``key: what is wrong; what would be right``."""
        return []

    def notices(self) -> list[str]:
        """Keys that cannot act, in the same form: the run says them and goes on."""
        return []

    # ---- numbers that follow what was measured ----

    def initial_controls(self) -> Mapping[str, float]:
        """Numbers by name that change from one optimizer step to the next, as a run begins.

        They are part of every checkpoint, and the same on all ranks.
        """
        return {}

    def next_controls(
        self, controls: Mapping[str, float], measured: Mapping[str, float]
    ) -> Mapping[str, float]:
        """The controls of the next optimizer step.

        ``measured``: ``loss``, ``entropy`` and what ``metrics`` counts, of the step that was taken
        with ``controls``, over all ranks. Not called for a step that was skipped.
        """
        return controls

    def controlled(self, controls: Mapping[str, float]) -> Self:
        """The recipe whose ``loss`` and ``metrics`` an optimizer step with ``controls`` has."""
        return self

    # ---- groups: numpy, on raw scores ----

    def accepts(self, group: RolloutGroup, run: RunSettings) -> str | None:
        """None, or why another prompt's group should be sampled instead of this one."""
        return None

    def select(self, group: RolloutGroup, run: RunSettings) -> Sequence[int]:
        """The responses of ``group`` that are trained, by their places; at least none."""
        return range(len(group.completions))

    def trained_tokens(self, completion: Completion, run: RunSettings) -> np.ndarray:
        """bool [R], the tokens of a response that are trained if it is selected."""
        return completion.loss_mask

    @abstractmethod
    def advantages(
        self, groups: Sequence[RolloutGroup], run: RunSettings, inputs: AdvantageInputs
    ) -> Sequence[Advantages]:
        """Of each group float [G], one number for each response, or G arrays [R], one per token.

        With scope ``group`` called with one group at a time, so that nothing depends on which
        groups arrive together; with scope ``batch`` once, with all of this data-parallel rank.
        """

    def batch_rewards(self, group: RolloutGroup, run: RunSettings) -> np.ndarray:
        """float [G] or [G, m]: what statistics of the whole batch are made of.

        Called with scope ``batch`` alone; the ranks exchange it, and ``advantages`` is given that
        of all groups as ``inputs.rewards``.
        """
        return group.rewards

    def batch_statistics(
        self, group: RolloutGroup, run: RunSettings, inputs: AdvantageInputs
    ) -> np.ndarray:
        """float [m] or [G, m]: ``batch_rewards`` of a recipe whose statistics are also made of what
        models say; ``inputs`` are those of the one group.
        """
        return self.batch_rewards(group, run)

    def token_weights(self, group: RolloutGroup, run: RunSettings) -> Sequence[np.ndarray]:
        """For each response float [R], the weights of its tokens' losses (``loss_weights``).

        Read at the trained tokens of selected responses alone.
        """
        return [np.ones(len(c.token_ids)) for c in group.completions]

    def denominator(self, groups: Sequence[RolloutGroup], run: RunSettings) -> float:
        """What divides the loss's sum over ``groups``; over micro-batches and ranks it adds up."""
        chosen = [group.completions[i] for group in groups for i in self.select(group, run)]
        return float(sum(self.trained_tokens(completion, run).sum() for completion in chosen))

    # ---- tokens: torch, on the device ----

    @abstractmethod
    def loss(self, logprobs: Tensor, entropy: Tensor, terms: Terms) -> Tensor:
        """Terms of a sum, weighed by ``terms.loss_weights``; with span ``token`` one for each of
        the n tokens.

        ``logprobs`` and ``entropy`` [n] (nats, at the sampling temperature) are the policy's and
        carry gradient. A rank that has run out of work calls it with one token of weight 0.
        """

    def metrics(self, logprobs: Tensor, entropy: Tensor, terms: Terms) -> dict[str, Tensor]:
        """What to report beside loss, entropy and the comparison with the inference server.

        Scalars: ``NAME_sum`` adds up over rows and is reported as ``policy/NAME``, divided by the
        number of trained tokens or, where there is one, by ``NAME_num``, which adds up too; of
        ``NAME_max`` the largest is, as ``policy/NAME_max``. Called without gradient, with all n
        tokens of a row.
        """
        return {}

    # ---- the critic, of a recipe that needs one ----

    def returns(
        self, groups: Sequence[RolloutGroup], run: RunSettings, inputs: AdvantageInputs
    ) -> Sequence[Sequence[np.ndarray]]:
        """Of each group G arrays [R]: what the critic's values are trained to. Called with the
        arguments of ``advantages``.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a critic and has no returns")

    def value_loss(self, values: Tensor, terms: ValueTerms) -> Tensor:
        """[n] terms of a sum; ``values`` [n] are the critic's and carry gradient."""
        raise NotImplementedError(f"{type(self).__name__} needs a critic and has no value_loss")

    def value_denominator(self, groups: Sequence[RolloutGroup], run: RunSettings) -> float:
        """What divides the value loss's sum over ``groups``: their trained tokens. Adds up."""
        return Recipe.denominator(self, groups, run)

    def value_metrics(self, values: Tensor, terms: ValueTerms) -> dict[str, Tensor]:
        """Scalars that add up over rows, reported as ``critic/NAME`` per trained token. Without
        gradient."""
        return {}

    def is_set(self, key: str) -> bool:
        """Whether a field has another value than its default.

        A value that is its default is never refused: a dumped configuration names every key.
        """
        default = {f.name: f.default for f in fields(self)}[key]
        return bool(getattr(self, key) != default)
