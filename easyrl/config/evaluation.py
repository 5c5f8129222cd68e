"""Section ``evaluation``: sets of held-out prompts, and how often they are answered."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from easyrl.config.base import Section
from easyrl.config.data import DatasetConfig
from easyrl.config.rollout import SamplingConfig

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")  # of a set: a part of metrics, overrides and files


class EvaluationSamplesConfig(Section):
    """How held-out prompts are answered, and what is counted."""

    num_samples: PositiveInt = 1  # responses for each prompt
    pass_at: Annotated[list[PositiveInt], Field(min_length=1)] = [1]  # k of pass@k, each at most
    # num_samples
    sampling: SamplingConfig = SamplingConfig()
    threshold: float = 0.5  # a sample is correct if its first reward reaches this, an episode if
    # its environment's does

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if max(self.pass_at) > self.num_samples:
            raise ValueError(
                f"pass_at: {max(self.pass_at)} needs num_samples of at least as many; raise it"
            )
        if self.sampling.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                "num_samples: sampling.temperature of 0 is greedy, all samples would be equal; "
                "use 1, or a temperature above 0"
            )
        return self


class EvaluationSetConfig(EvaluationSamplesConfig):
    """A set of held-out prompts with figures of its own."""

    data: DatasetConfig


class EvaluationConfig(EvaluationSamplesConfig):
    """Evaluation on held-out prompts: pass@k and avg@k, of one set or of several named ones.

    A version is evaluated where the batch that it generates leaves endpoints idle; the optimizer
    step that ends the batch waits for it. Figures come later than the metrics of their step.
    """

    model_config = ConfigDict(extra="allow")
    named: ClassVar[type[Section] | None] = EvaluationSetConfig

    data: DatasetConfig | None = None  # of the one set; none where sets have names
    every_steps: NonNegativeInt = 50  # 0: only where asked for below
    at_start: bool = True  # of the model as it is before the first step
    at_end: bool = True  # of the trained model

    # any other key is the name of a set, evaluation: {aime24: {data: …}, math500: {data: …}}, with
    # data, num_samples, pass_at, sampling and threshold of its own; what it does not say of the
    # last four is as beside the names
    __pydantic_extra__: dict[str, EvaluationSetConfig]

    @property
    def sets(self) -> dict[str, EvaluationSetConfig]:
        """By name; the one set without a name has the empty one."""
        if self.data is None:
            return dict(self.__pydantic_extra__)
        shared = {key: getattr(self, key) for key in EvaluationSamplesConfig.model_fields}
        return {"": EvaluationSetConfig(data=self.data, **shared)}

    @model_validator(mode="before")
    @classmethod
    def _named_sets(cls, values: Any) -> Any:
        """Each with what is said beside it; one name is nothing but a wrong key."""
        if not isinstance(values, Mapping) or cls.named is None:
            return values
        named = {name: value for name, value in values.items() if name not in cls.model_fields}
        _check_names(named, cls)
        if named and values.get("data") is not None:
            raise ValueError(
                f"data: has no name, which the sets beside it have ({', '.join(named)}); move it "
                "below a name of its own"
            )
        if not named and values.get("data") is None:
            raise ValueError(
                "data: is required; name the files of held-out prompts there, or those of several "
                "sets as evaluation: {NAME: {data: …}, …}"
            )
        shared = {k: values[k] for k in EvaluationSamplesConfig.model_fields if k in values}
        return {**values, **{name: _with(shared, value) for name, value in named.items()}}


def set_key(name: str) -> str:
    """Where the configuration has the set of that name."""
    return f"evaluation.{name}" if name else "evaluation"


def folded(name: str) -> str:
    """What two names of sets may not share: trackers and file systems take ``-`` for ``_``, or
    large letters for small ones."""
    return name.lower().replace("-", "_")


def _check_names(named: Mapping[Any, Any], section: type[EvaluationConfig]) -> None:
    """Raises ``ValueError`` for a key that cannot be a set's name."""
    known = [*section.model_fields]
    alike: dict[str, str] = {}
    for name, value in named.items():
        close = difflib.get_close_matches(str(name), known, n=1)
        if not isinstance(value, Mapping | Section) or (
            close and isinstance(value, Mapping) and "data" not in value
        ):
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
            raise ValueError(
                f"{name}: unknown key; {hint} (a set of held-out prompts is a mapping with data)"
            )
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} cannot be the name of a set; use letters, digits, _ and -, a letter "
                "first"
            )
        other = alike.setdefault(folded(name), name)
        if other != name:
            raise ValueError(
                f"{name}: is the name of another set in other letters ({other}); rename one of the "
                "two"
            )


def _with(shared: Mapping[str, Any], value: Any) -> Any:
    """A set's own keys, and of the shared ones what it does not say."""
    if not isinstance(value, Mapping):
        return value
    found = {**shared, **value}
    both = shared.get("sampling"), value.get("sampling")
    if all(isinstance(each, Mapping) for each in both):
        found["sampling"] = {**both[0], **both[1]}  # type: ignore[dict-item]
    return found
