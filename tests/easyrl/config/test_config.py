"""Configuration: kinds of bad config with their messages, overrides, and the example files."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from easyrl.config import Config, ConfigError, WeightSyncConfig, endpoint_url
from easyrl.config.file import dump_config, load_config
from easyrl.config.machine import check_paths
from easyrl.config.run import MOST_CHARACTERS, RunConfig

FOLDER = Path(__file__).resolve().parents[3] / "configs"
CONFIGS = sorted(path for path in FOLDER.rglob("*.yaml") if path.parent.name != "launch")
MINIMAL = """
model: {path: models/tiny}
data: {files: [train.jsonl]}
inference: {endpoints: ["http://127.0.0.1:8000"]}
rewards: [{name: exact}]
"""


def load(folder: Path, text: str = MINIMAL, *overrides: str) -> Config:
    path = folder / "config.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def test_the_minimal_config_loads_with_defaults(tmp_path):
    config = load(tmp_path)
    assert config.model.path == config.model.tokenizer_path == Path("models/tiny")
    assert config.rollout.num_generations == 8
    assert config.evaluation is None


# ---- bad values --------------------------------------------------------------------------------

EVALUATION = "evaluation={data: {files: [x.jsonl]}"
# name → (overrides of the minimal config, lines of the message)
KL = ["recipe.kl_coef=0.1"]
BAD_VALUES = {
    "unknown section": (["trianer.batch_size=8"], "trianer: unknown key; did you mean 'trainer'?"),
    "unknown key": (
        ["trainer.batchsize=8"],
        "trainer.batchsize: unknown key; did you mean 'batch_size'?",
    ),
    "unknown key like no other": (
        ["model.xyzzy=1"],
        "model.xyzzy: unknown key; known keys: activation_checkpointing, attention, "
        "checkpoint_every, dtype, fused_layers, ignore_router_aux_loss, logprob_backward, "
        "logprob_chunk_size, lora, path, tokenizer",
    ),
    "unknown nested key": (
        ["data.fields.promt=q"],
        "data.fields.promt: unknown key; did you mean 'prompt'?",
    ),
    "unknown key in a list": (
        ["rewards[0].wieght=2"],
        "rewards[0].wieght: unknown key; did you mean 'weight'?",
    ),
    "unknown key in an optional section": (
        [EVALUATION + ", sampling: {max_token: 3}}"],
        "evaluation.sampling.max_token: unknown key; did you mean 'max_tokens'?",
    ),
    "an evaluation without prompts": (
        ["evaluation={every_steps: 3}"],
        "evaluation.data: is required; name the files of held-out prompts there, or those of",
    ),
    "unknown key of an evaluation": (
        [EVALUATION + ", every_stps: 3}"],
        "evaluation.every_stps: unknown key; did you mean 'every_steps'? (a set of held-out prom",
    ),
    "unknown section of an evaluation": (
        [EVALUATION + ", samplng: {top_k: 20}}"],
        "evaluation.samplng: unknown key; did you mean 'sampling'?",
    ),
    "unknown key of a named set": (
        ["evaluation={aime24: {data: {files: [x.jsonl]}, num_sample: 8}}"],
        "evaluation.aime24.num_sample: unknown key; did you mean 'num_samples'?",
    ),
    "unknown key of a named set's data": (
        ["evaluation={aime24: {data: {filez: [x.jsonl]}}}"],
        "evaluation.aime24.data.filez: unknown key; did you mean 'files'?",
    ),
    "a named set that has a schedule": (
        ["evaluation={aime24: {data: {files: [x.jsonl]}, every_steps: 5}}"],
        "evaluation.aime24.every_steps: unknown key; known keys: data, num_samples, pass_at",
    ),
    "a named set without prompts": (
        ["evaluation={aime24: {num_samples: 8}}"],
        "evaluation.aime24.data: is required",
    ),
    "a named set of too few samples": (
        ["evaluation={num_samples: 2, aime24: {data: {files: [x.jsonl]}, pass_at: [4]}}"],
        "evaluation.aime24.pass_at: 4 needs num_samples of at least as many",
    ),
    "a named set that has data beside it": (
        [EVALUATION + ", aime24: {data: {files: [y.jsonl]}}}"],
        "evaluation.data: has no name, which the sets beside it have (aime24); move it below",
    ),
    "a set's name that is no part of a metric's": (
        ["evaluation={'aime 24': {data: {files: [x.jsonl]}}}"],
        "evaluation: 'aime 24' cannot be the name of a set; use letters, digits, _ and -, a let",
    ),
    "a set's name that is a number": (
        ["evaluation={2024: {data: {files: [x.jsonl]}}}"],
        "evaluation: 2024 cannot be the name of a set",
    ),
    "two sets that trackers take for one": (
        ["evaluation={aime_24: {data: {files: [x.jsonl]}}, AIME-24: {data: {files: [y.jsonl]}}}"],
        "evaluation: AIME-24: is the name of another set in other letters (aime_24); rename",
    ),
    "wrong type": (
        ["trainer.batch_size=many"],
        "trainer.batch_size: Input should be a valid integer (got 'many')",
    ),
    "truth value for a number": (
        ["trainer.batch_size=true"],
        "trainer.batch_size: Input should be a valid integer (got True)",
    ),
    "fraction for a count": (
        ["rollout.num_generations=8.5"],
        "rollout.num_generations: Input should be a valid integer (got 8.5)",
    ),
    "text for a number": (
        ["trainer.learning_rate='1e-6'"],
        "trainer.learning_rate: Input should be a valid number (got '1e-6')",
    ),
    "text for a list": (
        ["data.files=train.jsonl"],
        "data.files: Input should be a valid list (got 'tr",
    ),
    "value for a section": (["trainer=3"], "trainer: Input should be a valid dictionary"),
    "negative": (
        ["trainer.learning_rate=-1e-6"],
        "trainer.learning_rate: Input should be greater than 0",
    ),
    "zero for a count": (
        ["trainer.batch_size=0"],
        "trainer.batch_size: Input should be greater than 0",
    ),
    "infinite": (
        ["trainer.learning_rate=.inf"],
        "trainer.learning_rate: Input should be a finite number",
    ),
    "negative seed": (
        ["run.seed=-1"],
        "run.seed: Input should be greater than or equal to 0 (got -1)",
    ),
    "not one of the choices": (
        ["run.mode=asinc"],
        "run.mode: Input should be 'async' or 'sync' (got 'as",
    ),
    "probability above 1": (
        ["rollout.top_p=1.5"],
        "rollout.top_p: Input should be less than or equal to",
    ),
    "top_k of 0": (
        ["rollout.top_k=0"],
        "rollout.top_k: must be -1 (all tokens) or at least 1 (got 0)",
    ),
    "greedy rollout": (
        ["rollout.temperature=0"],
        "rollout.temperature: 0 is greedy, a group's responses would all be equal; use 1.0",
    ),
    "rollout that may not end early": (
        ["rollout.min_tokens=5"],
        "rollout.min_tokens: 5 samples from another distribution than the policy that is trained",
    ),
    "rollout of the likeliest tokens": (
        ["rollout.top_p=0.9"],
        "rollout.top_p: 0.9 samples from another distribution than the policy that is trained, "
        "its ratios are biased; use 1.0, or set rollout.allow_off_policy_sampling=true",
    ),
    "rollout of the likeliest tokens by number": (
        ["rollout.top_k=50"],
        "rollout.top_k: 50 samples from another distribution than the policy that is trained, "
        "its ratios are biased; use -1, or set rollout.allow_off_policy_sampling=true",
    ),
    "rollout without unlikely tokens": (
        ["rollout.min_p=0.05"],
        "rollout.min_p: 0.05 samples from another distribution than the policy that is trained, "
        "its ratios are biased; use 0.0, or set rollout.allow_off_policy_sampling=true",
    ),
    "presence penalty in rollout": (
        ["rollout.presence_penalty=0.5"],
        "rollout.presence_penalty: 0.5 samples from another distribution than the policy that is "
        "trained, its ratios are biased; use 0.0, or set rollout.allow_off_policy_sampling=true",
    ),
    "frequency penalty in rollout": (
        ["rollout.frequency_penalty=-0.5"],
        "rollout.frequency_penalty: -0.5 samples from another distribution than the policy that is "
        "trained, its ratios are biased; use 0.0, or set rollout.allow_off_policy_sampling=true",
    ),
    "repetition penalty in rollout": (
        ["rollout.repetition_penalty=1.1"],
        "rollout.repetition_penalty: 1.1 samples from another distribution than the policy that is "
        "trained, its ratios are biased; use 1.0, or set rollout.allow_off_policy_sampling=true",
    ),
    "more tokens at least than at most": (
        ["rollout.min_tokens=20", "rollout.max_tokens=10"],
        "rollout.min_tokens: 20 is more than max_tokens, which is 10; lower it",
    ),
    "more tokens at least than at most in the evaluation": (
        [EVALUATION + ", sampling: {min_tokens: 20, max_tokens: 10}}"],
        "evaluation.sampling.min_tokens: 20 is more than max_tokens, which is 10; lower it",
    ),
    "greedy samples": (
        [EVALUATION + ", num_samples: 4, sampling: {temperature: 0}}"],
        "evaluation.num_samples: sampling.temperature of 0 is greedy, all samples would be equal; "
        "use 1, or a temperature above 0",
    ),
    "checkpointing of no layer": (
        ["model.checkpoint_every=2", "model.activation_checkpointing=none"],
        "model.checkpoint_every: has no effect without checkpointing",
    ),
    "not looking ahead in sync mode": (
        [*KL, "trainer.look_ahead=false", "run.mode=sync"],
        "trainer.look_ahead: has no effect with run.mode=sync",
    ),
    "not looking ahead in strict mode": (
        [*KL, "trainer.look_ahead=false", "run.determinism=strict"],
        "trainer.look_ahead: has no effect with run.determinism=strict",
    ),
    "not looking ahead with a reference on the host": (
        [*KL, "trainer.look_ahead=false", "trainer.offload_reference=true"],
        "trainer.look_ahead: has no effect with trainer.offload_reference; remove it",
    ),
    "no balance in strict mode": (
        ["trainer.balance=false", "run.determinism=strict"],
        "trainer.balance: has no effect with run.determinism=strict",
    ),
    "engine to choose": (["trainer.engine=deepspeed"], "trainer.engine: unknown key"),
    "a path as the run's name": (
        ["run.name=a/../b"],
        "run.name: use letters, digits, '_', '-' and '.' only",
    ),
    "colon in the run's name": (
        ["run.name='a:b'"],
        "run.name: use letters, digits, '_', '-' and '.' only",
    ),
    "no files": (["data.files=[]"], "data.files: is empty; list one file at least"),
    "no placeholder": (
        ["data.prompt_template=Answer!"],
        "data.prompt_template: must contain {prompt} (got 'Answer!')",
    ),
    "broken regular expression": (
        ["data.answer_pattern='('"],
        "data.answer_pattern: is not a regular expression: missing )",
    ),
    "regular expression without a group": (
        ["data.answer_pattern='#### .+'"],
        "data.answer_pattern: needs one group, such as '#### (.+)'",
    ),
    "system prompt without a chat template": (
        ["data.apply_chat_template=false", "data.system_prompt=hi"],
        "data.system_prompt: has no effect without a chat template; remove it",
    ),
    "endpoint that is no URL": (
        ["inference.endpoints=['localhost:8000']"],
        "inference.endpoints: 'localhost:8000' is not an http:// or https:// URL",
    ),
    "endpoint of the OpenAI routes": (
        ["inference.endpoints=['http://a:1/v1']"],
        "inference.endpoints: 'http://a:1/v1': leave off /v1",
    ),
    "endpoint with a password": (
        ["inference.endpoints=['http://me:secret@a:1']"],
        "inference.endpoints: a URL with a user name; name the key's variable",
    ),
    "endpoint named twice": (
        ["inference.endpoints=['http://a:1', 'http://a:1/']"],
        "inference.endpoints: names an endpoint twice",
    ),
    "reward with name and file": (
        ["rewards[0].file=x.py"],
        "rewards[0]: give either name (exact, math, format, thinking_toggle, length_target, ",
    ),
    "reward with neither": (
        ["rewards=[{weight: 1.0}]"],
        "rewards[0]: give either name (exact, math, fo",
    ),
    "unknown reward": (
        ["rewards[0].name=exakt"],
        "rewards[0].name: Input should be 'exact', 'math', 'format', 'thinking_toggle', ",
    ),
    "missing reward file": (
        ["rewards=[{file: no/r.py}]"],
        "rewards[0].file: no/r.py does not exist",
    ),
    "two rewards of one name": (
        ["rewards=[{name: exact}, {name: exact}]"],
        "rewards: two are called the same (['exact', 'exact']); set log_as of one",
    ),
    "ZeRO 0 in bf16": (
        ["trainer.zero_stage=0"],
        "trainer.zero_stage: 0 cannot accumulate bf16 gradients in fp32 (DeepSpeed refuses it); "
        "use 1,",
    ),
    "muon's shards": (
        ["trainer.optimizer=muon", "trainer.zero_stage=3"],
        "trainer.optimizer: muon needs whole matrices, of which trainer.zero_stage=3 leaves each",
    ),
    "muon on the host": (
        ["trainer.optimizer=muon", "trainer.offload_optimizer=true"],
        "trainer.offload_optimizer: muon would do its matrix products on the host; remove it, or",
    ),
    "8-bit moments on the host": (
        ["trainer.optimizer=adam8bit", "trainer.offload_optimizer=true"],
        "trainer.offload_optimizer: adam8bit would do its quantisation on the host; remove it, or",
    ),
    "muon's momentum for another": (
        ["trainer.muon_momentum=0.9"],
        "trainer.muon_momentum: has no effect with trainer.optimizer=adamw; remove it",
    ),
    "muon's rate for another": (
        ["trainer.optimizer=adam8bit", "trainer.muon_learning_rate=1e-3"],
        "trainer.muon_learning_rate: has no effect with trainer.optimizer=adam8bit; remove it",
    ),
    "unknown optimizer": (
        ["trainer.optimizer=adam"],
        "trainer.optimizer: Input should be 'adamw', 'adam8bit' or 'muon' (got 'adam')",
    ),
    "warm-up longer than the run": (
        ["trainer.warmup_steps=10", "trainer.max_steps=10"],
        "trainer.warmup_steps: must be below trainer.max_steps",
    ),
    "floor of a constant learning rate": (
        ["trainer.min_lr_ratio=0.1"],
        "trainer.min_lr_ratio: has no effect with a constant lr_schedule; remove it",
    ),
    "pass@k above the samples": (
        [EVALUATION + ", num_samples: 2, pass_at: [1, 4]}"],
        "evaluation.pass_at: 4 needs num_samples of at least as many",
    ),
    "no pass@k": (
        [EVALUATION + ", pass_at: []}"],
        "evaluation.pass_at: List should have at least 1",
    ),
    "unknown variable": (
        ["data.system_prompt=${run.nam}"],
        "Interpolation key 'run.nam' not found",
    ),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_a_bad_value_names_its_key_and_the_remedy(tmp_path, name):
    overrides, message = BAD_VALUES[name]
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, MINIMAL, *overrides)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    source = f"{tmp_path / 'config.yaml'}: "
    assert lines[0].startswith(source)
    assert any(line.removeprefix(source).startswith(message) for line in lines), caught.value


def test_all_problems_are_reported_at_once(tmp_path):
    overrides = ["run.mode=x", "trainer.batch_size=0", "rewards[0].weigt=1"]
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, MINIMAL, *overrides)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{tmp_path / 'config.yaml'}: 3 problem(s)"
    assert [line.split(": ")[0] for line in lines[1:]] == [
        "  run.mode",
        "  rewards[0].weigt",
        "  trainer.batch_size",
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.top_p=0.9", "rollout.top_k=50", "rollout.allow_off_policy_sampling=true"],
        [EVALUATION + ", sampling: {top_p: 0.9, temperature: 0, presence_penalty: 1.0}}"],
        [EVALUATION + ", num_samples: 4, sampling: {temperature: 0.6}}"],
        [
            *("rollout.min_tokens=10", "rollout.max_tokens=10"),
            "rollout.allow_off_policy_sampling=true",
        ],
        ["scoring.truncated_reward=-1.0"],
        ["trainer.balance=false"],
        ["trainer.look_ahead=false", *KL],
        ["trainer.look_ahead=false", "trainer.old_policy=lagged"],
        ["trainer.look_ahead=false", "trainer.updates_per_batch=2"],
    ],
)
def test_the_remedies_are_accepted(tmp_path, overrides):
    load(tmp_path, MINIMAL, *overrides)


def test_a_dump_of_defaults_contradicts_nothing(tmp_path):
    config = load(tmp_path)
    assert load(tmp_path, dump_config(config)) == config


# ---- bad files and overrides -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: {path: m",
            r"config\.yaml:1: did not find .* \(column 8\); close this",
        ),
        (
            "model: {path: m}\n\tdata: 1",
            r"config\.yaml:2: found .* \(column 1\); indent with spaces",
        ),
        (
            MINIMAL + "model: {path: other}\n",
            r"config\.yaml:6: found duplicate key model \(column 1\); remove one",
        ),
        ("- a\n- b", r"config\.yaml: expected a mapping of sections, got list"),
        ("", r"config\.yaml: 3 problem\(s\)\n  model: is required\n  data: is required"),
        ("model: {path: m}", r"2 problem\(s\)\n  data: is required\n  inference: is required"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config file .*no\.yaml does not exist"):
        load_config(tmp_path / "no.yaml")


def test_a_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"config\.yaml: 'utf-8' codec can't decode"):
        load_config(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.batch_size", "override 'trainer.batch_size' is not of the form key.path=value"),
        ("=3", "override '=3' is not of the form key.path=value"),
        ("rollout.stop=[a", "override 'rollout.stop=[a': while parsing"),
        ("rewards[4].weight=1", "override 'rewards[4].weight=1': list index out of range"),
    ],
)
def test_a_bad_override_is_quoted(tmp_path, override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, MINIMAL, override)


# ---- overrides ---------------------------------------------------------------------------------


def test_overrides(tmp_path):
    config = load(
        tmp_path,
        MINIMAL,
        "trainer.learning_rate=1e-6",
        "trainer.max_steps=3",
        "trainer.max_steps=null",
        "trainer.adam_betas=[0.9, 0.95]",
        "rewards[0].weight=2",
        "rewards.0.kwargs={pattern: '#### (.+)'}",
        "rollout.stop=['a=b', \"\\n\"]",
        "data.chat_template_kwargs.enable_thinking=false",
        "evaluation.data.files=['${data.files[0]}']",
        "run.name=it",
    )
    assert config.trainer.learning_rate == 1e-6
    assert config.trainer.max_steps is None
    assert config.trainer.adam_betas == (0.9, 0.95)
    assert config.rewards[0].weight == 2.0
    assert config.rewards[0].kwargs == {"pattern": "#### (.+)"}
    assert config.rollout.stop == ["a=b", "\n"]
    assert config.data.chat_template_kwargs == {"enable_thinking": False}
    assert config.evaluation.data.files == [Path("train.jsonl")]
    assert config.run.name == "it"


def test_named_sets_of_an_evaluation_have_what_is_said_beside_them(tmp_path):
    text = """
evaluation:
  num_samples: 8
  sampling: {temperature: 0.7, top_k: 20, max_tokens: 32768}
  aime24: {data: {files: [aime24.json]}}
  math500: {data: {files: [math500.json]}, num_samples: 4, sampling: {max_tokens: 4096}}
"""
    sets = load(tmp_path, MINIMAL + text, "evaluation.aime24.pass_at=[1,8]").evaluation.sets
    assert [(name, each.num_samples, each.pass_at) for name, each in sets.items()] == [
        ("aime24", 8, [1, 8]),
        ("math500", 4, [1]),
    ]
    samplings = [(s.sampling.temperature, s.sampling.max_tokens) for s in sets.values()]
    assert samplings == [(0.7, 32768), (0.7, 4096)]
    assert sets["math500"].sampling.top_k == 20


def test_the_one_set_of_an_evaluation_has_no_name(tmp_path):
    evaluation = load(tmp_path, MINIMAL, EVALUATION + ", num_samples: 3}").evaluation
    ((name, one),) = evaluation.sets.items()
    assert (name, one.num_samples, one.data) == ("", 3, evaluation.data)


def test_two_sets_of_one_name_are_refused(tmp_path):
    twice = "  aime24: {data: {files: [x.json]}}\n" * 2
    with pytest.raises(
        ConfigError, match=r"config\.yaml:\d+: found duplicate key aime24 .*remove one"
    ):
        load(tmp_path, MINIMAL + "evaluation:\n" + twice)


def test_the_papers_evaluation_is_as_it_says():
    """Periodic asynchrony, section 6: AIME24, 8 times, 32k tokens, 0.7, 0.95 and 20."""
    sets = load_config(FOLDER / "aime24_math500_eval.yaml").evaluation.sets
    assert list(sets) == ["aime24", "math500"]
    aime, sampling = sets["aime24"], sets["aime24"].sampling
    assert (aime.num_samples, sampling.max_tokens) == (8, 32 * 1024)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.95, 20)
    assert sets["math500"].sampling == sampling
    assert sets["math500"].data.fields.prompt == "problem"


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert load(tmp_path, MINIMAL, "model.path=~/m").model.path == Path("/home/someone/m")


# ---- dumping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_example_configs_load_and_survive_a_dump(tmp_path, path):
    config = load_config(path)
    assert config.evaluation is not None
    assert load(tmp_path, dump_config(config)) == config


def test_there_are_example_configs():
    assert {path.stem for path in CONFIGS} >= {"gsm8k_qwen3", "deepscaler_qwen3", "laptop_cpu"}


@pytest.mark.parametrize(
    "text",
    ["${prompt}", "$x$ \\frac{1}{2}", "\\${a} \\\\${b}\\", "1e-6", "null", "a: b\n  c", "???", " "],
)
def test_any_text_survives_a_dump(tmp_path, text):
    config = load(tmp_path)
    data = config.data.model_copy(update={"system_prompt": text})
    config = config.model_copy(update={"data": data})
    assert load(tmp_path, dump_config(config)) == config


# ---- paths -------------------------------------------------------------------------------------


def existing(folder: Path) -> list[str]:
    """Overrides that make all paths of the minimal config exist."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "train.jsonl").write_text("{}")
    return [
        f"model.path={folder}/model",
        f"data.files=[{folder}/train.jsonl]",
        f"run.output_dir={folder}/runs/new",
        f"weight_sync.directory={folder}",
    ]


def test_paths_that_exist_pass_and_nothing_is_made(tmp_path):
    check_paths(load(tmp_path, MINIMAL, *existing(tmp_path)))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.path=org/name",
            "model.path: org/name is not a directory, nor a model's name",
        ),
        (
            "model.path={}/runs",
            "model.path: {}/runs has no config.json; is it a Hugging Face model?",
        ),
        ("model.tokenizer={}/tok", "model.tokenizer: {}/tok is not a directory"),
        ("data.files=[{}/train.jsonl,no.jsonl]", "data.files[1]: no.jsonl does not exist"),
        ("data.chat_template={}/no.jinja", "data.chat_template: {}/no.jinja does not exist"),
        ("evaluation={{data: {{files: [no.json]}}}}", "evaluation.data.files[0]: no.json does not"),
        (
            "evaluation={{math: {{data: {{files: [no.json]}}}}}}",
            "evaluation.math.data.files[0]: no.json does not exist",
        ),
        (
            "run.output_dir={}/train.jsonl/a",
            "run.output_dir: {0}/train.jsonl/a cannot be made, {0}/tr",
        ),
        (
            "run.output_dir={}/loop/a",
            "run.output_dir: {0}/loop/a: {0}/loop is a link to {0}/loop, which is not there; rem",
        ),
        (
            "run.output_dir={}/dangling/a",
            "run.output_dir: {0}/dangling/a: {0}/dangling is a link to /no/disk, which is not th",
        ),
        (
            f"run.output_dir={{}}/{'x' * 300}",
            f"run.output_dir: {{}}/{'x' * 300} cannot be made (File name too long); name another",
        ),
        ("data.files=[{}]", "data.files[0]: {} is a directory; list its files one by one"),
        ("data.files=['{}/*.jsonl']", "data.files[0]: {}/*.jsonl does not exist; list the files"),
        ("rewards=[{{file: '{}/r.pkl'}}]", "rewards[0].file: {}/r.pkl does not exist; correct the"),
        ("weight_sync.directory={}/no", "weight_sync.directory: {}/no does not exist; name a dir"),
    ],
)
def test_a_bad_path_names_its_key(tmp_path, override, message):
    overrides = existing(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to("/no/disk")
    config = load(tmp_path, MINIMAL, *overrides, override.format(tmp_path))
    with pytest.raises(ConfigError) as caught:
        check_paths(config)
    (line,) = str(caught.value).splitlines()[1:]
    assert line.strip().startswith(message.format(tmp_path))


# ---- environment and packages ------------------------------------------------------------------


def test_the_key_variable_must_be_set(tmp_path, monkeypatch):
    overrides = [*existing(tmp_path), "inference.api_key_env=EASYRL_TEST_KEY"]
    config = load(tmp_path, MINIMAL, *overrides)
    monkeypatch.delenv("EASYRL_TEST_KEY", raising=False)
    message = "inference.api_key_env: the environment variable EASYRL_TEST_KEY is not set"
    with pytest.raises(ConfigError, match=message):
        check_paths(config)
    monkeypatch.setenv("EASYRL_TEST_KEY", "secret")
    check_paths(config)


def test_bitsandbytes_must_be_installed(tmp_path, monkeypatch):
    config = load(tmp_path, MINIMAL, *existing(tmp_path), "trainer.optimizer=adam8bit")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    message = re.escape("trainer.optimizer: adam8bit needs bitsandbytes, which is not installed")
    with pytest.raises(ConfigError, match=message):
        check_paths(config)
    (tmp_path / "bitsandbytes.py").write_text("")
    importlib.invalidate_caches()
    check_paths(config)


@pytest.mark.parametrize(
    ("tracker", "package"),
    [
        ("wandb", "wandb"),
        ("trackio", "trackio"),
        ("mlflow", "mlflow"),
        ("swanlab", "swanlab"),
        ("prometheus", "prometheus_client"),
    ],
)
def test_a_tracker_must_be_installed(tracker, package, tmp_path, monkeypatch):
    config = load(tmp_path, MINIMAL, *existing(tmp_path), f"run.trackers=[tensorboard, {tracker}]")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, package, raising=False)
    (tmp_path / package).mkdir()  # where its runs go, perhaps; it is no package
    message = f"run.trackers: {tracker} is not installed; pip install 'easyrl[{tracker}]'"
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_paths(config)
    (tmp_path / package / "__init__.py").write_text("")
    importlib.invalidate_caches()
    check_paths(config)


@pytest.mark.parametrize(
    "url, problem",
    [
        ("http://[::1]:8000", None),
        ("https://[fd00::2%25eth0]:8000/base", None),
        ("http://[::1", "Invalid IPv6 URL"),
        ("http://::1:8000", "names no server|Port could not be cast"),
        ("http://host:99999", "Port out of range"),
        ("http://:8000", "names no server"),
        ("http://host:8000/?x=1", "names no server"),
    ],
)
def test_an_endpoint_is_a_server_that_a_url_names(url, problem):
    if problem is None:
        assert endpoint_url(url) == url
        return
    with pytest.raises(ValueError, match=problem):
        endpoint_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://bob:MARKED@h:8000/v1",
        "http://bob:MARKED@h:8000",
        "bob:MARKED@h:8000",
        "ftp://bob:MARKED@h",
        "HTTP://bob:MARKED@h:8000",
        "http://bob:MAR/KED@[::1",
        "http://bob:MARKED?x@h",
        "http://MARKED@h:99999",
        "http://h/?token=MARKED",
        "http://h:8000#MARKED",
        "h:8000?token=MARKED",
        "http://h:99999/?token=MARKED@h/v1",
    ],
)
def test_what_may_be_a_secret_in_a_url_is_not_shown(tmp_path, url):
    with pytest.raises(ValueError) as caught:
        endpoint_url(url)
    assert "MAR" not in str(caught.value) and "KED" not in str(caught.value)
    if "@" in url:
        assert "inference.api_key_env" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, MINIMAL, f"inference.endpoints=['{url}']")
    assert "MAR" not in str(caught.value) and "KED" not in str(caught.value)
    assert "inference.endpoints" in str(caught.value)


def test_a_run_has_a_name_that_names_of_files_have_room_for():
    assert RunConfig(name="a" * MOST_CHARACTERS).name == "a" * MOST_CHARACTERS
    with pytest.raises(ValueError, match="at most 128 characters"):
        RunConfig(name="a" * 240)


@pytest.mark.parametrize(
    "given, host",
    [("trainer-0", "trainer-0"), ("10.0.0.1", "10.0.0.1"), ("fd00::1", "fd00::1"),
     ("[fd00::1]", "fd00::1"), ("trainer-0:8000", None), ("http://trainer-0", None)],
)  # fmt: skip
def test_an_advertised_host_is_a_name_or_an_address(given, host):
    if host is not None:
        assert WeightSyncConfig(advertise_host=given).advertise_host == host
        return
    with pytest.raises(ValueError, match="leave off http:// and the port"):
        WeightSyncConfig(advertise_host=given)


@pytest.mark.parametrize(
    "overrides, problem",
    [
        (["samples.per_step=-1"], "samples.per_step: Input should be greater than or equal to 0"),
        (["samples.keep=0"], "samples.keep: Input should be greater than 0"),
        (
            ["samples={per_step: 0, console_every: 5}"],
            "samples.console_every: has nothing to show with per_step 0; set per_step",
        ),
        (
            ["samples.console_every=5", "run.console=false"],
            "samples.console_every: has no effect with run.console: false; remove it",
        ),
        (["samples.per_stp=1"], "samples.per_stp: unknown key; did you mean 'per_step'?"),
    ],
)
def test_samples_that_cannot_be_kept_or_shown_are_refused(tmp_path, overrides, problem):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, MINIMAL, *overrides)
    assert problem in str(caught.value)
    assert load(tmp_path, MINIMAL, "samples.per_step=0").samples.per_step == 0


def test_an_override_with_the_brackets_of_an_ipv6_address_says_how_to_write_it():
    with pytest.raises(ConfigError, match=r'in quotes: \["http://\[::1\]:8000"\]'):
        load_config("benchmarks/overlap.yaml", ["inference.endpoints=[http://[::1]:8000]"])
    config = load_config("benchmarks/overlap.yaml", ['inference.endpoints=["http://[::1]:8000"]'])
    assert config.inference.urls == ["http://[::1]:8000"]
