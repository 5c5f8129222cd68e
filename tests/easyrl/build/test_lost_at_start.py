"""A rank that is lost before the model is loaded ends the others, as a later one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from easyrl.runtime.machine import free_port
from easyrl.schema import TEMPORARY_FAILURE
from tests.tiny_models import save_tiny_model

RANK = """
import os, signal, sys
from contextlib import ExitStack
from easyrl.build.run import open_run
from easyrl.config.file import load_config
from easyrl.recipes.loading import with_whole_recipe
from easyrl.runtime.signals import RunSignals
from easyrl.runtime.stopping import StopRequest

config = with_whole_recipe(load_config("benchmarks/overlap.yaml", sys.argv[1:]))
signals = RunSignals(StopRequest(config.trainer.grace_s))
signals.install()
fall_silent = lambda: os.environ["RANK"] == "1" and os.kill(os.getpid(), signal.SIGSTOP)
try:
    with ExitStack() as opened:
        open_run(config, opened, signals, resume=False, on_folder=fall_silent)
finally:
    signals.finish()
"""


def test_a_rank_that_falls_silent_at_the_start_ends_the_others(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "qwen3")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    settings = [
        f"run.output_dir={tmp_path / 'run'}",
        f"model.path={model}",
        f"data.files=[{tmp_path / 'prompts.jsonl'}]",
        "inference.endpoints=[http://127.0.0.1:9]",
        "watchdog.peer_timeout_s=3",
    ]
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, *settings],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = ranks[0].communicate(timeout=120)[1]
        assert ranks[0].returncode == TEMPORARY_FAILURE, said
        assert "no sign of life of rank 1 for 3 s (watchdog.peer_timeout_s)" in said
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.communicate()
