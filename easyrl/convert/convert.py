"""A peer's values as settings of EasyRL, and what has no counterpart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from easyrl.config import Config, ConfigError
from easyrl.config.file import validate_config
from easyrl.convert.peer import Note, Peer, Settings, Values
from easyrl.convert.reading import flat, read_tree
from easyrl.convert.trl import TRL
from easyrl.convert.verl import VERL

PEERS = {peer.name: peer for peer in (TRL, VERL)}
SHOWN = 8  # of the keys that nothing is known of
OF_DATASET = ("data.dataset", "data.subset", "data.split")
ENDPOINT = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Converted:
    """Settings that ``load_config`` takes, and what the user has to know of them."""

    peer: Peer
    settings: Settings
    notes: Sequence[Note]

    def tree(self) -> dict[str, Any]:
        """The settings as sections, in the configuration's order."""
        tree: dict[str, Any] = {}
        for section in Config.model_fields:
            for key, value in self.settings.items():
                if key.split(".")[0] == section:
                    _put(tree, key.split("."), value)
        return tree

    def text(self, source: str) -> str:
        """The YAML file, headed by the notes."""
        head = [f"Converted from {source} ({self.peer.title}) by easyrl convert."]
        if self.notes:
            head += ["Of its keys:", *(f"- {note}" for note in self.notes)]
        lines = "\n".join(head).splitlines()
        body = yaml.safe_dump(self.tree(), sort_keys=False, allow_unicode=True, width=100)
        return "\n".join(f"# {line}" for line in lines) + "\n\n" + body


def convert_file(
    path: Path,
    *,
    peer: str | None = None,
    world_size: int | None = None,
    further: Mapping[str, Any] | None = None,
) -> Converted:
    """Reads a peer's file; ``peer`` None: by its keys.

    Args:
        world_size: processes of TRL's training, for a file that does not tell.
        further: settings by our key, for what such a file does not have.
    Raises:
        ConfigError: naming the file, the peer's key, and the remedy.
    """
    tree = read_tree(path)
    which = PEERS[peer] if peer is not None else _peer_of(tree, path)
    values = flat(tree, which.by_key)
    if not any(which.row(key) for key in values):
        raise ConfigError(
            f"{path}: has no key of {which.title}, but {', '.join(list(values)[:SHOWN])}; name "
            "another file, or the other trainer with --from"
        )
    converted = convert(which, values, str(path), world_size=world_size)
    settings = converted.settings | dict(further or {})
    if "data.files" in settings:  # in place of the dataset
        for key in OF_DATASET:
            settings.pop(key, None)
    notes = [*converted.notes, *_still_missing(settings)]
    settings = _with_placeholders(settings)
    converted = replace(converted, settings=settings, notes=notes)
    validate_config(converted.tree(), f"{path}, converted")
    return converted


def convert(
    peer: Peer, given: Mapping[str, Any], source: str, *, world_size: int | None = None
) -> Converted:
    """Of a peer's values by its keys, dotted. Raises ``ConfigError``."""
    values = Values(source, given, peer.by_key, world_size)
    for key, value in given.items():
        row = peer.row(key)
        if isinstance(value, str) and "${" in value and row is not None and not row.is_silent:
            raise ConfigError(
                f"{source}: {key}: {value} is of another file; write the value itself there"
            )
    settings: Settings = {}
    for row in peer.rows:
        if row.value is not None and (theirs := values[row.theirs]) is not None:
            if (value := row.value(theirs)) is not None:
                settings[row.ours] = value
    for make in peer.together:
        settings |= make(values)
    without = [
        Note(row.theirs, given[row.theirs], row.how)
        for row in peer.rows
        if not row.ours and not row.is_silent and row.theirs in given
        if given[row.theirs] not in (row.default, None, {}, [])
    ]
    return Converted(peer, settings, [*values.notes, *without, *_unknown(peer, given)])


def _unknown(peer: Peer, given: Mapping[str, Any]) -> list[Note]:
    unknown = [key for key, value in given.items() if peer.row(key) is None and value is not None]
    if not unknown:
        return []
    more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
    keys = f"{', '.join(unknown[:SHOWN])}{more}"
    return [Note(keys, None, "not looked at; docs/moving.md has the keys that are")]


def _peer_of(tree: Mapping[str, Any], path: Path) -> Peer:
    found = [peer for peer in PEERS.values() if any(key in tree for key in peer.own_keys)]
    if len(found) != 1:
        raise ConfigError(
            f"{path}: is neither clearly TRL's nor verl's ({', '.join(list(tree)[:SHOWN])}); say "
            "which with --from trl or --from verl"
        )
    return found[0]


def _still_missing(settings: Settings) -> list[Note]:
    missing = {
        "model.path": "is not in the file; the folder of the model",
        "data.files": "is not in the file; the files of the prompts",
        "rewards": "are not in the file; functions for TRL and verl run unchanged "
        "(docs/rewards.md), --reward FILE:FUNCTION names them",
        "inference.endpoints": f"is not in the file; {ENDPOINT} is written",
    }
    if "data.dataset" in settings:
        del missing["data.files"]
    return [Note(key, None, text) for key, text in missing.items() if key not in settings]


def _with_placeholders(settings: Settings) -> Settings:
    placeholders: Settings = {"model.path": "path/to/model", "inference.endpoints": [ENDPOINT]}
    if "data.dataset" not in settings:
        placeholders["data.files"] = ["path/to/prompts.jsonl"]
    return placeholders | settings


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *sections, last = path
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[last] = value
