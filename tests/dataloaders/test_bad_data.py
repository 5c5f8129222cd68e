"""Kinds of bad data, each with the message that its user gets."""

import json
import re
from pathlib import Path

import pytest

from easyrl.config import DatasetConfig
from easyrl.dataloaders.prompts.dataset import BadRecordError, load_prompts
from tests.tiny_tokenizer import tiny_tokenizer

GOOD = '{"prompt": "1+1?", "answer": "2"}'


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def load(path: Path, content: str | bytes, tokenizer, **settings):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_prompts(DatasetConfig(files=[path], **settings), tokenizer)


# name → (a .jsonl line, settings, message after "FILE:LINE: ")
BAD_RECORDS = {
    "broken JSON": ('{"prompt": "x", "ans', {}, "is not JSON (Unterminated string"),
    "two objects on a line": (
        GOOD + GOOD,
        {},
        "is not JSON (Extra data at column 34); a line must be",
    ),
    "not an object": ("[1, 2]", {}, "is of type list; a record must be a JSON object"),
    "not a JSON value": (
        '{"prompt": "x", "answer": NaN}',
        {},
        "is not JSON (NaN is not a JSON value)",
    ),
    "too deep": ("[" * 100_000, {}, "is not JSON (nested too deeply)"),
    "no prompt field": (
        '{"question": "x", "answer": "2"}',
        {},
        "has no field 'prompt'; its fields are: question, answer (set data.fields.prompt)",
    ),
    "no answer field": (
        '{"prompt": "x", "solution": "2"}',
        {},
        "has no field 'answer'; its fields are: prompt, solution (set data.fields.answer)",
    ),
    "no nested field": (
        GOOD,
        {"fields": {"answer": "answer.value"}},
        "has no field 'answer.value'; its fields are: prompt, answer (set data.fields.answer)",
    ),
    "blank prompt": (
        '{"prompt": " \\n", "answer": "2"}',
        {},
        "field 'prompt' is empty; every prompt",
    ),
    "prompt of another type": (
        '{"prompt": 7, "answer": "2"}',
        {},
        "field 'prompt' is of type int; it must be text or a list of chat messages",
    ),
    "half a surrogate pair": (
        '{"prompt": "ab\\ud800", "answer": "2"}',
        {},
        "field 'prompt' has half a surrogate pair at character 2",
    ),
    "answer is null": (
        '{"prompt": "x", "answer": null}',
        {},
        "field 'answer' is null; an answer is text or a number (data without answers: "
        "data.fields.answer=null)",
    ),
    "answer of another type": (
        '{"prompt": "x", "answer": ["2"]}',
        {},
        "field 'answer' is list; an",
    ),
    "answer is a truth value": (
        '{"prompt": "x", "answer": true}',
        {},
        "field 'answer' is bool; an",
    ),
    "blank answer": ('{"prompt": "x", "answer": " "}', {}, "field 'answer' gives an empty answer"),
    "pattern without a match": (
        GOOD,
        {"answer_pattern": "#### (.+)"},
        "field 'answer' does not match '#### (.+)'; repair the record or change data.",
    ),
    "list that is no chat": (
        '{"prompt": [{"role": "user"}], "answer": "2"}',
        {},
        "field 'prompt' is a list but not of chat messages; each needs a role and a content",
    ),
    "chat that is already answered": (
        '{"prompt": [{"role": "assistant", "content": "hi"}], "answer": "2"}',
        {},
        "the chat in field 'prompt' leaves nothing to answer",
    ),
    "chat without a template": (
        '{"prompt": [{"role": "user", "content": "hi"}], "answer": "2"}',
        {"apply_chat_template": False},
        "the prompt is a chat; set data.apply_chat_template=true or give plain text",
    ),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_a_bad_record_names_its_file_and_line(tmp_path, tokenizer, caplog, name):
    line, settings, message = BAD_RECORDS[name]
    path = tmp_path / "data.jsonl"
    good = '{"prompt": "1+1?", "answer": {"value": "#### 2"}}' if "fields" in settings else GOOD
    if "answer_pattern" in settings:
        good = '{"prompt": "1+1?", "answer": "#### 2"}'
    content = f"{good}\n\n{line}\n{good}\n"  # a blank line counts as a line but is no record
    with pytest.raises(BadRecordError) as caught:
        load(path, content, tokenizer, **settings)
    assert str(caught.value).startswith(f"{path}:3: {message}")
    assert "(data.on_bad_record=skip leaves such records out)" in str(caught.value)

    prompts = load(path, content, tokenizer, on_bad_record="skip", **settings)
    assert [p.index for p in prompts] == [0, 1]
    (warning,) = caplog.messages
    assert "left out 1 records (bad_record), kept 2" in warning


def test_skipped_records_are_reported_once_with_their_count(tmp_path, tokenizer, caplog):
    content = "\n".join([GOOD, "x", GOOD, "y", "[]"])
    load(tmp_path / "d.jsonl", content, tokenizer, on_bad_record="skip")
    (warning,) = caplog.messages
    assert warning.startswith("data: left out 3 records (bad_record), kept 2; the first: ")
    assert f"{tmp_path / 'd.jsonl'}:2: is not JSON" in warning


def test_an_array_element_is_named_by_the_line_it_starts_on(tmp_path, tokenizer):
    content = json.dumps([json.loads(GOOD), {"prompt": "x"}], indent=2)
    line = content.splitlines().index("  {", 2) + 1
    with pytest.raises(BadRecordError, match=rf"d\.json:{line}: has no field 'answer'"):
        load(tmp_path / "d.json", content, tokenizer)


def test_a_parquet_record_is_named_by_its_row(tmp_path, tokenizer):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "d.parquet"
    table = pyarrow.table({"prompt": ["a", "b", "c"], "answer": [1.0, None, float("nan")]})
    parquet.write_table(table, path)
    with pytest.raises(BadRecordError, match=r"d\.parquet:row 2: field 'answer' is null"):
        load_prompts(DatasetConfig(files=[path]), tokenizer)
    parquet.write_table(table.slice(2), path)
    with pytest.raises(BadRecordError, match=r"d\.parquet:row 1: field 'answer' is not a number"):
        load_prompts(DatasetConfig(files=[path]), tokenizer)


def test_a_record_that_the_chat_template_refuses(tmp_path):
    tokenizer = tiny_tokenizer("{{ raise_exception('no system role') }}")
    with pytest.raises(BadRecordError, match=r"d\.jsonl:1: the chat template refuses the prompt"):
        load(tmp_path / "d.jsonl", GOOD, tokenizer)


def test_a_prompt_that_is_too_long_can_fail(tmp_path, tokenizer):
    settings = {"max_prompt_tokens": 3, "apply_chat_template": False, "on_long_prompt": "fail"}
    message = r"d\.jsonl:1: the prompt has 4 tokens, data\.max_prompt_tokens is 3; raise it or set"
    with pytest.raises(BadRecordError, match=message):
        load(tmp_path / "d.jsonl", GOOD, tokenizer, **settings)


def test_nothing_left_is_an_error_even_when_skipping(tmp_path, tokenizer):
    message = (
        r"data: no usable prompt is left, 2 are bad_record; the first: .*d\.jsonl:1: is not JSON"
    )
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "d.jsonl", "x\ny", tokenizer, on_bad_record="skip")


# name → (file, content or None for no file, message after the file's name)
BAD_FILES = {
    "missing": ("d.jsonl", None, ": does not exist; check the path"),
    "empty": ("d.jsonl", "", ": is empty; fill it"),
    "blank": ("d.jsonl", "\n \n", ": holds no records; fill it"),
    "empty array": ("d.json", "[]", ": holds no records; fill it"),
    "unknown kind": (
        "d.csv",
        GOOD,
        ": unknown file type '.csv'; convert it to one of .jsonl, .json",
    ),
    "not UTF-8": (
        "d.jsonl",
        GOOD.encode() + b"\n\xff\xfe",
        ":2: is not UTF-8 (invalid start byte)",
    ),
    "object for an array": ("d.json", GOOD, ": is not a JSON array of objects; wrap it in [ ]"),
    "array cut between elements": ("d.json", f"[{GOOD},\n{GOOD}", ":2: the JSON array is cut off"),
    "array cut inside an element": (
        "d.json",
        f"[{GOOD},\n{GOOD[:9]}",
        ":2: the JSON array is cut off",
    ),
    "array with a missing comma": (
        "d.json",
        f"[{GOOD}\n{GOOD}]",
        ":2: is not JSON (expected , or ]",
    ),
    "text after the array": ("d.json", f"[{GOOD}]\n{GOOD}", ":2: text after the array's end"),
    "damaged parquet": ("d.parquet", b"PAR1 and then nonsense", ": is not a readable parquet file"),
}


@pytest.mark.parametrize("on_bad_record", ["fail", "skip"])
@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_always_an_error(tmp_path, tokenizer, name, on_bad_record):
    file, content, message = BAD_FILES[name]
    path = tmp_path / file
    with pytest.raises(ValueError, match="^" + re.escape(f"{path}{message}")):
        if content is None:
            load_prompts(DatasetConfig(files=[path], on_bad_record=on_bad_record), tokenizer)
        else:
            load(path, content, tokenizer, on_bad_record=on_bad_record)


def test_a_folder_is_no_file(tmp_path, tokenizer):
    folder = tmp_path / "d.jsonl"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"d\.jsonl: is a directory; list its files"):
        load_prompts(DatasetConfig(files=[folder]), tokenizer)


# ---- settings that do not fit the tokenizer ------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "settings", "message"),
    [
        (
            None,
            {},
            r"val\.apply_chat_template: the tokenizer has no chat template; give one as val",
        ),
        ("x", {"chat_template": "no.jinja"}, r"val\.chat_template: no\.jinja does not exist"),
        ("{% if %}", {}, r"val\.chat_template: is not Jinja"),
        (
            "x",
            {"chat_template_kwargs": {"tokenize": True}},
            r"val\.chat_template_kwargs: \['tokenize'\] are set by EasyRL",
        ),
    ],
)
def test_template_settings_name_their_key(tmp_path, template, settings, message):
    path = tmp_path / "d.jsonl"
    path.write_text(GOOD)
    with pytest.raises(ValueError, match=message):
        load_prompts(
            DatasetConfig(files=[path], **settings), tiny_tokenizer(template), source_key="val"
        )


def test_a_prompt_without_tokens_is_a_bad_record(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"1": 0}, [])))
    with pytest.raises(BadRecordError, match=r"d\.jsonl:2: the prompt has no tokens"):
        content = '{"prompt": "1", "answer": "1"}\n{"prompt": "x", "answer": "1"}'
        load(tmp_path / "d.jsonl", content, tokenizer, apply_chat_template=False)
