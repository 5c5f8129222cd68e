"""What plays a run's episodes: the recording gateway, and the hosts of its environments."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial

import numpy as np

from easyrl.config import Config, ConfigError, HistoryMode, SamplingConfig
from easyrl.environments.failures import EnvironmentFailed
from easyrl.environments.hosts import EnvironmentHosts
from easyrl.environments.mixing import environment_of
from easyrl.episodes.gateway_child import GatewayChild
from easyrl.episodes.player import EpisodePlayer
from easyrl.episodes.session import Generate
from easyrl.gateway.messages import NO_TEMPLATE, Settings
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.inference_client.pool.group_assignment import GroupAssignment
from easyrl.metrics.event_log import Record, ignore
from easyrl.runtime.loop_thread import LoopThread
from easyrl.schema import Completion, GatewayGone, Prompt

log = logging.getLogger(__name__)

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
    record: Record = ignore,
) -> EpisodePlayer | None:
    """Starts the gateway and the hosts on the producer's loop; None for a run without environments.

    Raises ``ConfigError`` where one cannot be loaded.
    """
    if not config.environments:
        return None
    gateway = GatewayChild(gateway_settings(config))
    opened.callback(lambda: thread.run(gateway.close()))
    try:
        problem = thread.run(gateway.start())
    except GatewayGone as error:
        raise ConfigError(str(error)) from error
    if problem is not None:
        _warn_of_template(config, problem)
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


def _warn_of_template(config: Config, problem: str) -> None:
    """What comes of a template that renders an answered turn otherwise than it was sampled."""
    if problem == NO_TEMPLATE:
        log.warning(
            "environments: %s has no chat template, so that chat requests are refused and token "
            "ids alone are taken; give one as data.chat_template",
            config.model.tokenizer_path,
        )
        return
    log.warning(
        "environments: the chat template does not continue a conversation exactly: %s. Behind an "
        "answer, %s",
        problem,
        "; ".join(
            f"{each.name} (history: {each.history}) {BEHIND_ANSWER[each.history]}"
            for each in config.environments
        ),
    )


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


def gateway_settings(config: Config) -> Settings:
    """The tokenizer and chat template that prompts are rendered with."""
    data = config.data
    own = None if data.chat_template is None else data.chat_template.read_text(encoding="utf-8")
    return Settings(
        tokenizer=str(config.model.tokenizer_path),
        chat_template=own,
        chat_template_kwargs=dict(data.chat_template_kwargs),
    )
