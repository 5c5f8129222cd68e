"""Models whose attention is not quite that of Llama: served right, or refused.

References are full forwards with the library's own attention.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    DogeConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    GptOssConfig,
    GraniteConfig,
    JetMoeConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
    Starcoder2Config,
)

from easyrl.inference_client.servers.embedded.decode_masks import DecodeMasks
from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from easyrl.inference_client.servers.embedded.prompts import MIN_APART
from easyrl.inference_client.servers.embedded.requests import GenerationRequest, Sequence
from easyrl.inference_client.servers.embedded.sampling import SamplingParams

VOCAB = 64
WINDOW = 32
ATOL = 1e-4  # what is read wrongly moves log-probabilities by 0.1 and more
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
    initializer_range=0.3,
)
MIXTURE = dict(num_local_experts=4, num_experts_per_tok=2)
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256,
        "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": None}  # fmt: skip
BLOOM = {"vocab_size": VOCAB, "hidden_size": 32, "initializer_range": 0.3, "eos_token_id": None,
         "bos_token_id": None}  # fmt: skip
OPT = {name: size for name, size in SIZES.items() if name not in ("intermediate_size",
       "num_key_value_heads", "initializer_range")}  # fmt: skip
# positions that are learned, dropout in their configurations, parallel layers, heads with scales
PLAIN: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(**GPT2),
    "opt": OPTConfig(**OPT, ffn_dim=48, word_embed_proj_dim=32, init_std=0.3),
    "phi": PhiConfig(**SIZES),
    "olmo": OlmoConfig(**SIZES),
    "olmo2": Olmo2Config(**SIZES),
    "cohere": CohereConfig(**SIZES, logit_scale=0.25),
    "granite": GraniteConfig(**SIZES, logits_scaling=4.0),
}
# query heads are several sets over repeated keys; a mask of each head's own
OTHERS: dict[str, PreTrainedConfig] = {
    "jetmoe": JetMoeConfig(**{**SIZES, **MIXTURE, "num_attention_heads": 2}, kv_channels=16),
    "doge": DogeConfig(**SIZES, keep_window_size=256),
    "falcon": FalconConfig(
        **BLOOM,
        num_attention_heads=4,
        num_hidden_layers=2,
        alibi=False,
        max_position_embeddings=256,
    ),
    "gptj": GPTJConfig(**GPT2, rotary_dim=4),
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
WINDOWED: dict[str, PreTrainedConfig] = {
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "mixtral": MixtralConfig(**SIZES, **MIXTURE, sliding_window=WINDOW),
    "phi3": Phi3Config(**SIZES, sliding_window=WINDOW),
    "starcoder2": Starcoder2Config(**SIZES, sliding_window=WINDOW),
    "qwen2": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, sliding_window=WINDOW, **ALTERNATING),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=WINDOW, **ALTERNATING),
    "gpt-oss": GptOssConfig(**SIZES, **MIXTURE, head_dim=8, sliding_window=WINDOW, **ALTERNATING,
                            rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
}  # fmt: skip
# positions are made of a mask of padding; a state that is no keys and values
REFUSED: dict[str, PreTrainedConfig] = {
    "bloom": BloomConfig(**BLOOM, n_layer=2, n_head=4),
    "qwen3-next": Qwen3NextConfig(**SIZES, num_experts=0, linear_num_value_heads=4,
                                  linear_num_key_heads=2),
}  # fmt: skip


def save(config: PreTrainedConfig, directory: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def responses(engine: EmbeddedEngine, length: int, num_samples: int, count: int) -> list[Sequence]:
    """``num_samples`` of ``count`` tokens, to one prompt of ``length``."""
    prompt = np.random.default_rng(0).integers(1, VOCAB, length)
    params = SamplingParams(n=num_samples, max_tokens=count, seed=1)
    try:
        return engine.submit(GenerationRequest(prompt, params)).result(60)
    finally:
        engine.close()


def check(directory: Path, sequence: Sequence) -> None:
    """Its log-probabilities against one full forward."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = torch.tensor([*sequence.prompt.tolist(), *sequence.token_ids])
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, len(sequence.prompt) - 1 : -1]
    of_tokens = torch.tensor(sequence.token_ids)[:, None]
    expected = logits.log_softmax(-1).gather(1, of_tokens)[:, 0]
    torch.testing.assert_close(torch.tensor(sequence.logprobs), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("kind", OTHERS)
def test_long_prompts_of_models_that_cannot_share_them(kind: str, tmp_path: Path) -> None:
    directory = save(OTHERS[kind], tmp_path)
    engine = EmbeddedEngine(directory, dtype="float32", max_model_len=256)
    found = responses(engine, MIN_APART + 30, 8, 8)
    assert len(found) == 8
    for sequence in found:
        check(directory, sequence)


@pytest.mark.parametrize("kind", PLAIN)
def test_a_prompt_is_shared(kind: str, tmp_path: Path) -> None:
    engine = EmbeddedEngine(save(PLAIN[kind], tmp_path), dtype="float32")
    assert engine._batch._shares_prompts
    found = responses(engine, MIN_APART + 30, 8, 8)
    assert len(found) == 8
    for sequence in found:
        check(tmp_path, sequence)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kind", WINDOWED)
def test_a_sliding_window_is_passed_in_prompt_and_response(
    kind: str, batch_invariant: bool, tmp_path: Path
) -> None:
    """Once by the prompt, once in mid-response, in one go with sequences that are shorter."""
    save(WINDOWED[kind], tmp_path)
    for length in (3 * WINDOW, WINDOW - 4):
        engine = EmbeddedEngine(tmp_path, dtype="float32", batch_invariant=batch_invariant)
        found = responses(engine, length, 3, 12)
        assert [len(sequence.token_ids) for sequence in found] == [12] * 3
        for sequence in found:
            check(tmp_path, sequence)


def test_prompts_of_unequal_lengths_around_a_window(tmp_path: Path) -> None:
    engine = EmbeddedEngine(save(WINDOWED["gemma3"], tmp_path), dtype="float32")
    generator = np.random.default_rng(1)
    asked = [
        engine.submit(
            GenerationRequest(
                generator.integers(1, VOCAB, length), SamplingParams(n=2, max_tokens=20, seed=1)
            )
        )
        for length in (1, 7, WINDOW - 1, WINDOW, WINDOW + 1, 4 * WINDOW)
    ]
    found = [sequence for future in asked for sequence in future.result(60)]
    engine.close()
    for sequence in found:
        check(tmp_path, sequence)


def test_a_window_that_nothing_is_longer_than_does_not_keep_prompts_from_being_shared(
    tmp_path: Path,
) -> None:
    save(MistralConfig(**SIZES, sliding_window=2 * MIN_APART), tmp_path)
    engine = EmbeddedEngine(tmp_path, dtype="float32", max_model_len=2 * MIN_APART)
    assert engine._batch._shares_prompts
    for sequence in responses(engine, MIN_APART, 8, 8):
        check(tmp_path, sequence)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_decoded_from_slots_is_refused(kind: str, tmp_path: Path) -> None:
    save(REFUSED[kind], tmp_path)
    with pytest.raises(ValueError, match="is not served by the embedded server: .*vLLM"):
        EmbeddedEngine(tmp_path, dtype="float32", max_model_len=128)


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_a_window_that_is_left_out_is_noticed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a model whose forward takes no mask of this form."""
    plain = DecodeMasks.of_step

    def without(masks: DecodeMasks, *step: torch.Tensor) -> object:
        full = plain(DecodeMasks(), *step)
        return {"full_attention": full, "sliding_attention": full} if masks.by_kind else full

    monkeypatch.setattr(DecodeMasks, "of_step", without)
    with pytest.raises(ValueError, match=r"decoding token by token is off by \d"):
        EmbeddedEngine(save(WINDOWED[kind], tmp_path), dtype="float32")


def test_a_model_without_a_longest_sequence_wants_one_named(tmp_path: Path) -> None:
    save(REFUSED["bloom"], tmp_path)
    with pytest.raises(ValueError, match="max_model_len: .* pass --max-model-len"):
        EmbeddedEngine(tmp_path, dtype="float32")


def test_positions_that_were_not_learned_are_refused(tmp_path: Path) -> None:
    save(PLAIN["gpt2"], tmp_path)
    with pytest.raises(ValueError, match="max_model_len: must be from 2 to the model's 256"):
        EmbeddedEngine(tmp_path, dtype="float32", max_model_len=257)


def test_a_window_that_is_not_used_is_no_limit(tmp_path: Path) -> None:
    config = Qwen2Config(**SIZES, use_sliding_window=False, sliding_window=WINDOW)
    directory = save(config, tmp_path)
    for sequence in responses(EmbeddedEngine(directory, dtype="float32"), 3 * WINDOW, 2, 8):
        check(directory, sequence)
