"""Prompts: what records become, and the order in which they are handed out."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from easyrl.config import DatasetConfig
from easyrl.config.file import load_config
from easyrl.dataloaders.prompts.dataset import PromptOrder, load_prompts
from easyrl.schema import Prompt
from tests.tiny_tokenizer import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("EASYRL_DATA", ROOT.parent / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"the example data are not in {DATA}; set EASYRL_DATA to their folder"
)
RECORDS = [
    {"prompt": "1+1?", "answer": "2", "level": 1},
    {"prompt": "größer als 3?", "answer": "4", "level": 2},
    {"prompt": "a {set} of \\frac{1}{2}", "answer": "x", "level": 3},
]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def write(path: Path, records: list) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(records, indent=2), encoding="utf-8")
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def load(path: Path, tokenizer, records: list = RECORDS, **settings):
    return load_prompts(DatasetConfig(files=[write(path, records)], **settings), tokenizer)


# ---- records → prompts -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_every_file_kind_gives_the_same_prompts(tmp_path, tokenizer, caplog, kind):
    prompts = load(tmp_path / f"data.{kind}", tokenizer, apply_chat_template=False)
    assert [p.index for p in prompts] == [0, 1, 2]
    assert [p.text for p in prompts] == [r["prompt"] for r in RECORDS]
    assert [p.answer for p in prompts] == ["2", "4", "x"]
    assert [dict(p.metadata) for p in prompts] == [{"level": 1}, {"level": 2}, {"level": 3}]
    for prompt in prompts:
        assert prompt.token_ids.dtype == np.int32
        assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert caplog.messages == []  # nothing is left out


def test_files_are_read_in_order_up_to_max_records(tmp_path, tokenizer):
    files = [
        write(tmp_path / "b.jsonl", RECORDS),
        write(tmp_path / "a.json", RECORDS[::-1]),
    ]
    config = DatasetConfig(files=files, max_records=4)
    prompts = load_prompts(config, tokenizer)
    assert [p.answer for p in prompts] == ["2", "4", "x", "x"]
    assert [p.index for p in prompts] == [0, 1, 2, 3]


def test_chat_template_matches_the_tokenizers_own_call(tmp_path, tokenizer):
    prompts = load(
        tmp_path / "a.jsonl",
        tokenizer,
        system_prompt="be brief",
        prompt_template="Q: {prompt} in {braces}",
        chat_template_kwargs={"shout": True},
    )
    for prompt, record in zip(prompts, RECORDS, strict=True):
        messages = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": f"Q: {record['prompt']} in {{braces}}"},
        ]
        expected = tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, shout=True, return_dict=False
        )
        assert prompt.token_ids.tolist() == expected
        assert tokenizer.decode(prompt.token_ids).endswith("<eos><|assistant|>!")
        assert prompt.text == record["prompt"]


def test_template_file_replaces_the_tokenizers(tmp_path, tokenizer):
    template = tmp_path / "chat.jinja"
    template.write_text("[{{ messages[0].content }}]")
    prompts = load(tmp_path / "a.jsonl", tokenizer, chat_template=template)
    assert tokenizer.decode(prompts[0].token_ids) == "[1+1?]"


def test_a_prompt_that_is_a_chat_is_used_as_it_is(tmp_path, tokenizer):
    chat = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 2+2?"},
    ]
    for kind in ("jsonl", "parquet"):
        prompts = load(
            tmp_path / f"a.{kind}",
            tokenizer,
            [{"prompt": chat, "answer": 4}],
            prompt_template="never {prompt}",
            system_prompt="brief",
        )
        assert tokenizer.decode(prompts[0].token_ids) == (
            "<|system|>brief<eos><|user|>1+1?<eos><|assistant|>2<eos>"
            "<|user|>and 2+2?<eos><|assistant|>"
        )
        assert (prompts[0].text, prompts[0].answer) == ("and 2+2?", "4")


def test_nested_fields_and_numbers_as_answers(tmp_path, tokenizer):
    records = [{"q": {"text": "1+1?"}, "a": {"truth": value}} for value in ("2", 2, 2.0, 2.5)]
    fields = {"prompt": "q.text", "answer": "a.truth"}
    prompts = load(tmp_path / "a.jsonl", tokenizer, records, fields=fields)
    assert [p.answer for p in prompts] == ["2", "2", "2", "2.5"]


def test_without_answers(tmp_path, tokenizer):
    prompts = load(tmp_path / "a.jsonl", tokenizer, [{"prompt": "hi"}], fields={"answer": None})
    assert prompts[0].answer is None


def test_answer_pattern_takes_the_last_match(tmp_path, tokenizer):
    records = [{"prompt": "p", "answer": "#### 1\nno:\n####  1,234 "}]
    prompts = load(tmp_path / "a.jsonl", tokenizer, records, answer_pattern="#### (.+)")
    assert prompts[0].answer == "1,234"


def test_long_prompts_are_left_out_and_counted(tmp_path, tokenizer, caplog):
    settings = {"apply_chat_template": False, "max_prompt_tokens": 10}
    prompts = load(tmp_path / "a.jsonl", tokenizer, **settings)
    assert [p.answer for p in prompts] == ["2"]
    (warning,) = caplog.messages
    assert "left out 2 records (too_long), kept 1" in warning and "a.jsonl:2" in warning


@needs_data
@pytest.mark.parametrize(
    ("config", "section", "files", "num_prompts", "first_answer"),
    [
        ("gsm8k_qwen3", "data", ["gsm8k_train.jsonl"], 7473, "72"),
        ("gsm8k_qwen3", "evaluation", ["gsm8k_test.jsonl"], 1319, "18"),
        ("deepscaler_qwen3", "data", ["deepscaler_math_train.json"], 7470, "0"),  # 4 lack an answer
        (
            "deepscaler_qwen3",
            "evaluation",
            ["math500.json", "aime24.json"],
            530,
            "\\left( 3, \\frac{\\pi}{2} \\right)",
        ),
        ("laptop_cpu", "data", ["gsm8k_train.jsonl"], 512, "72"),
    ],
)
def test_example_data_load_with_the_example_configs(
    tokenizer, caplog, config, section, files, num_prompts, first_answer
):
    tree = load_config(ROOT / "configs" / f"{config}.yaml")
    data = tree.data if section == "data" else tree.evaluation.data
    assert [file.name for file in data.files] == files
    # The byte-level tokenizer needs about four times as many tokens as a real one.
    update = {"files": [DATA / file for file in files], "max_prompt_tokens": 10_000}
    began = time.process_time()
    prompts = load_prompts(data.model_copy(update=update), tokenizer)
    assert len(prompts) == num_prompts
    assert not any("too_long" in message for message in caplog.messages)
    assert prompts[0].answer == first_answer
    # About 2 s here; one call of the tokenizer per record takes several times as long.
    assert time.process_time() - began < 20


# ---- the order -----------------------------------------------------------------------------------


def dataset(num_prompts: int) -> list[Prompt]:
    return [
        Prompt(i, np.array([i, i + 1], dtype=np.int32), f"p{i}", str(i)) for i in range(num_prompts)
    ]


def keys(order: PromptOrder, start: int = 0) -> list[tuple[int, int]]:
    """From position ``start`` to the end of the order."""
    end = start + order.num_left(start)
    return [order.prompt(position).key for position in range(start, end)]


def test_the_order_crosses_epochs_and_loses_nothing():
    order = PromptOrder(dataset(7), seed=3, epochs=3)
    drawn = keys(order)
    assert len(drawn) == 21
    assert sorted(drawn) == [(epoch, index) for epoch in range(3) for index in range(7)]
    assert [epoch for epoch, _ in drawn] == sorted(epoch for epoch, _ in drawn)
    orders = [[index for e, index in drawn if e == epoch] for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 3


def test_order_depends_on_the_seed_only():
    def order(seed):
        return keys(PromptOrder(dataset(50), seed=seed, epochs=2))

    assert order(1) == order(1)
    assert order(1) != order(2)
    # Pinned: a checkpoint of another numpy version must resume into the same order.
    first_epoch = [index for _, index in keys(PromptOrder(dataset(8), seed=0))]
    assert first_epoch == [6, 3, 5, 0, 7, 2, 1, 4]


def test_positions_may_be_asked_for_in_any_order():
    """Ranks and rejected groups reach into the next epoch and back."""
    order = PromptOrder(dataset(5), seed=2, epochs=4)
    expected = keys(order)
    positions = np.random.RandomState(0).permutation(20).tolist()
    assert [order.prompt(p).key for p in positions] == [expected[p] for p in positions]


def test_unshuffled_keeps_the_files_order():
    drawn = keys(PromptOrder(dataset(5), shuffle=False, epochs=2))
    assert drawn == [(epoch, index) for epoch in range(2) for index in range(5)]


def test_a_prompt_is_that_of_the_dataset_in_its_epoch():
    prompts = dataset(5)
    prompt = PromptOrder(prompts, shuffle=False, epochs=2).prompt(8)
    assert prompt.epoch == 1 and prompt.index == 3
    assert prompt.token_ids is prompts[3].token_ids and prompt.answer == "3"


def test_the_order_ends_with_its_epochs():
    order = PromptOrder(dataset(6), epochs=2)
    assert [order.num_left(p) for p in (0, 5, 11, 12)] == [12, 7, 1, 0]
    assert order.num_left(13) == 0  # resumed with fewer epochs
    for position in (12, 13):
        with pytest.raises(AssertionError):
            order.prompt(position)
    with pytest.raises(AssertionError):
        order.prompt(-1)


def test_without_epochs_the_order_has_no_end_and_begins_as_with_them():
    endless = PromptOrder(dataset(6), seed=4, epochs=None)
    assert endless.num_left(0) is None and endless.num_left(10**9) is None
    bounded = keys(PromptOrder(dataset(6), seed=4, epochs=3))
    assert [endless.prompt(p).key for p in range(18)] == bounded
    assert endless.prompt(6 * 10**6).epoch == 10**6


def test_cursor_resumes_where_it_was():
    whole = keys(PromptOrder(dataset(11), seed=5, epochs=4))
    for num_done in range(len(whole) + 1):
        cursor = json.loads(json.dumps(PromptOrder(dataset(11), seed=5, epochs=4).cursor(num_done)))
        second = PromptOrder(dataset(11), seed=5, epochs=4)
        position = second.position(cursor)
        assert keys(second, position) == whole[num_done:]


def test_more_epochs_extend_a_finished_run():
    first = PromptOrder(dataset(6), seed=1, epochs=1)
    done = keys(first)
    second = PromptOrder(dataset(6), seed=1, epochs=2)
    position = second.position(first.cursor(6))
    assert done + keys(second, position) == keys(PromptOrder(dataset(6), seed=1, epochs=2))


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        (PromptOrder(dataset(9), seed=5), "num_prompts was 10 .* is 9 now"),
        (PromptOrder(dataset(10), seed=6), "seed was 5 .* is 6 now"),
        (PromptOrder(dataset(10), seed=5, shuffle=False), "shuffle was True .* is False now"),
        (
            PromptOrder(
                [*dataset(9), replace(dataset(10)[9], token_ids=np.array([9], np.int32))], seed=5
            ),
            "dataset_hash",
        ),
        (PromptOrder([*dataset(9), replace(dataset(10)[9], answer="no")], seed=5), "dataset_hash"),
    ],
)
def test_a_cursor_of_other_data_is_refused(changed, key):
    cursor = PromptOrder(dataset(10), seed=5).cursor(0)
    with pytest.raises(ValueError, match=key):
        changed.position(cursor)


@pytest.mark.parametrize("cursor", [{"position": 3}, {}, {"position": 3, "batch_size": 4}])
def test_something_else_is_no_cursor(cursor):
    with pytest.raises(ValueError, match="not a cursor of PromptOrder: it has the keys"):
        PromptOrder(dataset(10)).position(cursor)


def test_no_prompts_no_order():
    with pytest.raises(ValueError, match="the dataset is empty"):
        PromptOrder([])
