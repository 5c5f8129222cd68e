"""What plays a run's episodes: the recording gateway, and the hosts of its environments."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial

import numpy as np

from easyrl.completion_check import Vocabulary
from easyrl.config import Config, ConfigError, SamplingConfig
from easyrl.environments.failures import EnvironmentFailed
from easyrl.environments.hosts import EnvironmentHosts
from easyrl.environments.mixing import environment_of
from easyrl.episodes.gateway_child import GatewayChild
from easyrl.episodes.player import EpisodePlayer
from easyrl.episodes.session import Generate
from easyrl.gateway.messages import Settings
from easyrl.gateway.tool_parsers import unread_calls
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.inference_client.pool.group_assignment import GroupAssignment
from easyrl.metrics.event_log import Record, ignore
from easyrl.runtime.loop_thread import LoopThread
from easyrl.schema import Completion, GatewayGone, Prompt

log = logging.getLogger(__name__)


def open_episodes(
    config: Config,
    opened: ExitStack,
    thread: LoopThread,
    pool: EndpointPool,
    vocabulary: Vocabulary,
    record: Record = ignore,
) -> EpisodePlayer | None:
    """Starts the gateway and the hosts on the producer's loop; None for a run without environments.

    Raises ``ConfigError`` where one cannot be loaded.
    """
    if not config.environments:
        return None
    gateway = GatewayChild(gateway_settings(config, vocabulary))
    opened.callback(lambda: thread.run(gateway.close()))
    try:
        problem = thread.run(gateway.start())
    except GatewayGone as error:
        raise ConfigError(str(error)) from error
    if problem is not None:
        log.warning("environments: the chat template cannot continue a conversation: %s", problem)
    tell_tool_parser(config, gateway.tool_parser)
    hosts = []
    for number, environment in enumerate(config.environments):
        of = EnvironmentHosts(environment)
        opened.callback(partial(_close, thread, of))
        try:
            thread.run(of.start())
        except EnvironmentFailed as error:
            raise ConfigError(f"environments[{number}]: {error}") from error
        hosts.append(of)

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
    )


def tell_tool_parser(config: Config, chosen: str | None) -> None:
    """Says what ``auto`` has come to. Raises ``ConfigError`` where an environment needs a parser
    and there is none."""
    if chosen is not None:
        if config.data.tool_parser == "auto":
            log.warning("environments: tool calls are read as %s (data.tool_parser: auto)", chosen)
        return
    problem = f"data.tool_parser: {unread_calls()}"
    for number, environment in enumerate(config.environments):
        if environment.kind == "tools":
            raise ConfigError(f"{problem} (for environments[{number}].tools)")
    log.warning("%s; until then requests with tools are refused", problem)


def _close(thread: LoopThread, hosts: EnvironmentHosts) -> None:
    thread.run(hosts.close())


def session_of(pool: EndpointPool, group: GroupAssignment) -> Generate:
    """The turns of one sample of ``group``: at one endpoint while it lives; the first of them takes
    a place that the group holds there."""
    own: GroupAssignment | None = None

    async def generate(prompt_ids: np.ndarray, sampling: SamplingConfig, seed: int) -> Completion:
        nonlocal own
        own = own or group.session()
        return await pool.generate(prompt_ids, sampling, seed, own)

    return generate


def gateway_settings(config: Config, vocabulary: Vocabulary) -> Settings:
    """The tokenizer and chat template that prompts are rendered with, and how turns end."""
    data = config.data
    own = None if data.chat_template is None else data.chat_template.read_text(encoding="utf-8")
    return Settings(
        tokenizer=str(config.model.tokenizer_path),
        chat_template=own,
        chat_template_kwargs=dict(data.chat_template_kwargs),
        tool_parser=data.tool_parser,
        end_ids=None if vocabulary.end_ids is None else sorted(vocabulary.end_ids),
    )
