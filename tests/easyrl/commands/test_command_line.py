"""The ``easyrl`` command: its sub-commands, and what it takes to show them."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import easyrl.commands
from easyrl.__main__ import command_line

COMMANDS = {"train", "sft", "dpo", "serve", "eval", "endpoints", "verify", "replay", "recipes"}
COMMANDS |= {"plan-memory", "samples", "diff", "lab"}


def test_help_names_every_command_and_every_command_has_a_file():
    shown = CliRunner().invoke(command_line(), ["--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert {line.split()[1] for line in shown.output.splitlines() if line[:2] == "│ "} >= COMMANDS
    folder = Path(easyrl.commands.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    own = {"eval": "evaluate"}  # a builtin's name
    assert files == {own.get(name, name.replace("-", "_")) for name in COMMANDS}


@pytest.mark.parametrize("command", sorted(COMMANDS - {"serve"}))
def test_a_command_shows_its_help_without_torch(command):
    code = (
        "import sys; from typer.testing import CliRunner; from easyrl.__main__ import command_line;"
        f"result = CliRunner().invoke(command_line(), [{command!r}, '--help']);"
        "sys.exit(result.exit_code or int('torch' in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_worker_process_that_imports_the_main_module_imports_no_command():
    code = (
        "import sys, easyrl.__main__;"
        "heavy = {'easyrl.commands', 'easyrl.config', 'pydantic', 'numpy', 'torch'};"
        "sys.exit(', '.join(heavy & set(sys.modules)) or None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("unknown", [["trian"], ["endpoints", "rename"]])
def test_an_unknown_command_is_refused(unknown):
    refused = CliRunner().invoke(command_line(), unknown)
    assert refused.exit_code == 2 and unknown[-1] in refused.output
