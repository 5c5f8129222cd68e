"""The texts of an evaluation, in a file of their own: a line of JSON per prompt."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from easyrl.samples.folder import LEVEL, UNFINISHED
from easyrl.samples.records import valid
from easyrl.samples.show import Decode
from easyrl.schema import RolloutGroup


class TextFile:
    """Takes groups as they are finished."""

    def __init__(self, opened: BinaryIO, decode: Decode) -> None:
        self._file, self._decode = opened, decode
        self._encoder = msgspec.json.Encoder()

    def add(self, group: RolloutGroup) -> None:
        """Raises ``OSError``."""
        prompt = group.prompt
        responses = [
            {
                "text": valid(self._decode(completion.token_ids.tolist())),
                "num_tokens": len(completion.token_ids),
                "truncated": completion.truncated,
                "reward": score.reward,
                "components": dict(score.components),
            }
            for completion, score in zip(group.completions, group.scores, strict=True)
        ]
        line = {
            "index": prompt.index,
            "location": valid(prompt.location),
            "prompt": valid(self._decode(prompt.token_ids.tolist())),
            "answer": None if prompt.answer is None else valid(prompt.answer),
            "excluded": group.excluded.reason if group.excluded is not None else None,
            "responses": responses,
        }
        self._file.write(self._encoder.encode(line) + b"\n")


@contextmanager
def text_file(file: Path, decode: Decode) -> Iterator[TextFile]:
    """``file``, gzip if its name ends so, which is there once all was written without an error.

    Raises ``OSError``.
    """
    unfinished = file.with_name(file.name + UNFINISHED)
    try:
        with unfinished.open("wb") as raw:
            if file.suffix == ".gz":
                with gzip.GzipFile("", "wb", LEVEL, raw, mtime=0) as packed:
                    yield TextFile(cast(BinaryIO, packed), decode)
            else:
                yield TextFile(raw, decode)
        unfinished.rename(file)
    finally:
        unfinished.unlink(missing_ok=True)
