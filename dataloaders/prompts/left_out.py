"""Records that cannot be used: an error, or left out and counted."""

from __future__ import annotations

import logging
from typing import Literal

from easyrl.dataloaders.prompts.records import BadRecordError

logger = logging.getLogger(__name__)

Choice = Literal["skip", "fail"]


class LeftOut:
    """The records of a dataset that are left out; raises where the configuration wants it.

    Args:
        source_key: where the dataset sits in the configuration; messages name keys below it.
        what: a record is to become, such as "prompt".
        on_bad_record: what the key of this name says.
        on_long: the key that says what happens to a record that is too long, and its value.
        limit: the key that says what is too long, and its value in tokens.
    """

    def __init__(
        self,
        source_key: str,
        what: str,
        *,
        on_bad_record: Choice,
        on_long: tuple[str, Choice],
        limit: tuple[str, int],
    ) -> None:
        self._key, self._what = source_key, what
        self._on_bad_record, self._on_long, self._limit = on_bad_record, on_long, limit
        self._problems: dict[str, list[str]] = {"bad_record": [], "too_long": []}

    def bad_record(self, location: str, problem: str) -> None:
        if self._on_bad_record == "fail":
            hint = f"({self._key}.on_bad_record=skip leaves such records out)"
            raise BadRecordError(f"{location}: {problem}\n{hint}")
        self._problems["bad_record"].append(f"{location}: {problem}")

    def too_long(self, location: str, num_tokens: int) -> None:
        (choice_key, choice), (limit_key, limit) = self._on_long, self._limit
        problem = (
            f"{location}: the {self._what} has {num_tokens} tokens, "
            f"{self._key}.{limit_key} is {limit}"
        )
        if choice == "fail":
            raise BadRecordError(f"{problem}; raise it or set {self._key}.{choice_key}=skip")
        self._problems["too_long"].append(problem)

    def report(self, num_kept: int) -> None:
        """One warning per reason. Raises ``ValueError`` if nothing is left."""
        for reason, problems in self._problems.items():
            if not problems:
                continue
            if num_kept == 0:
                raise_limit = f"raise {self._key}.{self._limit[0]}"
                remedy = raise_limit if reason == "too_long" else "repair them"
                raise ValueError(
                    f"{self._key}: no usable {self._what} is left, {len(problems)} are {reason}; "
                    f"the first: {problems[0]}; {remedy}, or give other {self._key}.files"
                )
            message = "%s: left out %d records (%s), kept %d; the first: %s"
            logger.warning(message, self._key, len(problems), reason, num_kept, problems[0])
