"""Errors of a certificate: the violation, and its line, batch, prompt or endpoint."""

from __future__ import annotations

from easyrl.schema import Key


class CertificateError(RuntimeError):
    """The on-policy contract is broken, or the certificate is not what was written.

    ``problem`` is said without the place; the message has both. ``line`` counts from 1.
    """

    def __init__(
        self,
        problem: str,
        *,
        line: int | None = None,
        batch: int | None = None,
        key: Key | None = None,
        endpoint: str | None = None,
        file: str | None = None,
    ) -> None:
        self.problem = problem
        self.line = line
        self.batch = batch
        self.key = key
        self.endpoint = endpoint
        self.file = file
        super().__init__(f"{self.place}: {problem}" if self.place else problem)

    @property
    def place(self) -> str:
        """Such as ``certificate.jsonl line 5, batch 3, prompt 17 of epoch 0``."""
        parts = []
        if self.line is not None:
            parts.append(f"certificate.jsonl line {self.line}")
        if self.file is not None:
            parts.append(self.file)
        if self.batch is not None:
            parts.append(f"batch {self.batch}")
        if self.key is not None:
            parts.append(describe(self.key))
        if self.endpoint is not None:
            parts.append(f"endpoint {self.endpoint}")
        return ", ".join(parts)

    def at_line(self, line: int) -> CertificateError:
        """The same, found in this line."""
        return CertificateError(
            self.problem,
            line=line,
            batch=self.batch,
            key=self.key,
            endpoint=self.endpoint,
            file=self.file,
        )


class OtherSettings(CertificateError):
    """The run cannot go on with settings that fix the order of its prompts; says what to put back.

    Nothing is wrong with the certificate.
    """


def describe(key: Key) -> str:
    """``key`` in words."""
    return f"prompt {key[1]} of epoch {key[0]}"
