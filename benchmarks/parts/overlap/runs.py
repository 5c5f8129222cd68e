"""The two training runs that ``benchmarks.overlap`` measures, as processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from benchmarks.parts.launched_run import start_trainer
from benchmarks.parts.overlap.endpoint import SleepingEndpoint
from benchmarks.parts.overlap.spans import Batch, read_batches
from benchmarks.parts.random_model import write_prompts, write_random_model
from benchmarks.parts.worktree import ROOT, imported_first
from easyrl.inference_client.servers.managed.launch import (
    EmbeddedServerProcess,
)
from easyrl.runtime.machine import free_port, pin_process, usable_cpus

CONFIG = "benchmarks/overlap.yaml"
Mode = Literal["sync", "async"]


@dataclass(frozen=True)
class Workload:
    """Sizes of a run; responses draw their lengths from a model that ends at random."""

    batch_size: int = 48
    num_generations: int = 8
    prompt_tokens: int = 32
    min_tokens: int = 128
    max_tokens: int = 320
    max_tokens_per_micro_batch: int = 2000
    hidden_size: int = 128
    num_layers: int = 3

    def write(self, folder: Path, num_batches: int) -> tuple[Path, Path]:
        """Model and prompts."""
        model = write_random_model(
            folder / "model", hidden_size=self.hidden_size, num_layers=self.num_layers
        )
        num_prompts = self.batch_size * num_batches
        return model, write_prompts(folder / "prompts.jsonl", num_prompts, self.prompt_tokens)

    def overrides(
        self, mode: Mode, folder: Path, run_dir: Path, url: str, max_inflight: int, num_batches: int
    ) -> list[str]:
        """Settings of a run of ``num_batches`` with what was written in ``folder``."""
        return [
            f"run.mode={mode}",
            f"run.output_dir={run_dir.absolute()}",
            f"model.path={folder.absolute() / 'model'}",
            f"data.files=[{folder.absolute() / 'prompts.jsonl'}]",
            f"data.max_prompt_tokens={self.prompt_tokens + 8}",
            f"inference.endpoints=[{url}]",
            f"inference.max_inflight={max_inflight}",
            f"trainer.batch_size={self.batch_size}",
            f"trainer.max_steps={num_batches}",
            f"trainer.max_tokens_per_micro_batch={self.max_tokens_per_micro_batch}",
            f"rollout.num_generations={self.num_generations}",
            f"rollout.min_tokens={self.min_tokens}",
            "rollout.allow_off_policy_sampling=true",
            f"rollout.max_tokens={self.max_tokens}",
        ]


class Setup(Protocol):
    """Trainer and endpoints of a run, whose generation can be made slower and faster."""

    def run(self, mode: Mode, run_dir: Path, speed: float, num_batches: int) -> list[Batch]:
        """A training run, in an empty folder. Ends the program if it fails."""
        ...

    def slower(self, speed: float, factor: float) -> float:
        """The speed with which generation takes ``factor`` more time, as far as one can say."""
        ...

    def describe(self, speed: float) -> str: ...


@dataclass(kw_only=True, eq=False)
class ServerOfCheckout(EmbeddedServerProcess):
    """``easyrl serve`` as another revision has it."""

    checkout: Path

    def _working_directory(self) -> Path:
        return self.checkout


@dataclass(frozen=True)
class OneRank:
    """The embedded server on one core, the trainer on another; speed: sequences in flight."""

    folder: Path
    work: Workload
    config: str = CONFIG
    settings: tuple[str, ...] = ()  # further ones
    checkout: Path = ROOT  # whose server and trainer run

    def slower(self, speed: float, factor: float) -> float:
        return max(1, round(speed / factor))

    def describe(self, speed: float) -> str:
        return f"{speed} sequences in flight"

    def run(self, mode: Mode, run_dir: Path, speed: float, num_batches: int) -> list[Batch]:
        work, max_inflight = self.work, int(speed)
        trainer_cpu, server_cpu = usable_cpus()[0], usable_cpus()[-1]
        options = ["--max-model-len", str(work.prompt_tokens + work.max_tokens + 32)]
        options += ["--num-threads", "1", "--max-num-seqs", str(max_inflight)]
        log = run_dir / "trainer.log"
        code = imported_first(self.checkout)
        with ServerOfCheckout(
            self.folder.absolute() / "model",
            options,
            checkout=self.checkout,
            port=free_port(),
            cpus=[server_cpu],
            log=run_dir / "server.log",
            env={"PYTHONPATH": code["PYTHONPATH"]},
        ) as server:
            overrides = work.overrides(
                mode, self.folder, run_dir, server.url, max_inflight, num_batches
            )
            overrides += ["model.activation_checkpointing=layer"]  # nearer to generation's time
            overrides += self.settings
            config = str(ROOT / self.config)
            command = [sys.executable, "-m", "easyrl.train", config, *overrides]
            environment = {**code, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            with log.open("wb") as file:
                trainer = subprocess.Popen(
                    command,
                    env=environment,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                    cwd=self.checkout,
                )
            pin_process(trainer.pid, [trainer_cpu])
            _finish(trainer, log)
        return read_batches(run_dir, num_ranks=1)


@dataclass(frozen=True)
class TwoRanks:
    """ZeRO-2 on both cores, each rank its producer; speed: the endpoint's seconds per token."""

    folder: Path
    work: Workload
    endpoint: SleepingEndpoint
    max_inflight: int = 16  # of both ranks: a group each
    checkout: Path = ROOT  # whose trainer runs

    def slower(self, speed: float, factor: float) -> float:
        return speed * factor

    def describe(self, speed: float) -> str:
        return f"{speed:.2g} s per token, {self.max_inflight} at a time"

    def run(self, mode: Mode, run_dir: Path, speed: float, num_batches: int) -> list[Batch]:
        self.endpoint.seconds_per_token = speed
        overrides = self.work.overrides(
            mode, self.folder, run_dir, self.endpoint.url, self.max_inflight, num_batches
        )
        overrides += [f"weight_sync.{proof}=false" for proof in ("prove", "probe", "canary")]
        log = run_dir / "trainer.log"
        trainer = start_trainer(
            str(ROOT / CONFIG),
            [*overrides, "trainer.zero_stage=2"],
            log,
            num_ranks=2,
            folder=self.checkout,
            PYTHONPATH=imported_first(self.checkout)["PYTHONPATH"],
        )
        _finish(trainer, log)
        return read_batches(run_dir, num_ranks=2)


def _finish(trainer: subprocess.Popen[bytes], log: Path) -> None:
    """Waits for its end, a good one. Leaves no process behind if this one ends before."""
    try:
        if trainer.wait() != 0:
            sys.exit(log.read_text()[-3000:])
    finally:
        if trainer.poll() is None:
            os.killpg(trainer.pid, signal.SIGKILL)  # it has a session of its own
            trainer.wait()
