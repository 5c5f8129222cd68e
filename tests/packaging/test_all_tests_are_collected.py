"""No folder of tests has a name that pytest passes over, nor a file a mark that make overlooks."""

from __future__ import annotations

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
