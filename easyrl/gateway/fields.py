"""Every field of a request, in one of four classes; what is in none is refused by its name.

*Honoured* are those of the forms in ``requests``. The others are here: training's own, which may
say what training does and nothing else (``TRAININGS``, ``FORCED``), and those that change neither
what is sampled nor what is told of it (``IGNORED``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from easyrl.config import SamplingConfig
from easyrl.gateway.errors import BadRequest

# Of ``SamplingConfig``: equal to training's, or absent.
TRAININGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)
# Training has none of these, and would train on tokens of another distribution, or of none; or no
# record could answer them. With the values that say nothing.
FORCED: Mapping[str, tuple[Any, ...]] = {
    "seed": (),
    "n": (1,),
    "best_of": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "watermarking": (False,),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "reasoning_effort": (),
    "verbosity": (),
    "truncate_prompt_tokens": (),
    "prediction": (),
    "functions": ([],),
    "function_call": (),
    "audio": (),
    "modalities": (["text"],),
    "documents": ([],),
    "echo": (False,),
    "chat_template": (),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "include_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "features": (),
    "content_parts": (),
    "kv_transfer_params": (),
    "extra_args": ({},),
    "vllm_xargs": ({},),
}
# Who asks, what a provider may keep of it, and how fast: of any value.
IGNORED = frozenset(
    {
        "model",  # there is one
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "cache_salt",
        "skip_reading_prefix_cache",
        "priority",
        "request_id",
        "session_id",
        "stream_interval",
        "detokenize",
        "output_kind",
        "flat_logprobs",
    }
)
STREAM_OPTIONS: Mapping[str, tuple[Any, ...]] = {"continuous_usage_stats": (False,)}
STREAM_OPTIONS_IGNORED = frozenset({"include_obfuscation"})
_REMEDIES: Mapping[str, str] = {
    "seed": "is set by training, per turn; leave it out",
    "reasoning_effort": "is sent as chat_template_kwargs, where the template knows it",
    "chat_template": "is the run's data.chat_template; leave it out",
}
MAX_SHOWN = 80  # characters of a value in a message


def check_fields(
    values: Mapping[str, Any],
    honoured: Collection[str],
    sampling: SamplingConfig,
    where: str = "",
    *,
    trainings: Collection[str] = TRAININGS,
) -> None:
    """Raises ``BadRequest`` at what training decides, if it is to be otherwise, and at a field of
    no class. A null counts as absent.

    Args:
        honoured: the fields that are read elsewhere.
        where: what the fields stand in, with a dot behind.
        trainings: those of ``TRAININGS`` that can stand there.
    """
    given = {key: value for key, value in values.items() if value is not None}
    for key, value in given.items():
        if key in honoured:
            continue
        if key in trainings:
            _check_trainings(where + key, value, getattr(sampling, key))
        elif key in FORCED:
            check_forced(where + key, value, FORCED[key], _REMEDIES.get(key))
        elif key in TRAININGS:
            raise BadRequest(where + key, "stands in sampling_params on this route; move it there")
        elif key not in IGNORED:
            raise unknown(key, [*honoured, *trainings, *FORCED, *IGNORED], where)


def check_stream_options(values: Mapping[str, Any], honoured: Collection[str]) -> None:
    """The same of ``stream_options``."""
    where = "stream_options."
    for key, value in values.items():
        if value is None or key in honoured or key in STREAM_OPTIONS_IGNORED:
            continue
        if key not in STREAM_OPTIONS:
            raise unknown(key, [*honoured, *STREAM_OPTIONS], where)
        check_forced(where + key, value, STREAM_OPTIONS[key])


def check_forced(
    path: str, value: Any, neutral: tuple[Any, ...], remedy: str | None = None
) -> None:
    """Raises ``BadRequest`` at a value that says something."""
    if value in neutral:
        return
    other = f" or send {neutral[0]!r}" if neutral else ""
    said = remedy or f"is not how training samples; leave it out{other}"
    raise BadRequest(path, f"{shown(value)} {said}")


def unknown(key: str, known: Iterable[str], where: str) -> BadRequest:
    near = get_close_matches(key, list(known), n=1)
    remedy = f"correct it to {near[0]}" if near else "leave it out"
    return BadRequest(where + shown_key(key), f"there is no such field here; {remedy}")


def _check_trainings(path: str, value: Any, own: Any) -> None:
    if path.endswith("top_k") and value == 0:
        value = -1  # both are all tokens
    if value != own or isinstance(value, bool) != isinstance(own, bool):
        raise BadRequest(
            path,
            f"{shown(value)} is not what training samples with, which is {own}; leave it out or "
            f"send {own}",
        )


def shown(value: Any) -> str:
    """A value in a message, cut."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def shown_key(key: str) -> str:
    """The name of a field in a message, cut."""
    return key if len(key) <= MAX_SHOWN else key[:MAX_SHOWN] + "…"
