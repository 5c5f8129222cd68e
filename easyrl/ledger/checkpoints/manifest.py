"""``checkpoint.json``: what a checkpoint says of itself, with a hash of that.

Without torch: who only asks which checkpoints a run has need not wait for it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from blake3 import blake3

from easyrl.ledger.format import FORMAT, other_format

MANIFEST = "checkpoint.json"


class Damaged(ValueError):
    """A checkpoint cannot be used; the message names the file."""


def write_manifest(file: Path, record: dict[str, Any]) -> None:
    """Writes ``record`` with its own hash and fsyncs."""
    content = {"format": FORMAT, "blake3": _record_blake3(record), "record": record}
    text = json.dumps(content)
    with file.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The record of a checkpoint. Raises ``Damaged`` naming the file."""
    file = folder / MANIFEST
    try:
        content = json.loads(file.read_bytes())
        record, expected = content["record"], content["blake3"]
        found = content.get("format", 1)
    except FileNotFoundError:
        raise Damaged(f"{file} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{file} cannot be read ({error})") from None
    if found != FORMAT:
        raise Damaged(f"{file} {other_format(found)}")
    if _record_blake3(record) != expected:
        raise Damaged(f"{file} is not as it was written: its hash differs")
    return record


def _record_blake3(record: Any) -> str:
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return blake3(canonical.encode()).hexdigest()
