"""Endpoints that refuse: everything, now and then, or with a reason that is not true."""

from __future__ import annotations

from benchmarks.parts.hostile.behaviour import RESPONSES, NotNow, endpoint
from benchmarks.parts.hostile.endpoint import Exchange

PROMPT_TOKENS = 12  # of every prompt in these runs


async def _refuse(exchange: Exchange, status: str, message: str, *headers: str) -> None:
    body = b'{"error": {"message": "%s"}}' % message.encode()
    await exchange.answer(body, status, *headers)


@endpoint("status", *RESPONSES, both=True)
async def refuse_every_prompt(exchange: Exchange) -> None:
    """400 to every request for responses."""
    await _refuse(exchange, "400 Bad Request", "this prompt is not acceptable")


@endpoint("status")
async def refuse_everything(exchange: Exchange) -> None:
    """400 to whatever is asked, health and weights included."""
    await _refuse(exchange, "400 Bad Request", "no")


@endpoint("status", *RESPONSES, share=0.3, refuses=True, both=True)
async def refuse_some_prompts(exchange: Exchange) -> None:
    """422 to some requests for responses."""
    await _refuse(exchange, "422 Unprocessable Entity", "token_ids: not acceptable")


@endpoint("status", *RESPONSES, refuses=True, both=True)
async def refuse_prompts_of_the_dataset(exchange: Exchange) -> None:
    """413 to every prompt of the dataset; other lengths, the canary's, are answered."""
    if any(len(prompt) != PROMPT_TOKENS for prompt in exchange.request.prompts):
        raise NotNow
    await _refuse(exchange, "413 Payload Too Large", "too long")


@endpoint("status")
async def key_demanded(exchange: Exchange) -> None:
    """401 to everything, from one request to the next."""
    await _refuse(exchange, "401 Unauthorized", "Unauthorized", "WWW-Authenticate: Bearer")


@endpoint("status", *RESPONSES, share=0.5)
async def forbidden_now_and_then(exchange: Exchange) -> None:
    """403 to every other request for responses."""
    await _refuse(exchange, "403 Forbidden", "quota")


@endpoint("status", share=0.5)
async def key_in_status_line(exchange: Exchange) -> None:
    """500 with the run's key in the status line, now and then, on every route."""
    await exchange.answer(b"", f"500 asked with {key_of(exchange)}")


@endpoint("status", share=0.5)
async def key_in_redirect(exchange: Exchange) -> None:
    """302 to a login page, with the run's key in its address."""
    await exchange.answer(b"", "302 Found", f"Location: https://login.invalid/?{key_of(exchange)}")


@endpoint("status", *RESPONSES, share=0.5, refuses=True, both=True)
async def key_escaped_in_refusal(exchange: Exchange) -> None:
    """400 with the run's key in the message, each of its characters escaped as JSON may have it."""
    escaped = "".join(f"\\u{ord(character):04x}" for character in key_of(exchange))
    await _refuse(exchange, "400 Bad Request", f"asked with {escaped}")


def key_of(exchange: Exchange) -> str:
    return exchange.request.headers.get("authorization", "no key")


@endpoint("status", *RESPONSES)
async def route_gone(exchange: Exchange) -> None:
    """404 to every request for responses: restarted without --enable-scale-out."""
    await exchange.answer(b'{"detail": "Not Found"}', "404 Not Found")


@endpoint("status", *RESPONSES)
async def too_many_requests(exchange: Exchange) -> None:
    """429 to every request for responses, with a Retry-After of a year."""
    await _refuse(exchange, "429 Too Many Requests", "later", "Retry-After: 31536000")


@endpoint("status", share=0.3)
async def internal_errors(exchange: Exchange) -> None:
    """500 with a megabyte of traceback, now and then, on every route."""
    await exchange.answer(b"Traceback (most recent call last)\n" * 30_000, "500 Internal Error")


@endpoint("status")
async def unavailable(exchange: Exchange) -> None:
    """503 to everything from a moment on."""
    await _refuse(exchange, "503 Service Unavailable", "model is loading")


@endpoint("status", "/health", "/weight_info")
async def health_denied(exchange: Exchange) -> None:
    """503 to health probes while prompts are answered."""
    await exchange.answer(b"", "503 Service Unavailable")


@endpoint("status", *RESPONSES, share=0.5)
async def status_without_meaning(exchange: Exchange) -> None:
    """A status of 999."""
    await exchange.answer(b"{}", "999 Whatever")
