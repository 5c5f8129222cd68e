"""What ``easyrl doctor`` looks at of environments: the gateway, and that each can be loaded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from easyrl.build.episodes import describe_template, describe_tool_parser, gateway_settings
from easyrl.completion_check import Vocabulary
from easyrl.config import Config, ConfigError, EnvironmentConfig
from easyrl.doctor.finding import Finding, findings_of, ok
from easyrl.environments.failures import EnvironmentFailed
from easyrl.environments.hosts import EnvironmentHosts
from easyrl.episodes.gateway_child import GatewayChild
from easyrl.gateway.messages import NO_TEMPLATE
from easyrl.runtime.loop_thread import LoopThread
from easyrl.schema import GatewayGone


def check_environments(config: Config, vocabulary: Vocabulary) -> Iterator[Finding]:
    """Starts the gateway, and a host of each environment, as a run does; none is left behind."""
    with ExitStack() as opened:
        thread = opened.enter_context(LoopThread())
        check = partial(_gateway, config, vocabulary, thread, opened)
        yield from findings_of("environments", check)
        for number, environment in enumerate(config.environments):
            load = partial(_environment, number, environment, thread)
            yield from findings_of(f"environment {environment.name}", load)


def _gateway(
    config: Config, vocabulary: Vocabulary, thread: LoopThread, opened: ExitStack
) -> Iterator[Finding]:
    gateway = GatewayChild(gateway_settings(config, vocabulary))
    opened.callback(lambda: thread.run(gateway.close()))
    try:
        problem = thread.run(gateway.start())
    except GatewayGone as error:
        raise ConfigError(str(error)) from error
    yield ok("chat template of environments", describe_template(config, problem))
    if problem != NO_TEMPLATE:
        yield ok("tool calls", describe_tool_parser(config, gateway.tool_parser))


def _environment(
    number: int, environment: EnvironmentConfig, thread: LoopThread
) -> Iterator[Finding]:
    """Of its hosts, one is enough to see whether it is loaded."""
    hosts = EnvironmentHosts(environment.model_copy(update={"num_hosts": 1}))
    start_s = time.monotonic()
    try:
        thread.run(hosts.start())
    except EnvironmentFailed as error:
        raise ConfigError(f"environments[{number}]: {error}") from error
    finally:
        thread.run(hosts.close())
    name = f"environment {environment.name}"
    yield ok(name, f"loaded in {time.monotonic() - start_s:.1f} s ({environment.kind})")
