"""Small changes of a value that several rows need."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

from easyrl.config.rollout import SamplingConfig
from easyrl.convert.peer import Settings, Values

NEUTRAL = SamplingConfig()
RESTRICTS = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "swanlab")


def named(names: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """Ours for each of a peer's names; None, which sets nothing, for others."""
    return lambda value: names.get(value)


def run_name(value: str) -> str | None:
    """As it may stand in names of files."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", value).strip("-.")
    return plain or None


def trackers(value: Any) -> list[str]:
    """Those that we have, of a list, one name, or nothing."""
    wanted = [value] if isinstance(value, str) else list(value or ())
    return [tracker for tracker in TRACKERS if tracker in wanted]


def all_tokens(value: int | None) -> int:
    """``top_k``, whose 0 and null are our -1."""
    return -1 if value in (None, 0, -1) else value  # type: ignore[return-value]


def off_policy_sampling(settings: Mapping[str, Any], values: Values, key: str) -> Settings:
    """What lets a run sample from another distribution than the policy's, where it does."""
    changed = [
        name
        for name in RESTRICTS
        if settings.get(f"rollout.{name}", getattr(NEUTRAL, name)) != getattr(NEUTRAL, name)
    ]
    if not changed:
        return {}
    values.note(
        key,
        f"{', '.join(changed)} of sampling makes the ratios biased, as it does there; "
        "rollout.allow_off_policy_sampling is set for it, better leave all tokens in",
    )
    return {"rollout.allow_off_policy_sampling": True}


def whole_multiple(count: int, of: int) -> int:
    """``count`` or the next multiple."""
    return ceil(count / of) * of


def kept(keys: Mapping[str, str], given: Mapping[str, Any]) -> tuple[Settings, Sequence[str]]:
    """A mapping's keys as ours, and those that have no counterpart."""
    settings = {keys[key]: value for key, value in given.items() if key in keys}
    return settings, [key for key in given if key not in keys]
