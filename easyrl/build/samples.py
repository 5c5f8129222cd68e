"""What the model writes: who keeps it, and who shows it on the console."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from easyrl.build.run import OpenRun
from easyrl.build.tokenizer import load_tokenizer, token_decoder
from easyrl.config import Config
from easyrl.runtime.schedule import Due
from easyrl.samples.console import ConsoleSample
from easyrl.samples.folder import SampleFolder
from easyrl.samples.table import COLUMNS, SampleTable
from easyrl.samples.writer import SampleWriter
from easyrl.schema import Progress

logger = logging.getLogger(__name__)


def open_samples(run: OpenRun, progress: Progress) -> SampleWriter | None:
    """This rank's, which goes on after ``progress``; None where nothing is to be kept.

    What earlier attempts have written behind that will come again, and is removed by the first rank
    before any rank has a batch.
    """
    config, folder = run.config.samples, SampleFolder(run.output)
    if run.ranks.is_first:
        try:
            folder.remove_after(progress.step)
        except OSError as error:
            logger.warning(
                "%s: samples of an earlier attempt cannot be removed (%s); those of steps after "
                "%d are not of this run until it comes to them",
                folder.path,
                error.strerror,
                progress.step,
            )
    if not config.per_step:
        return None
    return SampleWriter(folder, config.keep, run.ranks.dp_rank, run.ranks.dp_size)


def console_sample(config: Config, output: Path, from_step: int) -> ConsoleSample | None:
    """What the console shows of the steps after ``from_step``; None: nothing."""
    every = config.samples.console_every
    if not every:
        return None
    decode = token_decoder(load_tokenizer(config))
    return ConsoleSample(SampleFolder(output), decode, Due(every, max(from_step, 0)))


def wandb_table(
    config: Config, output: Path, from_step: int
) -> tuple[Sequence[str], SampleTable] | None:
    """Its columns, and what gives its rows of the steps after ``from_step``; None: no table."""
    samples = config.samples
    if not (samples.wandb_every and samples.per_step) or config.source == "records":
        return None
    decode = token_decoder(load_tokenizer(config))
    due = Due(samples.wandb_every, max(from_step, 0))
    return COLUMNS, SampleTable(SampleFolder(output), decode, due)
