"""Strict mode's demand on endpoints: responses that depend on prompt and seed alone."""

from __future__ import annotations

import logging
from pathlib import Path

from easyrl.config import Config, ConfigError
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.runtime.determinism import is_strict, remembered

logger = logging.getLogger(__name__)

ENDPOINTS_ARITHMETIC_FILE = "arithmetic-endpoints.txt"


def require_invariant_endpoints(
    config: Config, pool: EndpointPool, output: Path | None = None
) -> None:
    """Refuses endpoints whose responses depend on what else they decode, now and from now on.

    Does nothing unless the run is strict. Raises ``ConfigError`` for those that answer by now; one
    that comes later is excluded, and the log says why. vLLM does not tell: each gets a warning.

    Args:
        output: of rank 0, the run's folder; a warning tells there that the endpoints of this
            attempt compute otherwise than the first one's did.
    """
    if not is_strict(config):
        return
    rule = _Rule()
    problems = [problem for e in pool.endpoints if (problem := rule.problem(e)) is not None]
    if problems:
        raise ConfigError("\n".join(["inference.endpoints:", *problems]))
    if output is not None:
        rule.remember_in(output / ENDPOINTS_ARITHMETIC_FILE)
    pool.set_admission(rule.problem)


class _Rule:
    """Their first embedded server sets the arithmetic: two servers that compute differently would
    give the same request other bits."""

    def __init__(self) -> None:
        self._memory: Path | None = None  # keeps the arithmetic for later attempts
        self._first: tuple[str, str] | None = None  # url and arithmetic
        self._warned: set[str] = set()

    def remember_in(self, memory: Path) -> None:
        """Keeps the arithmetic of the first endpoint there, once it is known."""
        self._memory = memory
        if self._first is not None:
            self._remember(self._first[1])

    def problem(self, endpoint: Endpoint) -> str | None:
        """Why ``endpoint`` cannot be used, and the remedy; None where it can, or is not known."""
        served, url = endpoint.served, endpoint.url
        if served is None:
            return None
        if not served.is_embedded:
            if url not in self._warned:
                self._warned.add(url)
                logger.warning(
                    "run.determinism: %s is not an embedded server and does not say whether its "
                    "responses depend on what else it decodes; if it was not started with "
                    "VLLM_BATCH_INVARIANT=1 on a device that has it, only the trainer's side is "
                    "exact, given the journalled rollouts",
                    url,
                )
            return None
        if not served.batch_invariant:
            return (
                f"{url} decodes responses together, which changes their last bits; start it with "
                "easyrl serve MODEL --batch-invariant, or set run.determinism=none"
            )
        assert served.arithmetic is not None
        if self._first is None:
            self._first = url, served.arithmetic
            self._remember(served.arithmetic)
        first_url, first = self._first
        if served.arithmetic == first:
            return None
        return (
            f"{url} computes with {served.arithmetic}, {first_url} with {first}: their last bits "
            "differ; use machines of one kind, the same torch and the same --num-threads, or set "
            "run.determinism=none"
        )

    def _remember(self, now: str) -> None:
        try:
            first = now if self._memory is None else remembered(self._memory, now)
        except OSError as error:  # the endpoint can be used all the same
            logger.warning("how the endpoints compute cannot be kept for later attempts: %s", error)
            return
        if first != now:
            logger.warning(
                "run.determinism: the endpoints of this attempt compute with %s, "
                "the first one's did with %s; the last bits of new responses, and with them their "
                "tokens, may not be those of a run that was never interrupted",
                now,
                first,
            )
