"""The recipe that a configuration names: found, its keys checked, and whether it fits the rest."""

from __future__ import annotations

import difflib
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from blake3 import blake3
from pydantic import ValidationError, create_model

from easyrl.config import Config, ConfigError, RecipeConfig
from easyrl.config.base import Section
from easyrl.config.critic import CriticConfig
from easyrl.config.presets import preset_names, preset_notices
from easyrl.config.records import RecordsConfig
from easyrl.config.trainer import no_look_ahead
from easyrl.recipes.cispo import CISPO
from easyrl.recipes.dapo import DAPO
from easyrl.recipes.distillation import Distillation
from easyrl.recipes.dpo import DPO
from easyrl.recipes.dr_grpo import DrGRPO
from easyrl.recipes.dual_clip import DualClip
from easyrl.recipes.gdpo import GDPO
from easyrl.recipes.grpo import GRPO
from easyrl.recipes.gspo import GSPO
from easyrl.recipes.gspo_token import GSPOToken
from easyrl.recipes.online_dpo import OnlineDPO
from easyrl.recipes.pf_ppo import PFPPO
from easyrl.recipes.ppo import PPO
from easyrl.recipes.recipe import Models, Recipe, RunSettings
from easyrl.recipes.reinforce_pp import ReinforcePP
from easyrl.recipes.reinforce_pp_baseline import ReinforcePPBaseline
from easyrl.recipes.rloo import RLOO
from easyrl.recipes.rpo import RPO
from easyrl.recipes.sft import SFT
from easyrl.recipes.turn_grpo import TurnGRPO
from easyrl.recipes.two_sided import TwoSided
from easyrl.runtime.user_code import FileRaises, NoPythonFile, describe, raised_at, run_file

BUILT_IN: dict[str, type[Recipe]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "gspo_token": GSPOToken,
    "cispo": CISPO,
    "rloo": RLOO,
    "reinforce_pp": ReinforcePP,
    "reinforce_pp_baseline": ReinforcePPBaseline,
    "two_sided": TwoSided,
    "dual_clip": DualClip,
    "gdpo": GDPO,
    "turn_grpo": TurnGRPO,
    "online_dpo": OnlineDPO,
    "rpo": RPO,
    "distillation": Distillation,
    "ppo": PPO,
    "pf_ppo": PFPPO,
    "sft": SFT,
    "dpo": DPO,
}


def load_recipe(config: Config) -> Recipe:
    """The recipe of ``config.recipe``. Raises ``ConfigError`` naming each key and the remedy."""
    recipe = _recipe(config.recipe)
    problems = [f"recipe.{problem}" for problem in recipe.problems()]
    problems += _contradictions(config, recipe)
    if problems:
        raise ConfigError("\n".join(["recipe:", *(f"  {problem}" for problem in problems)]))
    return recipe


def with_whole_recipe(config: Config) -> Config:
    """``config`` with all keys of its recipe, defaults too. Raises ``ConfigError``.

    To be called before anything is loaded that takes long, and before the configuration is kept:
    a later version's other defaults must not change what a run is.
    """
    section = config.recipe
    own = asdict(load_recipe(config)).items()
    keys = {key: str(value) if isinstance(value, Path) else value for key, value in own}
    whole = RecipeConfig.model_validate({"name": section.name, "file": section.file} | keys)
    return config.model_copy(update={"recipe": whole})


def no_such_recipe(name: str) -> str:
    """That no built-in recipe or preset has this ``name``, and which there are."""
    presets = [preset for preset in preset_names() if preset not in BUILT_IN]
    close = difflib.get_close_matches(name, [*BUILT_IN, *presets], n=2)
    meant = f"did you mean {' or '.join(map(repr, close))}? There" if close else "there"
    return (
        f"no built-in recipe is called {name!r}; {meant} are {', '.join(BUILT_IN)}, as presets "
        f"{', '.join(presets)}, or name the file of your own in recipe.file"
    )


def run_settings(config: Config) -> RunSettings:
    """What a recipe is told of the run."""
    if isinstance(config, RecordsConfig):
        num_completions = 2 if _class(config.recipe).pairs else 1
        return RunSettings(config.data.max_tokens, num_completions, 1.0, config.run.seed)
    rollout = config.rollout
    return RunSettings(
        rollout.max_tokens,
        rollout.num_generations,
        rollout.temperature,
        config.run.seed,
        {reward.label: reward.weight for reward in config.rewards},
    )


def _contradictions(config: Config, recipe: Recipe) -> list[str]:
    """Values that do not go with the recipe, each with its key and the remedy."""
    trainer = config.trainer
    problems = []
    if recipe.source != config.source:
        others = [name for name, cls in BUILT_IN.items() if cls.source == config.source]
        problems.append(
            f"recipe.name: {config.recipe.name} trains on {recipe.source}, the run is one on "
            f"{config.source}; set source: {recipe.source}, or use {' or '.join(others)}"
        )
    problems += _without_rewards(config, recipe)
    needs, first = recipe.needs, recipe.before_advantages
    problems += [
        f"recipe.name: {config.recipe.name} has a {model}, which is not built for a model that is "
        f"split; remove {config.parallel.split_key}, or use another recipe"
        for model, is_needed in (("critic", needs.critic), ("teacher", needs.teacher is not None))
        if is_needed and config.parallel.is_split
    ]
    if first != Models(reference=first.reference and needs.reference, critic=needs.critic):
        problems.append(
            "recipe.name: before_advantages names the critic that needs does, and of other models "
            "at most its reference; correct the recipe"
        )
    if isinstance(recipe, DAPO) and recipe.overlong_buffer > 0:
        problems += [
            f"rewards[{index}].name: overlong is in the recipe already (recipe.overlong_buffer is "
            f"{recipe.overlong_buffer}); remove it, or set recipe.overlong_buffer=0"
            for index, reward in enumerate(config.rewards)
            if reward.name == "overlong"
        ]
    if config.model.logprob_backward == "same_pass" and recipe.span != "token":
        problems.append(
            "model.logprob_backward: same_pass needs a loss that is a sum over tokens, which "
            f"couples those of a {recipe.span} in recipe {config.recipe.name} as it is set; use "
            "auto"
        )
    if recipe.rejects and trainer.max_steps is None and trainer.lr_schedule != "constant":
        problems.append(
            f"recipe.name: {config.recipe.name} rejects groups, so that the run's last step is not "
            f"known, which trainer.lr_schedule={trainer.lr_schedule} needs; set trainer.max_steps, "
            "or lr_schedule: constant"
        )
    return problems


def _without_rewards(config: Config, recipe: Recipe) -> list[str]:
    if config.source == "records" or not recipe.uses_rewards:
        return []
    problems = []
    if config.environments:
        if _has_each_reward(recipe):
            problems.append(
                f"recipe.name: {config.recipe.name}, as it is set, makes its advantages of each of "
                "several rewards, and an episode has one, its environment's; use recipe.name: grpo "
                "with advantage: group_std, or turn_grpo"
            )
    elif not config.rewards:
        problems.append(
            f"rewards: recipe {config.recipe.name} makes its advantages of rewards; add one"
        )
    if config.rollout.num_generations < 2 and recipe.compares_responses:
        problems.append(
            "rollout.num_generations: a baseline needs at least 2 responses per group; raise it"
        )
    return problems


def _has_each_reward(recipe: Recipe) -> bool:
    """Whether the advantages are made of each reward by itself, not of their sum."""
    each = isinstance(recipe, GRPO) and recipe.advantage == "each_reward_std"
    return each or isinstance(recipe, GDPO)


def ratio_keys_at_rest(config: Config, recipe: Recipe) -> str | None:
    """That the recipe's clips cannot act, where the old policy is the policy in every update."""
    ratio_is_one = config.trainer.old_policy == "auto" and config.trainer.updates_per_batch == 1
    if not ratio_is_one or not recipe.ratio_keys:
        return None
    return (
        f"recipe.{' and '.join(recipe.ratio_keys)} cannot act: with one update per batch "
        "(trainer.updates_per_batch=1, trainer.old_policy=auto) the ratio is 1; they act with "
        "trainer.updates_per_batch above 1 or trainer.old_policy=lagged"
    )


def notices(config: Config, recipe: Recipe) -> list[str]:
    """What a run says once at its start: what of the recipe cannot act, and what it waits for."""
    said = preset_notices(config)
    said += [f"recipe.{notice}" for notice in recipe.notices()]
    said += _keys_without_effect(config, recipe.needs)
    if _has_each_reward(recipe) and config.scoring.truncated_reward is not None:
        said.append(
            "scoring.truncated_reward: replaces the sum of a response's rewards, and recipe "
            f"{config.recipe.name}, as it is set, makes advantages of each reward by itself, which "
            "it does not reach; use recipe.mask_truncated=true"
        )
    if (at_rest := ratio_keys_at_rest(config, recipe)) is not None:
        said.append(at_rest)
    if not recipe.has_ratio and config.trainer.updates_per_batch > 1:
        said.append(
            f"trainer.updates_per_batch: recipe {config.recipe.name} has no ratio to the old "
            "policy, so that the updates after a batch's first are off-policy and not corrected; "
            "use 1, or a recipe with a ratio"
        )
    if recipe.scope == "batch":
        said.append(
            f"the run does not stream: the advantages of recipe {config.recipe.name} are of all "
            "groups of an optimizer step, training begins when the last one is complete. No "
            "training overlaps the generation of a step's groups: with one update per batch, a "
            "batch takes generation plus training (time/wait_s and time/train_s), not about the "
            "longer of the two"
        )
    return said


def _keys_without_effect(config: Config, needs: Models) -> list[str]:
    """Keys of sections ``trainer`` and ``critic`` that cannot act with the models that the recipe
    needs, and those that act otherwise than they say.
    """
    trainer = config.trainer
    said = []
    if trainer.offload_reference and not needs.reference:
        said.append(
            "trainer.offload_reference: has no effect without a reference model; remove it, or "
            "use a recipe that needs one (recipe.kl_coef above 0)"
        )
    if trainer.old_policy == "lagged" and not needs.old_policy:
        said.append(
            "trainer.old_policy: lagged has no effect with a recipe without a ratio to the old "
            "policy; use auto"
        )
    has_frozen_models = (
        needs.reference
        or needs.critic
        or needs.scores_with_teacher
        or (needs.old_policy and (trainer.old_policy == "lagged" or trainer.updates_per_batch > 1))
    )
    said += _critic_notices(config, needs)
    could_look_ahead = has_frozen_models or no_look_ahead(trainer, config.run) is not None
    if not trainer.look_ahead and not could_look_ahead:
        said.append(
            "trainer.look_ahead: has no effect without a reference, a critic, a lagged old policy, "
            "several updates per batch or a teacher that scores sampled tokens; remove it"
        )
    return said


def _critic_notices(config: Config, needs: Models) -> list[str]:
    own = config.critic
    if needs.critic:
        if config.trainer.zero_stage < 3:
            return []
        return [
            "trainer.zero_stage: 3 shards the policy; the critic is trained with 2, its weights "
            "whole on each rank, as its values are read before the ranks agree on rows"
        ]
    changed = [key for key, value in CriticConfig() if value != getattr(own, key)]
    return [
        f"critic.{key}: has no effect with recipe {config.recipe.name}, which has no critic; "
        "remove it, or use ppo or pf_ppo"
        for key in changed
    ]


# ---- the class and its keys ----


def _recipe(section: RecipeConfig) -> Recipe:
    cls = _class(section)
    if missing := sorted(cls.__abstractmethods__):
        raise ConfigError(
            f"recipe.name: {section.name} has no {' and no '.join(missing)}; define what "
            "easyrl.recipes.Recipe leaves open"
        )
    hints = get_type_hints(cls, include_extras=True)
    keys: dict[str, Any] = {f.name: (hints[f.name], f) for f in fields(cls)}
    # pydantic takes no mapping for a strict dataclass
    model = create_model(cls.__name__, __base__=Section, **keys)
    try:
        values = model.model_validate(section.settings)
    except ValidationError as error:
        lines = [f"  {_describe(problem, list(keys), section.name)}" for problem in error.errors()]
        raise ConfigError("\n".join(["recipe:", *lines])) from None
    try:
        return cls(**{key: getattr(values, key) for key in keys})
    except ValueError as error:  # __post_init__: "key: what is wrong; what would be right"
        raise ConfigError(f"recipe.{error}") from error
    except Exception as error:  # users' code may raise anything
        where = section.name if section.file is None else raised_at(error, section.file)
        raise ConfigError(
            f"recipe.name: {where}: {section.name} cannot be made, {describe(error)}; correct it "
            "(its fields are frozen, __post_init__ may only check them)"
        ) from error


def _describe(problem: Any, keys: list[str], name: str) -> str:
    key, message = str(problem["loc"][0]), problem["msg"].removeprefix("Value error, ")
    path = "recipe." + ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        close = difflib.get_close_matches(key, keys, n=1)
        known = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(keys)}"
        return f"{path}: unknown key of recipe {name}; {known}"
    if problem["type"] == "missing":
        return f"{path}: is required; add it"
    return f"{path}: {message} (got {problem['input']!r})"


def _class(section: RecipeConfig) -> type[Recipe]:
    """Raises ``ConfigError``."""
    if section.file is None:
        if section.name not in BUILT_IN:
            raise ConfigError(f"recipe.name: {no_such_recipe(section.name)}")
        return BUILT_IN[section.name]
    if not section.file.is_file():
        raise ConfigError(f"recipe.file: {section.file} does not exist; correct the path")
    module = _module(section.file.resolve())
    cls = getattr(module, section.name, None)
    if not (isinstance(cls, type) and issubclass(cls, Recipe)):
        classes = [v for v in vars(module).values() if isinstance(v, type)]
        own = [c for c in classes if issubclass(c, Recipe) and c.__module__ == module.__name__]
        found = [c.__name__ for c in own]
        what = "is no Recipe" if cls is not None else "is not there"
        raise ConfigError(
            f"recipe.name: {section.name} in {section.file} {what}; its recipes: "
            f"{', '.join(found) or 'none, derive a class from easyrl.recipes.Recipe'}"
            + ("; name one of them" if found else "")
        )
    keys = {f.name for f in fields(cls)}
    annotated = vars(cls).get("__annotations__", {})
    if missing := {n for n, hint in annotated.items() if "ClassVar" not in str(hint)} - keys:
        raise ConfigError(
            f"recipe.name: {section.name} in {section.file} declares {', '.join(sorted(missing))} "
            "and is no dataclass; write @dataclass(frozen=True) above it"
        )
    if taken := keys & {"name", "file"}:
        raise ConfigError(
            f"recipe.name: {section.name} in {section.file} has a field {', '.join(taken)}, "
            "which is a key of the section itself; rename it"
        )
    return cls


@cache
def _module(file: Path) -> Any:
    """The user's file, run once in a process. Raises ``ConfigError``."""
    try:
        return run_file(file, f"easyrl_recipe_{blake3(str(file).encode()).hexdigest(length=6)}")
    except NoPythonFile:
        raise ConfigError(f"recipe.file: {file} is no Python file") from None
    except FileRaises as error:
        raise ConfigError(
            f"recipe.file: {error.where}: {file} cannot be run, {error.what}; {error.remedy}"
        ) from error.__cause__
