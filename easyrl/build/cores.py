"""Processors that the trainer and embedded servers on its machine divide as they need them."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path

from deepspeed.accelerator import get_accelerator

from easyrl.config import Config
from easyrl.runtime.determinism import is_strict
from easyrl.runtime.rank_store import spans_hosts
from easyrl.runtime.shared_cores import VARIABLE, SharedCores, can_share, shared_file

logger = logging.getLogger(__name__)


def share_cores(config: Config, opened: ExitStack) -> SharedCores:
    """With all ranks and with servers that this command starts, or that were started for it.

    With nobody where the number of threads is somebody's wish (``OMP_NUM_THREADS``) or decides bits
    (strict mode), and on devices.
    """
    is_fixed = not can_share() or is_strict(config) or spans_hosts()
    if is_fixed or get_accelerator().device_name() != "cpu":
        return SharedCores()
    file = os.environ.get(VARIABLE)
    try:
        if file is None:
            if not _starts_servers_here(config):
                return SharedCores()
            file = str(opened.enter_context(shared_file(config.run.output_dir)))
        cores = SharedCores(Path(file))
    except OSError as error:
        logger.warning("processors are not shared with the servers: %s", error)
        return SharedCores()
    opened.callback(cores.close)
    return cores


def _starts_servers_here(config: Config) -> bool:
    """Embedded ones, on the CPU."""
    launch = config.inference.launch
    return launch is not None and launch.engine == "embedded" and not any(launch.devices or ())
