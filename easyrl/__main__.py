"""The ``easyrl`` command: one sub-command per file of ``easyrl/commands/``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from easyrl.runtime.startup_signals import end_at_signals

if TYPE_CHECKING:
    import typer

# These hand their command line on: ``deepspeed --module`` has it read in the same way, without us.
READS_ITS_ARGUMENTS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def command_line() -> typer.Typer:
    """All sub-commands. Imported in here: worker processes import the main module again."""
    import typer

    from easyrl.arguments.version import version_option
    from easyrl.commands.convert import convert_command
    from easyrl.commands.diff import diff_command
    from easyrl.commands.doctor import doctor_command
    from easyrl.commands.dpo import dpo_command
    from easyrl.commands.endpoints import endpoints_commands
    from easyrl.commands.evaluate import eval_command
    from easyrl.commands.init import init_command
    from easyrl.commands.lab import lab_command
    from easyrl.commands.plan import plan_command
    from easyrl.commands.plan_memory import plan_memory_command
    from easyrl.commands.recipes import recipes_command
    from easyrl.commands.replay import replay_command
    from easyrl.commands.report import report_command
    from easyrl.commands.samples import samples_command
    from easyrl.commands.serve import serve_command
    from easyrl.commands.sft import sft_command
    from easyrl.commands.trace import trace_command
    from easyrl.commands.train import train_command
    from easyrl.commands.up import up_command
    from easyrl.commands.verify import verify_command

    commands = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    commands.callback()(version_option)
    commands.command("init")(init_command)
    commands.command("up")(up_command)
    commands.command("train", context_settings=READS_ITS_ARGUMENTS)(train_command)
    commands.command("sft", context_settings=READS_ITS_ARGUMENTS)(sft_command)
    commands.command("dpo", context_settings=READS_ITS_ARGUMENTS)(dpo_command)
    commands.command("serve", context_settings=READS_ITS_ARGUMENTS)(serve_command)
    commands.command("eval")(eval_command)
    commands.command("verify")(verify_command)
    commands.command("replay", context_settings=READS_ITS_ARGUMENTS)(replay_command)
    commands.command("diff")(diff_command)
    commands.command("lab")(lab_command)
    commands.command("samples")(samples_command)
    commands.command("trace")(trace_command)
    commands.command("report")(report_command)
    commands.command("recipes")(recipes_command)
    commands.command("doctor")(doctor_command)
    commands.command("plan-memory")(plan_memory_command)
    commands.command("plan")(plan_command)
    commands.command("convert")(convert_command)
    commands.add_typer(endpoints_commands, name="endpoints")
    return commands


def main() -> None:
    """Entry point of the console script."""
    end_at_signals()
    sys.exit(command_line()())


if __name__ == "__main__":
    main()
