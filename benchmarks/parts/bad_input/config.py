"""Mistakes in the configuration: its file, its keys, their values, and what contradicts."""

from __future__ import annotations

from benchmarks.parts.bad_input.scene import CONFIG, TRAIN, Mistake


def _replaced(old: str, new: str) -> str:
    assert old in CONFIG
    return CONFIG.replace(old, new)


def _line_of(text: str, config: str) -> str:
    """``file:line`` of ``text`` in the configuration."""
    return f"{{folder}}/config.yaml:{config[: config.index(text)].count(chr(10)) + 1}"


_TAB = _replaced("trainer: {zero_stage: 0,", "trainer:\n\tzero_stage: 0\nx: {")
_UNCLOSED = _replaced("rewards: [{name: exact}]", "rewards: [{name: exact}")
_DUPLICATE = CONFIG + "model: {path: {model}}\n"
_DUPLICATE_IN_SECTION = _replaced("max_steps: 1,", "max_steps: 1, batch_size: 8,")
_ALIAS = _replaced("zero_stage: 0", "zero_stage: *stage")
_TAG = _replaced("zero_stage: 0", "zero_stage: !!python/object/apply:os.getcwd []")
_COLON = _replaced("rewards: [{name: exact}]", "rewards: name: exact")
_INDENT = _replaced("rewards: [{name: exact}]", "rewards:\n  - name: exact\n weight: 2.0")

MISTAKES = [
    Mistake("a mistyped key", "trainer.batch_sise", ("trainer.batch_sise=8",)),
    Mistake("a mistyped section", "trainr", ("trainr.batch_size=8",)),
    Mistake("a key of another project", "trainer.ppo_epochs", ("trainer.ppo_epochs=4",)),
    Mistake("a key in the wrong section", "trainer.temperature", ("trainer.temperature=0.7",)),
    Mistake("text for a number", "trainer.batch_size", ("trainer.batch_size=many",)),
    Mistake("a fraction for a count", "trainer.batch_size", ("trainer.batch_size=2.5",)),
    Mistake("a number for a switch", "data.shuffle", ("data.shuffle=2",)),
    Mistake("a negative number", "trainer.learning_rate", ("trainer.learning_rate=-1e-6",)),
    Mistake("zero for a count", "rollout.max_tokens", ("rollout.max_tokens=0",)),
    Mistake("not a number", "trainer.learning_rate", ("trainer.learning_rate=.nan",)),
    Mistake("a value not in the list", "run.mode", ("run.mode=asynchronous",)),
    Mistake("a text for a list", "inference.endpoints", ("inference.endpoints=http://host:8000",)),
    Mistake("a number for a section", "trainer", ("trainer=5",)),
    Mistake("a section left empty", "trainer", ("trainer=null",)),
    Mistake("a mapping for a list", "rewards", ("rewards={name: exact}",)),
    Mistake("an empty list of rewards", "rewards", ("rewards=[]",)),
    Mistake("a temperature of 0", "rollout.temperature", ("rollout.temperature=0",)),
    Mistake("nucleus sampling", "rollout.top_p", ("rollout.top_p=0.9",)),
    Mistake("one response to a group", "rollout.num_generations", ("rollout.num_generations=1",)),
    Mistake(
        "slices that are not equal",
        "trainer.updates_per_batch",
        ("trainer.updates_per_batch=3", "trainer.max_steps=3"),
    ),
    Mistake("a warm-up behind the end", "trainer.warmup_steps", ("trainer.warmup_steps=5",)),
    Mistake("bf16 without ZeRO", "trainer.zero_stage", ("model.dtype=bf16",)),
    Mistake(
        "offloading what is not sharded",
        "trainer.offload_optimizer",
        ("trainer.offload_optimizer=true",),
    ),
    Mistake("a key of an earlier version", "objective.kl_coef", ("objective.kl_coef=0.1",)),
    Mistake("an override without a value", "trainer.batch_size", ("trainer.batch_size",)),
    Mistake("an override with a space", "trainer.batch_size", ("trainer.batch_size", "=", "8")),
    Mistake("an override that is no YAML", "data.files", ("data.files=[a.jsonl",)),
    Mistake("an override behind a list's end", "rewards[3].weight", ("rewards[3].weight=2",)),
    Mistake("an override below a number", "trainer.batch_size", ("trainer.batch_size.x=1",)),
    Mistake("a variable that is not set", "run.name", ("run.name=${oc.env:EASYRL_NOT_SET}",)),
    Mistake("a reference to no key", "run.name", ("run.name=${run.title}",)),
    Mistake("a run's name with a slash", "run.name", ("run.name=mine/first",)),
    Mistake("a tab as indentation", _line_of("\tzero", _TAB), config=_TAB),
    Mistake("an unclosed bracket", "{folder}/config.yaml:6", config=_UNCLOSED),
    Mistake("a section twice", ("{folder}/config.yaml:11", "model"), config=_DUPLICATE),
    Mistake("a key twice", ("{folder}/config.yaml:9", "batch_size"), config=_DUPLICATE_IN_SECTION),
    Mistake("an unknown alias", _line_of("*stage", _ALIAS), config=_ALIAS),
    Mistake("a Python tag", _line_of("!!python", _TAG), config=_TAG),
    Mistake("two colons in a line", _line_of("rewards: name", _COLON), config=_COLON),
    Mistake("a wrong indentation", "{folder}/config.yaml:8", config=_INDENT),
    Mistake("an empty file", "{folder}/config.yaml", config=""),
    Mistake("a list instead of sections", "{folder}/config.yaml", config="- model\n- data\n"),
    Mistake("plain text", "{folder}/config.yaml", config="train my model please\n"),
    Mistake("two documents in a file", "{folder}/config.yaml", config=CONFIG + "---\n" + CONFIG),
    Mistake(
        "a file in UTF-16", "{folder}/config.yaml", files={"config.yaml": CONFIG.encode("utf-16")}
    ),
    Mistake("a binary file", "{folder}/config.yaml", files={"config.yaml": bytes(range(256)) * 4}),
    Mistake("no section data", "data", config=_replaced("data:", "#data:")),
    Mistake("no section inference", "inference", config=_replaced("inference:", "#inference:")),
    Mistake("a mistyped option", "--resum", command=("train", "--resum", "{folder}/config.yaml")),
    Mistake("no configuration at all", "CONFIG", command=("train",)),
    Mistake(
        "a JSON file of something else",
        "{folder}/settings.json",
        files={"settings.json": '{"learning_rate": 1e-6, "epochs": 3}'},
        command=("train", "{folder}/settings.json"),
    ),
    Mistake("two rewards of one name", "rewards", ("rewards=[{name: exact}, {name: exact}]",)),
    Mistake(
        "an evaluation of too few samples",
        "evaluation.pass_at",
        ("evaluation={data: {files: [{folder}/prompts.jsonl]}, pass_at: [4]}",),
    ),
    Mistake(
        "a decaying rate without an end",
        "trainer.lr_schedule",
        (
            "recipe.name=dapo",
            "recipe.kl_coef=0.0",
            "trainer.max_steps=null",
            "trainer.lr_schedule=cosine",
        ),
    ),
    Mistake("an unknown tracker", "run.trackers[0]", ("run.trackers=[mlflow]",)),
    Mistake("a sub-command that is none", "trian", command=("trian", *TRAIN[1:])),
]
