"""An environment that works before its only turn, for as long as its record says."""

from __future__ import annotations

import asyncio
from typing import Any

from easyrl.environments.client import Client

PROMPT_IDS = list(range(1, 17))


async def rollout(client: Client, prompt: Any) -> float:
    """The parity of the first token; nothing is learnt."""
    await asyncio.sleep(prompt.metadata["works_s"])
    made = await client.generate(PROMPT_IDS)
    return float(made.token_ids[0] % 2)
