"""No folder of tests has a name that pytest passes over, nor a file a mark that make overlooks, and
the list of long tests names none that are gone."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MARK = re.compile(r"\bmark\.(runs|vllm)\b")


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    passed_over = pytestconfig.getini("norecursedirs")
    folders = {file.parent for file in TESTS.rglob("test_*.py")}
    names = {name for folder in folders for name in folder.relative_to(TESTS).parts}
    assert "build" in names
    assert not [name for name in names if any(fnmatch(name, each) for each in passed_over)]


def test_marks_stand_in_the_files_whose_tests_have_them() -> None:
    """The Makefile looks for them there, and names one folder besides."""
    elsewhere = {
        str(file.parent.relative_to(TESTS))
        for file in TESTS.rglob("*.py")
        if not file.name.startswith("test_") and MARK.search(file.read_text())
    }
    assert elsewhere == {"inference_client/contract"}
    assert f"VLLM_TESTS = tests/{elsewhere.pop()} " in (TESTS.parent / "Makefile").read_text()


def test_long_tests_are_there_and_run_by_a_target_of_their_own() -> None:
    listed = (TESTS / "long_tests.txt").read_text().splitlines()
    assert listed == sorted(set(listed))
    there = {
        f"{file}::{node.name}"
        for file in {line.partition("::")[0] for line in listed}
        for node in ast.walk(ast.parse((TESTS.parent / file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert [line for line in listed if line not in there] == []
    assert len(listed) > 300
    makefile, ci = (TESTS.parent / "Makefile").read_text(), (TESTS.parent / ".ci/run").read_text()
    assert "--long=without" in makefile and "--long=only" in makefile
    assert "make test\nmake test-long\n" in ci
