"""A model whose responses end after log-normal numbers of tokens, by its own end token.

Token (i, c) says "i tokens so far", in one of two colours c. What follows it is (i + 1, 0) or
(i + 1, 1), about equally likely, or the end token with the log-normal's hazard at i. So every
engine that samples from the model draws the same lengths, without settings of its own, and a
response's colours are random. Attention and MLPs are those of any small Qwen3 and add next to
nothing to the residual stream; embedding and output projection hold the rule.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist

import torch
from torch import Tensor
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from easyrl.demo.build_model import build_tokenizer

COLOURS = "ab"
CERTAIN = 25.0  # logit of what the rule allows over what it does not, which is below half of that
SURE_END = 20.0  # log-odds of the end token where it has to come, and negative where it must not
COLOUR_NOISE = 0.3  # logit: colours are not quite equally likely, so that weights show


def end_log_odds(shortest: int, longest: int) -> list[float]:
    """Log-odds that a response ends with its next token, by the tokens it has, from 0.

    Log-normal with its central 95 % (two standard deviations on each side) between ``shortest`` and
    ``longest`` tokens, the end token included; what is outside ends at these.
    """
    spread = math.log(longest / shortest) / 4
    logarithm = NormalDist(math.log(math.sqrt(shortest * longest)), spread)
    odds = []
    for length in range(1, longest + 1):  # if it ends now
        before = logarithm.cdf(math.log(length - 1)) if length > shortest else 0.0
        hazard = (logarithm.cdf(math.log(length)) - before) / (1 - before)
        if length < shortest:
            odds.append(-SURE_END)
        elif length == longest:
            odds.append(SURE_END)
        else:
            odds.append(math.log(hazard / (1 - hazard)))
    return odds


def write_ending_model(
    directory: Path, *, shortest: int, longest: int, num_layers: int, seed: int = 0
) -> Path:
    """A folder that ``from_pretrained`` loads, of hidden size 128, with its tokenizer."""
    hidden = 128
    tokenizer = build_tokenizer()
    first = len(tokenizer)
    tokenizer.add_tokens([f"<{i}{c}>" for i in range(1, longest) for c in COLOURS])
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(1e-2)
            layer.mlp.down_proj.weight.mul_(1e-2)
        embedding, head = _rule(end_log_odds(shortest, longest), first, hidden)
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.fill_(0.0)
        model.lm_head.weight[first:] = head[1:]
        model.lm_head.weight[tokenizer.eos_token_id] = head[0]
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _rule(odds: list[float], first: int, hidden: int) -> tuple[Tensor, Tensor]:
    """Embedding [V, hidden], and rows of the projection: the end token's, then the counters'.

    A state has a random direction, a place for the log-odds of its end, and a constant that keeps
    all norms alike, so that the final RMSNorm changes nothing but the scale, which is one here.
    """
    num_states = len(odds)  # 0 tokens so far: every token that is no counter
    state = torch.zeros(num_states, hidden)
    direction = torch.randn(num_states, hidden - 2)
    state[:, 2:] = direction / direction.norm(dim=1, keepdim=True)
    state[:, 0] = torch.tensor(odds) / SURE_END
    state[:, 1] = torch.sqrt(hidden - 1 - state[:, 0] ** 2)  # a squared norm of ``hidden``
    embedding = torch.cat(
        [state[:1].expand(first, -1), state[1:].repeat_interleave(len(COLOURS), 0)]
    )
    follower = torch.zeros(num_states - 1, hidden)
    follower[:, 2:] = CERTAIN * state[:-1, 2:]
    # one colour's gain is the other's loss: the chance to end stays what it is
    tilt = COLOUR_NOISE * torch.randn_like(follower) / math.sqrt(hidden)
    counters = torch.stack([follower + tilt, follower - tilt], dim=1).flatten(0, 1)
    end = torch.zeros(1, hidden)
    end[0, 0] = SURE_END
    # the two colours share what is left: e^CERTAIN each, against e^(CERTAIN + odds + log 2)
    end[0, 1] = (CERTAIN + math.log(len(COLOURS))) / math.sqrt(hidden - 1)
    return embedding, torch.cat([end, counters])
