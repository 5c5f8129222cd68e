"""Mistakes in recipes: their name and keys, the user's file, what its methods return."""

from __future__ import annotations

from benchmarks.parts.bad_input.scene import Mistake

FILE = "{folder}/recipe.py"
HEAD = """\
from dataclasses import dataclass
import numpy as np
import torch
from easyrl.recipes import GRPO, Recipe

@dataclass(frozen=True)
class Mine(Recipe):
"""
ADVANTAGES = """\
    def advantages(self, groups, run, inputs):
        return [group.rewards - group.rewards.mean() for group in groups]
"""
LOSS = """\
    def loss(self, logprobs, entropy, terms):
        return -terms.advantages * logprobs
"""
FIRST, THIRD = 9, 11  # lines of the first method's body, of the second's where the first is good


def _own(
    title: str, source: str | bytes, location: str | tuple[str, ...], *overrides: str
) -> Mistake:
    recipe = f"recipe={{name: Mine, file: {FILE}}}"
    return Mistake(title, location, (recipe, *overrides), files={"recipe.py": source})


def _advantages(title: str, body: str, location: str = FILE) -> Mistake:
    method = f"    def advantages(self, groups, run, inputs):\n        {body}\n"
    return _own(title, HEAD + method + LOSS, (location, "Mine.advantages"))


def _loss(title: str, body: str, location: str = FILE) -> Mistake:
    method = f"    def loss(self, logprobs, entropy, terms):\n        {body}\n"
    return _own(title, HEAD + ADVANTAGES + method, (location, "Mine.loss"))


def _more(title: str, method: str, body: str, location: str = FILE) -> Mistake:
    name = method.partition("(")[0]
    source = f"{HEAD}    def {method}:\n        {body}\n{ADVANTAGES}{LOSS}"
    return _own(title, source, (location, f"Mine.{name}"))


MISTAKES = [
    Mistake("an unknown recipe", "recipe.name", ("recipe.name=gprpo",)),
    Mistake("an unknown key", "recipe.clip_eps", ("recipe.clip_eps=0.2",)),
    Mistake(
        "a key of another recipe",
        "recipe.overlong_buffer",
        ("recipe={name: grpo, overlong_buffer: 8}",),
    ),
    Mistake("text for a number", "recipe.kl_coef", ("recipe.kl_coef=small",)),
    Mistake("a negative coefficient", "recipe.kl_coef", ("recipe.kl_coef=-0.1",)),
    Mistake("a choice that is none", "recipe.aggregation", ("recipe.aggregation=tokens",)),
    Mistake("a bound below the clip", "recipe.delta", ("recipe={name: two_sided, delta: 1.1}",)),
    Mistake("an estimator without gradient", "recipe.kl_estimator", ("recipe.kl_estimator=k1",)),
    Mistake("a file that is missing", "recipe.file", ("recipe.file={folder}/recpe.py",)),
    _own(
        "a class of another name",
        HEAD.replace("Mine", "Other") + ADVANTAGES + LOSS,
        ("recipe.name", "Other"),
    ),
    _own("a function instead of a class", "def Mine(groups): ...\n", "recipe.name"),
    _own("a class that is no recipe", "class Mine: ...\n", "recipe.name"),
    _own("no loss", HEAD + ADVANTAGES, ("recipe.name", "loss")),
    _own("no advantages", HEAD + LOSS, ("recipe.name", "advantages")),
    _own(
        "no dataclass",
        "from easyrl.recipes import GRPO\nclass Mine(GRPO):\n    beta: float = 1.0\n",
        ("recipe.name", "beta"),
    ),
    _own("a syntax error", HEAD + "    def advantages(self, groups\n", FILE + ":8"),
    _own(
        "an import that is missing",
        "import no_such_package\n" + HEAD + ADVANTAGES + LOSS,
        f"{FILE}:1",
    ),
    _own("an error at import", "X = 1 / 0\n" + HEAD + ADVANTAGES + LOSS, f"{FILE}:1"),
    _own("a file in Latin-1", b"NAME = 'caf\xe9'\n", FILE),
    _own("a field called name", HEAD + "    name: str = 'x'\n" + ADVANTAGES + LOSS, "recipe.name"),
    _own("a key that is required", HEAD + "    beta: float\n" + ADVANTAGES + LOSS, "recipe.beta"),
    _own(
        "an error in __post_init__",
        HEAD + "    def __post_init__(self):\n        self.x = 1\n" + ADVANTAGES + LOSS,
        f"{FILE}:{FIRST}",
    ),
    _own(
        "a type that is not defined",
        HEAD + "    beta: Flaot = 1.0\n" + ADVANTAGES + LOSS,
        f"{FILE}:8",
    ),
    _advantages("advantages of NaN", "return [g.rewards * np.nan for g in groups]"),
    _advantages("one advantage for a group", "return [1.0 for g in groups]"),
    _advantages("too few advantages", "return [g.rewards[:-1] for g in groups]"),
    _advantages("advantages of no group", "return []"),
    _advantages("advantages that are not returned", "pass"),
    _advantages("advantages as text", "return [['a'] * len(g.rewards) for g in groups]"),
    _advantages("advantages that raise", "return groups.rewards", f"{FILE}:{FIRST}"),
    _own(
        "advantages of other arguments",
        HEAD + "    def advantages(self, rewards):\n        return rewards\n" + LOSS,
        (FILE, "Mine.advantages"),
    ),
    _own(
        "a loss of other arguments",
        HEAD + ADVANTAGES + "    def loss(self, logits, labels):\n        return logits\n",
        (FILE, "Mine.loss"),
    ),
    _loss("a loss of NaN", "return (logprobs * torch.nan).sum()"),
    _loss("a loss that is not returned", "pass"),
    _loss("a loss as a number", "return float(logprobs.sum())"),
    _loss("a loss without gradient", "return logprobs.detach()"),
    _loss("a loss of a wrong shape", "return logprobs[:, None] * terms.advantages"),
    _loss("a mean where terms are asked for", "return logprobs.mean()"),
    _loss("a loss that raises", "return terms.rewards * logprobs", f"{FILE}:{THIRD}"),
    _more("an acceptance that is no reason", "accepts(self, group, run)", "return True"),
    _more(
        "an acceptance that raises",
        "accepts(self, group, run)",
        "return group.reward",
        f"{FILE}:{FIRST}",
    ),
    _more("a selection of responses that are not there", "select(self, group, run)", "return [99]"),
    _more(
        "trained tokens as indices",
        "trained_tokens(self, completion, run)",
        "return np.arange(len(completion.token_ids))",
    ),
    _more("a denominator of zero", "denominator(self, groups, run)", "return 0.0"),
    _more(
        "metrics that are no tensors",
        "metrics(self, logprobs, entropy, terms)",
        "return {'x_sum': 'y'}",
    ),
    _more(
        "metrics of a wrong name",
        "metrics(self, logprobs, entropy, terms)",
        "return {'clipped': logprobs.sum()}",
    ),
]
