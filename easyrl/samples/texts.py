"""The texts of an evaluation, in a file of their own: a line of JSON per prompt."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from easyrl.runtime.whole_files import LEVEL, UNFINISHED
from easyrl.samples.records import valid
from easyrl.samples.show import Decode
from easyrl.schema import RolloutGroup


class TextsNotWritten(ValueError):
    """The file cannot be written; the message names it and the remedy."""


class TextFile:
    """Takes groups as they are finished; gzip if the file's name ends so.

    The file is there, in place of what was there before, once ``finish`` returns. Every method but
    ``close`` raises ``TextsNotWritten``.
    """

    def __init__(self, file: Path, decode: Decode) -> None:
        self._path, self._decode = file, decode
        self._unfinished = file.with_name(file.name + UNFINISHED)
        self._encoder = msgspec.json.Encoder()
        self._files: list[IO[bytes]] = []  # the one to write into last
        with self._told():
            self._files.append(self._unfinished.open("wb"))
            if file.suffix == ".gz":
                raw = self._files[0]
                self._files.append(gzip.GzipFile("", "wb", LEVEL, raw, mtime=0))  # type: ignore[arg-type]

    def add(self, set_name: str, group: RolloutGroup) -> None:
        """A line of ``group``, which may have no responses; of the only set the name is empty."""
        prompt = group.prompt
        responses = [
            {
                "text": valid(self._decode(completion.token_ids.tolist())),
                "num_tokens": len(completion.sampled_ids),
                "truncated": completion.truncated,
                "reward": score.reward,
                "components": dict(score.components),
            }
            for completion, score in zip(group.completions, group.scores, strict=True)
        ]
        line = {
            **({"set": set_name} if set_name else {}),
            "index": prompt.index,
            "location": valid(prompt.location),
            "prompt": valid(self._decode(prompt.token_ids.tolist())),
            "answer": None if prompt.answer is None else valid(prompt.answer),
            "excluded": group.excluded.reason if group.excluded is not None else None,
            "responses": responses,
        }
        with self._told():
            self._files[-1].write(self._encoder.encode(line) + b"\n")

    def finish(self) -> None:
        """All groups were added."""
        with self._told():
            while self._files:
                self._files.pop().close()
            self._unfinished.rename(self._path)

    def close(self) -> None:
        """Removes what is not finished. Safe to call twice."""
        try:
            for opened in reversed(self._files):
                opened.close()
        except OSError:
            pass  # of what is removed
        self._files = []
        self._unfinished.unlink(missing_ok=True)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TextsNotWritten(
                f"--keep-texts: {self._path} cannot be written ({error.strerror}); make room "
                "there, or name a file in another folder that exists"
            ) from error
