"""Errors of a certificate: the violation, and its line, batch, prompt or endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from easyrl.schema import Key


@dataclass(eq=False)
class CertificateError(RuntimeError):
    """The on-policy contract is broken, or the certificate is not what was written."""

    problem: str  # without the place; the text has both
    _: KW_ONLY
    line: int | None = None  # from 1
    batch: int | None = None
    key: Key | None = None
    endpoint: str | None = None
    file: str | None = None

    remedy: ClassVar[str] = "; restore the file, or start a new run in another folder"

    def in_folder(self, folder: Path) -> Self:
        """The same, naming the run's folder and the remedy."""
        return type(self)(f"{folder}: {self}{self.remedy}")

    def __str__(self) -> str:
        """Such as ``certificate.jsonl line 5, batch 3, prompt 17 of epoch 0: is missing``."""
        places = (
            ("certificate.jsonl line {}", self.line),
            ("{}", self.file),
            ("batch {}", self.batch),
            ("prompt {0[1]} of epoch {0[0]}", self.key),
            ("endpoint {}", self.endpoint),
        )
        place = ", ".join(words.format(value) for words, value in places if value is not None)
        return f"{place}: {self.problem}" if place else self.problem


class OtherSettings(CertificateError):
    """The run cannot go on with settings that fix the order of its prompts; says what to put back.

    Nothing is wrong with the certificate.
    """

    remedy = ""


@contextmanager
def located(**place: Any) -> Iterator[None]:
    """A ``CertificateError`` from inside is at ``place``, where it does not say so itself."""
    try:
        yield
    except CertificateError as error:
        for name, value in place.items():
            if getattr(error, name) is None:
                setattr(error, name, value)
        raise
