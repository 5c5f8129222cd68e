"""The records that pass between the rooms (words: the glossary of docs/architecture.md); no torch.

Shape legend: P prompt tokens, R response tokens, G responses per prompt, T tokens in a packed row,
N trained tokens of a row, S segments of a row, Q sequences (responses) of a row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor


TEMPORARY_FAILURE = 75  # sysexits.h: the same command with --resume may succeed later
NEEDS_CHANGE = 2  # ... would end the same way: settings, data or endpoints have to change


class InterruptedRun(RuntimeError):
    """The run cannot go on for now and has written a checkpoint to go on from.

    ``status`` is the process's: ``TEMPORARY_FAILURE``, ``NEEDS_CHANGE``, or 0 for a stop that was
    asked for.
    """

    def __init__(self, message: str, *, status: int = TEMPORARY_FAILURE) -> None:
        super().__init__(message)
        self.status = status


class LedgerError(ValueError):
    """A file that a run is held to cannot be written, or is not as it was; names it and the remedy.

    ``--resume`` would end the same way until that is done, unless it ``is_temporary``.
    """

    is_temporary = False


class EndedBySignal(SystemExit):
    """SIGINT or SIGTERM ends the process; its ``code`` is 128 and the signal's number."""


class RunComplete(Exception):
    """A run that is to be resumed has come to its end; the message says how to train further."""


class StopRequested(RuntimeError):
    """SIGTERM, or a stop that another rank was asked for: save and end, nothing has failed."""


class TooManyExcluded(RuntimeError):
    """Endpoints refuse more prompts than ``data.max_excluded`` allows; a restart would stop too."""


class RewardError(RuntimeError):
    """A reward could not be had, or a batch had none of it; names reward, cause and remedy."""


class GatewayGone(RuntimeError):
    """The gateway's process does not come up, so that no environment has a model to ask."""


class StoppedByAlarm(RuntimeError):
    """A collapse alarm was raised and ``alarms.on_alarm`` is ``stop``."""


class NoEndpointServes(RuntimeError):
    """No endpoint proved that it serves the weights of the next batch."""


class PeerOutage(RuntimeError):
    """Another rank has no endpoint left."""


class BatchWithdrawn(RuntimeError):
    """Groups of the open batch were taken back: an endpoint that made them failed its proof."""


class EndpointsDisagree(BatchWithdrawn):
    """Endpoints' log-probabilities are too far from the trainer's: their groups are taken back.

    ``problems``: what is wrong, by URL.
    """

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{url} {text}" for url, text in sorted(problems.items())))
        self.problems = dict(problems)


class PolicyVersion(NamedTuple):
    """Identity of a set of weights: which run, which of its attempts, how many closed batches."""

    run: str
    attempt: int
    v: int

    def __str__(self) -> str:
        return f"{self.run}:{self.attempt}:{self.v}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Inverse of ``str``. Raises ``ValueError`` if ``text`` is not ``run:attempt:v``."""
        try:
            run, attempt, v = text.rsplit(":", 2)
            return cls(run, int(attempt), int(v))
        except ValueError:
            raise ValueError(f"not a policy version (run:attempt:v): {text!r}") from None


# of an endpoint: a policy version, or one that it has yet to prove
_STAMP = re.compile(r"(?P<run>.+):\d+:\d+(:probe)?(:updating)?")


def other_run(own: str | None, *shown: str) -> str:
    """What to add to a message if one of the stamps ``shown`` is another run's than ``own``.

    Two runs that share an endpoint take it from each other at every sync. Empty if none is.
    """
    ours = _STAMP.fullmatch(own or "")
    runs = [stamp["run"] for stamp in map(_STAMP.fullmatch, shown) if stamp is not None]
    others = [] if ours is None else [run for run in runs if run != ours["run"]]
    if not others:
        return ""
    return f": another run ({others[0][:200]}) has given it weights; no two runs can share it"


# Begins the digest of weights that are served as a model and an adapter, each with its own tensors:
# one of the whole model, the adapter merged into it, cannot be compared with it.
APART = "adapter:"


def comparable(digest: str, other: str) -> bool:
    """Whether weights of these two digests were served in the same form."""
    return digest.startswith(APART) == other.startswith(APART)


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """What a batch's samples are made by: a version, and the hash of its weights.

    Attempts of a run that come to the same weights share the hash, never the version.
    """

    version: PolicyVersion
    digest: str  # blake3 over the served tensors' names and hashes, 64 hex digits; see ``APART``


Key = tuple[int, int]  # epoch and index of a prompt: what identifies it in a run


# Why a prompt has no responses: it is too long for every context, or two endpoints refuse it.
ExclusionKind = Literal["too_long", "refused"]


class Exclusion(NamedTuple):
    """Why a prompt is not trained: nobody can answer it."""

    kind: ExclusionKind
    reason: str  # an endpoint's text: one line, printable, bounded


class ExcludedPrompt(NamedTuple):
    """A prompt that endpoints have refused, as ``data.max_excluded`` counts it."""

    position: int  # in the run's order, from its first prompt
    epoch: int
    prompt_index: int
    reason: str


class Decision(NamedTuple):
    """What became of a position of the open batch."""

    position: int
    accepted: bool
    exclusion: Exclusion | None = None
    trains: int | None = None  # data-parallel rank that is to train it; None: the one that drew it


# Versions of an adapter for which a proof of the model below it holds. That never changes: a bit of
# it that flips in an endpoint's memory is found after so many at the latest.
BASE_PROOF_HOLDS = 16


@dataclass(frozen=True, slots=True)
class WeightProof:
    """A question about the served bits that an endpoint has answered right (``challenge.py``)."""

    nonce: str  # 64 hex digits, drawn for the question
    num_tensors: int  # that it was asked about
    num_workers: int  # that answered
    answers: str  # blake3 of all their answers, 64 hex digits
    whole: bool  # one worker with every tensor in one piece: weights and nonce say what is right


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What an endpoint has shown of the weights it serves."""

    url: str
    version: str
    bits_proved: bool  # the hash of every served tensor was read back and compared
    canary_mean: float | None  # mean |log-prob difference| to the trainer, nats
    proof: WeightProof | None = None  # None where no bits were proved
    # of the model below an adapter, which never changes: its last proof; None where all is proved
    base: WeightProof | None = None


class EndpointAgreement(msgspec.Struct, frozen=True):
    """How far an endpoint's log-probabilities are from the trainer's, over a batch's trained
    tokens that it sampled."""

    url: str
    num_tokens: int  # compared
    mean: float | None  # |Δ log-prob|, nats; None: not finite
    maximum: float | None


@dataclass(frozen=True, slots=True)
class Published:
    """One weight sync."""

    served: ServedWeights
    metrics: Mapping[str, float]


@dataclass
class Progress:
    """Where the run is; part of every checkpoint."""

    step: int = 0  # optimizer steps, skipped ones included
    closed_batches: int = 0  # v of the policy version
    bad_steps: int = 0  # in a row
    position: int = 0  # prompts that closed batches have drawn, from the beginning of the order
    weights: str = ""  # digest of the weights after closed batches, once they were published
    reported_step: int = -1  # whose metrics are out
    unreported: dict[str, float] = field(default_factory=dict)  # of a closed batch, until they are
    # by closed batches, among the last positions that data.max_excluded looks at
    excluded: list[ExcludedPrompt] = field(default_factory=list)
    unevaluated: bool = False  # an evaluation of the present weights was due, and is not out yet
    controls: dict[str, float] = field(default_factory=dict)  # of the recipe, for the next update

    def __post_init__(self) -> None:
        self.excluded = [ExcludedPrompt(*each) for each in self.excluded]  # JSON has lists


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of one epoch; ``(epoch, index)`` identifies it in a run."""

    index: int  # position in the dataset as loaded, the same in every epoch
    token_ids: np.ndarray  # int32 [P]
    text: str  # the user's question, before the chat template
    answer: str | None
    epoch: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the other fields of the record
    location: str = ""  # of its record, file and line
    system: str = ""  # the system message; empty without one
    messages: Sequence[Mapping[str, Any]] | None = None  # the record's own chat; None: text
    # its answer's field: as the record has it, or as data.answer_pattern has found it
    answer_column: Mapping[str, Any] = field(default_factory=dict)
    is_held_out: bool = False  # of a set that is evaluated and not trained

    def __reduce__(self) -> tuple[type[Prompt], tuple[Any, ...]]:
        """Pickled for each response that is scored: the dataclass's own way takes three times."""
        fields = self.index, self.token_ids, self.text, self.answer, self.epoch, self.metadata
        asked = self.location, self.system, self.messages, self.answer_column
        return Prompt, (*fields, *asked, self.is_held_out)

    @property
    def key(self) -> Key:
        return self.epoch, self.index


@dataclass(frozen=True, slots=True)
class GivenCompletion:
    """A completion that a record brings with its prompt."""

    token_ids: np.ndarray  # int32 [R]
    loss_mask: np.ndarray  # bool [R], tokens that are trained; the last one is


@dataclass(frozen=True, slots=True)
class SupervisedRecord:
    """A prompt with given completions: one, or of a preference pair the chosen, then the rejected.

    ``prompt.key`` identifies it in a run.
    """

    prompt: Prompt
    completions: tuple[GivenCompletion, ...]


class VersionSpan(NamedTuple):
    """Tokens ``[start, end)`` of a response were made by weights ``version``."""

    version: str
    start: int
    end: int


class Turn(NamedTuple):
    """One request of an episode: its completion's tokens [start, end), sampled from ``sampled`` on.

    What stands before that is what the environment wrote.
    """

    # number of the turn that it continues: that one's tokens, and its ancestors', stand before it;
    # None: nothing does
    parent: int | None
    start: int
    sampled: int
    end: int
    finish_reason: str  # "stop" or "length"
    endpoint: str  # URL
    proof: int  # as a completion's


@dataclass(frozen=True, slots=True)
class Episode:
    """What an environment has made of one sample: a tree of turns, and what it says of it."""

    turns: tuple[Turn, ...]  # as they were recorded; parents before children
    environment: str  # its name in the configuration
    reward: float
    components: Mapping[str, float]  # its metrics
    turn_rewards: tuple[float, ...] = ()  # of each turn; empty: there are none
    failure: str | None = None  # why the environment has not come to its end; one line

    @property
    def num_branches(self) -> int:
        """Turns that no other one continues."""
        return len(self.turns) - len({turn.parent for turn in self.turns} - {None})


MAX_TURNS = "max_turns"  # finish reason of an episode that was refused a further turn


@dataclass(frozen=True, slots=True)
class Completion:
    """One response, token ids as the server sampled them; or one episode.

    An episode stands for itself, its group's prompt is not put before it: ``token_ids`` are those
    of its turns one after another, each once, and ``loss_mask`` is true exactly of those that were
    sampled. ``logprobs`` of the others are zero, and ``version_spans`` leave them out.
    """

    token_ids: np.ndarray  # int32 [R]
    logprobs: np.ndarray  # float32 [R], the server's, of the sampled tokens
    finish_reason: str  # "stop", "length" or, of an episode, MAX_TURNS (both: truncated)
    version_spans: tuple[VersionSpan, ...]  # stamped by the server
    endpoint: str  # URL; empty: nobody sampled it, it was given
    loss_mask: np.ndarray  # bool [R], tokens that are trained
    proof: int = 0  # number of its endpoint's last good proof of its weights when it came; 0: none
    episode: Episode | None = None

    @property
    def sampled_ids(self) -> np.ndarray:
        """int32, the tokens that endpoints have sampled: all but what an environment wrote."""
        return self.token_ids if self.episode is None else self.token_ids[self.loss_mask]

    @property
    def made_by(self) -> tuple[tuple[str, int], ...]:
        """Endpoint and number of its proof, of the response or of each turn."""
        if self.episode is None:
            return ((self.endpoint, self.proof),)
        return tuple((turn.endpoint, turn.proof) for turn in self.episode.turns)

    @property
    def truncated(self) -> bool:
        return self.finish_reason in ("length", MAX_TURNS)


@dataclass(frozen=True, slots=True)
class JournalledTurn:
    """One turn as it is journalled, before anybody knows whether its episode comes to an end."""

    key: Key  # of the prompt
    sample: int  # number in its group
    episode: str  # one start of it: the session's name
    environment: str  # its name in the configuration
    parent: int | None  # as a ``Turn``'s, among the turns of this start
    prompt_ids: np.ndarray  # int32, what it was shown beyond its parent's tokens
    completion: Completion  # what was sampled


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one response and the parts it is the weighted sum of."""

    reward: float
    # By reward name, unweighted; none of a reward without an opinion. What a reward says beside
    # its score is called NAME/PART, and is no summand.
    components: Mapping[str, float]
    failed: bool = False  # a reward function raised or timed out and was scored zero
    # its rollout failed: it has no part in its group, and none of its tokens is trained
    masked: bool = False


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """A finished group: what the producer hands to the trainer."""

    prompt: Prompt
    completions: tuple[Completion, ...]  # G, in sample order
    scores: tuple[Score, ...]  # G
    policy_version: str  # the version it was requested for
    dispatched_s: float  # time.monotonic() when its first request was sent
    completed_s: float  # ... when its last response was scored
    position: int = 0  # of its prompt in the order, from the batch's first
    excluded: Exclusion | None = None  # why it has no completions and is not trained
    rejected: str | None = None  # why it is not trained: the recipe's reason, or too few are left
    # blake3 of its journal record, or of a supervised record's tokens, 32 hex digits; None: neither
    digest: str | None = None
    drawn_by: int | None = None  # data-parallel rank; None: the one that trains it
    bytes_moved: int = 0  # that brought it here from the rank that drew it, in this attempt

    @property
    def rewards(self) -> np.ndarray:
        """float32 [G]"""
        return np.array([score.reward for score in self.scores], dtype=np.float32)

    @property
    def unmasked(self) -> list[int]:
        """Places of the responses that the recipe sees; where nothing is scored, of all."""
        if not self.scores:
            return list(range(len(self.completions)))
        return [place for place, score in enumerate(self.scores) if not score.masked]

    @property
    def refused(self) -> str | None:
        """Why it is replaced by the next prompt of the order; None: it is trained."""
        return self.rejected if self.excluded is None else self.excluded.reason


EndedBy = Literal["accepted", "data", "max_draws"]  # B accepted groups; the order's end; the bound
Outcome = Literal["trained", "skipped", "excluded", "rejected"]


class GroupOutcome(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """What became of one drawn prompt: in the certificate, the events, and between ranks."""

    epoch: int
    index: int
    position: int  # in the order, from the batch's first prompt
    outcome: Outcome  # skipped: its optimizer step was; excluded: it has no usable responses
    digest: str | None  # of its journal record, 32 hex digits; None: not journalled
    stamped: list[str]  # versions on its tokens, sorted
    endpoints: list[str]  # URLs that made them, sorted
    update: int = 0  # of the batch's optimizer steps
    rank: int = 0  # data-parallel, that trained it, or drew it if it was refused
    drawn_by: int | None = None  # the rank whose journal has its record, where that is another one
    reason: str | None = None  # why it was excluded or rejected
    exclusion: ExclusionKind | None = None
    recovered: bool = False  # from the journal of an earlier attempt

    @property
    def key(self) -> Key:
        return self.epoch, self.index

    @property
    def accepted(self) -> bool:
        return self.outcome in ("trained", "skipped")

    @classmethod
    def of(cls, group: RolloutGroup, *, recovered: bool = False) -> GroupOutcome:
        """What is to be said of ``group``; a usable one counts as trained for now."""
        outcome: Outcome = "trained"
        if group.refused is not None:
            outcome = "rejected" if group.excluded is None else "excluded"
        return cls(
            epoch=group.prompt.epoch,
            index=group.prompt.index,
            position=group.position,
            outcome=outcome,
            digest=group.digest,
            stamped=sorted({span.version for c in group.completions for span in c.version_spans}),
            endpoints=sorted({url for c in group.completions for url, _ in c.made_by} - {""}),
            reason=group.refused,
            exclusion=None if group.excluded is None else group.excluded.kind,
            recovered=recovered,
            drawn_by=group.drawn_by,
        )


@dataclass(frozen=True, slots=True)
class TrainedResponse:
    """What a recipe makes of a response of which n tokens are trained."""

    sample: int  # of its group's responses
    tokens: np.ndarray  # int64 [n], their places in the response
    advantages: np.ndarray  # float [n]
    loss_weights: np.ndarray  # float [n]
    returns: np.ndarray | None = None  # float [n], what a critic is trained to; None without one


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A finished group, and those of its responses that are trained."""

    group: RolloutGroup
    responses: tuple[TrainedResponse, ...]  # each with a trained token

    @property
    def has_signal(self) -> bool:
        """Whether a token has another advantage than exactly zero."""
        return any(response.advantages.any() for response in self.responses)


class OpenGroup(NamedTuple):
    """How far a group is that is not complete."""

    key: Key
    num_prompt_tokens: int
    finished: tuple[int, ...]  # tokens of each response that has returned and nobody has taken
    num_missing: int  # responses that have not returned

    def within(self, max_tokens: int) -> list[int]:
        """Places in ``finished`` of what fits into ``max_tokens``, in order of return."""
        places = []
        for place, num_tokens in enumerate(self.finished):
            if num_tokens <= max_tokens:
                places.append(place)
                max_tokens -= num_tokens
        return places


class FinishedSamples(NamedTuple):
    """Responses of a group that is not complete."""

    prompt: Prompt
    completions: Mapping[int, Completion]  # by sample number


class Segment(NamedTuple):
    """A run of tokens of a packed row that attends to its ancestors and causally to itself."""

    start: int
    length: int
    parent: int  # index of the parent segment, -1 for a root


class SampleKey(NamedTuple):
    """Identifies a response in a run."""

    epoch: int
    prompt: int  # its index
    sample: int  # of its group's responses
    part: int = 0  # of an episode


@dataclass(frozen=True, slots=True)
class FrozenLogprobs:
    """What the frozen models say of a micro-batch's trained tokens, at the sampling temperature,
    and what the critic said of them as the batch began."""

    reference: Tensor | None  # float32 [N]; None without a reference
    old_policy: Tensor | None  # float32 [N]; None where the policy itself is the old policy
    values: Tensor | None = None  # float32 [N], of the state before each token; None: no critic
    # float32 [N]; None without a teacher, or where its whole distributions are compared
    teacher: Tensor | None = None

    def to(self, device: torch.device) -> FrozenLogprobs:
        """The same on ``device``."""
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        return FrozenLogprobs(**{n: None if v is None else v.to(device) for n, v in said.items()})


@dataclass(frozen=True, slots=True)
class GroupOutputs:
    """What models say of a group's responses before their advantages are known, without gradient.

    G arrays float32 [R] each: of trained tokens; zero elsewhere, and of a model that
    ``before_advantages`` does not name. Empty where it names none.
    """

    values: tuple[np.ndarray, ...] = ()  # of the critic as the batch began
    reference_logprobs: tuple[np.ndarray, ...] = ()


NOTHING_SAID = GroupOutputs()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A packed row: a forest of segments, depth first (prompt with responses is the simplest tree).

    Token ``label_ids[n]`` is predicted at row position ``predictor_index[n]``; one position may
    predict the first token of several responses.
    """

    input_ids: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T]
    segments: tuple[Segment, ...]  # S
    predictor_index: Tensor  # int64 [N]
    label_ids: Tensor  # int64 [N]
    advantages: Tensor  # float32 [N]
    inference_logprobs: Tensor  # float32 [N]
    loss_weights: Tensor  # float32 [N]; the loss sum is sum(loss_weights * per_token_loss)
    sequence_index: Tensor  # int64 [N], which of the row's Q sequences the token belongs to;
    # tokens of a sequence are adjacent and in order
    sequences: tuple[SampleKey, ...]  # Q
    endpoints: tuple[str, ...]  # Q, URL of the endpoint that sampled the sequence; empty: given
    frozen: FrozenLogprobs | None = None  # computed ahead of time; else with the policy's forward
    returns: Tensor | None = None  # float32 [N], what the critic is trained to; None without one
    is_dummy: bool = False  # all weights zero; keeps collectives equal between ranks

    def to(self, device: torch.device) -> MicroBatch:
        """The same with its tensors on ``device``, those of ``frozen`` too."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: v.to(device) for n, v in values.items() if hasattr(v, "to")})

    @property
    def num_sequences(self) -> int:
        """Q"""
        return len(self.sequences)

    @property
    def is_sampled(self) -> bool:
        """Whether endpoints have made the sequences; else they were given, as records are."""
        return any(self.endpoints)

    @property
    def num_tokens(self) -> int:
        """T, the tokens that go through the model."""
        return int(self.input_ids.shape[0])

    @property
    def num_loss_tokens(self) -> int:
        """N"""
        return int(self.label_ids.shape[0])
