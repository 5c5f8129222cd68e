"""Supervised records: formats, which tokens are trained, what is refused and where it lies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from easyrl.config.records import RecordDatasetConfig
from easyrl.dataloaders.prompts.dataset import PromptOrder, load_prompts
from easyrl.dataloaders.prompts.records import BadRecordError
from easyrl.dataloaders.supervised.batches import RecordBatches
from easyrl.dataloaders.supervised.dataset import RecordDataset, load_records, record_digest
from easyrl.demo.build_model import build_tokenizer
from easyrl.schema import GivenCompletion, PolicyVersion, ServedWeights, SupervisedRecord
from tests.tiny_tokenizer import tiny_tokenizer

# as the demo's, with the assistant's turns marked
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# drops the thoughts of earlier turns, as Qwen3's does
UNSTABLE = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "<think>2*2</think>4"},
]


def write(tmp_path: Path, *records: Any) -> Path:
    file = tmp_path / "records.jsonl"
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    file.write_text("".join(line + "\n" for line in lines))
    return file


def load(tmp_path: Path, *records: Any, template: str | None = None, **keys: Any) -> RecordDataset:
    config = RecordDatasetConfig(files=[write(tmp_path, *records)], **keys)
    tokenizer = build_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return load_records(config, tokenizer, {tokenizer.eos_token_id})


def shown(record: SupervisedRecord) -> tuple[str, list[tuple[str, str]]]:
    """The prompt, and of each completion its text and that of its trained tokens."""
    decode = build_tokenizer().decode
    return decode(record.prompt.token_ids), [
        (decode(c.token_ids), decode(c.token_ids[c.loss_mask])) for c in record.completions
    ]


SUM = ("<|user|>1+1<|end|><|assistant|>", [("2<|end|>", "2<|end|>")])
FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "prompt and completion": ({"prompt": "1+1", "completion": "2"}, "completion"),
    "question and answer": ({"question": "1+1", "answer": "2"}, "question"),
    "messages": ({"messages": CHAT[:2]}, "messages"),
    "prompt as a chat": ({"prompt": CHAT[:1], "completion": CHAT[1:2]}, "completion"),
    "completion with its prompt": ({"prompt": "1+1", "completion": CHAT[:2]}, "completion"),
}


@pytest.mark.parametrize(("record", "name"), FORMATS.values(), ids=FORMATS)
def test_a_format_is_known_by_its_fields(tmp_path: Path, record: dict[str, Any], name: str) -> None:
    data = load(tmp_path, record)
    assert data.format == name
    assert shown(data.records[0]) == SUM


def test_the_prompt_is_what_a_server_would_be_given(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"system_prompt": "2", "prompt_template": "1*{prompt}"}
    data = load(tmp_path, {"prompt": "1+1", "completion": "2"}, **keys)
    prompts = RecordDatasetConfig(files=[write(tmp_path, {"prompt": "1+1", "answer": "2"})], **keys)
    (prompt,) = load_prompts(prompts, build_tokenizer())
    assert np.array_equal(data.records[0].prompt.token_ids, prompt.token_ids)


@pytest.mark.parametrize("template", [None, MARKED], ids=["by prefix", "marked"])
def test_every_turn_of_the_assistant_is_trained(tmp_path: Path, template: str | None) -> None:
    data = load(tmp_path, {"messages": CHAT}, template=template)
    prompt, ((text, trained),) = shown(data.records[0])
    assert prompt == "<|user|>1+1<|end|><|assistant|>"
    assert text == "2<|end|><|user|>2+2<|end|><|assistant|><think>2*2</think>4<|end|>"
    assert trained == "2<|end|><think>2*2</think>4<|end|>"


def test_the_marks_are_those_of_transformers(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = MARKED
    encoded: Any = tokenizer.apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    (record,) = load(tmp_path, {"messages": CHAT}, template=MARKED).records
    (completion,) = record.completions
    start = len(record.prompt.token_ids)
    ids = np.concatenate([record.prompt.token_ids, completion.token_ids])
    assert ids.tolist() == encoded["input_ids"]
    mask = [0] * start + completion.loss_mask.astype(int).tolist()
    assert mask == encoded["assistant_masks"]


def test_of_prompt_and_completion_only_the_completion_is_trained(tmp_path: Path) -> None:
    data = load(tmp_path, {"prompt": CHAT[:3], "completion": CHAT[3:]})
    prompt, ((text, trained),) = shown(data.records[0])
    assert prompt == "<|user|>1+1<|end|><|assistant|>2<|end|><|user|>2+2<|end|><|assistant|>"
    assert text == trained == "<think>2*2</think>4<|end|>"


def test_what_follows_the_last_turn_of_the_assistant_is_left_out(tmp_path: Path) -> None:
    data = load(tmp_path, {"messages": CHAT[:3]})
    assert shown(data.records[0]) == SUM


def test_what_a_template_writes_behind_a_turn_s_end_is_not_trained(tmp_path: Path) -> None:
    spaced = MARKED.replace("<|end|>{% endgeneration %}", "<|end|> {% endgeneration %}")
    data = load(tmp_path, {"messages": CHAT}, template=spaced)
    _, ((text, trained),) = shown(data.records[0])
    assert trained == "2<|end|><think>2*2</think>4<|end|>"
    assert text.startswith("2<|end|> <|user|>") and text.endswith("4<|end|>")


def test_texts_without_a_template_end_with_the_end_token(tmp_path: Path) -> None:
    config = RecordDatasetConfig(
        files=[write(tmp_path, {"prompt": "1+1=", "completion": "2"})], apply_chat_template=False
    )
    data = load_records(config, build_tokenizer(), {build_tokenizer().eos_token_id})
    assert shown(data.records[0]) == ("1+1=", [("2<|end|>", "2<|end|>")])


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "1+1", "chosen": "2", "rejected": "3"},
        {"prompt": CHAT[:1], "chosen": CHAT[1:2], "rejected": [{**CHAT[1], "content": "3"}]},
        {"prompt": "1+1", "chosen": CHAT[:2], "rejected": [CHAT[0], {**CHAT[1], "content": "3"}]},
        {"chosen": CHAT[:2], "rejected": [CHAT[0], {**CHAT[1], "content": "3"}]},
    ],
    ids=["texts", "messages", "chats with prompt", "chats alone"],
)
@pytest.mark.parametrize("template", [None, MARKED], ids=["by prefix", "marked"])
def test_a_pair_shares_its_prompt(
    tmp_path: Path, record: dict[str, Any], template: str | None
) -> None:
    data = load(tmp_path, record, template=template)
    assert data.format == "preference"
    prompt, completions = shown(data.records[0])
    assert prompt == SUM[0]
    assert completions == [("2<|end|>",) * 2, ("3<|end|>",) * 2]


def test_field_names_are_the_user_s(tmp_path: Path) -> None:
    fields = {"prompt": "instruction", "completion": "io.output"}
    record = {"instruction": "1+1", "io": {"output": "2"}}
    data = load(tmp_path, record, fields=fields, format="completion")
    assert shown(data.records[0]) == SUM


GOOD = {"prompt": "1+1", "completion": "2"}
PAIR = {"prompt": "1+1", "chosen": "2", "rejected": "3"}
BAD: dict[str, tuple[Sequence[Any], dict[str, Any], str]] = {
    "missing key": ([GOOD, {"prompt": "1"}], {}, r":2: has no field 'completion'; its fields are"),
    "unknown fields": ([{"text": "1"}], {}, r":1: its fields \(text\) are those of no format"),
    "empty answer": ([GOOD, GOOD | {"completion": " "}], {}, r":2: field 'completion' is empty"),
    "empty prompt": ([GOOD | {"prompt": ""}], {}, r":1: field 'prompt' is empty"),
    "a number": ([GOOD | {"completion": 2}], {}, r":1: field 'completion' is of type int"),
    "null": ([GOOD | {"completion": None}], {}, r":1: field 'completion' is null"),
    "broken JSON": ([GOOD, '{"prompt": "1'], {}, r":2: is not JSON"),
    "no object": ([GOOD, "[1]"], {}, r":2: is of type list"),
    "no message": ([{"messages": ["1+1"]}], {}, r":1: field 'messages' is a list but not of chat"),
    "text for messages": ([{"messages": "1+1"}], {}, r":1: field 'messages' is of type str"),
    "no messages": ([{"messages": []}], {}, r":1: the chat in field 'messages' is empty"),
    "no answer": ([{"messages": CHAT[:1]}], {}, r":1: .* no message of the assistant"),
    "answer first": ([{"messages": CHAT[1:2]}], {}, r":1: .* begins with a message of the assist"),
    "empty turn": (
        [{"messages": [*CHAT[:3], {"role": "assistant", "content": ""}]}],
        {},
        r":1: .* message 4, the assistant's, is empty",
    ),
    "nothing to answer": ([GOOD | {"prompt": CHAT[:2]}], {}, r":1: .* leaves nothing to answer"),
    "half a surrogate pair": ([GOOD | {"completion": "\ud800"}], {}, r":1: .* half a surrogate"),
    "other prompt in front": (
        [GOOD | {"completion": CHAT[2:]}],
        {},
        r":1: field 'completion' has no message of the assistant behind the prompt",
    ),
    "the same twice": ([PAIR, PAIR | {"rejected": "2"}], {}, r":2: .* are the same"),
    "pair without prompt": ([{"chosen": "1", "rejected": "2"}], {}, r":1: has no field 'prompt'"),
    "other prompts": (
        [{"chosen": CHAT[:2], "rejected": CHAT[2:]}],
        {},
        r":1: .* begin with different messages",
    ),
    "too long": (
        [GOOD, GOOD],
        {"on_long_record": "fail", "max_tokens": 4},
        r":1: the record has 8 tokens, data.max_tokens is 4; raise it or set data.on_long_record",
    ),
    "all too long": ([GOOD, GOOD], {"max_tokens": 4}, r"no usable record is left, 2 are too_long"),
    "chat without template": (
        [{"messages": CHAT}],
        {"apply_chat_template": False},
        r":1: field 'messages' is a chat",
    ),
}


@pytest.mark.parametrize(("records", "keys", "problem"), BAD.values(), ids=BAD)
def test_bad_records_are_named(
    tmp_path: Path, records: Sequence[Any], keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        load(tmp_path, *records, **keys)


def test_a_template_that_is_not_prefix_stable_is_named(tmp_path: Path) -> None:
    thoughtful = [*CHAT[:1], {**CHAT[3]}, *CHAT[2:]]
    problem = r":1: the chat template is not prefix-stable: .* first 2 messages .* others follow"
    with pytest.raises(BadRecordError, match=problem):
        load(tmp_path, {"messages": thoughtful}, template=UNSTABLE)
    load(tmp_path, {"messages": CHAT}, template=UNSTABLE)  # no thought is dropped


def test_a_generation_prompt_that_no_turn_begins_with_is_named(tmp_path: Path) -> None:
    template = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    template = template.replace("<|assistant|>{% endif %}", "<|assistant|><think>{% endif %}")
    with pytest.raises(BadRecordError, match="otherwise when the answer follows its generation"):
        load(tmp_path, {"messages": CHAT[:2]}, template=template)


def test_marks_that_are_not_the_turns_are_named(tmp_path: Path) -> None:
    template = MARKED.replace("m['role'] == 'assistant'", "loop.last")
    with pytest.raises(BadRecordError, match=r"marks 1 turns .* the chat has 2"):
        load(tmp_path, {"messages": CHAT}, template=template)


def test_skipped_records_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = [GOOD, GOOD | {"completion": ""}, GOOD | {"completion": "1" * 50}, "{", GOOD]
    data = load(tmp_path, *records, on_bad_record="skip", max_tokens=20)
    assert [record.prompt.location[-2:] for record in data.records] == [":1", ":5"]
    assert [record.prompt.index for record in data.records] == [0, 1]
    assert "left out 2 records (bad_record), kept 2" in caplog.text
    assert "left out 1 records (too_long), kept 2" in caplog.text


def test_records_that_show_no_end_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endless = build_tokenizer().chat_template.replace("<|end|>", "")
    load(tmp_path, GOOD, template=endless)
    assert "1 of 1 records do not end with a token that ends a response" in caplog.text


def test_a_completion_continues_its_prompt_with_a_tokenizer_that_adds_a_space() -> None:
    """SentencePiece's way: a text begins as if a space were in front of it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["▁", *"abc\n", "</s>"]
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    from easyrl.dataloaders.supervised.conversations import Conversation, TextSpan
    from easyrl.dataloaders.supervised.dataset import _Tokeniser

    tokenise = _Tokeniser(tokenizer, {5}, with_template=False)
    ((prompt, (completion,)),) = tokenise([Conversation("", "ab", ((TextSpan("ca", True),),))])
    whole = tokenizer("abca")["input_ids"]
    assert [*prompt, *completion.token_ids] == [*whole, 5]


def test_identity_is_of_tokens_and_of_what_is_trained(tmp_path: Path) -> None:
    one, two = load(tmp_path, GOOD, PAIR | GOOD).records
    assert record_digest(one) == record_digest(two)
    (other,) = load(tmp_path, GOOD | {"completion": "3"}).records
    assert record_digest(other) != record_digest(one)
    (given,) = one.completions
    untrained = GivenCompletion(given.token_ids, np.array([False, True]))
    masked = SupervisedRecord(one.prompt, (untrained,))
    assert record_digest(masked) != record_digest(one)
    assert load(tmp_path, GOOD, GOOD).digest != load(tmp_path, GOOD).digest


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_record_is_in_one_batch_of_one_rank(tmp_path: Path, num_ranks: int) -> None:
    numbers = [{"prompt": f"{i}+1", "completion": str(i + 1)} for i in range(11)]
    data = load(tmp_path, *numbers)
    seen: list[tuple[int, int]] = []
    batches = [
        RecordBatches(
            data.records,
            PromptOrder(data.prompts, seed=3, epochs=2, dataset_hash=data.digest),
            4,
            rank,
            num_ranks,
        )
        for rank in range(num_ranks)
    ]
    position, sizes = 0, []
    while batches[0].has_more(position):
        served = ServedWeights(PolicyVersion("run", 0, len(sizes)), "")
        opened = [each.begin(served, position) for each in batches]
        groups = [group for batch in opened for group in batch.updates[0].drain_ready(10**6)]
        assert {g.position for g in groups} == set(range(len(groups)))
        for group in groups:
            record = data.records[group.prompt.index]
            assert group.digest == record_digest(record)
            assert group.completions[0].token_ids is record.completions[0].token_ids
        seen += [group.prompt.key for group in sorted(groups, key=lambda g: g.position)]
        ends = {batch.membership.ended_by for batch in opened}
        assert ends == ({"accepted"} if len(groups) == 4 else {"data"})
        sizes.append(len(groups))
        position += len(groups)
    assert sizes == [4, 4, 4, 4, 4, 2]
    assert sorted(seen) == [(epoch, i) for epoch in range(2) for i in range(11)]
    assert [i for _, i in seen[:11]] != list(range(11))


def test_a_byte_tokenizer_gives_the_same_as_its_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    config = RecordDatasetConfig(files=[write(tmp_path, {"messages": CHAT})])
    (record,) = load_records(config, tokenizer, {tokenizer.eos_token_id}).records
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    (completion,) = record.completions
    ids = [*record.prompt.token_ids, *completion.token_ids]
    assert tokenizer.decode(ids) == text
