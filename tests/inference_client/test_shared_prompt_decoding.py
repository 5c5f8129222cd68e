"""Decoding with prompts held once for their samples, and prefill in pieces, step by step.

Models are float64 where they can be; norms compute in float32 all the same, and log-probabilities
are recorded in it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from easyrl.inference_client.servers.embedded import attention as attention_module
from easyrl.inference_client.servers.embedded import batch as batch_module
from easyrl.inference_client.servers.embedded import prefill as prefill_module
from easyrl.inference_client.servers.embedded.attention import (
    SharedPrompts,
    decode_attention,
    plain_masked_attention,
)
from easyrl.inference_client.servers.embedded.batch import RunningBatch
from easyrl.inference_client.servers.embedded.cache import Prefilled, SlotCache, StatesOfLayers
from easyrl.inference_client.servers.embedded.prefill import states_of_layers
from easyrl.inference_client.servers.embedded.prompts import (
    MIN_APART,
    MIN_READS_SAVED,
    PromptStore,
    longest_in_slots,
)
from easyrl.inference_client.servers.embedded.requests import Sequence
from easyrl.inference_client.servers.embedded.sampling import (
    SamplingParams,
    UniformStream,
    uniform_numbers,
)
from easyrl.inference_client.servers.embedded.sharing_probe import takes_shared_prompts
from tests.tiny_models import VOCAB_SIZE, Family, tiny_model

ATOL = 1e-4  # a wrong key, value or position moves log-probabilities by 1e-2 and more
rng = np.random.default_rng(0)


def new_sequence(prompt: np.ndarray, max_tokens: int = 8, seed: int = 0) -> Sequence:
    return Sequence(
        prompt=prompt,
        params=SamplingParams(max_tokens=max_tokens, seed=seed),
        uniforms=UniformStream(seed, 0),
        eos_token_id=None,
        stop_token_ids=(),
        forbidden_early=(),
        stop_strings=None,
    )


def new_prompt(length: int) -> np.ndarray:
    return rng.integers(1, VOCAB_SIZE, length)


def new_model(family: Family = "qwen3", seed: int = 0) -> PreTrainedModel:
    model = tiny_model(family, seed=seed, initializer_range=0.3)
    if family != "qwen3_moe":  # grouped products take no float64
        model = model.double()
    return model.eval().requires_grad_(False)


def new_batch(model: PreTrainedModel, max_num_seqs: int = 32) -> RunningBatch:
    return RunningBatch(model, max_num_seqs=max_num_seqs, max_model_len=512, raw_logprobs=False)


def run_all(batch: RunningBatch) -> list[Sequence]:
    finished: list[Sequence] = []
    while batch.num_admitted:
        finished += batch.step()
    return finished


def check(model: PreTrainedModel, sequence: Sequence, count: int | None = None) -> None:
    """Its log-probabilities against one full forward with the model's own attention."""
    assert len(sequence.token_ids) == (sequence.params.max_tokens if count is None else count)
    tokens = torch.tensor([*sequence.prompt.tolist(), *sequence.token_ids])
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, len(sequence.prompt) - 1 : -1]
    of_tokens = torch.tensor(sequence.token_ids, dtype=torch.int64)[:, None]
    expected = logits.double().log_softmax(-1).gather(1, of_tokens)[:, 0]
    got = torch.tensor(sequence.logprobs, dtype=torch.float64)
    torch.testing.assert_close(got, expected, atol=ATOL, rtol=0)


# --- the attention by itself ---

HEADS, REPEATS, SIZE, NUM_ROWS = 2, 3, 8, 7


def random(*shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape))


def states(length: int) -> StatesOfLayers:
    pair = (random(1, HEADS, length, SIZE), random(1, HEADS, length, SIZE))
    return [(torch.empty(0), torch.empty(0)), pair]


def test_two_parts_are_the_dense_attention_over_prompt_and_own_tokens() -> None:
    """Three prompts of 1, 5 and 300 tokens among rows, two rows without."""
    one, five, long = states(1), states(5), states(300)
    of_row = [long, None, five, long, one, None, five]
    own = [3, 1, 9, 4, 2, 9, 1]
    query = random(NUM_ROWS, HEADS, REPEATS, SIZE)
    buffers = random(2, NUM_ROWS, 12, HEADS, SIZE)  # position-major, as the slots
    key, value = (x[:, :9].transpose(1, 2) for x in buffers)
    mask = torch.zeros(NUM_ROWS, 9).double()
    mask.masked_fill_(torch.arange(9) >= torch.tensor(own)[:, None], -torch.inf)
    shared = SharedPrompts.of(of_row, query.device)
    assert [len(layers[1][0][0, 0]) for layers, _ in shared.prompts] == [300, 5, 1]
    given = (query, key, value, mask[:, None, None])
    got = decode_attention(*given, shared, 1, 0.3)
    assert got.shape == query.shape
    for row in range(NUM_ROWS):
        keys, values = key[row, :, : own[row]], value[row, :, : own[row]]
        prompt = of_row[row]
        if prompt is not None:
            keys = torch.cat((prompt[1][0][0], keys), 1)
            values = torch.cat((prompt[1][1][0], values), 1)
        expected = (query[row] @ keys.mT * 0.3).softmax(-1) @ values
        torch.testing.assert_close(got[row], expected, atol=1e-12, rtol=0)
    alone = decode_attention(*given, SharedPrompts.of([None] * NUM_ROWS, query.device), 1, 0.3)
    plain, _ = plain_masked_attention(*given, 0.3)
    torch.testing.assert_close(alone, plain, atol=1e-12, rtol=0)


def test_plain_log_sum_exps_are_the_fused_kernels() -> None:
    query, key, value = random(3, 2, 4, 8), random(3, 2, 6, 8), random(3, 2, 6, 8)
    mask = torch.zeros(3, 1, 1, 6).double()
    mask[1, ..., 2:] = -torch.inf
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=mask, scale=0.5
    )
    for got, expected in zip(
        plain_masked_attention(query, key, value, mask, 0.5), fused, strict=True
    ):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


# --- the running batch ---


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_groups_of_all_lengths_that_join_and_leave(family: Family) -> None:
    model, batch = new_model(family), new_batch(new_model(family), max_num_seqs=64)
    prompts = [new_prompt(n) for n in (1, 2, 150, MIN_APART, MIN_APART + 1, 300)]
    finished: list[Sequence] = []
    for number, prompt in enumerate(prompts):
        group = [new_sequence(prompt, 3 + 5 * (i % 4), 10 * number + i) for i in range(8)]
        batch.add(group, "v")
        for _ in range(3):
            finished += batch.step()
    batch.add([late := new_sequence(prompts[2], 5, seed=99)], "v")
    computed = batch.stats.prefilled_tokens
    finished += batch.step()
    cut = next(sequence for sequence in batch.sequences if sequence is not late)
    count = int(batch._rows.num_generated[cut.row])
    batch.remove([cut])
    finished += run_all(batch)
    assert batch.stats.prefilled_tokens == computed == sum(len(p) - 1 for p in prompts)
    assert batch._cache.capacity[1] < 150, "the slots hold long prompts"
    assert len(finished) == 8 * len(prompts)
    for sequence in finished:
        check(model, sequence)
    check(model, cut, count)
    assert len({tuple(s.token_ids[:3]) for s in finished}) > 4 * len(prompts)


def num_apart(batch: RunningBatch) -> int:
    """Running sequences whose prompts are read apart."""
    return len(batch._shared_prompts.rows)


def test_a_prompt_is_read_apart_only_where_reads_are_saved() -> None:
    """A sample alone keeps its prompt in its slot, also when more of it come later."""
    model, batch = new_model(), new_batch(new_model())
    alone = [new_sequence(new_prompt(200), 24, seed=i) for i in range(3)]
    batch.add(alone, "v")
    batch.step()
    assert len(batch.sequences) == 3 and num_apart(batch) == 0
    prompt = new_prompt(MIN_APART - 1)
    short = [new_sequence(prompt, 5, seed=i) for i in range(8)]
    batch.add(short, "v")
    batch.step()
    assert len(batch.sequences) == 11 and num_apart(batch) == 0
    computed = batch.stats.prefilled_tokens
    more = [new_sequence(alone[1].prompt, 6, seed=10 + i) for i in range(7)]
    batch.add(more, "v")
    finished = batch.step()
    assert num_apart(batch) == 7 and batch.stats.prefilled_tokens == computed
    finished += run_all(batch)
    assert len(finished) == 18
    for sequence in finished:
        check(model, sequence)
    batch.add([known := new_sequence(finished[-1].prompt)], "v")  # of the last that was used
    run_all(batch)
    assert batch.stats.prefilled_tokens == computed
    check(model, known)


def test_long_prompts_among_short_sequences_are_read_apart() -> None:
    """Else attention would read as much of every slot as the longest of them holds."""
    model, batch = new_model(), new_batch(new_model())
    short = [new_sequence(new_prompt(8), 12, seed=i) for i in range(20)]
    batch.add(short, "v")
    batch.step()
    assert len(batch.sequences) == 20
    batch.add([new_sequence(new_prompt(n), 4, seed=n) for n in (300, 290)], "v")
    finished = batch.step()
    assert len(batch.sequences) == 22 and num_apart(batch) == 2
    assert batch._longest < MIN_APART
    finished += run_all(batch)
    assert len(finished) == 22
    for sequence in finished:
        check(model, sequence)


def positions_read(lengths: list[int], running: int, num_rows: int, apart: list[int]) -> int:
    rest = [running, *(n for i, n in enumerate(lengths) if i not in apart)]
    return num_rows * max(rest) + sum(MIN_READS_SAVED + lengths[i] for i in apart)


def test_slots_hold_what_lets_attention_read_least() -> None:
    """Against every choice of prompts that are read apart."""
    for _ in range(200):
        count = int(rng.integers(0, 6))
        lengths = [int(n) for n in rng.integers(1, 400, count)]
        running, num_rows = int(rng.integers(0, 200)), count + int(rng.integers(0, 20))
        longest = longest_in_slots(iter(lengths), running, num_rows)

        long = [i for i, n in enumerate(lengths) if n >= MIN_APART]
        choices = [list(c) for k in range(len(long) + 1) for c in combinations(long, k)]
        chosen = [i for i, n in enumerate(lengths) if n > longest]
        assert set(chosen) <= set(long)
        reads = partial(positions_read, lengths, running, num_rows)
        assert reads(chosen) == min(map(reads, choices))


@pytest.mark.parametrize("length", [12, 150])
def test_prefilled_states_are_not_kept_beside_the_slots(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of models and prompts that are not read apart, while they run."""
    prefilled: list[weakref.ref[torch.Tensor]] = []

    def kept(cache: DynamicCache) -> StatesOfLayers:
        layers = states_of_layers(cache)
        prefilled.extend(weakref.ref(tensor) for pair in layers for tensor in pair)
        return layers

    model = new_model()
    drop_keyword(model)
    batch = new_batch(model)
    monkeypatch.setattr(prefill_module, "states_of_layers", kept)
    prompts = [new_prompt(length), new_prompt(60)]  # computed together, padded
    batch.add([new_sequence(prompt, seed=i) for prompt in prompts for i in range(8)], "v")
    batch.step()
    gc.collect()
    assert len(batch.sequences) == 16 and len(prefilled) == 4
    assert [reference() for reference in prefilled] == [None] * 4
    for sequence in run_all(batch):
        check(new_model(), sequence)


def test_without_a_prompt_apart_other_devices_use_the_librarys_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[torch.Tensor] = []

    def library(module: nn.Module, query: torch.Tensor, *_: object, **__: object) -> object:
        calls.append(query)
        return query.transpose(1, 2), None

    monkeypatch.setattr(attention_module, "sdpa_attention_forward", library)
    query = torch.zeros(3, 4, 1, 8, device="meta")
    states = torch.zeros(3, 2, 5, 8, device="meta")
    mask = torch.zeros(3, 1, 1, 5, device="meta")
    attend = AttentionInterface._global_mapping[attention_module.NAME]
    for prompts, num_calls in ((0, 1), (1, 1)):
        pair = torch.zeros(1, 2, 100, 8, device="meta")
        of_rows = [[(pair, pair)] if prompts else None] * 3
        shared = SharedPrompts.of(of_rows, query.device)
        output, _ = attend(FirstLayer(), query, states, states, mask, shared_prompts=shared)
        assert output.shape == (3, 1, 4, 8) and len(calls) == num_calls


class FirstLayer(nn.Module):
    layer_idx = 0


def test_a_short_prompt_that_is_prefilled_with_a_long_one() -> None:
    model = new_model()
    batch = new_batch(model)
    long = new_prompt(MIN_APART + 200)
    prompts = [new_prompt(3), *[long] * 8, new_prompt(20)]
    together = [new_sequence(prompt, seed=i) for i, prompt in enumerate(prompts)]
    batch.add(together, "v0")  # one forward, padded to the longest, which takes no slot
    for sequence in run_all(batch):
        check(model, sequence)


def test_weights_that_change_in_between() -> None:
    """Who runs keeps its prompt's states; a prompt that is begun is begun again."""
    old, new, served = new_model(seed=0), new_model(seed=1), new_model(seed=0)
    batch, prompt = new_batch(served), new_prompt(120)
    batch.add([running := new_sequence(prompt, max_tokens=12)], "old")
    for _ in range(5):
        batch.step()
    served.load_state_dict(new.state_dict())
    batch.forget_prefixes()
    batch.stamp("new")
    batch.add([fresh := new_sequence(prompt, max_tokens=6)], "new")
    run_all(batch)
    check(new, fresh)
    assert running.version_starts == [("old", 0), ("new", 5)]
    assert fresh.version_starts == [("new", 0)]
    cache, tokens = DynamicCache(), torch.tensor([*prompt.tolist(), *running.token_ids])
    logprobs = []
    with torch.no_grad():
        old(tokens[None, :119], past_key_values=cache)
        for position in range(119, len(tokens) - 1):
            model = old if position < 119 + 5 else new
            logits = model(tokens[None, position : position + 1], past_key_values=cache).logits
            logprobs.append(logits[0, -1].log_softmax(-1)[tokens[position + 1]])
    got = torch.tensor(running.logprobs, dtype=torch.float64)
    torch.testing.assert_close(got, torch.stack(logprobs), atol=ATOL, rtol=0)


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(batch_module, "PREFILL_TOKENS", 64)
    monkeypatch.setattr(batch_module, "PREFILL_TOKENS_BESIDE_DECODING", 32)
    return 32


def test_prefill_in_pieces_lets_the_others_decode(short_pieces: int) -> None:
    model, batch = new_model(), new_batch(new_model())
    batch.add([running := new_sequence(new_prompt(10), max_tokens=40)], "v")
    batch.step()
    two = (new_prompt(200), new_prompt(90))
    added = [new_sequence(prompt, seed=i) for prompt in two for i in range(2)]
    batch.add([*added, new_sequence(new_prompt(20))], "v")
    for step in range(1, 8):  # 199 tokens take seven pieces
        before = batch.stats.prefilled_tokens
        batch.step()
        assert 0 < batch.stats.prefilled_tokens - before <= short_pieces
        assert int(batch._rows.num_generated[running.row]) == step + 1
        assert len(batch.sequences) == (3 if step == 7 else 1)
    finished = run_all(batch)
    assert len(finished) == 6
    for sequence in finished:
        check(model, sequence)


def test_prompts_computed_together_are_of_like_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long prompt among many short ones does not pad them all."""
    forwards: list[tuple[int, ...]] = []
    forward = prefill_module.Prefill._forward

    def record(self: prefill_module.Prefill, tokens: np.ndarray, *others: Any) -> None:
        forwards.append(tokens.shape)
        forward(self, tokens, *others)

    monkeypatch.setattr(prefill_module.Prefill, "_forward", record)
    model, batch = new_model(), new_batch(new_model())
    batch.add([new_sequence(new_prompt(n)) for n in (300, *[50] * 8, 200, 45)], "v")
    for sequence in run_all(batch):
        check(model, sequence)
    assert forwards == [(2, 299), (9, 49)]
    computed, real = sum(n * length for n, length in forwards), 299 + 8 * 49 + 199 + 44
    assert computed - real <= 2 * max(prefill_module.FEW_TOKENS, prefill_module.MOST_PADDING * real)


@pytest.mark.parametrize("change", ["weights", "removal"])
def test_a_prompt_that_is_begun_is_not_gone_on_with_wrongly(change: str, short_pieces: int) -> None:
    model, served = new_model(seed=1), new_model(seed=0)
    batch = new_batch(served)
    batch.add([first := new_sequence(new_prompt(150))], "v")
    batch.add([second := new_sequence(new_prompt(150))], "v")
    assert batch.step() == [] and not batch.sequences  # 64 tokens of the first
    if change == "weights":
        served.load_state_dict(model.state_dict())
        batch.forget_prefixes()
    else:
        model = new_model(seed=0)
        batch.remove([first])
        assert batch.num_admitted == 1
    run_all(batch)
    check(model, second)
    check(model, first, 8 if change == "weights" else 0)


def test_one_at_a_time_a_known_prompt_changes_no_bit() -> None:
    """What ``--batch-invariant`` promises, for a prompt long enough to be held apart elsewhere."""
    prompt, model = new_prompt(3 * MIN_APART), new_model()
    batch, bits = new_batch(model, max_num_seqs=1), []
    for _ in range(2):
        batch.add([sequence := new_sequence(prompt)], "v")
        run_all(batch)
        bits.append((sequence.token_ids, sequence.logprobs))
    assert bits[0] == bits[1]
    assert batch.stats.prefilled_tokens == len(prompt) - 1
    check(model, sequence)


# --- models of another kind ---


def drop_keyword(model: PreTrainedModel) -> None:
    """As a layer whose attention is written in another way."""
    attention = model.base_model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, shared_prompts=None, **kwargs: forward(*args, **kwargs)


def add_sinks(model: PreTrainedModel) -> None:
    attention = model.base_model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs, s_aux=torch.zeros(4))


def refuse_keyword(model: PreTrainedModel) -> None:
    inner = model.base_model
    forward = inner.forward

    def strict(**kwargs: object) -> object:
        if "shared_prompts" in kwargs:
            raise TypeError("forward() got an unexpected keyword argument 'shared_prompts'")
        return forward(**kwargs)

    inner.forward = strict


@pytest.mark.parametrize("change", [drop_keyword, add_sinks, refuse_keyword])
def test_other_attention_keeps_the_slots(change: Callable[[PreTrainedModel], None]) -> None:
    model = new_model()
    change(model)
    assert not takes_shared_prompts(model, 512)
    assert model.config._attn_implementation == "sdpa"
    batch = new_batch(model)
    batch.add([new_sequence(new_prompt(150), seed=i) for i in range(2)], "v")
    for sequence in run_all(batch):
        check(new_model(), sequence)
    assert takes_shared_prompts(new_model(), 512)


def test_the_store_keeps_what_is_used_and_the_last_that_was() -> None:
    cache = SlotCache(1, 8, 8, torch.device("cpu"))
    store = PromptStore(cache, can_share=False)
    first, second = new_prompt(4), new_prompt(5)
    sequences = [new_sequence(prompt) for prompt in (first, first, second)]
    one, other, last = sequences

    def start(row: int, prefilled: torch.Tensor | None) -> torch.Tensor:
        """What the sequence's slot is filled with."""
        given = None if prefilled is None else Prefilled([(prefilled, prefilled)], 0, 3 + row // 2)
        source = store.start([sequences[row]], given, longest=1000)
        assert source is not None
        sequences[row].row = row
        cache.ensure(row + 1, 8)
        index = torch.tensor([row]), torch.tensor([0])
        cache.fill(*index, source.layers, source.length)
        return source.layers[0][0]

    states, others = random(1, HEADS, 3, SIZE), random(1, HEADS, 4, SIZE)
    assert start(0, states) is states
    torch.testing.assert_close(start(1, None), states)
    assert start(2, others) is others
    store.end([last])
    store.end([one])
    assert one.prompt_key in store and last.prompt_key in store
    store.end([other])
    assert one.prompt_key in store and last.prompt_key not in store
    torch.testing.assert_close(start(0, None), states)
    store.forget()
    assert one.prompt_key not in store
    newer = random(1, HEADS, 3, SIZE)
    assert start(1, newer) is newer
    store.end([one])  # who still had the forgotten one
    torch.testing.assert_close(start(0, None), newer)


def test_of_prompts_that_end_together_the_last_is_kept() -> None:
    cache = SlotCache(1, 4, 8, torch.device("cpu"))
    store = PromptStore(cache, can_share=False)
    sequences = [new_sequence(new_prompt(4 + number)) for number in range(4)]
    before, first, second, running = sequences
    made = [random(1, HEADS, 3 + number, SIZE) for number in range(4)]
    for row, (sequence, states) in enumerate(zip(sequences, made, strict=True)):
        source = store.start([sequence], Prefilled([(states, states)], 0, 3 + row), longest=1000)
        assert source is not None
        sequence.row = row
        cache.ensure(row + 1, 8)
        cache.fill(torch.tensor([row]), torch.tensor([0]), source.layers, source.length)
    store.end([before])
    assert before.prompt_key in store
    store.end([first, second])
    known = [sequence.prompt_key in store for sequence in sequences]
    assert known == [False, False, True, True]
    again = store.start([new_sequence(second.prompt)], None, longest=1000)
    assert again is not None
    torch.testing.assert_close(again.layers[0][0], made[2])


def test_uniform_numbers_are_philoxs_under_the_key() -> None:
    for seed, index in ((0, 0), (-5, 2), (2**63 - 1, 7)):
        key = np.array([seed % 2**64, index], dtype=np.uint64)
        bits = np.random.Philox(key=key).random_raw(50)
        (numbers,) = uniform_numbers([UniformStream(seed, index)], 50)
        assert (numbers * 2**24 == bits >> np.uint64(40)).all()
