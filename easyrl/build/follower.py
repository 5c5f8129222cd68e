"""A process that has a part of the model and no trainer: it follows the head of its group."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from easyrl.build.ranks import join_ranks
from easyrl.config import Config
from easyrl.engines.group.calls import END
from easyrl.engines.group.follower import Follower, WriteShare
from easyrl.engines.megatron.engine import MegatronEngine
from easyrl.engines.megatron.layout import Place
from easyrl.models.supported import model_notices
from easyrl.runtime.determinism import make_deterministic
from easyrl.runtime.signals import RunSignals
from easyrl.weight_sync.shares import ShareWriter


def _write_share(place: Place) -> WriteShare | None:
    """Of the first tensor rank of a pipeline stage, in the first model-parallel group."""
    if place.tensor != 0 or place.data != 0:
        return None
    return partial(ShareWriter().write, place.stage)


def follow(config: Config, signals: RunSignals) -> None:
    """Until the head's run ends. Raises ``LostProcess`` where a process of its group is gone before
    that.

    A stop that is asked for here is the head's to make: it is told, and saves.
    """
    with ExitStack() as opened:
        make_deterministic(config)
        model_notices(config.model)
        joined = join_ranks(config, opened, signals)
        group = joined.group
        assert group is not None
        call, arguments = group.calls.hear()
        if call == END:  # it has found something to be put right, or nothing left to do
            return
        (total_steps,) = arguments
        engine = MegatronEngine(config, group.place.layout, total_steps=total_steps)
        signals.begin_training()
        Follower(engine, group.calls, group.files, group.teller, _write_share(group.place)).serve()
