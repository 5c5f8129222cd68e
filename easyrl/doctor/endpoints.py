"""Whether an endpoint answers, with which key, and how long a context it serves."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from easyrl.config import Config, set_key
from easyrl.doctor.finding import Finding, failed, ok
from easyrl.inference_client.client import EndpointClient, ServedModel
from easyrl.inference_client.errors import EndpointError, RequestRejected

UNTOUCHED = "default"  # the version of a server that nobody has given weights
RAISE_CONTEXT = "lower one of them, or raise the server's --max-model-len"


class _Version(msgspec.Struct):
    version: str = ""


_VERSION = msgspec.json.Decoder(_Version)


@dataclass(frozen=True)
class Reached:
    """An endpoint that answers."""

    client: EndpointClient
    served: ServedModel
    version: str | None  # of its weights; None: it does not tell

    @property
    def has_run_weights(self) -> bool:
        """Whether a run, which may be using it, has given it weights."""
        return self.version not in (None, UNTOUCHED)

    @property
    def url(self) -> str:
        return self.client.url


async def reach(client: EndpointClient) -> tuple[Finding, Reached | None]:
    """Asks what a run asks first: health, the served model. None: it cannot be used."""
    name = f"endpoint {client.url}"
    try:
        await client.health()
        served = await client.served_model()
        reached = Reached(client, served, await _weight_version(client))
    except EndpointError as error:
        remedy = "start the server, or correct its URL in inference.endpoints"
        if isinstance(error, RequestRejected):
            remedy = "correct its key (inference.api_key_env) or its URL in inference.endpoints"
        return failed(name, error.reason, remedy), None
    seen = f"serves {served.name} ({await _version(client, served)})"
    return ok(name, seen), reached


async def _weight_version(client: EndpointClient) -> str | None:
    try:
        return await client.weight_version()
    except RequestRejected:
        return None


async def _version(client: EndpointClient, served: ServedModel) -> str:
    if served.is_embedded:
        return "easyrl serve"
    try:
        return f"vLLM {(await client.get(_VERSION, '/version')).version:.40}"
    except EndpointError:
        return "it does not tell its version"


def context_needs(config: Config, *, rollout: bool) -> dict[str, int]:
    """Tokens of the longest prompt with its response, by the keys that ask for them."""
    needs: dict[str, int] = {}
    if rollout:
        key = "data.max_prompt_tokens + rollout.max_tokens"
        needs[key] = config.data.max_prompt_tokens + config.rollout.max_tokens
    for name, held_out in {} if config.evaluation is None else config.evaluation.sets.items():
        key = f"{set_key(name)}.data.max_prompt_tokens + {set_key(name)}.sampling.max_tokens"
        needs[key] = held_out.data.max_prompt_tokens + held_out.sampling.max_tokens
    return needs


def context_finding(config: Config, reached: Reached) -> Finding:
    """Whether prompts and responses as long as the configuration allows have room there."""
    name, limit = f"context of {reached.url}", reached.served.max_model_len
    needs = context_needs(config, rollout=True)
    if limit is None:
        return ok(name, "it names no limit")
    short = [f"{key} is {needed:,}" for key, needed in needs.items() if needed > limit]
    if short:
        return failed(name, f"{' and '.join(short)}, it serves {limit:,} tokens", RAISE_CONTEXT)
    return ok(name, f"{limit:,} tokens, {max(needs.values()):,} needed")
