"""Records out of files: .jsonl, .json arrays and .parquet, each with its file and line.

A record that cannot be read is a value here (``Record.problem``): the caller decides whether one
bad line ends the run. A file that cannot be read raises ``ValueError`` with its name and a remedy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
            values = _parse(line)
        except ValueError as error:
            problem = f"is not JSON ({error}); a line must be one whole object"
            yield Record(location, problem=problem)
        else:
            yield _record(location, values)


def _read_json_array(path: Path) -> Iterator[Record]:
    """Walks the array element by element, because ``json.loads`` forgets the lines."""
    text = _read_text(path)
    position = _skip_space(text, 0)
    if position == len(text):
        return
    if text[position] != "[":
        raise ValueError(
            f"{path}: is not a JSON array of objects; wrap it in [ ], or rename it to .jsonl if "
            "each line is an object"
        )
    line, counted = 1, 0
    position = _skip_space(text, position + 1)
    while text[position : position + 1] != "]":
        line, counted = line + text.count("\n", counted, position), position
        try:
            values, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            _fail_array(path, line, text, position, error)
        yield _record(f"{path}:{line}", values)
        position = _skip_space(text, position)
        if text[position : position + 1] == ",":
            position = _skip_space(text, position + 1)
        elif text[position : position + 1] != "]":
            line = text.count("\n", 0, position) + 1
            _fail_array(path, line, text, position, ValueError("expected , or ] after an element"))
    rest = _skip_space(text, position + 1)
    if rest < len(text):
        line = text.count("\n", 0, rest) + 1
        raise ValueError(f"{path}:{line}: text after the array's end; a .json file is one array")


def _fail_array(path: Path, line: int, text: str, position: int, error: Exception) -> NoReturn:
    if isinstance(error, json.JSONDecodeError):
        position, line = error.pos, error.lineno
        what = f"{error.msg} at column {error.colno}"
    else:
        what = str(error)
    if position >= len(text.rstrip()) or "Unterminated string" in str(error):
        raise ValueError(
            f"{path}:{line}: the JSON array is cut off; fetch the file again"
        ) from None
    raise ValueError(
        f"{path}:{line}: is not JSON ({what}); repair or regenerate the file"
    ) from None


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for values in batch.to_pylist():
                    number += 1
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


def _parse(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position
