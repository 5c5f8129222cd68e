"""Mutation tests: a copy of a package with one piece of its source changed must fail its check.

A test file has rows ``Mutation(file, before, after)`` and a check of its own, and asserts for each
row ``assert_killed(mutation, check)``; once, that ``check`` passes on ``copied_package`` without a
mutation. The check is given the package's copy, in which the changed file and all that import it
are new modules: it has to take from there, never from ``easyrl``, what it tests.

    def check(recipes: ModuleType) -> None:
        recipe = recipes.GRPO(kl_coef=0.0)
        torch.testing.assert_close(recipe.loss(*inputs), formula(*inputs))

    @pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
    def test_a_mutation_is_found(mutation: Mutation) -> None:
        assert_killed(mutation, check)
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]
RECIPES = "easyrl/recipes"
_numbers = itertools.count()

Check = Callable[[ModuleType], None]  # given the package's copy; raises AssertionError


@dataclass(frozen=True)
class Mutation:
    """One change of a source file."""

    file: str  # inside the package's folder: "gspo.py"
    before: str  # text that is in the file exactly once
    after: str

    def __str__(self) -> str:
        return f"{self.file}: {self.before} -> {self.after}"

    def applied(self, source: str) -> str:
        """Raises ``ValueError`` if ``before`` is not in ``source`` exactly once."""
        if (found := source.count(self.before)) != 1:
            raise ValueError(f"{self}: found {found} times; name text that is there exactly once")
        if self.before == self.after:
            raise ValueError(f"{self}: changes nothing")
        return source.replace(self.before, self.after)


@contextmanager
def copied_package(
    mutation: Mutation | None = None, *, package: str = RECIPES
) -> Iterator[ModuleType]:
    """A copy of ``package`` (a folder below ``easyrl/``), imported under a name of its own.

    The package's modules import each other's copies; everything else is the original. Raises
    ``ValueError`` if ``mutation`` does not fit its file.
    """
    original = package.replace("/", ".")
    name = f"mutated_{original.rpartition('.')[2]}_{next(_numbers)}"
    inside = re.compile(rf"^(\s*(?:from|import)\s+){re.escape(original)}\b", re.M)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / name
        changed = False
        for file in sorted((ROOT / package).rglob("*.py")):
            source, place = file.read_text(), file.relative_to(ROOT / package)
            if mutation is not None and place == Path(mutation.file):
                source, changed = mutation.applied(source), True
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_text(inside.sub(rf"\g<1>{name}", source))
        if mutation is not None and not changed:
            raise ValueError(f"{mutation}: {package} has no such file")
        try:
            yield _imported(name, folder)
        finally:
            for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[module]


def assert_killed(mutation: Mutation, check: Check, *, package: str = RECIPES) -> None:
    """Fails unless ``check`` raises ``AssertionError`` for the changed copy.

    A copy that cannot be imported, or a check that ends with another error, has shown nothing
    about a number: that error is raised.
    """
    with copied_package(mutation, package=package) as copy:
        try:
            check(copy)
        except AssertionError:
            return
    raise AssertionError(f"survived: {mutation}")


def _imported(name: str, folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    for file in sorted(folder.glob("*.py")):  # so that a check finds each as an attribute
        if file.stem != "__init__":
            importlib.import_module(f"{name}.{file.stem}")
    return module
