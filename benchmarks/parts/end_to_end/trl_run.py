"""TRL's side, a process of its own. Arguments: files of the job and of the answer.

A real ``GRPOTrainer`` on the CPU, with ``transformers``' batched ``generate``, as TRL has it
without vLLM. The job is a ``TrlJob`` as JSON, the answer a list of ``TrlRun``, one for each
micro-batch of the job.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.extras import profiling

from benchmarks.parts.end_to_end.heldout import heldout_logprob
from benchmarks.parts.end_to_end.rewards import REWARDS
from benchmarks.parts.end_to_end.rows import Measured, Step
from benchmarks.parts.end_to_end.trl_job import TrlJob, TrlRun


class Profile:
    """TRL's own profiled spans, seconds by name; they contain one another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        add = self._add
        # what it would do with them is to send them to a tracking service
        profiling.ProfilingContext._log_metrics = lambda context, seconds: add(context, seconds)

    def _add(self, context: Any, seconds: float) -> None:
        self.seconds[context.name.partition(".")[2]] += seconds

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, defaultdict(float)
        return taken


class Steps(TrainerCallback):
    """The seconds of each step, from the end of the one before."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.steps: list[Step] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._profile.take()
        self._start, self._used = time.perf_counter(), time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """After each step, its last event; and once more, with a summary, at the end."""
        if "reward" not in logs:
            return
        now = time.perf_counter()
        found = self._profile.take()
        seconds, self._start = now - self._start, now
        used, self._used = self._used, time.process_time()
        spans = {
            "generate": found["transformers.generate"],
            "reference": found["_prepare_inputs.reference"],
            "prepare": found["_prepare_inputs"],
        }
        spans["prepare"] -= spans["generate"] + spans["reference"]
        spans["train"] = seconds - found["_prepare_inputs"]
        spans["processor"] = self._used - used
        self.steps.append(Step(seconds, spans, logs["reward"], logs["completions/mean_length"]))


def run(job: TrlJob, micro_batch: int) -> Measured:
    """Trains ``num_steps`` from the model as it is in its folder."""
    profile = Profile()
    steps = Steps(profile)
    trainer = GRPOTrainer(
        model=job.model,
        reward_funcs=_reward(job.reward),
        args=GRPOConfig(
            output_dir="unused",
            model_init_kwargs={"dtype": "float32"},
            seed=job.seed,
            max_steps=job.num_steps,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=(job.batch_size * job.num_generations // micro_batch),
            num_generations=job.num_generations,
            max_completion_length=job.max_tokens,
            generation_kwargs={"min_new_tokens": job.min_tokens} if job.min_tokens else None,
            temperature=1.0,
            shuffle_dataset=False,
            loss_type="dapo",  # the mean over all tokens of the batch
            beta=job.kl_coef,
            learning_rate=job.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=_dataset(job),
        callbacks=[steps],
    )
    if job.kl_coef:
        _profile_reference(trainer, profile)
    trainer.train()
    assert len(steps.steps) == job.num_steps
    if not job.measure_heldout:
        return Measured(steps.steps)
    with tempfile.TemporaryDirectory() as folder:
        trainer.model.save_pretrained(folder)
        return Measured(steps.steps, heldout_logprob(Path(folder)))


def _dataset(job: TrlJob) -> Dataset:
    """As many prompts as are needed, in our order, rendered already."""
    lines = Path(job.prompts).read_bytes().splitlines()
    records = [msgspec.json.decode(line) for line in lines]
    assert len(records) >= job.num_steps * job.batch_size, "a prompt would come twice"
    return Dataset.from_list([{"prompt": r["text"], "answer": r["answer"]} for r in records])


def _reward(name: str) -> Callable[..., list[float]]:
    function = REWARDS[name]

    def reward(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        rows = zip(answer, completions, completion_ids, strict=True)
        return [function(*row) for row in rows]

    return reward


def _profile_reference(trainer: Any, profile: Profile) -> None:
    """The reference's pass has no span of its own in TRL."""
    compute = trainer._get_per_token_logps_and_entropies

    def timed(model: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = compute(model, *args, **kwargs)
        if model is trainer.ref_model:
            profile.seconds["_prepare_inputs.reference"] += time.perf_counter() - start
        return result

    trainer._get_per_token_logps_and_entropies = timed


def main() -> None:
    warnings.filterwarnings("ignore")
    source, target = map(Path, sys.argv[1:])
    job = msgspec.json.decode(source.read_bytes(), type=TrlJob)
    torch.set_num_threads(job.num_threads)
    runs = [TrlRun(size, run(job, size)) for size in job.micro_batches]
    target.write_bytes(msgspec.json.encode(runs))


if __name__ == "__main__":
    main()
