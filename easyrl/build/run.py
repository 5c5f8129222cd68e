"""The run itself: its ranks, its folder, and what it says of its configuration first."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from easyrl.build.ranks import GroupChannels, join_ranks
from easyrl.build.row_settings import decide_row_settings
from easyrl.build.space import warn_of_little_space
from easyrl.build.trial import try_attention
from easyrl.config import Config
from easyrl.config.file import plain_secrets
from easyrl.engines.group.calls import END
from easyrl.metrics.event_log import Record
from easyrl.metrics.logprob_agreement import not_judged
from easyrl.models.supported import model_notices
from easyrl.recipes.loading import load_recipe, notices
from easyrl.rewards.functions import check_rewards
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.determinism import make_deterministic
from easyrl.runtime.notices import Notices
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.run_folder import next_attempt, open_event_log, prepare_output
from easyrl.runtime.signals import RunSignals
from easyrl.runtime.watchdog import TokenProgress
from easyrl.schema import PolicyVersion

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenRun:
    """What every part of a run is built with."""

    config: Config
    opened: ExitStack  # closes the parts, the last one first
    signals: RunSignals
    resume: bool
    collectives: Collectives
    peers: Notices  # the board that all ranks read
    group: GroupChannels | None  # of this head's model-parallel group; None: nothing is split
    output: Path  # this run's alone
    version: PolicyVersion  # of this attempt, with v 0
    tokens: TokenProgress
    record: Record  # where events go, and are counted for ``tokens``

    @property
    def ranks(self) -> Ranks:
        return self.collectives.ranks


def open_run(
    config: Config,
    opened: ExitStack,
    signals: RunSignals,
    *,
    resume: bool,
    on_folder: Callable[[], object],
) -> OpenRun:
    """Joins the ranks and takes the run's folder. Collective.

    The run's configuration is ``config`` with how rows are packed decided.

    ``on_folder`` is called once that is this process's. Raises ``ConfigError``.
    """
    make_deterministic(config)
    check_rewards(config.rewards)
    said_of_model = model_notices(config.model)  # refuses a model before servers start
    config, said_of_rows = decide_row_settings(config)
    joined = join_ranks(config, opened, signals)
    if joined.group is not None:
        opened.callback(joined.group.calls.tell_last, (END, ()))
    collectives = Collectives(joined.ranks)
    try_attention(config)
    output = prepare_output(config, collectives, opened, resume=resume)
    on_folder()
    if collectives.ranks.is_first:
        _say_at_start(config, [*said_of_model, *said_of_rows])
        warn_of_little_space(config)
    tokens = TokenProgress()
    return OpenRun(
        config,
        opened,
        signals,
        resume,
        collectives,
        joined.peers,
        joined.group,
        output,
        next_attempt(config, output, collectives),
        tokens,
        tokens.counting(open_event_log(config, output, collectives, opened)),
    )


def _say_at_start(config: Config, said_of_model: list[str]) -> None:
    said = [*notices(config, load_recipe(config)), not_judged(config), *said_of_model]
    for notice in filter(None, said):
        logger.warning("%s", notice)
    for key in plain_secrets(config):
        logger.warning(
            "%s: is a secret in plain text; it is left out of the run's files and trackers, so "
            "that --resume has to be given it again: better write ${oc.env:NAME} and export "
            "the variable NAME",
            key,
        )
