"""Recomputes the log-probability of every trained token under the weights of its batch.

Independent of what is checked: a plain ``transformers`` model, one response at a time, with the
weights as the run's checkpoints hold them. A response that other weights made, or to another
prompt, or whose tokens were exchanged, differs from what its endpoint said of it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from easyrl.ledger.recorded_run import RecordedRun
from easyrl.schema import Completion, RolloutGroup

# Mean over a response, nats. Two fp32 programs that sum in other orders differ by 1e-6 to 1e-5
# here; the weights before and behind one step of these runs by more than 1e-2 (``visible``).
TOLERANCE = 1e-3
MASTER = "master"


@dataclass(frozen=True)
class ContentCheck:
    """What was found; differences are means over a response, in nats.

    A group whose rewards are all equal has no gradient: the trainer does not run it, unless its
    endpoint has no other, and so cannot know what it holds.

    Attributes:
        visible: the smallest mean difference of a batch's responses under the weights of the batch
            before; None with one batch. Must be far above ``TOLERANCE``, or nothing was checked.
    """

    num_batches: int
    num_responses: int
    num_tokens: int
    wrong_groups: tuple[str, ...]  # with a gradient; which, and by how much
    wrong_without_gradient: tuple[str, ...]
    largest: float  # of all others
    visible: float | None

    @property
    def sees_old_weights(self) -> bool:
        return self.visible is None or self.visible > 3 * TOLERANCE


def check_trained_contents(run_dir: Path, model: Path) -> ContentCheck:
    """All batches of the finished run in ``run_dir``, which began with ``model``, an fp32 one.

    It must have kept its journal and a checkpoint of each step. Raises ``ValueError`` where they
    lack.
    """
    run = RecordedRun(run_dir)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    wrong: dict[bool, list[str]] = {False: [], True: []}  # by whether rewards are all equal
    differences, visible = [0.0], []
    num_responses = num_tokens = 0
    for v in range(run.num_batches):
        keys = frozenset(g.key for g in run.batch(v).groups if g.outcome == "trained")
        groups = run.groups(v, keys)
        if v:
            old = [group_difference(policy, group) for group in groups.values()]
            visible.append(float(np.mean(old)))
            step = run.batch(v - 1).step
            put_weights(policy, read_masters(run_dir / f"checkpoints/step-{step}"))
        differing = {key: group_difference(policy, group) for key, group in groups.items()}
        for key, difference in sorted(differing.items()):
            if difference <= TOLERANCE:
                differences.append(difference)
                continue
            is_flat = len(set(groups[key].rewards.tolist())) == 1
            wrong[is_flat].append(
                f"batch {v}, prompt {key[1]} of epoch {key[0]}: {difference:.3g} nats"
            )
        num_responses += sum(len(group.completions) for group in groups.values())
        num_tokens += sum(
            len(request.token_ids)
            for group in groups.values()
            for completion in group.completions
            for request in requests_of(group.prompt.token_ids, completion)
        )
    return ContentCheck(
        run.num_batches,
        num_responses,
        num_tokens,
        tuple(wrong[False]),
        tuple(wrong[True]),
        max(differences),
        min(visible, default=None),
    )


def read_masters(folder: Path) -> dict[str, Tensor]:
    """The fp32 masters of a checkpoint by name, flat: put together from the ranks' pieces."""
    pieces: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for file in folder.glob("rank-*-of-*.safetensors"):
        with safe_open(file, framework="pt") as state:
            starts = json.loads(state.metadata()["DCP_SHARDING_INFO"])
            columns = json.loads(state.metadata().get("columns", "{}"))
            for key in state.keys():  # noqa: SIM118 - not a dict
                if key.startswith(f"{MASTER}/"):
                    values = state.get_tensor(key)
                    places = torch.arange(len(values))
                    if key in columns:  # of a matrix: where it starts in them, first, width, of
                        start, first, width, of = columns[key]
                        places = (start + places) // width * of + first + (start + places) % width
                    else:
                        places += starts[key]["saved_offsets"][0]
                    pieces[key.removeprefix(f"{MASTER}/")].append((places, values))
    masters = {}
    for name, found in pieces.items():
        places, values = (torch.cat(parts) for parts in zip(*found, strict=True))
        ordered, order = places.sort()
        if not torch.equal(ordered, torch.arange(len(ordered))):
            raise ValueError(f"{folder}: {name} is not whole")
        masters[name] = values[order]
    return masters


@torch.no_grad()
def put_weights(policy: nn.Module, masters: Mapping[str, Tensor]) -> None:
    """Writes the fp32 masters of a checkpoint into ``policy``, all of them."""
    for name, parameter in policy.named_parameters():
        (value,) = (masters[key] for key in masters if key == name or key.endswith(f".{name}"))
        parameter.copy_(value.view(parameter.shape))


def group_difference(policy: nn.Module, group: RolloutGroup) -> float:
    """The largest mean |Δ log-prob| of its responses, nats; of an episode, of its turns."""
    return max(
        request_difference(policy, request)
        for completion in group.completions
        for request in requests_of(group.prompt.token_ids, completion)
    )


class Request(NamedTuple):
    """What the model was shown, and what it sampled."""

    prompt_ids: np.ndarray  # int32 [P]
    token_ids: np.ndarray  # int32 [R]
    logprobs: np.ndarray  # float32 [R]


def requests_of(prompt_ids: np.ndarray, completion: Completion) -> list[Request]:
    """One; of an episode, which says itself what the model was shown, one for each turn.

    Raises ``ValueError`` if what is trained of an episode are not exactly the tokens that its turns
    have sampled.
    """
    tokens, logprobs = completion.token_ids, completion.logprobs
    if completion.episode is None:
        return [Request(prompt_ids, tokens, logprobs)]
    paths: list[np.ndarray] = []
    requests: list[Request] = []
    is_sampled = np.zeros(len(tokens), dtype=np.int64)
    for turn in completion.episode.turns:
        before = tokens[:0] if turn.parent is None else paths[turn.parent]
        paths.append(np.concatenate([before, tokens[turn.start : turn.end]]))
        shown = paths[-1][: len(before) + turn.sampled - turn.start]
        sampled = slice(turn.sampled, turn.end)
        requests.append(Request(shown, tokens[sampled], logprobs[sampled]))
        is_sampled[sampled] += 1
    if not np.array_equal(is_sampled, completion.loss_mask.astype(np.int64)):
        raise ValueError("what is trained of an episode is not what was sampled, each token once")
    return requests


@torch.no_grad()
def request_difference(policy: nn.Module, request: Request) -> float:
    """Mean |Δ log-prob| between what its endpoint said of an answer and ``policy``, nats."""
    ids = np.concatenate([request.prompt_ids, request.token_ids]).astype(np.int64)
    tokens, num_shown = torch.from_numpy(ids), len(request.prompt_ids)
    logits = policy(tokens[None]).logits[0, num_shown - 1 : -1].double()
    own = logits.log_softmax(-1).gather(-1, tokens[num_shown:, None])[:, 0].numpy()
    return float(np.abs(own - request.logprobs).mean())
