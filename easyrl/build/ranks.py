"""The processes of a run: who trains, who follows, and what they notice of each other."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass

import torch.distributed as dist

from easyrl.build.peers import watch_peers
from easyrl.config import Config
from easyrl.engines.group.channel import GroupChannel
from easyrl.engines.megatron.layout import Layout, Place
from easyrl.engines.process_group import start_process_group
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.notices import Notices
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.signals import RunSignals


@dataclass(frozen=True)
class GroupChannels:
    """Of the model-parallel group of a process; only a model that is split has one."""

    place: Place
    teller: int  # rank of the process that has what the model says
    calls: GroupChannel
    files: GroupChannel


@dataclass(frozen=True)
class Joined:
    """What a process knows of the others."""

    ranks: Ranks
    peers: Notices  # the board that all processes read
    group: GroupChannels | None  # None: this process has the whole model, or a ZeRO shard of it


def is_follower(config: Config) -> bool:
    """Whether this process, by the launcher's variables, runs no trainer. Starts nothing.

    Raises ``ConfigError`` naming ``parallel`` if so many processes cannot share the model.
    """
    rank, world_size = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
    return not Layout.of(config.parallel, max(world_size, 1)).place(rank).is_head


def join_ranks(config: Config, opened: ExitStack, signals: RunSignals) -> Joined:
    """Joins the processes that the launcher started; from now on they are watched. Collective.

    Raises ``ConfigError`` if so many cannot share the model.
    """
    start_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = Layout.of(config.parallel, world_size)
    everyone = Collectives(Ranks.data_parallel(rank, world_size))
    peers = watch_peers(everyone, opened, signals, config.watchdog.peer_timeout_s)
    if not config.parallel.is_split:
        return Joined(everyone.ranks, peers, None)
    place = layout.place(rank)
    members = layout.group(place.data)
    calls, files = GroupChannel(members), GroupChannel(members)
    group = GroupChannels(place, layout.teller(place.data), calls, files)
    return Joined(place.ranks, peers, group)
