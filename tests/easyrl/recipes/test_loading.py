"""The recipe of a configuration: built-in or a user's file, its keys, and what it contradicts."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from easyrl.config import Config, ConfigError
from easyrl.config.file import dump_config, load_config, validate_config
from easyrl.recipes import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    RLOO,
    RPO,
    ClippedSurrogate,
    DrGRPO,
    DualClip,
    GSPOToken,
    OnlineDPO,
    ReinforcePP,
    ReinforcePPBaseline,
    TwoSided,
)
from easyrl.recipes.loading import (
    BUILT_IN,
    load_recipe,
    notices,
    run_settings,
    with_whole_recipe,
)
from tests.recipes import REQUIRED

ROOT = Path(__file__).resolve().parents[3]
RECIPE_FILES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
OF_ROLLOUTS = [name for name, cls in BUILT_IN.items() if cls.source == "rollouts"]

MINIMAL = """
model: {path: models/tiny}
data: {files: [train.jsonl]}
inference: {endpoints: ["http://127.0.0.1:8000"]}
rewards: [{name: exact}]
"""
OWN = """
from dataclasses import dataclass

from easyrl.recipes import GRPO, Recipe


@dataclass(frozen=True)
class Own(GRPO):
    sharpness: float = 1.5

    def __post_init__(self):
        if self.sharpness < 0:
            raise ValueError("sharpness: is below 0; use 0 or more")


class Undecorated(GRPO):
    sharpness: float = 1.5


@dataclass(frozen=True)
class Taken(GRPO):
    file: str = ""


class Unfinished(Recipe):
    pass


class NoRecipe:
    pass
"""


def load(folder: Path, *overrides: str, text: str = MINIMAL) -> Config:
    path = folder / "config.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def of(name: str) -> list[str]:
    """Overrides: the recipe and what it has to be given."""
    given = [f"recipe.{key}={value}" for key, value in REQUIRED.get(name, {}).items()]
    return [f"recipe.name={name}", *given]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


@pytest.mark.parametrize("name", OF_ROLLOUTS)
def test_a_built_in_has_its_paper_s_defaults(tmp_path: Path, name: str) -> None:
    cls = BUILT_IN[name]
    recipe = load_recipe(load(tmp_path, *of(name)))
    given = {key: Path(value) for key, value in REQUIRED.get(name, {}).items()}
    assert type(recipe) is cls and recipe == cls(**given)


@pytest.mark.parametrize("file", RECIPE_FILES, ids=lambda file: file.stem)
def test_a_ready_file_runs_its_recipe_and_has_no_key_that_cannot_act(file: Path) -> None:
    """But for the clip of a paper that trains with one update per batch."""
    config = load_config(file)
    assert config.recipe.name == file.stem and config.run.name == file.stem
    said = notices(config, load_recipe(config))
    assert not [notice for notice in said if "has no effect" in notice]
    if config.trainer.updates_per_batch > 1:
        assert not [notice for notice in said if "cannot act" in notice]


def test_the_published_objectives_have_ready_files() -> None:
    assert set(BUILT_IN) == {file.stem for file in RECIPE_FILES}


def test_published_values() -> None:
    """DeepSeekMath §4.2, Dr. GRPO §3.2, DAPO §4.1 with its 4096 of 20480 tokens."""
    grpo, dr_grpo, dapo = GRPO(), DrGRPO(), DAPO()
    assert (grpo.advantage, grpo.aggregation, grpo.kl_coef) == ("group_std", "sequence", 0.04)
    assert (grpo.kl_estimator, grpo.clip_eps_low, grpo.clip_eps_high) == ("k3", 0.2, 0.2)
    assert (dr_grpo.advantage, dr_grpo.aggregation) == ("group_mean", "constant")
    assert (dr_grpo.kl_coef, dr_grpo.clip_eps_low, dr_grpo.clip_eps_high) == (0.0, 0.2, 0.2)
    assert (dapo.advantage, dapo.aggregation, dapo.kl_coef) == ("group_std", "token", 0.0)
    assert (dapo.clip_eps_low, dapo.clip_eps_high) == (0.2, 0.28)
    assert dapo.overlong_buffer == 4096 / 20480 and dapo.dynamic_sampling


def test_published_values_of_grpo_s_relatives() -> None:
    """GSPO §5.1, INTELLECT-2 §4.1, dual-clip PPO's c."""
    gspo, two_sided, cispo = GSPO(), TwoSided(), CISPO()
    assert (gspo.clip_eps_low, gspo.clip_eps_high, gspo.kl_coef) == (3e-4, 4e-4, 0.0)
    assert GSPOToken().clip_eps_high == 4e-4
    assert (two_sided.delta, two_sided.clip_eps_low, two_sided.clip_eps_high) == (4.0, 0.2, 0.2)
    assert (two_sided.kl_coef, two_sided.entropy_coef) == (0.001, 1e-4)
    assert two_sided.aggregation == cispo.aggregation == "token" and two_sided.dynamic_sampling
    assert cispo.clip_eps_low >= 1 and cispo.kl_coef == 0  # no lower bound in effect
    assert DualClip().clip_ratio_c == 3.0
    assert (OnlineDPO().beta, OnlineDPO().label_smoothing) == (0.1, 0.0)
    assert (RPO().beta, RPO().reward_scale) == (1e-5, 3.0)  # Llama-Nemotron §6.2
    assert ReinforcePPBaseline().kl_estimator == "k2" and ReinforcePP().kl_coef == 0


@pytest.mark.parametrize(
    ("name", "scope", "span"),
    [
        ("grpo", "group", "token"),
        ("cispo", "group", "token"),
        ("two_sided", "group", "token"),
        ("dual_clip", "group", "token"),
        ("gspo", "group", "sequence"),
        ("gspo_token", "group", "sequence"),
        ("rloo", "group", "group"),
        ("reinforce_pp", "batch", "token"),
        ("reinforce_pp_baseline", "batch", "token"),
        ("gdpo", "batch", "token"),
        ("turn_grpo", "group", "token"),
        ("online_dpo", "group", "group"),
        ("rpo", "group", "group"),
        ("ppo", "batch", "token"),
        ("pf_ppo", "batch", "token"),
    ],
)
def test_scope_and_span(tmp_path: Path, name: str, scope: str, span: str) -> None:
    config = load(tmp_path, f"recipe.name={name}")
    recipe = load_recipe(config)
    assert (recipe.scope, recipe.span) == (scope, span)
    waits = [said for said in notices(config, recipe) if "does not stream" in said]
    assert len(waits) == (scope == "batch")


def test_a_recipe_without_a_kl_couples_no_tokens() -> None:
    assert (
        RLOO(kl_in_reward_coef=0.0).span == "token" and RLOO(kl_in_reward_coef=0.0).advantage_only
    )
    assert RLOO().needs.reference and not RLOO(kl_in_reward_coef=0.0).needs.reference


def test_the_recipe_is_told_the_weights_of_the_rewards(tmp_path: Path) -> None:
    config = load(tmp_path, "rewards=[{name: exact, weight: 2.0}, {name: format}]")
    assert run_settings(config).reward_weights == {"exact": 2.0, "format": 1.0}


def test_a_users_file_is_a_recipe(tmp_path: Path, own: Path) -> None:
    config = load(tmp_path, f"recipe={{file: {own}, name: Own, sharpness: 2}}")
    recipe = load_recipe(config)
    assert isinstance(recipe, GRPO) and type(recipe).__name__ == "Own"
    assert recipe.sharpness == 2.0  # type: ignore[attr-defined]
    assert load_recipe(config) == recipe  # one class however often it is loaded


BAD = {
    "no such recipe": (
        ["recipe.name=gpro"],
        "recipe.name: no built-in recipe is called 'gpro'; did you mean 'gspo' or 'grpo'?",
    ),
    "no such file": (["recipe.file=no/r.py"], "recipe.file: no/r.py does not exist"),
    "no such class": (
        ["recipe={file: OWN, name: Mine}"],
        "recipe.name: Mine in OWN is not there; its recipes: Own, Undecorated, Taken, Unfinished",
    ),
    "a class that is no recipe": (
        ["recipe={file: OWN, name: NoRecipe}"],
        "recipe.name: NoRecipe in OWN is no Recipe",
    ),
    "a class that is no dataclass": (
        ["recipe={file: OWN, name: Undecorated}"],
        "recipe.name: Undecorated in OWN declares sharpness and is no dataclass; write",
    ),
    "a field that is a key of the section": (
        ["recipe={file: OWN, name: Taken}"],
        "recipe.name: Taken in OWN has a field file",
    ),
    "methods that are missing": (
        ["recipe={file: OWN, name: Unfinished}"],
        "recipe.name: Unfinished has no advantages and no loss",
    ),
    "a value that the class refuses": (
        ["recipe={file: OWN, name: Own, sharpness: -1}"],
        "recipe.sharpness: is below 0; use 0 or more",
    ),
    "unknown key": (["recipe.kl_ceof=1"], "recipe.kl_ceof: unknown key of recipe grpo; did you"),
    "unknown key like no other": (
        ["recipe.xyzzy=1"],
        "recipe.xyzzy: unknown key of recipe grpo; known keys: aggregation, dynamic_sampling",
    ),
    "another recipe's key": (
        ["recipe.overlong_buffer=0.1"],
        "recipe.overlong_buffer: unknown key of recipe grpo; known keys: ",
    ),
    "wrong type": (
        ["recipe.kl_coef='0.1'"],
        "recipe.kl_coef: Input should be a valid number (got '0.1')",
    ),
    "negative": (["recipe.kl_coef=-1"], "recipe.kl_coef: Input should be greater than or equal to"),
    "not finite": (["recipe.entropy_coef=.inf"], "recipe.entropy_coef: Input should be a finite"),
    "no such choice": (
        ["recipe.aggregation=mean"],
        "recipe.aggregation: Input should be 'sequence', 'token' or 'constant' (got 'mean')",
    ),
    "k1 as a loss": (
        ["recipe.kl_estimator=k1"],
        "recipe.kl_estimator: k1 has a zero expected gradient as a loss; use k3 or k2",
    ),
    "an advantage per token for a ratio per response": (
        ["recipe={name: gspo, kl_in_reward_coef: 0.01}"],
        "recipe.kl_in_reward_coef: gives each token an advantage of its own, and gspo has one for "
        "a response; use recipe.name: gspo_token",
    ),
    "a bound inside of the clip": (
        ["recipe={name: two_sided, delta: 1.1}", "trainer.max_steps=3"],
        "recipe.delta: 1.1 is not above 1 + recipe.clip_eps_high = 1.2",
    ),
    "a second bound below 1": (
        ["recipe={name: dual_clip, clip_ratio_c: 1.0}"],
        "recipe.clip_ratio_c: Input should be greater than 1 (got 1.0)",
    ),
    "a schedule to a step that is not known": (
        ["recipe={name: grpo, dynamic_sampling: true}", "trainer.lr_schedule=cosine"],
        "recipe.name: grpo rejects groups, so that the run's last step is not known",
    ),
    "a schedule to a step that is not known, pairs": (
        ["recipe={name: online_dpo, dynamic_sampling: true}", "trainer.lr_schedule=cosine"],
        "recipe.name: online_dpo rejects groups, so that the run's last step is not known",
    ),
    "a reward scale of nothing": (
        ["recipe={name: rpo, reward_scale: 0.0}"],
        "recipe.reward_scale: Input should be greater than 0 (got 0.0)",
    ),
    "more than half of the preferences wrong": (
        ["recipe={name: online_dpo, label_smoothing: 0.5}"],
        "recipe.label_smoothing: Input should be less than 0.5 (got 0.5)",
    ),
    "gradient at once of pairs": (
        ["model.logprob_backward=same_pass", "recipe={name: rpo}"],
        "model.logprob_backward: same_pass needs a loss that is a sum over tokens, which couples "
        "those of a group in recipe rpo",
    ),
    "gradient at once of no sum over tokens": (
        ["model.logprob_backward=same_pass", "recipe.kl_in_reward_coef=0.1"],
        "model.logprob_backward: same_pass needs a loss that is a sum over tokens",
    ),
    "one response per prompt without a critic": (
        ["rollout.num_generations=1"],
        "rollout.num_generations: a baseline needs at least 2 responses per group; raise it",
    ),
    "punishment twice": (
        [
            "recipe.name=dapo",
            "rewards=[{name: exact}, {name: overlong, kwargs: {max_tokens: 1024}}]",
        ],
        "rewards[1].name: overlong is in the recipe already (recipe.overlong_buffer is 0.2); "
        "remove it, or set recipe.overlong_buffer=0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_names_its_key_and_the_remedy(tmp_path: Path, own: Path, name: str) -> None:
    overrides, message = BAD[name]
    config = load(tmp_path, *(override.replace("OWN", str(own)) for override in overrides))
    with pytest.raises(ConfigError) as caught:
        load_recipe(config)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert any(line.startswith(message.replace("OWN", str(own))) for line in lines), caught.value


NO_EFFECT = {
    "KL estimator without a KL": (
        ["recipe.kl_estimator=k2", "recipe.kl_coef=0.0"],
        "recipe.kl_estimator: has no effect without a KL term in the loss; remove it, or set "
        "recipe.kl_coef above 0",
    ),
    "cap without a correction": (
        ["recipe.importance_cap=3.0"],
        "recipe.importance_cap: has no effect without a correction; remove it, or set",
    ),
    "punishment without a buffer": (
        ["recipe={name: dapo, overlong_buffer: 0, overlong_penalty: 0.5}"],
        "recipe.overlong_penalty: has no effect without a buffer; remove it, or set",
    ),
    "clip with one update": (
        ["recipe.clip_eps_high=0.28"],
        "recipe.clip_eps_low and clip_eps_high cannot act: with one update per batch",
    ),
    "bound with one update": (
        ["recipe={name: dual_clip, clip_ratio_c: 5.0}"],
        "recipe.clip_eps_low and clip_eps_high and clip_ratio_c cannot act",
    ),
    "offloading no reference": (
        ["trainer.offload_reference=true", "recipe.kl_coef=0.0"],
        "trainer.offload_reference: has no effect without a reference model; remove it, or use a "
        "recipe that needs one (recipe.kl_coef above 0)",
    ),
    "an old policy that nothing is compared with": (
        ["recipe={name: rloo, kl_in_reward_coef: 0.0}", "trainer.old_policy=lagged"],
        "trainer.old_policy: lagged has no effect with a recipe without a ratio",
    ),
    "a critic's key without a critic": (
        ["critic.learning_rate=1e-4"],
        "critic.learning_rate: has no effect with recipe grpo, which has no critic; remove it, or "
        "use ppo or pf_ppo",
    ),
    "a critic of ZeRO 3": (
        ["recipe.name=ppo", "trainer.zero_stage=3"],
        "trainer.zero_stage: 3 shards the policy; the critic is trained with 2",
    ),
    "not looking ahead without frozen models": (
        ["trainer.look_ahead=false", "recipe.kl_coef=0.0"],
        "trainer.look_ahead: has no effect without a reference, a critic, a lagged old policy",
    ),
}


@pytest.mark.parametrize("name", NO_EFFECT)
def test_a_key_that_cannot_act_is_said_and_no_error(tmp_path: Path, name: str) -> None:
    overrides, message = NO_EFFECT[name]
    config = load(tmp_path, *overrides)
    said = notices(config, load_recipe(config))
    assert any(notice.startswith(message) for notice in said), said
    default = load(tmp_path, f"recipe.name={config.recipe.name}")
    told_anyway = notices(default, load_recipe(default))
    assert not any(message.partition(":")[0] + ": has no effect" in each for each in told_anyway)


def test_a_model_is_asked_first_only_where_it_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "first.py"
    file.write_text(
        "from easyrl.recipes import GRPO, Models\n\nclass First(GRPO):\n"
        "    before_advantages = Models(reference=True)\n"
    )
    recipe = f"recipe={{name: First, file: {file}, kl_coef: KL}}"
    load_recipe(load(tmp_path, recipe.replace("KL", "0.1")))
    with pytest.raises(ConfigError, match="at most its reference"):
        load_recipe(load(tmp_path, recipe.replace("KL", "0.0")))


def test_a_critic_is_baseline_enough_for_one_response(tmp_path: Path) -> None:
    load_recipe(load(tmp_path, "recipe={name: ppo}", "rollout.num_generations=1"))


def test_the_overlong_reward_goes_with_dapo_without_its_own(tmp_path: Path) -> None:
    overlong = "rewards=[{name: overlong, kwargs: {max_tokens: 1024}}]"
    load_recipe(load(tmp_path, overlong))
    load_recipe(load(tmp_path, overlong, "recipe={name: dapo, overlong_buffer: 0.0}"))


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    config = load(tmp_path, "recipe.kl_coef=-1", "recipe.agregation=token")
    with pytest.raises(ConfigError) as caught:
        load_recipe(config)
    lines = [line.split(": ")[0].strip() for line in str(caught.value).splitlines()]
    assert lines == ["recipe:", "recipe.kl_coef", "recipe.agregation"]


def test_a_file_that_cannot_be_run_says_why(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import nowhere_to_be_found\n")
    with pytest.raises(ConfigError, match=r"recipe.file: .*broken.py cannot be run, ModuleNotFo"):
        load_recipe(load(tmp_path, f"recipe={{file: {file}, name: X}}"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["recipe.kl_estimator=k2", "recipe.kl_coef=0.1"],
        ["trainer.offload_reference=true", "recipe.kl_in_reward_coef=0.1"],
        ["trainer.look_ahead=false"],
        ["trainer.look_ahead=false", "recipe.kl_coef=0.0", "trainer.old_policy=lagged"],
        ["trainer.look_ahead=false", "recipe.kl_coef=0.0", "trainer.updates_per_batch=2"],
        ["recipe.clip_eps_high=0.28", "trainer.updates_per_batch=2"],
        ["recipe.clip_eps_high=0.28", "trainer.old_policy=lagged"],
        ["recipe.kl_in_reward_coef=0.1", "model.logprob_backward=recompute"],
    ],
)
def test_the_remedies_are_accepted(tmp_path: Path, overrides: list[str]) -> None:
    load_recipe(load(tmp_path, *overrides))


@pytest.mark.parametrize("name", OF_ROLLOUTS)
def test_a_dump_of_all_keys_contradicts_nothing(tmp_path: Path, name: str) -> None:
    config = with_whole_recipe(load(tmp_path, *of(name)))
    assert set(config.recipe.settings) == {f.name for f in fields(BUILT_IN[name])}
    again = load(tmp_path, text=dump_config(config))
    assert again == config == with_whole_recipe(again)


def test_what_cannot_act_by_default_is_said_and_no_error(tmp_path: Path) -> None:
    config = load(tmp_path, "recipe.name=cispo")
    (notice,) = notices(config, load_recipe(config))
    assert notice.startswith("recipe.clip_eps_low and clip_eps_high cannot act: with one update")
    config = load(tmp_path, "recipe.name=cispo", "trainer.updates_per_batch=2")
    assert notices(config, load_recipe(config)) == []


# ---- keys that have moved ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("objective.kl_coef=0.1", "recipe.kl_coef"),
        ("objective.advantage=group_mean", "recipe.advantage"),
        ("objective.old_policy=lagged", "trainer.old_policy"),
        ("objective.shuffle_rewards=true", "scoring.shuffle_rewards"),
        ("rollout.truncated=mask", "recipe.mask_truncated=true (truncated: mask) or scoring.trun"),
        ("rollout.truncated_reward=0.0", "scoring.truncated_reward"),
    ],
)
def test_an_old_key_is_refused_with_its_new_name(tmp_path: Path, old: str, new: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, old)
    assert f"{old.split('=')[0]}: is now {new}" in str(caught.value)


def test_each_old_key_is_named_and_no_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "objective={aggregation: token, entropy_coef: 0, kl: 1}")
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[1:4] == [
        "objective.aggregation: is now recipe.aggregation",
        "objective.entropy_coef: is now recipe.entropy_coef",
        "objective.kl: unknown key",
    ]
    assert "objective: is no section any more; see docs/recipes.md" in lines[4]
    with pytest.raises(ConfigError, match="objective: is no section any more"):
        validate_config({"objective": None})


def test_another_recipe_leaves_no_key_of_the_file_s(tmp_path: Path) -> None:
    text = MINIMAL + "recipe: {name: grpo, aggregation: token, kl_coef: 0.0}\n"
    config = load(tmp_path, "recipe={name: cispo}", text=text)
    assert config.recipe.settings == {}
    assert load(tmp_path, "recipe.kl_coef=1", text=text).recipe.settings["aggregation"] == "token"


# ---- when it is looked at ------------------------------------------------------------------------


def command(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.yaml").write_text(MINIMAL)
    code = (
        "import sys; from easyrl.train import main; status = main(sys.argv[1:]); "
        "print('torch' in sys.modules, 'deepspeed' in sys.modules, file=sys.stderr); "
        "sys.exit(status)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "config.yaml", *overrides],
        cwd=folder,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_recipe_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    """And what else is wrong before torch is: that takes seconds."""
    other = command(tmp_path, "recipe.kl_ceof=1", "trainer.batch_size=0")
    assert other.returncode == 2 and "trainer.batch_size" in other.stderr
    assert other.stderr.splitlines()[-1] == "False False"
    printed = command(tmp_path, "recipe.kl_ceof=1", "--print-config")
    assert printed.returncode == 2 and "recipe.kl_ceof: unknown key" in printed.stderr
    assert printed.stderr.splitlines()[-1] == "True False"
    whole = command(tmp_path, "recipe.name=dapo", "--print-config")
    assert whole.returncode == 0 and "overlong_buffer: 0.2" in whole.stdout


# ---- the documentation ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_documented_defaults_are_those_of_the_code(name: str) -> None:
    """A recipe's row names each key of its own, and each that it shares with the others and sets
    otherwise."""
    page = {"rollouts": "recipes.md", "records": "supervised.md"}[BUILT_IN[name].source]
    rows = (ROOT / "docs" / page).read_text().splitlines()
    named = [row for row in rows if row.startswith(f"| `{name}` |")]
    (row,) = [row for row in named if row.endswith("` |")]  # of the table with defaults
    told = dict(re.findall(r"`(\w+): ([-\w.]+)`", row.split("|")[-2]))
    own = {key: _written(value) for key, value in asdict(BUILT_IN[name]()).items()}
    assert told == {key: own[key] for key in told}
    shared = {f.name: _written(f.default) for f in fields(ClippedSurrogate)}
    assert {key for key in own if own[key] != shared.get(key)} <= told.keys()


def _written(value: object) -> str:
    """As YAML has it."""
    if value is None:
        return "null"
    return str(value).lower() if not isinstance(value, float) else repr(value)
