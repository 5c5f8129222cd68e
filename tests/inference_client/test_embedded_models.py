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
    DogeConfig,
    JetMoeConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Starcoder2Config,
)

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
# query heads are several sets over repeated keys; a mask of each head's own
OTHERS: dict[str, PreTrainedConfig] = {
    "jetmoe": JetMoeConfig(**{**SIZES, **MIXTURE, "num_attention_heads": 2}, kv_channels=16),
    "doge": DogeConfig(**SIZES, keep_window_size=256),
}
WINDOWED: dict[str, PreTrainedConfig] = {
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "mixtral": MixtralConfig(**SIZES, **MIXTURE, sliding_window=WINDOW),
    "phi3": Phi3Config(**SIZES, sliding_window=WINDOW),
    "starcoder2": Starcoder2Config(**SIZES, sliding_window=WINDOW),
}


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
    found = responses(EmbeddedEngine(directory, dtype="float32"), MIN_APART + 30, 8, 8)
    assert len(found) == 8
    for sequence in found:
        check(directory, sequence)


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_sliding_window_is_served_up_to_its_size(kind: str, tmp_path: Path) -> None:
    directory = save(WINDOWED[kind], tmp_path)
    for too_long in (None, WINDOW + 1):
        with pytest.raises(ValueError, match=f"sliding window of {WINDOW} .* --max-model-len"):
            EmbeddedEngine(directory, dtype="float32", max_model_len=too_long)
    engine = EmbeddedEngine(directory, dtype="float32", max_model_len=WINDOW)
    for sequence in responses(engine, WINDOW - 8, 2, 8):
        check(directory, sequence)


def test_a_window_that_is_not_used_is_no_limit(tmp_path: Path) -> None:
    config = Qwen2Config(**SIZES, use_sliding_window=False, sliding_window=WINDOW)
    directory = save(config, tmp_path)
    for sequence in responses(EmbeddedEngine(directory, dtype="float32"), 3 * WINDOW, 2, 8):
        check(directory, sequence)
