"""What the documents name is there: paths, modules, links and keys of the configuration."""

import pytest

from tests.packaging.doc_references import (
    ROOT,
    Project,
    is_key,
    wrong_in_markdown,
    wrong_links,
    wrong_references,
)

DOCUMENTS = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_names_is_there(document):
    text = (ROOT / document).read_text()
    project = Project.here()
    assert wrong_in_markdown(text, project) + wrong_links(text, document, project) == []


def test_what_the_makefile_names_is_there():
    assert wrong_references((ROOT / "Makefile").read_text(), Project.here()) == []


# ---- the extractor: it finds what is wrong, and takes nothing else for wrong ----

WRONG = {
    "`easyrl/no_such.py`": ["path easyrl/no_such.py"],
    "`easyrl/no_such_room/`": ["path easyrl/no_such_room/"],
    "see `dataloaders/prompts/dataset.py`, `no_such.py`": ["file no_such.py"],
    "`objectives/advantages.py`": ["file objectives/advantages.py"],
    "`tests/end_to_end/test_nothing*.py`": ["path tests/end_to_end/test_nothing*.py"],
    "`configs/none.yaml`": ["path configs/none.yaml"],
    "`python -m benchmarks.nothing --repeats 2`": ["module benchmarks.nothing"],
    "`python -m easyrl.trainer`": ["module easyrl.trainer"],  # a package that cannot be run
    "`deepspeed --module easyrl.training CONFIG`": [
        "module easyrl.training",
        "name easyrl.training",
    ],
    "```python\nfrom easyrl import train_it\n```\n": ["name easyrl.train_it"],
    "```\neasyrl train configs/laptop_cpu.yaml trainer.batchsize=3\n```\n": [
        "key trainer.batchsize"
    ],
    "`trainer.grace_s.seconds`": ["key trainer.grace_s.seconds"],
    "`rewards[0].wight=2`": ["key rewards[0].wight"],
    "`evaluation.data.max_prompts`": ["key evaluation.data.max_prompts"],
    "```yaml\ninference:\n  launch: {engine: vllm, cuont: 4}\n```\n": [
        "key inference.launch.cuont"
    ],
}


@pytest.mark.parametrize("text", WRONG)
def test_a_planted_mistake_is_found(text):
    assert wrong_in_markdown(text, Project.here()) == WRONG[text]


@pytest.mark.parametrize(
    "text",
    [
        "`easyrl/trainer/loop.py`, `loop.py`, `trainer/loop.py`, `easyrl/trainer/`, `tests/golden`",
        "`tests/easyrl/models/test_lora*.py` and `configs/`",
        "`python -m easyrl.demo`, `python -m easyrl.train CONFIG`, `python -m pytest`",
        "`easyrl.train`, `easyrl.trainer.loop.Trainer`, `easyrl.train_policy`",
        "`runs/easyrl/model`, `.typecheck/easyrl/x.py`, `<directory>/easyrl-run/step`",
        "`trainer.grace_s`, `rewards[0].weight=2`, `evaluation.data.files`, `run.lock`",
        "`inference.launch.env.A`, `data.chat_template_kwargs`, `model.lora: {rank: 4}`",
        "prose may say easyrl/no_such.py and trainer.no_such",
        "```yaml\ninference:\n  launch: {engine: vllm, count: 4}\n```\n",
    ],
)
def test_what_is_right_is_not_refused(text):
    assert wrong_in_markdown(text, Project.here()) == []


def test_links_to_what_is_not_there_are_found():
    text = (
        "# A heading: `easyrl verify RUN_DIR`\n"
        "[here](#a-heading-easyrl-verify-run_dir) [there](on_policy.md#resume) "
        "[up](../README.md) [site](https://example.org/none)\n"
    )
    project = Project.here()
    assert wrong_links(text, "docs/endpoints.md", project) == []
    planted = text + "[a](none.md) [b](on_policy.md#none) [c](#none) [d](README.md)"
    assert wrong_links(planted, "docs/endpoints.md", project) == [
        "link none.md",
        "link on_policy.md#none",
        "link #none",
        "link README.md",
    ]


@pytest.mark.parametrize("key, known", [("trainer", True), ("train", False), ("run.name.x", False)])
def test_a_key_is_a_path_of_fields(key, known):
    assert is_key(key) is known
