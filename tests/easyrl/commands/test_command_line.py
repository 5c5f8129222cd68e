"""The ``easyrl`` command: its sub-commands, and what it takes to show them."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import easyrl.commands
from easyrl.__main__ import command_line

COMMANDS = {"train", "sft", "dpo", "serve", "eval", "endpoints", "verify", "replay", "recipes"}
COMMANDS |= {
    "plan-memory",
    "plan",
    "samples",
    "trace",
    "report",
    "diff",
    "lab",
    "init",
    "up",
    "doctor",
    "convert",
}
OF_CONFIG = ["train", "sft", "dpo", "up", "eval", "plan-memory", "doctor"]
OF_RUN = ["verify", "replay", "samples", "trace", "report"]  # plan can do without one


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


def shown_help(command: str, monkeypatch, capfd) -> list[str]:
    """Its lines, without the frame. Some commands hand their command line on: not ``output``."""
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(command_line(), [command, "--help"])
    assert shown.exit_code == 0
    text = shown.output + capfd.readouterr().out
    return [" ".join(line.strip("│ ").split()) for line in text.splitlines()]


@pytest.mark.parametrize("command", OF_CONFIG)
def test_all_commands_of_a_configuration_have_the_same_arguments(command, monkeypatch, capfd):
    lines = shown_help(command, monkeypatch, capfd)
    usage = next(line for line in lines if line.startswith("Usage: "))
    assert usage.endswith(f" {command} [OPTIONS] {{CONFIG}} [key=value]...")
    about = [line for line in lines if line.startswith(("* CONFIG", "key=value"))]
    assert about == [
        "* CONFIG <path> YAML file; easyrl init writes one, configs/ has more [required]",
        "key=value <list[str]> settings over the file's: trainer.max_steps=20",
    ]


@pytest.mark.parametrize("command", OF_RUN)
def test_all_commands_of_a_run_have_the_same_argument(command, monkeypatch, capfd):
    lines = shown_help(command, monkeypatch, capfd)
    assert "* RUN_DIR <path> the run's run.output_dir [required]" in lines


def test_the_version_is_told_without_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from easyrl.__main__ import command_line;"
        "result = CliRunner().invoke(command_line(), ['--version']); print(result.output);"
        "sys.exit(result.exit_code or int('torch' in sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    torch = importlib.metadata.version("torch")
    python = ".".join(map(str, sys.version_info[:3]))
    assert told.stdout.strip() == f"easyrl {easyrl.__version__}, Python {python}, torch {torch}"


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
