"""What a document shows as commands of the project, and which of them would be refused.

Looked at are ``easyrl``, ``python -m`` and ``deepspeed --module`` of modules of ours, ``make``, and
what ``docker run`` starts in the trainer's image. In code blocks the whole command line is read as
the command itself reads it; in code spans, and where a word is left out (``…``), sub-command and
options alone.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from easyrl.arguments.reference import commands
from tests.packaging.doc_references import BLOCK, IMPORT_NAMES, ROOT, SPAN, Project

SHELL = ("", "bash", "sh", "shell")  # languages of a code block
ENDS_A_COMMAND = {"&&", "||", ";", "|", "&", ">", ">>", "<", "(", ")"}
ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")
OURS = tuple(IMPORT_NAMES.values())
IMAGE = "easyrl-trainer"
LEFT_OUT = "…"
# Modules that are the trainer's commands in another process.
SAME_AS = {
    "easyrl": (),
    "easyrl.train": ("train",),
    "easyrl.commands.replay": ("replay",),
}


def wrong_commands(text: str, project: Project) -> list[str]:
    """Commands of a Markdown ``text`` that would be refused, each with the reason."""
    wrong = []
    for language, block in BLOCK.findall(text):
        if language in SHELL:
            for line in block.replace("\\\n", " ").splitlines():
                wrong += _wrong_in(line, project, whole=LEFT_OUT not in line)
    for span in SPAN.findall(BLOCK.sub("", text)):
        wrong += _wrong_in(span, project, whole=False)
    return wrong


def _wrong_in(line: str, project: Project, *, whole: bool) -> list[str]:
    try:
        found = list(_commands_in(line if whole else _without_notation(line)))
    except ValueError:  # no command line: a picture, a quotation mark of prose
        begins = line.split()[:1]
        return [f"{line}: cannot be read"] if whole and begins == ["easyrl"] else []
    reasons = (_reason(words, project, whole) for words in found)
    return [f"{line.strip()}: {reason}" for reason in reasons if reason]


def _without_notation(line: str) -> str:
    r"""Without brackets around what may be left out; ``add/remove`` for ``add\|remove``."""
    return re.sub(r"(\w)\\?\|(?=\w)", r"\1/", re.sub(r"[\[\]]", " ", line))


def _commands_in(line: str) -> Iterator[list[str]]:
    """The words of each command of a shell's line. Raises ``ValueError`` if a quote is open."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in ENDS_A_COMMAND:
            words.append(word)
            continue
        while words and (ASSIGNMENT.match(words[0]) or words[0] in ("do", "$", LEFT_OUT)):
            words = words[1:]
        if words:
            yield words
        words = []


def _reason(words: Sequence[str], project: Project, whole: bool) -> str | None:
    """Why the command would be refused; None: it would not be, or is none of ours."""
    program, arguments = words[0].rpartition("/")[2], list(words[1:])
    if program == "docker" and arguments[:1] == ["run"]:
        place = next((i for i, word in enumerate(words) if word.startswith(IMAGE)), len(words))
        inside = words[place + 1 :]
        return _reason(inside, project, whole) if inside else None
    if program == "easyrl":
        return _refused(arguments, whole)
    if program == "make":
        return _unknown_to_make(arguments)
    flag = {"python": "-m", "python3": "-m", "deepspeed": "--module"}.get(program)
    if flag is None or flag not in arguments[:-1]:
        return None
    module, *arguments = arguments[arguments.index(flag) + 1 :]
    if module in SAME_AS:
        return _refused([*SAME_AS[module], *arguments], whole)
    if module.partition(".")[0] not in OURS:
        return None
    if not project.can_run(module):
        return f"no module {module} to run"
    known = _options_of_module(module)
    unknown = [option for option in _options(arguments) if option not in known]
    return f"{module} has no option {unknown[0]}" if unknown else None


def _options(arguments: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in arguments if re.match(r"--[a-z]", word)]


# ---- easyrl ----


@cache
def _easyrl() -> dict[str, Any]:
    """Its commands, each of which does nothing when it is called."""
    known = commands()
    for command in known.values():
        command.callback = lambda **_: None
    return known


def _refused(arguments: Sequence[str], whole: bool) -> str | None:
    known = _easyrl()
    if not arguments or arguments[0].startswith("-") or not arguments[0].islower():
        return None  # easyrl --version; easyrl COMMAND
    groups = {name.partition(" ")[0] for name in known if " " in name}
    length = 2 if arguments[0] in groups and arguments[1:] else 1
    names = " ".join(arguments[:length]).split("/")
    names = [names[0], *(f"{arguments[0]} {name}" for name in names[1:])]  # endpoints add/remove
    if names == [arguments[0]] and arguments[0] in groups:
        return None  # a group's name alone
    if missing := [name for name in names if name not in known]:
        return f"no command easyrl {missing[0]}"
    command, rest = known[names[0]], list(arguments[length:])
    if not whole:
        options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
        unknown = [option for option in _options(rest) if option not in options]
        return f"easyrl {names[0]} has no option {unknown[0]}" if unknown else None
    with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.redirect_stdout(told):
        try:
            command.main(args=rest, prog_name=f"easyrl {names[0]}")
        except SystemExit as end:
            if end.code:
                return " ".join(re.sub(r"[│╭╮╰╯─]", " ", told.getvalue()).split())
    return None


# ---- modules and make ----


@cache
def _options_of_module(module: str) -> frozenset[str]:
    """What stands in its source, or in that of a module of the same package that it imports, as an
    option; of functions that typer reads, their arguments."""
    package = ".".join(module.split(".")[:2]) if module.startswith("easyrl.") else "benchmarks"
    modules = Project.here().modules
    found, seen, waiting = {"--help"}, set(), [module]
    while waiting:
        name = waiting.pop()
        file = modules.get(f"{name}.__main__", modules.get(name))
        if name in seen or file is None:
            continue
        seen.add(name)
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if re.fullmatch(r"--[a-z][\w-]*", node.value) else set()
            elif isinstance(node, ast.FunctionDef) and "Annotated" in ast.unparse(node.args):
                found |= {f"--{argument.arg.replace('_', '-')}" for argument in node.args.args}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package):
                waiting += [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
    return frozenset(found)


@cache
def _makefile() -> tuple[frozenset[str], frozenset[str]]:
    """Its targets, and the variables that it reads."""
    text = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([\w-]+):", text, re.MULTILINE)
    variables = re.findall(r"\$\((\w+)\)|\$\(if \$\((\w+)\)|^(\w+) *[?:]?=", text, re.MULTILINE)
    return frozenset(targets), frozenset(name for group in variables for name in group if name)


def _unknown_to_make(arguments: Sequence[str]) -> str | None:
    targets, variables = _makefile()
    for word in arguments:
        name, sets, _ = word.partition("=")
        if sets and name not in variables:
            return f"the Makefile reads no variable {name}"
        if not sets and name not in targets:
            return f"the Makefile has no target {name}"
    return None
