"""Which environment a prompt goes to."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from easyrl.config import ConfigError, EnvironmentConfig
from easyrl.environments.mixing import check_named, environment_of
from tests.easyrl.environments.environment_cases import coroutine, prompt

SOURCE = "async def rollout(client, prompt):\n    return 1.0\n"


@pytest.fixture
def environments(tmp_path: Path) -> list[EnvironmentConfig]:
    file = coroutine(tmp_path, SOURCE).file
    return [
        EnvironmentConfig(name=name, file=file, weight=weight)
        for name, weight in (("a", 1.0), ("b", 3.0))
    ]


def test_prompts_are_shared_out_by_weight(environments: list[EnvironmentConfig]) -> None:
    drawn = [environment_of(prompt(index=n), environments, 5).name for n in range(4000)]
    # 4000 draws of 3/4: a standard deviation of 27
    assert abs(Counter(drawn)["b"] - 3000) < 140
    again = [environment_of(prompt(index=n), environments, 5).name for n in range(4000)]
    assert drawn == again
    for other in (
        [environment_of(prompt(index=n), environments, 6).name for n in range(4000)],
        [environment_of(prompt(index=n, epoch=1), environments, 5).name for n in range(4000)],
    ):
        assert drawn != other


def test_a_record_may_name_its_environment(environments: list[EnvironmentConfig]) -> None:
    for name in ("a", "b"):
        for n in range(20):
            asked = prompt(index=n, metadata={"environment": name})
            assert environment_of(asked, environments, 0).name == name
    asked = prompt(metadata={"environment": "c"}, location="train.jsonl:7")
    with pytest.raises(ValueError, match="train.jsonl:7: its field environment names 'c'.* a, b"):
        environment_of(asked, environments, 0)


def test_one_environment_takes_all(environments: list[EnvironmentConfig]) -> None:
    for fields in ({}, {"environment": None}, {"environment": "a"}):
        asked = prompt(metadata=fields)
        assert environment_of(asked, environments[:1], 0) is environments[0]


@pytest.mark.parametrize("named", ["b", "A", "", 3, ["a"]])
def test_a_record_that_names_none_is_refused_at_the_start(
    environments: list[EnvironmentConfig], named: Any
) -> None:
    """Also where there is one environment, which would play it whatever it names."""
    good = [prompt(), prompt(metadata={"environment": "a"})]
    bad = prompt(metadata={"environment": named}, location="train.jsonl:90000")
    check_named(environments[:1], good)
    with pytest.raises(ConfigError, match=r"^train\.jsonl:90000: .* are a; correct") as raised:
        check_named(environments[:1], [*good, bad])
    assert f"names {named!r};" in str(raised.value)
    check_named([], [bad])
    with pytest.raises(ValueError, match="are a;"):
        environment_of(bad, environments[:1], 0)
