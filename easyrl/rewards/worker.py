"""The worker process's side: it holds the reward functions and a tokenizer, and scores token ids.

Light on purpose (no torch): every worker imports it.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from easyrl.config import RewardConfig
from easyrl.rewards.functions import (
    RewardFunctionError,
    Value,
    as_group_reward,
    call,
    load_reward,
    own_file,
    validated,
)
from easyrl.rewards.signatures import GroupReward
from easyrl.runtime.user_code import describe, raised_at
from easyrl.schema import Prompt

Decode = Callable[[Sequence[np.ndarray]], list[str]]


# of this worker process
_functions: list[GroupReward] = []
_files: list[Path | None] = []
_decode: Decode | None = None


def initialize(
    rewards: Sequence[RewardConfig], tokenizer_dir: Path, skip_special_tokens: bool = True
) -> None:
    """Prepares this process for ``score_reward``. Raises what ``load_reward`` raises."""
    global _functions, _files, _decode
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a worker per core already
    loaded = [(reward, load_reward(reward)) for reward in rewards]
    _functions = [as_group_reward(reward, function) for reward, function in loaded]
    _files = [own_file(reward, function) for reward, function in loaded]
    _decode = _load_decoder(tokenizer_dir, skip_special_tokens)


def score_reward(index: int, prompt: Prompt, token_ids: Sequence[np.ndarray]) -> list[Value]:
    """Calls reward ``index`` on the responses ``token_ids`` (int32 [R] each) of one prompt.

    Raises ``RewardFunctionError`` for whatever it raises: not every exception can be pickled, and a
    ``CancelledError`` or ``SystemExit`` of a user's function cancels and ends nothing of ours.
    """
    assert _decode is not None, "initialize() has not run in this process"
    texts = _decode(token_ids)
    returned = False
    try:
        result = call(_functions[index], prompt, texts, list(token_ids))
        returned = True
        return validated(result, len(texts))
    except BaseException as error:
        frames = "".join(traceback.format_tb(error.__traceback__)[1:])
        kind = type(error).__name__
        message = f"{kind}: {error}\n{frames}".rstrip()
        if returned:  # where that was found says nothing
            raise RewardFunctionError(str(error), str(error)) from None
        if (file := _files[index]) is None:
            raise RewardFunctionError(message, f"failed: {error}", None, kind) from None
        what = f"raised {describe(error)}"
        raise RewardFunctionError(message, what, raised_at(error, file), kind) from None


def _load_decoder(directory: Path, skip_special_tokens: bool) -> Decode:
    """Of ``tokenizer.json`` where there is one: importing transformers takes seconds."""
    if (directory / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(directory / "tokenizer.json"))
        return lambda token_ids: fast.decode_batch(
            [ids.tolist() for ids in token_ids], skip_special_tokens=skip_special_tokens
        )
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return lambda token_ids: [
        str(slow.decode(ids.tolist(), skip_special_tokens=skip_special_tokens)) for ids in token_ids
    ]
