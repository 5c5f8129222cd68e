"""What ``easyrl doctor`` looks at of environments: the gateway, and that each can be loaded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from easyrl.build.episodes import (
    describe_template,
    describe_tool_parser,
    gateway_settings,
    start_gateway,
    start_hosts,
)
from easyrl.completion_check import Vocabulary
from easyrl.config import Config, EnvironmentConfig
from easyrl.doctor.finding import Finding, findings_of, ok
from easyrl.gateway.messages import NO_TEMPLATE
from easyrl.runtime.loop_thread import LoopThread


def check_environments(config: Config, vocabulary: Vocabulary) -> Iterator[Finding]:
    """Starts the gateway, and a host of each environment, as a run does; none is left behind."""
    with LoopThread() as thread:
        yield from findings_of("environments", partial(_gateway, config, vocabulary, thread))
        for number, environment in enumerate(config.environments):
            load = partial(_environment, number, environment, thread)
            yield from findings_of(f"environment {environment.name}", load)


def _gateway(config: Config, vocabulary: Vocabulary, thread: LoopThread) -> Iterator[Finding]:
    with ExitStack() as opened:
        gateway, problem = start_gateway(gateway_settings(config, vocabulary), opened, thread)
        yield ok("chat template of environments", describe_template(config, problem))
        if problem != NO_TEMPLATE:
            yield ok("tool calls", describe_tool_parser(config, gateway.tool_parser))


def _environment(
    number: int, environment: EnvironmentConfig, thread: LoopThread
) -> Iterator[Finding]:
    """Of its hosts, one is enough to see whether it is loaded."""
    alone = environment.model_copy(update={"num_hosts": 1})
    start_s = time.monotonic()
    with ExitStack() as opened:
        start_hosts(number, alone, opened, thread)
        took_s = time.monotonic() - start_s
    yield ok(f"environment {environment.name}", f"loaded in {took_s:.1f} s ({environment.kind})")
