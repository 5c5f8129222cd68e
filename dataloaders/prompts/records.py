"""Records out of files: .jsonl, .json arrays and .parquet, each with its file and line.

A record that cannot be read is a value: the caller decides whether one bad line ends the run.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NoReturn


class BadRecordError(ValueError):
    """A record cannot be used. Says why and the remedy; ``tokenise_records`` adds where it is."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record, or what is wrong with it."""

    location: str  # "FILE:LINE", in a parquet file "FILE:row NUMBER"; both count from 1
    values: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None  # "what; remedy" if the record could not be read


def read_records(path: Path) -> Iterator[Record]:
    """The records of one file, in its order.

    Raises ``ValueError`` if the file is missing, empty, of an unknown kind, not UTF-8, a truncated
    or wrongly shaped JSON array, or a damaged parquet file.
    """
    readers = {".jsonl": _read_json_lines, ".json": _read_json_array, ".parquet": _read_parquet}
    if path.suffix not in readers:
        known = ", ".join(readers)
        raise ValueError(f"{path}: unknown file type {path.suffix!r}; convert it to one of {known}")
    if path.is_dir():
        raise ValueError(f"{path}: is a directory; list its files one by one")
    if not path.is_file():
        raise ValueError(f"{path}: does not exist; check the path and the working directory")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: is empty; fill it or take it off the list of files")
    num_records = 0
    for record in readers[path.suffix](path):
        num_records += 1
        yield record
    if num_records == 0:
        raise ValueError(f"{path}: holds no records; fill it or take it off the list of files")


def _read_json_lines(path: Path) -> Iterator[Record]:
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        location = f"{path}:{number}"
        try:
            values = _DECODER.decode(line)
        except (ValueError, RecursionError) as error:
            problem = f"is not JSON ({_describe(error)}); a line must be one whole object"
            yield Record(location, problem=problem)
        else:
            yield _record(location, values)


def _read_json_array(path: Path) -> Iterator[Record]:
    """Walks the array element by element, because ``json.loads`` forgets the lines."""
    text = _read_text(path)
    line_ends = list(accumulate(len(line) + 1 for line in text.split("\n")))

    def location(position: int) -> str:
        return f"{path}:{bisect_right(line_ends, position) + 1}"

    def failure(position: int, problem: str) -> ValueError:
        if position >= len(text.rstrip()) or problem.startswith("Unterminated string"):
            problem = "the JSON array is cut off; fetch the file again"
        else:
            problem = f"is not JSON ({problem}); repair or regenerate the file"
        return ValueError(f"{location(position)}: {problem}")

    position = _skip_space(text, 0)
    if position == len(text):
        return
    if text[position] != "[":
        raise ValueError(
            f"{path}: is not a JSON array of objects; wrap it in [ ], or rename it to .jsonl if "
            "each line is an object"
        )
    position = _skip_space(text, position + 1)
    while text[position : position + 1] != "]":
        try:
            values, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            at = error.pos if isinstance(error, json.JSONDecodeError) else position
            raise failure(at, _describe(error)) from None
        yield _record(location(position), values)
        position = _skip_space(text, end)
        if text[position : position + 1] == ",":
            position = _skip_space(text, position + 1)
        elif text[position : position + 1] != "]":
            raise failure(position, "expected , or ] after an element")
    rest = _skip_space(text, position + 1)
    if rest < len(text):
        raise ValueError(f"{location(rest)}: text after the array's end; a .json file is one array")


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            rows = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches())
            for number, values in enumerate(rows, start=1):
                yield Record(f"{path}:row {number}", values)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{path}: is not a readable parquet file ({error}); fetch it again"
        ) from error


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}:{line}: is not UTF-8 ({error.reason}); convert the file (iconv does)"
        ) from None


def _record(location: str, values: Any) -> Record:
    if not isinstance(values, dict):
        kind = type(values).__name__
        return Record(location, problem=f"is of type {kind}; a record must be a JSON object")
    return Record(location, values)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _describe(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position
