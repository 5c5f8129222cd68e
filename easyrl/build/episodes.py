"""What plays a run's episodes: the recording gateway, and the hosts of its environments."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np

from easyrl.completion_check import Vocabulary
from easyrl.config import (
    Config,
    ConfigError,
    EnvironmentConfig,
    HistoryMode,
    SamplingConfig,
)
from easyrl.environments.failures import EnvironmentFailed
from easyrl.environments.hosts import EnvironmentHosts
from easyrl.environments.mixing import environment_of
from easyrl.episodes.gateway_child import GatewayChild
from easyrl.episodes.outages import EnvironmentOutages
from easyrl.episodes.player import EpisodePlayer
from easyrl.episodes.rooms import MOST, RolloutRoom
from easyrl.gateway.messages import NO_TEMPLATE, Lease, Settings
from easyrl.gateway.tool_parsers import unread_calls
from easyrl.inference_client.pool.asked_ahead import AskedAhead
from easyrl.inference_client.pool.endpoint import UNLIMITED
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.inference_client.pool.group_assignment import GroupAssignment
from easyrl.metrics.event_log import Record, ignore
from easyrl.runtime.loop_thread import LoopThread
from easyrl.schema import Completion, GatewayGone, Prompt

log = logging.getLogger(__name__)

ROLLOUTS_PER_PLACE = 2  # open ones, for each request that endpoints may have in flight
# Where the chat template renders earlier turns otherwise than they were sampled.
BEHIND_ANSWER: dict[HistoryMode, str] = {
    "keep": "continues the tokens that were sampled",
    "as_template": "begins a branch, of the tokens that the template makes of it",
}


def open_episodes(
    config: Config,
    opened: ExitStack,
    thread: LoopThread,
    pool: EndpointPool,
    vocabulary: Vocabulary,
    record: Record = ignore,
    num_shares: int = 1,
) -> EpisodePlayer | None:
    """Starts the gateway and the hosts on the producer's loop; None for a run without environments.

    ``num_shares``: ranks that share the endpoints, and the places of each environment.
    Raises ``ConfigError`` where one cannot be loaded.
    """
    if not config.environments:
        return None
    contexts = [endpoint.context for endpoint in pool.endpoints if endpoint.served is not None]
    longest = max(contexts, default=UNLIMITED)
    settings = gateway_settings(config, vocabulary, None if longest == UNLIMITED else longest)
    gateway, problem = start_gateway(settings, opened, thread)
    log.warning("environments: %s", describe_template(config, problem))
    if problem != NO_TEMPLATE:
        tell_tool_parser(config, gateway.tool_parser)
    hosts = [
        start_hosts(number, environment, opened, thread)
        for number, environment in enumerate(config.environments)
    ]

    def choose(prompt: Prompt) -> int:
        chosen = environment_of(prompt, config.environments, config.run.seed)
        return config.environments.index(chosen)

    return EpisodePlayer(
        gateway,
        hosts,
        choose,
        applies_stop_strings=lambda: all(
            each.served is None or each.served.applies_stop_strings for each in pool.endpoints
        ),
        record=record,
        rooms=[RolloutRoom(partial(_most_rollouts, of, pool, num_shares)) for of in hosts],
        outages=EnvironmentOutages(config.inference.max_outage_s, record=record),
    )


def start_gateway(
    settings: Settings, opened: ExitStack, thread: LoopThread
) -> tuple[GatewayChild, str | None]:
    """The gateway that serves, and why its chat template cannot continue sampled tokens exactly.

    Raises ``ConfigError`` if it does not come up.
    """
    gateway = GatewayChild(settings)
    opened.callback(lambda: thread.run(gateway.close()))
    try:
        return gateway, thread.run(gateway.start())
    except GatewayGone as error:
        raise ConfigError(str(error)) from error


def start_hosts(
    number: int, environment: EnvironmentConfig, opened: ExitStack, thread: LoopThread
) -> EnvironmentHosts:
    """Those of entry ``number`` of ``environments``. Raises ``ConfigError`` if it is not loaded."""
    hosts = EnvironmentHosts(environment)
    opened.callback(lambda: thread.run(hosts.close()))
    try:
        thread.run(hosts.start())
    except EnvironmentFailed as error:
        raise ConfigError(f"environments[{number}]: {error}") from error
    return hosts


def _most_rollouts(of: EnvironmentHosts, pool: EndpointPool, num_shares: int) -> int:
    """Rollouts of an environment that this rank has open at a time, now.

    Where nobody says, as many as keep the endpoints busy while as many again are with their
    environments.
    """
    if (given := of.max_rollouts) is not None:
        return max(1, given // num_shares)
    places = sum(endpoint.max_inflight for endpoint in pool.endpoints if endpoint.is_up)
    return min(max(1, ROLLOUTS_PER_PLACE * places), MOST)


def tell_tool_parser(config: Config, chosen: str | None) -> None:
    """Says what ``auto`` has come to. Raises ``ConfigError`` where an environment needs a parser
    and there is none."""
    said = describe_tool_parser(config, chosen)
    if chosen is None:
        log.warning("%s", said)
    elif config.data.tool_parser == "auto":
        log.warning("environments: %s", said)


def describe_tool_parser(config: Config, chosen: str | None) -> str:
    """``chosen``: None: no parser reads the template's calls. Raises as ``tell_tool_parser``."""
    if chosen is not None:
        return f"tool calls are read as {chosen} (data.tool_parser: {config.data.tool_parser})"
    problem = f"data.tool_parser: {unread_calls()}"
    if (with_tools := _first_with_tools(config)) is not None:
        raise ConfigError(f"{problem} (for {with_tools})")
    return f"{problem}; until then requests with tools are refused"


def _first_with_tools(config: Config) -> str | None:
    """The key of the first environment's tools; None: no environment has any."""
    kinds = [environment.kind for environment in config.environments]
    return f"environments[{kinds.index('tools')}].tools" if "tools" in kinds else None


def describe_template(config: Config, problem: str | None) -> str:
    """What the chat template makes of a conversation. ``problem``: why it renders an answered turn
    otherwise than it was sampled; None: it does not. Raises ``ConfigError`` where there is none and
    an environment has tools."""
    if problem is None:
        return "the chat template continues a conversation exactly"
    if problem == NO_TEMPLATE:
        if (with_tools := _first_with_tools(config)) is not None:
            raise ConfigError(
                f"{with_tools}: {config.model.tokenizer_path} has no chat template to show them "
                "with; give one as data.chat_template"
            )
        return (
            f"{config.model.tokenizer_path} has no chat template, so that chat requests are "
            "refused and token ids alone are taken; give one as data.chat_template"
        )
    behind = "; ".join(
        f"{each.name} (history: {each.history}) {BEHIND_ANSWER[each.history]}"
        for each in config.environments
    )
    return (
        f"the chat template does not continue a conversation exactly: {problem}. Behind an "
        f"answer, {behind}"
    )


class EpisodeTurns:
    """The turns of one sample of ``group``: at one endpoint while it lives; the first of them takes
    a place that the group holds there. Called as ``Generate``."""

    def __init__(self, pool: EndpointPool, group: GroupAssignment) -> None:
        self._pool, self._own = pool, group.session()

    async def __call__(
        self,
        prompt_ids: np.ndarray,
        sampling: SamplingConfig,
        seed: int,
        ahead: AskedAhead | None = None,
    ) -> Completion:
        return await self._pool.generate(prompt_ids, sampling, seed, self._own, ahead)

    def lend_place(self, on_recall: Callable[[], object]) -> Lease | None:
        """A ``LendPlace``, of the endpoint at which the turns are."""
        endpoint = self._pool.lend(self._own, on_recall)
        if endpoint is None:
            return None
        key = self._pool.api_keys.of(endpoint.url)
        return Lease(endpoint.url, endpoint.context, key, self._pool.adapters.of(endpoint.url))

    def put_off(self) -> None:
        """The next turn comes later: others may have its place."""
        self._pool.give_back(self._own)

    def close(self) -> None:
        """No further turn comes."""
        self._pool.leave(self._own)


def gateway_settings(
    config: Config, vocabulary: Vocabulary, max_context: int | None = None
) -> Settings:
    """The tokenizer and chat template that prompts are rendered with, and how turns end;
    ``max_context``: tokens that any endpoint takes."""
    data = config.data
    own = None if data.chat_template is None else data.chat_template.read_text(encoding="utf-8")
    return Settings(
        tokenizer=str(config.model.tokenizer_path),
        chat_template=own,
        chat_template_kwargs=dict(data.chat_template_kwargs),
        tool_parser=data.tool_parser,
        vocabulary=vocabulary,
        max_context=max_context,
    )
