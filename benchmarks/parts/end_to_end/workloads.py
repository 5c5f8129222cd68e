"""What is trained: model, prompts and sizes of each workload, the same for both sides."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.parts.end_to_end.ending_model import write_ending_model
from benchmarks.parts.end_to_end.rewards import NO_SIGNAL
from benchmarks.parts.random_model import write_random_model
from easyrl.demo.build_model import build_model, build_tokenizer
from easyrl.demo.task import draw_problems, split_operands
from easyrl.inference_client.pool.adaptive_limit import NUM_TRIED


@dataclass(frozen=True)
class Expected:
    """Ratios of TRL's time to ours, and of the bound to ours."""

    one_machine: float
    separate_devices: float
    efficiency: float


@dataclass(frozen=True)
class Workload:
    """Sizes of a run; learning rate, clipping and AdamW are the same on both sides."""

    name: str
    model: str  # one of ``MODELS``; workloads that name the same share it
    batch_size: int  # B
    num_generations: int  # G
    max_tokens: int  # of a response
    reward: str  # of ``rewards.REWARDS``
    num_steps: int  # that count
    num_warm_up: int  # steps before them, on both sides
    expected: Expected
    max_tokens_per_micro_batch: int  # ours
    micro_batches: tuple[int, ...]  # sequences in one of TRL's, to choose from
    pair_s: float  # about, on two cores: both of TRL's runs, ours and the bound
    tuning_s: float  # ... choosing TRL's micro-batches
    prompt_tokens: int | None = None  # None: the demo's problems
    min_tokens: int = 0
    kl_coef: float = 0.0
    learning_rate: float = 1e-6
    every_other_without_signal: bool = False
    # Batches in which ``inference.max_inflight: auto`` may try, none of which counts. 0: those that
    # count are so many that the median does not see them.
    num_tried: int = 0

    @property
    def num_our_warm_up(self) -> int:
        """Steps of ours before those that count."""
        return max(self.num_warm_up, self.num_tried)

    @property
    def num_our_steps(self) -> int:
        return self.num_our_warm_up + self.num_steps

    @property
    def num_sequences(self) -> int:
        return self.batch_size * self.num_generations

    @property
    def max_prompt_tokens(self) -> int:
        return 16 if self.prompt_tokens is None else self.prompt_tokens

    @property
    def learns(self) -> bool:
        """Whether its reward is of what the held-out texts show."""
        return self.model == "warm_started"

    def write_prompts(self, path: Path, count: int, seed: int = 0) -> None:
        """``count`` records: ``prompt``, ``answer`` and ``text``, the prompt as a model sees it.

        Every other one has no answer where every other group is to have no signal.
        """
        rng = random.Random(seed)
        if self.prompt_tokens is None:
            problems = draw_problems(split_operands().train, count, rng)
            pairs = [(problem.prompt, problem.answer) for problem in problems]
        else:
            size = self.prompt_tokens
            pairs = [("".join(rng.choices("0123456789", k=size)), "0") for _ in range(count)]
        tokenizer = build_tokenizer()
        with path.open("w") as file:
            for number, (prompt, answer) in enumerate(pairs):
                if self.every_other_without_signal and number % 2:
                    answer = NO_SIGNAL
                record = {"prompt": prompt, "answer": answer, "text": prompt}
                if self.prompt_tokens is None:
                    message = [{"role": "user", "content": prompt}]
                    record["text"] = str(
                        tokenizer.apply_chat_template(
                            message, add_generation_prompt=True, tokenize=False
                        )
                    )
                file.write(json.dumps(record) + "\n")


def _warm_started(folder: Path) -> None:
    build_model(folder)


def _random(folder: Path) -> None:
    write_random_model(folder, hidden_size=128, num_layers=4)


def _log_normal(folder: Path) -> None:
    write_ending_model(folder, shortest=32, longest=512, num_layers=4)


MODELS: dict[str, Callable[[Path], None]] = {
    "warm_started": _warm_started,
    "random": _random,
    "log_normal": _log_normal,
}

SHORT = Workload(
    name="short",
    model="warm_started",
    batch_size=32,
    num_generations=8,
    max_tokens=40,
    reward="exact",
    num_steps=25,
    num_warm_up=0,
    expected=Expected(1.3, 1.8, 0.8),
    max_tokens_per_micro_batch=4096,
    micro_batches=(32, 64, 128, 256),
    pair_s=115,
    tuning_s=65,
    learning_rate=1e-4,
)
LONG_PROMPT = Workload(
    name="long prompt",
    model="random",
    batch_size=16,
    num_generations=8,
    prompt_tokens=1024,
    max_tokens=64,
    min_tokens=64,
    reward="random",
    num_steps=6,
    num_warm_up=1,
    num_tried=NUM_TRIED,
    expected=Expected(5.0, 9.0, 0.85),
    max_tokens_per_micro_batch=2048,
    micro_batches=(2, 4, 8),
    pair_s=780,
    tuning_s=90,
)


def _like(work: Workload, **changes: object) -> Workload:
    return Workload(**{**vars(work), **changes})  # type: ignore[arg-type]


WORKLOADS = {
    work.name: work
    for work in (
        SHORT,
        _like(
            SHORT,
            name="no-signal",
            reward="half",
            every_other_without_signal=True,
            expected=Expected(1.5, 2.3, 0.8),
        ),
        LONG_PROMPT,
        Workload(
            name="long tail",
            model="log_normal",
            batch_size=8,
            num_generations=8,
            prompt_tokens=64,
            max_tokens=512,
            reward="random",
            num_steps=6,
            num_warm_up=1,
            num_tried=NUM_TRIED,
            expected=Expected(2.3, 3.5, 0.9),
            max_tokens_per_micro_batch=2048,
            micro_batches=(4, 8, 16, 32),
            pair_s=310,
            tuning_s=190,
        ),
        _like(LONG_PROMPT, name="KL", kl_coef=0.04, expected=Expected(5.0, 9.0, 0.9), pair_s=940),
    )
}


def write_model(work: Workload, folder: Path) -> Path:
    """The workload's model, made once in ``folder``."""
    path = folder / work.model
    if not path.is_dir():
        unfinished = path.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        MODELS[work.model](unfinished)
        unfinished.rename(path)
    return path
