"""Servers of the run's own (``inference.launch``), beside those that somebody else runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from easyrl.config import Config, ConfigError, LaunchConfig
from easyrl.inference_client.servers.managed.supervisor import ManagedServers
from easyrl.runtime.determinism import is_strict
from easyrl.runtime.rank_store import spans_hosts
from easyrl.runtime.shared_cores import SharedCores


class StartedServers(NamedTuple):
    """All endpoints of the configuration, servers of the run's own among them."""

    urls: list[str]
    api_keys: dict[str, str]  # by URL, made for own servers
    last_ends: Callable[[], list[str]] = list  # how own servers have ended that are not up
    given_up: Callable[[], Collection[str]] = tuple  # URLs of own servers that will not be up again


def start_servers(
    config: Config, opened: ExitStack, log_dir: Path, cores: SharedCores | None = None
) -> StartedServers:
    """Starts the servers of ``inference.launch``, on the first rank.

    They come up while the model loads. ``log_dir`` receives what they print; embedded ones share
    ``cores``.
    """
    urls = config.inference.urls
    if config.inference.launch is None:
        return StartedServers(urls, {})
    if spans_hosts():
        raise ConfigError(
            "inference.launch: starts servers for one machine, this run has several; start them "
            "with vllm serve and name their URLs in inference.endpoints"
        )
    if int(os.environ.get("RANK", "0")) > 0:
        return StartedServers(urls, {})
    servers = ManagedServers(
        config.inference.launch,
        config.model.path,
        log_dir,
        config.model.dtype,
        batch_invariant=is_strict(config),
        env={} if cores is None else cores.environment,
        lora_rank=_lora_rank(config),
    )
    opened.callback(servers.close)
    try:
        urls = urls + servers.start()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return StartedServers(
        urls, servers.api_keys, lambda: servers.last_ends, lambda: servers.given_up
    )


def max_num_seqs(launch: LaunchConfig) -> int | None:
    """Sequences that a server which is launched so decodes at a time, where its options say it."""
    options = launch.options
    each = _number(options, "--max-num-seqs")
    if each is None:
        return None
    return each * (_number(options, "--data-parallel-size", "-dp") or 1)  # vLLM: of each copy


def _number(options: Sequence[str], *names: str) -> int | None:
    """What the last of these options is given: ``--name=8``, or a word of its own behind it."""
    found = None
    for option, following in pairwise([*options, ""]):
        name, equals, value = option.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else following
    # else a mistake, of which the server tells as it starts
    return int(found) if found is not None and found.isdecimal() and int(found) > 0 else None


def _lora_rank(config: Config) -> int | None:
    """Of the adapters that servers are started for; None: of none."""
    lora = config.model.lora
    return None if lora is None or config.weight_sync.lora == "merged" else lora.rank
