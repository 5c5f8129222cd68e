"""The cluster that a table is measured on, from a file as configs/launch/paper_cluster.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol, Self, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import PositiveInt, ValidationError, field_validator, model_validator
from yaml import YAMLError

from easyrl.config import ConfigError
from easyrl.config.base import FilePath, Section
from easyrl.config.file import describe_problem
from easyrl.config.file_errors import describe_yaml, why_not_there
from easyrl.config.inference import endpoint_url


class Endpoint(Section):
    """A server that is up."""

    url: str
    devices: PositiveInt = 1  # that it runs on

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, value: str) -> str:
        return endpoint_url(value)


class Trainer(Section):
    """A host that trains."""

    host: str  # as DeepSpeed's hostfile names it
    devices: PositiveInt  # a process on each

    @field_validator("host")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not value or value != "".join(value.split()) or "=" in value:
            raise ValueError("is not the name of a host; write it as a hostfile has it")
        return value


class Cluster(Section):
    """Endpoints, hosts that train, model and data."""

    endpoints: list[Endpoint]
    trainers: list[Trainer]  # the command is started on the first
    model: FilePath  # the folder, under the same path on all hosts that train
    data: list[FilePath]  # problems with their answers, as data.files of a configuration
    settings: list[str] = []  # more of the configuration: key.path=value

    @model_validator(mode="after")
    def _has_both_and_none_twice(self) -> Self:
        for key, names in (
            ("endpoints", [endpoint.url for endpoint in self.endpoints]),
            ("trainers", [trainer.host for trainer in self.trainers]),
            ("data", [str(path) for path in self.data]),
        ):
            if not names:
                raise ValueError(f"{key}: is empty; name at least one")
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"{key}: names {twice[0]} twice; remove one of the two")
        if wrong := [setting for setting in self.settings if "=" not in setting]:
            raise ValueError(f"settings: {wrong[0]!r} is no key.path=value; write it as one")
        return self

    @property
    def devices(self) -> int:
        """Of training and inference together."""
        return _devices(self.endpoints) + _devices(self.trainers)

    def part(self, devices: int) -> Cluster:
        """The first endpoints and hosts, ``devices`` together and divided as in the whole.

        Raises ``ConfigError`` if the cluster cannot be divided so.
        """
        if devices > self.devices:
            raise ConfigError(
                f"endpoints, trainers: have {self.devices} devices together, and {devices} are "
                "needed; add what is missing"
            )
        parts: dict[str, Sequence[Endpoint] | Sequence[Trainer]] = {}
        for key, whole in (("endpoints", self.endpoints), ("trainers", self.trainers)):
            wanted = devices * _devices(whole) / self.devices
            first = _first(whole, wanted)
            if first is None:
                raise ConfigError(
                    f"{key}: no first ones of the list have {wanted:g} devices, which {devices} of "
                    f"the cluster's {self.devices} devices need; list {key} so that they add up"
                )
            parts[key] = first
        return self.model_copy(update=parts)

    def overrides(self) -> list[str]:
        """Keys of the configuration that the cluster decides, the user's own last."""
        first = self.trainers[0].host
        urls = ",".join(f'"{endpoint.url}"' for endpoint in self.endpoints)
        return [
            f"inference.endpoints=[{urls}]",
            f"model.path={self.model}",
            f"data.files=[{','.join(map(str, self.data))}]",
            *([] if first == "localhost" else [f"weight_sync.advertise_host={first}"]),
            *self.settings,
        ]


class _HasDevices(Protocol):
    @property
    def devices(self) -> int: ...


D = TypeVar("D", bound=_HasDevices)


def load_cluster(path: Path) -> Cluster:
    """Raises ``ConfigError``, which names each key and the remedy."""
    if not path.is_file():
        raise ConfigError(f"cluster file {path} {why_not_there(path)}")
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except YAMLError as error:
        raise ConfigError(describe_yaml(path, error)) from error
    except (OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: {error}; correct the file") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: has no keys; configs/launch/paper_cluster.yaml is an example")
    try:
        return Cluster.model_validate(values)
    except ValidationError as error:
        lines = [describe_problem(problem, Cluster) for problem in error.errors()]
        raise ConfigError(f"{path}: {len(lines)} problem(s)\n" + "\n".join(lines)) from None


def _devices(parts: Sequence[_HasDevices]) -> int:
    return sum(part.devices for part in parts)


def _first(parts: Sequence[D], devices: float) -> Sequence[D] | None:
    """The first ones that have exactly so many devices together."""
    for number, total in enumerate(accumulate(part.devices for part in parts), start=1):
        if total == devices:
            return parts[:number]
    return None
