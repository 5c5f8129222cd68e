"""The commands that documents show are understood: sub-command, arguments and options."""

import pytest

from tests.packaging.doc_commands import wrong_commands
from tests.packaging.doc_references import ROOT, Project
from tests.packaging.test_docs_paths import DOCUMENTS


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_of_a_document_are_understood(document):
    assert wrong_commands((ROOT / document).read_text(), Project.here()) == []


def in_a_block(line: str) -> str:
    return f"```\n{line}\n```\n"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("easyrl trian configs/demo.yaml", "no command easyrl trian"),
        ("easyrl samples", "Missing argument"),
        ("easyrl samples runs/demo --steps 4", "No such option"),
        ("easyrl samples runs/demo --step four", "four"),
        ("easyrl verify runs/one runs/other", "unexpected extra argument"),
        ("easyrl train configs/demo.yaml --resme", "No such option"),
        ("easyrl serve models/M --port many", "many"),
        ("easyrl endpoints rename runs/demo", "no command easyrl endpoints rename"),
        ("A=1 .venv/bin/easyrl lab runs/demo --with a=b", "Missing option"),
        ("ls && easyrl diff runs/one", "Missing argument"),
        ("deepspeed --hostfile h --module easyrl.train", "Missing argument"),
        ("deepspeed --num_gpus 2 --module easyrl.train c.yaml --resum", "No such option"),
        ("python -m easyrl.demo --rundir runs/x", "easyrl.demo has no option --rundir"),
        ("python -m benchmarks.chaos --kill 3", "benchmarks.chaos has no option --kill"),
        ("python -m benchmarks.no_such", "no module benchmarks.no_such to run"),
        ("make demos", "no target demos"),
        ("make demo RUNDIR=runs/x", "no variable RUNDIR"),
        ("docker run --rm easyrl-trainer:cuda easyrl sampels runs/x", "no command easyrl sampels"),
        ("easyrl samples 'runs/demo", "cannot be read"),
    ],
)
def test_a_planted_mistake_is_found(line, reason):
    (found,) = wrong_commands(in_a_block(line), Project.here())
    assert reason in found


@pytest.mark.parametrize(
    ("span", "reason"),
    [
        ("easyrl verify RUN_DIR [--chian HASH]", "easyrl verify has no option --chian"),
        ("easyrl veryfy RUN_DIR", "no command easyrl veryfy"),
        ("easyrl endpoints add|drop RUN_DIR", "no command easyrl endpoints drop"),
    ],
)
def test_a_planted_mistake_in_prose_is_found(span, reason):
    (found,) = wrong_commands(f"as `{span}` says", Project.here())
    assert reason in found


@pytest.mark.parametrize(
    "line",
    [
        "easyrl samples runs/demo --step 4 --worst   # a comment",
        "easyrl lab runs/demo --step 5 --with a.b=2 --with \"'recipe={name: x}'\"",
        "easyrl train c.yaml run.output_dir=runs/x --resume > log & easyrl --version",
        "deepspeed … --module easyrl.train CONFIG [key=value …]",
        "CUDA_VISIBLE_DEVICES=0 python -m benchmarks.chaos --kills 3; python -m venv .venv",
        "make demo RUN=runs/x ARGS='a b'",
        "docker run --rm --init easyrl-trainer python -m easyrl.demo",
        "prose may say: easyrl is a command, don't",
        "easyrl: model 12.3 s",
    ],
)
def test_what_is_right_is_not_refused(line):
    assert wrong_commands(in_a_block(line), Project.here()) == []


def test_blocks_that_are_no_shell_are_left_alone():
    assert wrong_commands("```yaml\neasyrl nothing\n```\n", Project.here()) == []
