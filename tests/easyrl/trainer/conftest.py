"""What the trainer's tests are given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from easyrl.runtime.stopping import StopRequest


@pytest.fixture(scope="module")
def stop() -> Iterator[StopRequest]:
    request = StopRequest(60.0)
    yield request
    request.close()
