"""The environment of ``benchmarks.gateway``: a session of three turns, and how long each took.

The same code asks the gateway and, where the record has ``direct``, the server itself: that needs a
seed, which the gateway sets.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.parts.gateway.load import read_variants
from easyrl.environments.client import Client


async def rollout(client: Client, prompt: Any) -> dict[str, Any]:
    """The turns' seconds beyond the server's own, as turn rewards."""
    asked = prompt.metadata
    delays, added = _delays(asked["variants"]), []
    messages: list[dict[str, Any]] = []
    token_ids: list[int] = []
    for number, (text, ids) in enumerate(zip(asked["texts"], asked["token_ids"], strict=True)):
        more: dict[str, Any] = {"max_tokens": asked["max_tokens"]}
        if asked["direct"]:
            more["seed"] = prompt.seed + number
        began_s = time.perf_counter()
        if asked["is_chat"]:
            messages.append({"role": "user", "content": text})
            reply = await client.chat(messages, logprobs=True, **more)
            took_s = time.perf_counter() - began_s
            messages.append(reply.message)
            added.append(took_s - delays[reply.text])
        else:
            token_ids += ids
            made = await client.generate(token_ids, logprobs=0, **more)
            took_s = time.perf_counter() - began_s
            token_ids += made.token_ids
            added.append(took_s - delays[tuple(made.token_ids)])
    return {"reward": 0.0, "turn_rewards": added}


@cache
def _delays(path: str) -> dict[Any, float]:
    """Seconds that the server takes for an answer, by its text and by its token ids."""
    variants = read_variants(Path(path))
    by_text = {variant.text: variant.delay_s for variant in variants}
    return {**by_text, **{tuple(variant.token_ids): variant.delay_s for variant in variants}}
