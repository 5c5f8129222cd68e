"""The page of all commands: ``python -m easyrl.arguments.reference > docs/commands.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import typer

from easyrl.__main__ import READS_ITS_ARGUMENTS, command_line
from easyrl.arguments.train import train_arguments
from easyrl.commands.replay import replay_arguments
from easyrl.inference_client.servers.embedded.server import serve

# Of the commands that hand their command line on, what reads it.
READ_BY: dict[str, Callable[..., Any]] = {
    "train": train_arguments,
    "sft": train_arguments,
    "dpo": train_arguments,
    "serve": serve,
    "replay": replay_arguments,
}
HEAD = """# Commands

Every command of `easyrl` with its arguments, made from the sources by
`python -m easyrl.arguments.reference`; `easyrl COMMAND --help` shows the same. `easyrl --version`
tells the versions of EasyRL, Python and torch. On several devices or nodes
`deepspeed … --module easyrl.train` takes what `easyrl train` takes, and
`deepspeed … --module easyrl.commands.replay` what `easyrl replay` does. What their exit statuses
mean is in the [README](../README.md#exit-statuses), which one to use when in [tools](tools.md).
"""


def commands() -> dict[str, Any]:
    """Each command as typer's (click's) ``Command`` with all its parameters, by name.

    The name is what stands behind ``easyrl``, ``endpoints add`` for instance.
    """
    return dict(_named(typer.main.get_command(command_line()), ""))


def markdown() -> str:
    """``docs/commands.md``."""
    lines = [HEAD]
    for name, command in commands().items():
        shown = [parameter for parameter in command.params if not parameter.hidden]
        positional = " ".join(_spelled(p) for p in shown if p.param_type_name == "argument")
        options = " [OPTIONS]" if any(p.param_type_name == "option" for p in shown) else ""
        lines += [f"\n## easyrl {name}\n", f"`easyrl {name} {positional}".rstrip() + f"{options}`"]
        lines += ["", " ".join((command.help or "").split())]
        if shown:
            lines += ["", "| | meaning | default |", "|---|---|---|"]
        for parameter in shown:
            cells = (f"`{_spelled(parameter)}`", parameter.help or "", _default(parameter))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _named(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", None)  # of a group
    if below is not None:
        for name, each in below.items():
            yield from _named(each, f"{path} {name}")
        return
    name = path.strip()
    if command.context_settings == READS_ITS_ARGUMENTS:
        about, command = command.help, _reading(READ_BY[name])
        command.help = about
    yield name, command


def _reading(declared: Callable[..., Any]) -> Any:
    app = typer.Typer(add_completion=False)
    app.command()(declared)
    return typer.main.get_command(app)


def _spelled(parameter: Any) -> str:
    """As on a command line: ``CONFIG``, ``[key=value …]``, ``--step STEP``, ``--resume``."""
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
        if parameter.nargs != 1:
            name += " …"
        return name if parameter.required else f"[{name}]"
    names = ", ".join((*parameter.opts, *parameter.secondary_opts))
    if parameter.is_flag:
        return names
    value = parameter.metavar or parameter.name.upper()
    return f"{names} {value}"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    return "" if value is None or value is False or value == [] else f"`{value}`"


if __name__ == "__main__":
    print(markdown(), end="")
