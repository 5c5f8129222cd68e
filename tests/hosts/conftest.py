"""Skips these tests, with the reason, where hosts cannot be made."""

from __future__ import annotations

import pytest

from tests.hosts import namespaces, ssh


@pytest.fixture(scope="session", autouse=True)
def _hosts_can_be_made() -> None:
    reason = namespaces.why_closed() or ssh.why_missing()
    if reason is not None:
        pytest.skip(f"no hosts for several-node tests: {reason}")
