"""Python's collector does not walk, again and again, what torch and transformers leave behind."""

from __future__ import annotations

import gc

gc.disable()  # while tests are collected, which imports everything


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
