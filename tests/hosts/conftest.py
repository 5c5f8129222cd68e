"""Skips these tests, with the reason, where hosts cannot be made; else the cluster of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts import namespaces, ssh
from tests.hosts.cluster import Cluster, cluster


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = namespaces.why_closed() or ssh.why_missing()
    if reason is not None:
        pytest.skip(f"no hosts for the tests of several nodes: {reason}")
    with cluster(tmp_path_factory.mktemp("hosts"), "--batch-invariant") as made:
        yield made


@pytest.fixture
def hosts(_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster; what a test has started on its trainer hosts ends with it."""
    yield _cluster
    _cluster.end_run()
