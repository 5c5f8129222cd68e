"""Mistakes in prompt files, their fields and templates."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.parts.bad_input.scene import PROMPTS, Mistake

FILE = "{folder}/prompts.jsonl"


def _lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _data(
    title: str, content: str | bytes, location: str | tuple[str, ...], *overrides: str
) -> Mistake:
    return Mistake(title, location, overrides, files={"prompts.jsonl": content})


def _file(title: str, name: str, content: str | bytes, location: str = "") -> Mistake:
    path = f"{{folder}}/{name}"
    return Mistake(title, location or path, (f"data.files=[{path}]",), files={name: content})


def _template(title: str, content: str | bytes, location: str) -> Mistake:
    overrides = ("data.apply_chat_template=true", "data.chat_template={folder}/chat.jinja")
    return Mistake(title, location, overrides, files={"chat.jinja": content})


def _folder_for_a_file(folder: Path) -> None:
    (folder / "more.jsonl").mkdir()


GOOD = {"prompt": "1+1=", "answer": "2"}
MISTAKES = [
    _data("a field of another name", _lines({"question": "1+1="}), (f"{FILE}:1", "prompt")),
    _data("no answer in the second line", _lines(GOOD, {"prompt": "2+2="}), f"{FILE}:2"),
    _data("a number as a prompt", _lines(GOOD, GOOD, {"prompt": 5, "answer": "5"}), f"{FILE}:3"),
    _data("an empty prompt", _lines({"prompt": " ", "answer": "5"}), f"{FILE}:1"),
    _data("an answer of null", _lines({"prompt": "5", "answer": None}), f"{FILE}:1"),
    _data("a list as an answer", _lines({"prompt": "5", "answer": ["5"]}), f"{FILE}:1"),
    _data("an answer of NaN", '{"prompt": "5", "answer": NaN}\n', f"{FILE}:1"),
    _data("an empty file", "", FILE),
    _data("blank lines only", "\n\n\n", FILE),
    _data("a line cut off", PROMPTS[:-20], f"{FILE}:8"),
    _data("single quotes", "{'prompt': '1+1=', 'answer': '2'}\n", f"{FILE}:1"),
    _data("a JSON array in .jsonl", json.dumps([GOOD, GOOD]), f"{FILE}:1"),
    _data("a pretty-printed object", json.dumps(GOOD, indent=2), f"{FILE}:1"),
    _data("plain text in .jsonl", "What is 1+1?\n", f"{FILE}:1"),
    _data("a file in Latin-1", '{"prompt": "caf\xe9", "answer": "1"}\n'.encode("latin-1"), FILE),
    _data("a file in UTF-16", PROMPTS.encode("utf-16"), FILE),
    _data("a binary file", bytes(range(256)) * 8, FILE),
    _data("half a surrogate pair", '{"prompt": "\\ud83d", "answer": "1"}\n', f"{FILE}:1"),
    _data(
        "only too long prompts",
        _lines({"prompt": "1" * 99, "answer": "1"}),
        "data.max_prompt_tokens",
        "data.max_prompt_tokens=16",
    ),
    _data(
        "a too long prompt where that fails",
        _lines({"prompt": "1" * 99, "answer": "1"}),
        (f"{FILE}:1", "data.max_prompt_tokens"),
        "data.max_prompt_tokens=16",
        "data.on_long_prompt=fail",
    ),
    _data("bad records only, skipped", _lines({"x": 1}), "data", "data.on_bad_record=skip"),
    _data(
        "an answer that the pattern does not find",
        PROMPTS,
        (f"{FILE}:1", "data.answer_pattern"),
        "data.answer_pattern='#### (.+)'",
    ),
    Mistake("a pattern that is none", "data.answer_pattern", ("data.answer_pattern='(.+'",)),
    Mistake("a pattern without a group", "data.answer_pattern", ("data.answer_pattern='####'",)),
    Mistake("a template without {prompt}", "data.prompt_template", ("data.prompt_template=Hi",)),
    _data(
        "a chat that the assistant ends",
        _lines({"prompt": [{"role": "assistant", "content": "2"}], "answer": "2"}),
        f"{FILE}:1",
    ),
    _data(
        "a chat without templates",
        _lines({"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}),
        (f"{FILE}:1", "data.apply_chat_template"),
    ),
    _data(
        "a list of texts as a prompt", _lines({"prompt": ["1", "2"], "answer": "2"}), f"{FILE}:1"
    ),
    _file("a table in .csv", "prompts.csv", "prompt,answer\n1+1=,2\n"),
    _file("an archive", "prompts.jsonl.gz", b"\x1f\x8b\x08\x00"),
    _file("a .parquet that is none", "prompts.parquet", b"PAR1 and then nothing"),
    _file("a .json array cut off", "prompts.json", json.dumps([GOOD, GOOD])[:-9]),
    _file("an object in .json", "prompts.json", json.dumps({"train": [GOOD]})),
    _file("JSON lines in .json", "prompts.json", PROMPTS),
    Mistake(
        "a folder instead of a file",
        "{folder}/more.jsonl",
        ("data.files=[{folder}/more.jsonl]",),
        prepare=_folder_for_a_file,
    ),
    Mistake("a file that is missing", "data.files[0]", ("data.files=[{folder}/promts.jsonl]",)),
    Mistake("a pattern of files", "data.files[0]", ("data.files=['{folder}/*.jsonl']",)),
    Mistake("the name of a data set", "data.files[0]", ("data.files=['openai/gsm8k']",)),
    Mistake("no files", "data.files", ("data.files=[]",)),
    Mistake(
        "held-out data that are missing",
        "evaluation.data.files[0]",
        ("evaluation={data: {files: [{folder}/test.jsonl]}}",),
    ),
    _template(
        "a chat template that is missing an end",
        "{% for m in messages %}{{ m }}",
        "data.chat_template",
    ),
    _template("a chat template that is binary", b"\xff\xfe\x00{{", "data.chat_template"),
    _template(
        "a chat template with a wrong name", "{{ messages[0].text.upper() }}", "data.chat_template"
    ),
    Mistake(
        "a chat template that is missing",
        "data.chat_template",
        ("data.apply_chat_template=true", "data.chat_template={folder}/none.jinja"),
    ),
    Mistake(
        "a reserved argument of the template",
        "data.chat_template_kwargs",
        ("data.apply_chat_template=true", "data.chat_template_kwargs={tokenize: true}"),
    ),
    Mistake(
        "a system prompt without a template",
        "data.system_prompt",
        ("data.system_prompt='Be brief.'",),
    ),
]
