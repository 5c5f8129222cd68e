"""``docs/commands.md`` is what the command line declares, of every command."""

from __future__ import annotations

from pathlib import Path

from easyrl.arguments.reference import READ_BY, commands, markdown
from tests.easyrl.commands.test_command_line import COMMANDS

ROOT = Path(__file__).parents[3]


def test_the_document_is_up_to_date() -> None:
    written = (ROOT / "docs/commands.md").read_text()
    assert markdown() == written, "run python -m easyrl.arguments.reference > docs/commands.md"


def test_it_has_every_command() -> None:
    names = {name.partition(" ")[0] for name in commands()}
    assert names == COMMANDS
    assert set(READ_BY) <= COMMANDS


def test_every_argument_says_what_it_means() -> None:
    silent = {
        f"{name} {parameter.name}"
        for name, command in commands().items()
        for parameter in command.params
        if not parameter.hidden and not parameter.help
    }
    assert silent == set()


def test_a_command_that_hands_its_line_on_has_the_arguments_of_whom_it_is_handed_to() -> None:
    shown = markdown().partition("## easyrl train\n")[2].partition("\n## ")[0]
    assert "| `CONFIG` | YAML file" in shown
    assert "| `--seal KEYFILE` | seal the certificate" in shown
    assert "local_rank" not in shown  # DeepSpeed's launcher passes it
    assert "`--port PORT`" in markdown().partition("## easyrl serve\n")[2].partition("\n## ")[0]
