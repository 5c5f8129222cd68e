"""The decode loop against ``generate`` and full forwards of the same model."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from easyrl.inference_client.servers.embedded.requests import (
    BadRequestError,
    GenerationRequest,
    Sequence,
    UnavailableError,
)
from easyrl.inference_client.servers.embedded.sampling import (
    SamplingParams,
    UniformStream,
    apply_min_p,
    apply_top_k_top_p,
    forbid_early_stop,
    inverse_cdf,
    penalize,
    uniform_numbers,
)
from easyrl.inference_client.transfer.artifact import tensor_checksum
from easyrl.inference_client.vllm_plugin.easyrl_vllm.keyed_digests import slice_digest, whole_slice
from easyrl.inference_client.vllm_plugin.easyrl_vllm.slices import ServedSlice
from tests.inference_client.written_artifact import WeightArtifact, write_artifact

VOCAB = 64
NONCE = bytes(range(32))
EOS = 63
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    eos_token_id=EOS,
    bos_token_id=None,
    pad_token_id=0,
    initializer_range=0.3,  # large, so that greedy choices are clear and differ by position
)
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
}


def save_model(kind: str, directory: Path, seed: int = 0) -> PreTrainedModel:
    """A random model on disk, and the same one in memory."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32)
    model.save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def save_tokenizer(directory: Path) -> None:
    """Token i is one letter or digit; 63 is the special end."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789."
    vocab = {letter: i for i, letter in enumerate(letters)} | {"<eos>": EOS}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="."))
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>").save_pretrained(directory)


def prompts(count: int, seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, EOS, rng.integers(1, 40)) for _ in range(count)]


def submit(engine: EmbeddedEngine, prompt: np.ndarray, n: int = 1, **params: object) -> Future:
    settings = SamplingParams(**{"max_tokens": 16, "n": n, **params})  # type: ignore[arg-type]
    return engine.submit(GenerationRequest(np.asarray(prompt, dtype=np.int64), settings))


def run(engine: EmbeddedEngine, prompt: np.ndarray, **params: object) -> Sequence:
    (sample,) = submit(engine, prompt, **params).result(60)
    return sample


def reference_greedy(model: PreTrainedModel, prompt: np.ndarray, max_tokens: int) -> list[int]:
    ids = torch.from_numpy(prompt)[None]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens
    )
    return out[0, len(prompt) :].tolist()


def reference_logprobs(
    model: PreTrainedModel, prompt: np.ndarray, tokens: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Of ``tokens`` behind ``prompt``, from one full forward, float32 [R]."""
    ids = torch.tensor([*prompt.tolist(), *tokens])
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("qwen3")
    model = save_model("qwen3", directory)
    save_tokenizer(directory)
    return directory, model


@pytest.fixture
def engine(qwen3: tuple[Path, PreTrainedModel]) -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine(qwen3[0], dtype="float32", max_num_seqs=32)
    yield engine
    engine.close()


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_equals_generate_and_logprobs_equal_a_full_forward(
    kind: str, tmp_path: Path
) -> None:
    model = save_model(kind, tmp_path)
    engine = EmbeddedEngine(tmp_path, dtype="float32", max_num_seqs=4)  # 4: some have to wait
    texts = [*prompts(9), prompts(1)[0]]  # the last is a repetition
    limits = [3 + 9 * (i % 4) for i in range(len(texts))]
    futures = [
        submit(engine, text, temperature=0.0, max_tokens=limit)
        for text, limit in zip(texts, limits, strict=True)
    ]
    samples = [future.result(60)[0] for future in futures]
    engine.close()
    for text, limit, sample in zip(texts, limits, samples, strict=True):
        assert sample.token_ids == reference_greedy(model, text, limit)
        expected = reference_logprobs(model, text, sample.token_ids)
        # fp32, another order of summation
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)
        ended = sample.token_ids[-1] == EOS
        assert sample.finish_reason == ("stop" if ended else "length")
    assert not any(t.name == "embedded-engine" for t in threading.enumerate())


def test_joining_in_the_middle_changes_nobody(
    engine: EmbeddedEngine, qwen3: tuple[Path, PreTrainedModel]
) -> None:
    first, second, third = prompts(3, seed=5)
    long = submit(engine, first, temperature=0.0, max_tokens=200, ignore_eos=True)
    short = run(engine, second, temperature=0.0, max_tokens=5, ignore_eos=True)
    again = run(engine, third, temperature=0.0, max_tokens=5, ignore_eos=True)
    assert not long.done(), "a request waited for another's end"
    (sample,) = long.result(60)
    logits_of = {0: (first, sample), 1: (second, short), 2: (third, again)}
    for prompt, result in logits_of.values():
        ids = torch.tensor([*prompt.tolist(), *result.token_ids])
        with torch.no_grad():
            best = qwen3[1](ids[None]).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert best.tolist() == result.token_ids


def test_seeded_tokens_do_not_depend_on_the_crowd(engine: EmbeddedEngine) -> None:
    text = prompts(1, seed=7)[0]
    alone = run(engine, text, seed=11, max_tokens=100, ignore_eos=True)
    crowd = [
        submit(engine, other, max_tokens=20, top_p=0.9, temperature=0.7, presence_penalty=1.0)
        for other in prompts(20, seed=8)
    ]
    crowded = run(engine, text, seed=11, max_tokens=100, ignore_eos=True)
    other_seed = run(engine, text, seed=12, max_tokens=100, ignore_eos=True)
    for future in crowd:
        future.result(60)
    assert crowded.token_ids == alone.token_ids
    assert other_seed.token_ids != alone.token_ids


def test_samples_of_one_request_differ_and_are_reproducible(engine: EmbeddedEngine) -> None:
    text = prompts(1)[0]
    first = submit(engine, text, n=4, seed=3, ignore_eos=True).result(60)
    second = submit(engine, text, n=4, seed=3, ignore_eos=True).result(60)
    assert [s.token_ids for s in first] == [s.token_ids for s in second]
    assert len({tuple(s.token_ids) for s in first}) == 4


def test_a_prompt_is_prefilled_once_for_its_group(engine: EmbeddedEngine) -> None:
    engine.pause("wait").result(10)
    text = prompts(1, seed=3)[0]
    futures = [submit(engine, text, max_tokens=150, ignore_eos=True) for _ in range(3)]
    engine.resume().result(10)
    late = submit(engine, text, temperature=0.0, max_tokens=4)  # joins the running ones
    samples = [future.result(60)[0] for future in (*futures, late)]
    assert engine.stats.prefilled_tokens == len(text) - 1
    assert len({tuple(s.token_ids) for s in samples}) == 4


def test_logprobs_are_processed_or_raw(qwen3: tuple[Path, PreTrainedModel]) -> None:
    text = prompts(1)[0]
    for mode, temperature in (("processed_logprobs", 0.5), ("raw_logprobs", 1.0)):
        engine = EmbeddedEngine(qwen3[0], dtype="float32", logprobs_mode=mode)
        sample = run(engine, text, temperature=0.5, seed=1)
        engine.close()
        expected = reference_logprobs(qwen3[1], text, sample.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)


def test_top_logprobs_are_the_best_of_a_full_forward(
    engine: EmbeddedEngine, qwen3: tuple[Path, PreTrainedModel]
) -> None:
    text = prompts(1)[0]
    sample = run(engine, text, seed=4, logprobs=3, ignore_eos=True)
    ids = torch.tensor([*text.tolist(), *sample.token_ids])
    with torch.no_grad():
        full = qwen3[1](ids[None]).logits[0, len(text) - 1 : -1].log_softmax(-1)
    for position, top in enumerate(sample.top_logprobs):
        best = full[position].topk(3)
        assert top.token_ids == best.indices.tolist()
        assert top.logprobs == pytest.approx(best.values.tolist(), abs=1e-4)
        order = full[position].argsort(descending=True).tolist()
        assert top.sampled_rank == order.index(sample.token_ids[position]) + 1


def test_stop_tokens_and_lengths(engine: EmbeddedEngine) -> None:
    text = prompts(1, seed=9)[0]
    free = run(engine, text, seed=2, max_tokens=60, ignore_eos=True)
    assert len(free.token_ids) == 60 and free.finish_reason == "length"
    assert len(free.version_spans) == 1 and free.version_spans[0] == ("default", 0, 60)
    stop = free.token_ids[20]
    end = free.token_ids.index(stop)
    stopped = run(engine, text, seed=2, max_tokens=60, ignore_eos=True, stop_token_ids=(stop,))
    assert stopped.token_ids == free.token_ids[: end + 1]  # the stop token is included
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    late = run(
        engine,
        text,
        seed=2,
        max_tokens=60,
        ignore_eos=True,
        stop_token_ids=(stop,),
        min_tokens=end + 5,
    )
    assert stop not in late.token_ids[: end + 5] and len(late.token_ids) >= end + 5


def test_end_of_sequence_has_no_stop_reason(engine: EmbeddedEngine) -> None:
    samples = submit(engine, prompts(1)[0], n=16, max_tokens=200, temperature=2.0, seed=0)
    stopped = [s for s in samples.result(60) if s.finish_reason == "stop"]
    assert stopped, "at this temperature some of 16 end"
    for sample in stopped:
        assert sample.stop_reason is None
        assert sample.token_ids.index(EOS) == len(sample.token_ids) - 1


def test_stop_strings_cut_the_text_and_keep_the_tokens(engine: EmbeddedEngine) -> None:
    text = prompts(1, seed=9)[0]
    free = run(engine, text, seed=2, max_tokens=60, ignore_eos=True)
    assert engine.tokenizer is not None
    decoded = engine.tokenizer.decode(free.token_ids, skip_special_tokens=True)
    stop = decoded[10:12]
    end = decoded.index(stop)
    settings = dict(seed=2, max_tokens=60, ignore_eos=True, stop=("never!", stop))
    cut = run(engine, text, **settings)
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.stop_strings is not None and cut.stop_strings.text == decoded[:end]
    kept = engine.tokenizer.decode(cut.token_ids, skip_special_tokens=True)
    assert kept == decoded[: end + 2]
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    included = run(engine, text, include_stop_str_in_output=True, **settings)
    assert included.stop_strings is not None
    assert included.stop_strings.text == decoded[: end + 2]


def test_repetition_penalty_equals_generate(
    engine: EmbeddedEngine, qwen3: tuple[Path, PreTrainedModel]
) -> None:
    text = prompts(1, seed=2)[0]
    ids = torch.from_numpy(text)[None]
    expected = qwen3[1].generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=20,
        repetition_penalty=1.7,
    )
    sample = run(engine, text, temperature=0.0, max_tokens=20, repetition_penalty=1.7)
    assert sample.token_ids == expected[0, len(text) :].tolist()


# --- pause, abort, weights ---


def until_running(engine: EmbeddedEngine) -> None:
    while engine.num_running == 0:
        time.sleep(0.001)


def test_pause_modes(engine: EmbeddedEngine) -> None:
    text = prompts(1)[0]
    kept = submit(engine, text, max_tokens=200, ignore_eos=True, seed=1)
    until_running(engine)
    engine.pause("keep").result(10)
    assert engine.is_paused().result(10) and not kept.done() and engine.num_running == 1
    engine.resume().result(10)
    whole = kept.result(60)[0].token_ids
    assert len(whole) == 200

    waited = submit(engine, text, max_tokens=200, ignore_eos=True, seed=1)
    until_running(engine)
    engine.pause("wait").result(60)
    assert waited.done() and waited.result()[0].token_ids == whole
    held = submit(engine, text, max_tokens=2)
    assert engine.is_paused().result(10) and not held.done()
    engine.resume().result(10)
    held.result(60)

    aborted = submit(engine, text, max_tokens=200, ignore_eos=True, seed=1)
    until_running(engine)
    engine.pause("abort").result(10)
    (sample,) = aborted.result(10)
    assert sample.finish_reason == "abort"
    assert sample.token_ids == whole[: len(sample.token_ids)]
    assert len(sample.token_ids) < 200


def test_abort_of_one_request_leaves_the_others(engine: EmbeddedEngine) -> None:
    engine.pause("keep").result(10)
    settings = SamplingParams(max_tokens=8, ignore_eos=True)
    text = prompts(1)[0].astype(np.int64)
    requests = [GenerationRequest(text, settings, request_id=name) for name in "abc"]
    futures = [engine.submit(request) for request in requests]
    engine.abort(requests[0])
    assert engine.abort_ids(["b", "unknown"]).result(10) == 1
    assert [future.result(10)[0].finish_reason for future in futures[:2]] == ["abort"] * 2
    assert futures[0].result()[0].token_ids == []
    engine.resume().result(10)
    assert futures[2].result(60)[0].finish_reason == "length"


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_update_serves_the_new_weights_and_proves_it(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path / "old", seed=0)
    new = save_model(kind, tmp_path / "new", seed=1)
    artifact = artifact_of(tmp_path / "new", tmp_path / "artifact", "run:1:1")
    assert len(artifact.chunks) > 2
    engine = EmbeddedEngine(tmp_path / "old", dtype="float32")
    before = engine.weights.checksums().result(10)
    assert before.keys() == artifact.checksums.keys() and before != artifact.checksums
    update(engine, artifact)
    assert engine.weights.checksums().result(10) == artifact.checksums
    assert engine.weight_version().result(10) == "run:1:1"
    for text in prompts(4):
        sample = run(engine, text, temperature=0.0)
        assert sample.token_ids == reference_greedy(new, text, 16)
        assert [span.version for span in sample.version_spans] == ["run:1:1"]
    engine.close()


def test_version_spans_across_an_update_in_the_middle(
    engine: EmbeddedEngine, qwen3: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    artifact = artifact_of(qwen3[0], tmp_path / "artifact", "v1")
    future = submit(engine, prompts(1)[0], max_tokens=200, ignore_eos=True)
    while engine.stats.generated_tokens < 5:
        time.sleep(0.001)
    engine.pause("keep").result(10)
    update(engine, artifact)
    engine.resume().result(10)
    (sample,) = future.result(60)
    first, second = sample.version_spans
    assert (first.version, first.start, second.version, second.end) == ("default", 0, "v1", 200)
    assert 5 <= first.end == second.start < 200


def test_a_failed_update_names_the_tensor_and_stops_generation(
    engine: EmbeddedEngine, qwen3: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    weights = dict(saved_weights(qwen3[0]))
    name = "model.layers.1.mlp.up_proj.weight"
    wrong = {
        f"model has no weight {'x.weight'!r}": {**weights, "x.weight": torch.zeros(2)},
        f"{name!r} has shape": {**weights, name: torch.zeros(2, 2)},
        f"{name!r} is torch.bfloat16": {**weights, name: weights[name].bfloat16()},
        f"{name!r} did not arrive": {k: v for k, v in weights.items() if k != name},
    }
    for message, bad in wrong.items():
        artifact = write_artifact(bad.items(), tmp_path / "bad" / "v", "v1", 1 << 14)
        with pytest.raises(ValueError, match=message):
            update(engine, artifact)
        assert engine.weight_version().result(10) == "default"
        with pytest.raises(UnavailableError, match="the last weight update failed"):
            run(engine, prompts(1)[0])
    good = artifact_of(qwen3[0], tmp_path / "good", "v1")
    damaged = [
        dataclasses.replace(chunk, checksums={n: "0" * 64 for n in chunk.checksums})
        for chunk in good.chunks
    ]
    with pytest.raises(ValueError, match="tensor '.*' has hash"):
        update(engine, dataclasses.replace(good, chunks=tuple(damaged)))
    with pytest.raises(ValueError, match="no weight update is open"):
        engine.weights.finish("v1").result(10)
    update(engine, good)
    assert run(engine, prompts(1)[0]).finish_reason in ("stop", "length")


def test_the_engine_answers_while_an_update_hangs(
    engine: EmbeddedEngine, qwen3: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    artifact = artifact_of(qwen3[0], tmp_path, "v1")
    release = threading.Event()

    def slow(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        release.wait(20)

    announce(engine, artifact)
    engine.weights.start().result(10)
    engine.weights._place = slow  # type: ignore[method-assign]
    loading = engine.weights.load(**artifact.update_info())
    assert engine.weight_version().result(5) == "default"
    engine.pause("abort").result(5)
    assert not loading.done()
    release.set()
    loading.result(10)
    engine.weights.finish("v1").result(10)
    assert engine.weights.checksums().result(10) == artifact.checksums


def test_one_update_at_a_time_and_one_artifact_in_it(
    engine: EmbeddedEngine, qwen3: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    artifact = artifact_of(qwen3[0], tmp_path, "v1")
    with pytest.raises(ValueError, match="no trainer has announced its weights"):
        engine.weights.start().result(10)
    announce(engine, artifact)
    engine.weights.start().result(10)
    with pytest.raises(ValueError, match="a weight update is open"):
        engine.weights.start().result(10)
    with pytest.raises(ValueError, match="a weight update is open"):
        engine.weights.prove(NONCE, artifact.checksums.keys()).result(10)
    engine.weights.abandon().result(10)
    # nothing was written: the old weights still serve
    assert run(engine, prompts(1)[0]).finish_reason in ("stop", "length")
    engine.weights.start().result(10)
    first, *_ = artifact.chunks
    engine.weights.load(artifact.name, [first.describe()]).result(10)
    with pytest.raises(ValueError, match="'other': this update has begun with 'v'"):
        engine.weights.load("other", [first.describe()]).result(10)
    with pytest.raises(UnavailableError, match="the last weight update failed"):
        run(engine, prompts(1)[0])
    update(engine, artifact)
    assert engine.weights.prove(NONCE, artifact.checksums.keys()).result(10).problems == {}


def test_proof_names_each_tensor_that_differs(
    engine: EmbeddedEngine, qwen3: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    artifact = artifact_of(qwen3[0], tmp_path, "v1")
    update(engine, artifact)
    stale, absent = "model.norm.weight", "model.embed_tokens.weight"
    asked = artifact.checksums.keys() - {absent} | {"x.weight"}
    proof = engine.weights.prove(NONCE, asked).result(10)
    assert proof.transport == "file"
    assert proof.problems.keys() == {absent, "x.weight"}
    weights = dict(saved_weights(qwen3[0]))
    assert proof.slices == {
        name: [ServedSlice(whole_slice(w.dtype, w.shape), slice_digest(w, NONCE))]
        for name, w in weights.items()
        if name != absent
    }
    engine.weights._tensors[stale].view(-1)[0] += 1e-3
    again = engine.weights.prove(NONCE, asked).result(10)
    assert {name for name in proof.slices if again.slices[name] != proof.slices[name]} == {stale}


def saved_weights(directory: Path) -> list[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return sorted(load_file(directory / "model.safetensors").items())


def artifact_of(model: Path, root: Path, version: str) -> WeightArtifact:
    """The artifact of a saved model, by the names in its own file."""
    artifact = write_artifact(saved_weights(model), root / "v", version, 1 << 14)
    for name, tensor in saved_weights(model):
        assert artifact.checksums[name] == tensor_checksum(tensor)
    return artifact


def update(engine: EmbeddedEngine, artifact: WeightArtifact) -> None:
    announce(engine, artifact)
    engine.weights.start().result(10)
    for chunk in artifact.chunks:
        engine.weights.load(artifact.name, [chunk.describe()]).result(10)
    engine.weights.finish(artifact.version).result(10)


def announce(engine: EmbeddedEngine, artifact: WeightArtifact) -> None:
    """As the trainer does, on the folder above the artifact."""
    root = artifact.directory.parent
    (root / "announcement").write_text(blake3(b"token").hexdigest())
    info = {"run": "test", "token": "token", "root": str(root), "url": None}
    engine.weights.announce(info).result(10)


# --- what must be refused ---


def test_impossible_requests_are_refused(engine: EmbeddedEngine) -> None:
    text = np.arange(1, 10)
    with pytest.raises(BadRequestError, match="max_tokens: 9 prompt tokens and max_tokens=248"):
        submit(engine, text, max_tokens=248)
    assert len(run(engine, text, max_tokens=247, ignore_eos=True).token_ids) == 247
    with pytest.raises(BadRequestError, match="out of vocabulary"):
        submit(engine, np.array([1, VOCAB]))
    with pytest.raises(BadRequestError, match="must not be empty"):
        submit(engine, np.array([]))
    with pytest.raises(BadRequestError, match="at most max_num_seqs"):
        submit(engine, text, n=33)


def test_full_queue_and_closed_engine(qwen3: tuple[Path, PreTrainedModel]) -> None:
    engine = EmbeddedEngine(qwen3[0], dtype="float32", max_queue=3)
    engine.pause("keep").result(10)
    held = submit(engine, np.array([1]), n=3, max_tokens=1)
    with pytest.raises(UnavailableError, match="the queue holds 3"):
        submit(engine, np.array([1]))
    engine.close()
    assert [sample.finish_reason for sample in held.result(10)] == ["abort"] * 3
    with pytest.raises(UnavailableError, match="shutting down"):
        submit(engine, np.array([1]))


def test_unusable_models_are_refused(qwen3: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json is missing"):
        EmbeddedEngine(tmp_path)
    with pytest.raises(ValueError, match="max_model_len: must be from 2 to the model's 256"):
        EmbeddedEngine(qwen3[0], max_model_len=1000)
    chunked = Qwen2Config(**SIZES, layer_types=["full_attention", "chunked_attention"])
    AutoModelForCausalLM.from_config(chunked).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="layers with chunked_attention"):
        EmbeddedEngine(tmp_path)


# --- the sampler ---


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.7},
        {"temperature": 1.4, "top_k": 8, "top_p": 0.8},
        {"min_p": 0.1},
    ],
    ids=str,
)
def test_sampled_frequencies_are_the_softmax(
    params: dict[str, float], engine: EmbeddedEngine, qwen3: tuple[Path, PreTrainedModel]
) -> None:
    text, draws = prompts(1, seed=21)[0], 2048
    futures = [
        submit(engine, text, n=32, seed=i, max_tokens=1, **params) for i in range(draws // 32)
    ]
    tokens = [sample.token_ids[0] for future in futures for sample in future.result(60)]
    counts = np.bincount(tokens, minlength=VOCAB)
    with torch.no_grad():
        logits = qwen3[1](torch.from_numpy(text)[None]).logits[0, -1].double()
    probs = expected_distribution(logits / params.get("temperature", 1.0), params)
    assert counts[probs == 0].sum() == 0
    likely = probs * draws >= 5  # where the chi-square approximation holds; the rest in one bin
    observed = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(probs[likely], probs[~likely].sum()) * draws
    used = expected > 0
    chi2 = ((observed - expected)[used] ** 2 / expected[used]).sum()
    freedom = max(used.sum() - 1, 1)
    # seeds are fixed, so this is not flaky; 4 sigma of a chi-square would be a gross error
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom)


def expected_distribution(logits: torch.Tensor, params: dict[str, float]) -> np.ndarray:
    """By plain loops over the ordered probabilities, float64 [V]."""
    probs = logits.softmax(-1).numpy()
    order = np.argsort(-probs)
    kept = np.zeros_like(probs)
    if min_p := params.get("min_p"):
        order = np.array([i for i in order if probs[i] >= min_p * probs.max()])
    if top_k := params.get("top_k"):
        order = order[: int(top_k)]
    total, mass = probs[order].sum(), 0.0
    for i in order:
        if mass / total >= params.get("top_p", 1.0):
            break
        kept[i] = probs[i]
        mass += probs[i]
    return kept / kept.sum()


def test_filters_on_numbers_done_by_hand() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.1, 0.4, 0.2, 0.3]])
    kept = apply_top_k_top_p(probs.log(), torch.tensor([2, 0]), torch.tensor([1.0, 0.65]))
    assert kept.isfinite().tolist() == [[False, True, False, True]] * 2
    kept = apply_top_k_top_p(probs.log(), torch.tensor([0, 0]), torch.tensor([1.0, 0.1]))
    assert kept.isfinite().sum(-1).tolist() == [4, 1]
    kept = apply_min_p(probs.log(), torch.tensor([0.0, 0.6]))
    assert kept.isfinite().tolist() == [[True] * 4, [False, True, False, True]]


def test_early_stop_is_forbidden_also_for_token_zero() -> None:
    stop_ids = torch.tensor([[0, 2], [3, -1], [0, -1]])
    too_early = torch.tensor([True, True, False])
    kept = forbid_early_stop(torch.zeros(3, 4), stop_ids, too_early).isfinite()
    assert kept.tolist() == [[False, True, False, True], [True, True, True, False], [True] * 4]


def test_penalties_on_numbers_done_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, 2.0]])
    counts = torch.tensor([[0, 3, 1, 0]])
    in_prompt = torch.tensor([[True, False, False, False]])
    penalties = torch.tensor([[2.0, 0.5, 0.25]])  # repetition, frequency, presence
    got = penalize(logits, counts, in_prompt, penalties)
    assert got.tolist() == [[1.0, -4.0 - 1.5 - 0.25, 1.0 - 0.5 - 0.25, 2.0]]


def test_inverse_cdf_at_the_edges() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).expand(4, 4)
    uniform = torch.tensor([0.0, 0.4999, 0.5, 1.0 - 2**-24])
    assert inverse_cdf(probs, uniform).tolist() == [1, 1, 2, 2]


def drawn(stream: UniformStream, count: int) -> np.ndarray:
    return uniform_numbers([stream], count)[0]


def test_uniform_stream_is_one_stream_however_it_is_drawn() -> None:
    whole = drawn(UniformStream(-5, 2), 100)
    parts = UniformStream(-5, 2)
    assert np.array_equal(np.concatenate([drawn(parts, 40), drawn(parts, 60)]), whole)
    assert not np.array_equal(drawn(UniformStream(-5, 1), 100), whole)
    several = uniform_numbers([UniformStream(-5, index) for index in (1, 2)], 100)
    assert np.array_equal(several[1], whole) and not np.array_equal(several[0], whole)
    many = drawn(UniformStream(0, 0), 100_000)
    assert many.min() >= 0 and many.max() < 1
    assert abs(many.mean() - 0.5) < 0.005  # 5 sigma
