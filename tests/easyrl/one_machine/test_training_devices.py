"""Which devices ``easyrl up`` trains on: those that no server of the run has."""

from __future__ import annotations

from typing import Any

import pytest

from easyrl.config import Config, ConfigError
from easyrl.config.file import validate_config
from easyrl.one_machine.devices import training_devices

VLLM = {"engine": "vllm", "python": "python3"}


def devices(launch: dict[str, Any], num_devices: int, num_there: int) -> list[int]:
    config: Config = validate_config(
        {
            "model": {"path": "model", "dtype": "fp32"},
            "data": {"files": ["prompts.jsonl"]},
            "rewards": [{"name": "exact"}],
            "inference": {"launch": launch},
            "trainer": {"num_devices": num_devices},
        }
    )
    assert config.inference.launch is not None
    return training_devices(config, config.inference.launch, num_there)


def test_behind_those_of_the_servers() -> None:
    assert devices({**VLLM, "count": 2}, 2, 4) == [2, 3]
    assert devices({**VLLM, "count": 2, "tensor_parallel": 2}, 3, 8) == [4, 5, 6]
    assert devices({**VLLM, "count": 2, "devices": [[0], [2]]}, 2, 4) == [1, 3]
    assert devices({"engine": "embedded", "devices": [[1]]}, 1, 2) == [0]


def test_the_embedded_server_is_on_the_processors_unless_told_otherwise() -> None:
    assert devices({"engine": "embedded"}, 1, 1) == [0]


def test_a_machine_without_devices_has_none() -> None:
    assert devices({"engine": "embedded", "count": 3}, 2, 0) == []


def test_too_few_are_told() -> None:
    with pytest.raises(ConfigError, match=r"trainer.num_devices: 3 .* of 4 devices servers have 2"):
        devices({**VLLM, "count": 2}, 3, 4)
