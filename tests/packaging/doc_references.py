"""What a document names of the project, and what of it is not there.

Looked at are code spans and code blocks of Markdown, and a Makefile as a whole: paths below the
project's folders, ``….py`` names, modules, links between documents, and keys of the configuration.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel

from easyrl.config import Config
from easyrl.config.recipe import MOVED
from easyrl.config.records import RecordsConfig
from easyrl.recipes.loading import BUILT_IN

ROOT = Path(__file__).resolve().parents[2]
IMPORT_NAMES = {  # of the folders that have modules
    "easyrl": "easyrl",
    "dataloaders": "easyrl.dataloaders",
    "inference_client": "easyrl.inference_client",
    "kernels": "easyrl.kernels",
    "benchmarks": "benchmarks",
    "tests": "tests",
}
FOLDERS = (*IMPORT_NAMES, "configs", "docker", "docs")
# of a run and of a user
NOT_OURS = {
    "run.lock",
    "metrics.jsonl",
    "reward.py",
    "my_recipe.py",
    "guess.py",
    "shop.py",
    "notes_server.py",
    "recipe.my_key",
    "recipe.baseline",
    "easyrl.yaml",
    "model.embed_tokens.weight",  # a parameter
}

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
START = r"(?<![\w./<>$-])"  # of a name that stands for itself
PATH = re.compile(START + rf"(?:{'|'.join(FOLDERS)})/[\w*/.-]*")
PYTHON_FILE = re.compile(START + r"[\w*-]+(?:/[\w*-]+)*\.py\b")
RUN_MODULE = re.compile(r"(?:-m|--module)\s+((?:easyrl|benchmarks|tests)(?:\.\w+)*)")
DOTTED = re.compile(START + r"easyrl(?:\.\w+)+")
IMPORT = re.compile(r"^from (easyrl[\w.]*) import ([\w, ]+)$", re.MULTILINE)
KEY = re.compile(START + rf"(?:{'|'.join(Config.model_fields)})(?:\[\d+\])?(?:\.[a-z]\w*)+")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Project:
    """What there is to name: files, relative to the root, and import names of modules."""

    files: frozenset[str]
    modules: dict[str, str]  # name → file

    @classmethod
    @cache
    def here(cls) -> Project:
        """The checkout: what git tracks or would."""
        command = ["git", "ls-files", "-co", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        files = frozenset(name for name in listed.stdout.split("\n") if (ROOT / name).is_file())
        return cls(files, dict(_modules(files)))

    def has_path(self, path: str) -> bool:
        """Whether there is such a file, or files below such a folder; ``*`` stands for anything."""
        path = path.rstrip("/.")
        return any(fnmatch(file, path) or fnmatch(file, f"{path}/*") for file in self.files)

    def has_file_ending_in(self, path: str) -> bool:
        return any(fnmatch(f"/{file}", f"*/{path}") for file in self.files)

    def has_name(self, dotted: str) -> bool:
        """Whether it is a package, a module, or a name that a module binds."""
        if any(module == dotted or module.startswith(f"{dotted}.") for module in self.modules):
            return True
        module, _, name = dotted.rpartition(".")
        file = self.modules.get(module)
        return file is not None and name in _bound_names(ROOT / file)

    def can_run(self, module: str) -> bool:
        """Whether ``python -m module`` finds something to run."""
        file = self.modules.get(f"{module}.__main__", self.modules.get(module, ""))
        return bool(file) and not file.endswith("__init__.py")


def _modules(files: frozenset[str]) -> Iterator[tuple[str, str]]:
    for file in files:
        folder, _, rest = file.partition("/")
        if folder in IMPORT_NAMES and rest.endswith(".py"):
            parts = rest.removesuffix(".py").split("/")
            name = ".".join([IMPORT_NAMES[folder], *parts]).removesuffix(".__init__")
            yield name, file


@cache
def _bound_names(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def wrong_references(text: str, project: Project) -> list[str]:
    """What ``text`` names and the project does not have; ``text`` is code or a Makefile."""
    paths = {found[0] for found in PATH.finditer(text)}
    files = {found[0] for found in PYTHON_FILE.finditer(text)}
    dotted = {found[0] for found in DOTTED.finditer(text)}
    for package, names in IMPORT.findall(text):
        dotted |= {f"{package}.{name.strip()}" for name in names.split(",")}
    keys = {found[0] for found in KEY.finditer(text)} - files - NOT_OURS
    return sorted(
        [
            *(f"path {path}" for path in paths if not project.has_path(path)),
            *(
                f"file {file}"
                for file in files - paths - NOT_OURS
                if not project.has_file_ending_in(file)
            ),
            *(f"name {name}" for name in dotted - NOT_OURS if not project.has_name(name)),
            *(f"module {name}" for name in RUN_MODULE.findall(text) if not project.can_run(name)),
            *(f"key {key}" for key in keys if not is_key(key)),
        ]
    )


def wrong_in_markdown(text: str, project: Project) -> list[str]:
    """The same of all code spans and blocks; of blocks in YAML the keys one by one."""
    prose = BLOCK.sub("", text)
    wrong = wrong_references("\n".join(SPAN.findall(prose)), project)
    for language, block in BLOCK.findall(text):
        wrong += wrong_references(block, project)
        if language == "yaml":
            keys = _dotted_keys(yaml.safe_load(block))
            wrong += [f"key {key}" for key in keys if not is_key(key)]
    return wrong


def wrong_links(text: str, file: str, project: Project) -> list[str]:
    """Links of ``file`` to files and headings that are not there; other sites are not asked."""
    wrong = []
    for link in LINK.findall(BLOCK.sub("", text)):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / file).parent.joinpath(name).resolve() if name else ROOT / file
        if not project.has_path(target.relative_to(ROOT).as_posix()):
            wrong.append(f"link {link}")
        elif anchor and anchor not in _anchors(text if not name else target.read_text()):
            wrong.append(f"link {link}")
    return wrong


def _anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = HEADING.findall(BLOCK.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _dotted_keys(tree: Any, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _dotted_keys(value, f"{prefix}{key}.")


def is_key(dotted: str) -> bool:
    """Whether the configuration has this key, as in ``rewards[0].weight``."""
    section, _, name = dotted.partition(".")
    if dotted in NOT_OURS or name in MOVED.get(section, {}):
        return True  # named where it is said where it went
    if section == "recipe" and any(
        name == f.name for cls in BUILT_IN.values() for f in fields(cls)
    ):
        return True  # a recipe's keys are its class's fields
    return any(_has_key(config, dotted) for config in (Config, RecordsConfig))


def _has_key(model: type[BaseModel] | None, dotted: str) -> bool:
    for part in re.sub(r"\[\d+\]", "", dotted).split("."):
        named = getattr(model, "named", None) if model is not None else None
        if model is not None and part not in model.model_fields and named is not None:
            model = named  # the user's name of a section
            continue
        if model is None or part not in model.model_fields:
            return False
        annotation = model.model_fields[part].annotation
        if get_origin(annotation) is dict:
            return True  # its keys are the user's
        model = _section_in(annotation)
    return True


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a value of this type is or holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    held = (_section_in(each) for each in get_args(annotation))
    return next((section for section in held if section is not None), None)
