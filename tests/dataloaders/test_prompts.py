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
from easyrl.dataloaders.prompts.dataset import PromptBatches, load_prompts
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
def test_every_file_kind_gives_the_same_prompts(tmp_path, tokenizer, kind):
    prompts = load(tmp_path / f"data.{kind}", tokenizer, apply_chat_template=False)
    assert [p.index for p in prompts] == [0, 1, 2]
    assert [p.text for p in prompts] == [r["prompt"] for r in RECORDS]
    assert [p.answer for p in prompts] == ["2", "4", "x"]
    assert [dict(p.metadata) for p in prompts] == [{"level": 1}, {"level": 2}, {"level": 3}]
    for prompt in prompts:
        assert prompt.token_ids.dtype == np.int32
        assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert prompts.num_skipped == {"bad_record": 0, "too_long": 0}


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
    assert prompts.num_skipped == {"bad_record": 0, "too_long": 2}
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
    tokenizer, config, section, files, num_prompts, first_answer
):
    tree = load_config(ROOT / "configs" / f"{config}.yaml")
    data = tree.data if section == "data" else tree.evaluation.data
    assert [file.name for file in data.files] == files
    # The byte-level tokenizer needs about four times as many tokens as a real one.
    update = {"files": [DATA / file for file in files], "max_prompt_tokens": 10_000}
    began = time.process_time()
    prompts = load_prompts(data.model_copy(update=update), tokenizer)
    assert len(prompts) == num_prompts
    assert prompts.num_skipped["too_long"] == 0
    assert prompts[0].answer == first_answer
    # About 2 s here; one call of the tokenizer per record takes several times as long.
    assert time.process_time() - began < 20


# ---- batches -----------------------------------------------------------------------------------


def dataset(num_prompts: int) -> list[Prompt]:
    return [
        Prompt(i, np.array([i, i + 1], dtype=np.int32), f"p{i}", str(i)) for i in range(num_prompts)
    ]


def keys(batches) -> list[list[tuple[int, int]]]:
    return [[(p.epoch, p.index) for p in batch] for batch in batches]


def test_batches_cross_epochs_and_lose_nothing():
    batches = PromptBatches(dataset(7), 4, seed=3, epochs=3)
    handed_out = keys(batches)
    assert [len(batch) for batch in handed_out] == [4, 4, 4, 4, 4, 1]
    assert batches.num_batches == 6
    flat = [key for batch in handed_out for key in batch]
    assert sorted(flat) == [(epoch, index) for epoch in range(3) for index in range(7)]
    assert [epoch for epoch, _ in flat] == sorted(epoch for epoch, _ in flat)
    orders = [[index for e, index in flat if e == epoch] for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 3


def test_order_depends_on_the_seed_only():
    def order(seed, batch_size=8):
        batches = PromptBatches(dataset(50), batch_size, seed=seed, epochs=2)
        return [key for batch in keys(batches) for key in batch]

    assert order(1) == order(1) == order(1, batch_size=13)
    assert order(1) != order(2)
    # Pinned: a checkpoint of another numpy version must resume into the same order.
    first_epoch = [index for _, index in keys(PromptBatches(dataset(8), 8, seed=0))[0]]
    assert first_epoch == [6, 3, 5, 0, 7, 2, 1, 4]


def test_unshuffled_keeps_the_files_order():
    batches = PromptBatches(dataset(5), 2, shuffle=False, epochs=2)
    flat = [key for batch in keys(batches) for key in batch]
    assert flat == [(epoch, index) for epoch in range(2) for index in range(5)]


def test_cursor_resumes_where_it_was():
    whole = keys(PromptBatches(dataset(11), 4, seed=5, epochs=4))
    for num_done in range(len(whole) + 1):
        first = PromptBatches(dataset(11), 4, seed=5, epochs=4)
        for _ in range(num_done):
            next(first)
        state = json.loads(json.dumps(first.state()))
        second = PromptBatches(dataset(11), 4, seed=5, epochs=4)
        second.restore(state)
        assert keys(second) == whole[num_done:]


def test_more_epochs_extend_a_finished_run():
    first = PromptBatches(dataset(6), 3, seed=1, epochs=1)
    done = keys(first)
    second = PromptBatches(dataset(6), 3, seed=1, epochs=2)
    second.restore(first.state())
    assert done + keys(second) == keys(PromptBatches(dataset(6), 3, seed=1, epochs=2))


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        (PromptBatches(dataset(9), 4, seed=5), "num_prompts was 10 .* is 9 now"),
        (PromptBatches(dataset(10), 5, seed=5), "batch_size was 4 .* is 5 now"),
        (PromptBatches(dataset(10), 4, seed=6), "seed was 5 .* is 6 now"),
        (PromptBatches(dataset(10), 4, seed=5, shuffle=False), "shuffle was True .* is False now"),
        (
            PromptBatches(
                [*dataset(9), replace(dataset(10)[9], token_ids=np.array([9], np.int32))], 4, seed=5
            ),
            "dataset_hash",
        ),
    ],
)
def test_a_cursor_of_other_data_is_refused(changed, key):
    state = PromptBatches(dataset(10), 4, seed=5).state()
    with pytest.raises(ValueError, match=key):
        changed.restore(state)


def test_something_else_is_no_cursor():
    with pytest.raises(ValueError, match="not a state of PromptBatches: it has the keys"):
        PromptBatches(dataset(10), 4).restore({"position": 3})


def test_no_prompts_no_batches():
    with pytest.raises(ValueError, match="the dataset is empty"):
        PromptBatches([], 4)
