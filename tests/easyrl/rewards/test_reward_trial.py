"""A trial call finds what would have ended the run at its first group, with file and line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from easyrl.config import ConfigError, RewardConfig
from easyrl.rewards import worker
from easyrl.rewards.trial import try_rewards
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.workers.worker_pool import WorkerPool
from easyrl.schema import Prompt
from tests.tiny_models import random_completion
from tests.tiny_tokenizer import tiny_tokenizer

# by name: the body of a function, and what is said of it; {line} is that of its ``def``
BODIES = {
    "good": ("return [1.0] * len(texts)", None),
    "of_one": ("(text,) = texts; return [1.0]", None),  # scope: sample
    "text": ("return 'good'", r"{file}:{line}: text returned 'good'; expected a list of 2 numbers"),
    "nothing": ("pass", r"{file}:{line}: nothing returned None, as it has no return with a value"),
    "printing": ("print(len(texts))", r"{file}:{line}: printing returned None, as it has no"),
    "of_another_task": ("return None if prompt else [1.0]", None),  # no opinion; said below
    "of_no_response": ("return [None for _ in texts]", None),
    "nan": ("return [float('nan')] * 2", r"{file}:{line}: nan returned nan for response 0"),
    "too_few": ("return [1.0]", r"{file}:{line}: too_few returned 1 rewards for 2 responses"),
    "raising": ("raise OSError('no judge')", r"{file}:{next}: raising raised OSError: no judge"),
    "deeper": ("return helper(texts)", r"{file}:2: deeper raised KeyError: 'x'"),
    "leaving": ("import sys; sys.exit(1)", r"{file}:{next}: leaving raised SystemExit: 1"),
    "hanging": (
        "while True: pass",
        r"{file}:{line}: hanging had no result after rewards\[12\].timeout_s=0.3",
    ),
    "dying": ("import os; os._exit(3)", r"{file}:{line}: dying ended its worker process .*code 3"),
}
HELPER = "def helper(texts):\n    return {}['x']\n"


@pytest.fixture(scope="module")
def tried(tmp_path_factory) -> Iterator[tuple[Path, LoopThread, WorkerPool]]:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "r.py").write_text(
        HELPER
        + "".join(f"def {n}(prompt, texts, token_ids):\n    {b}\n" for n, (b, _) in BODIES.items())
    )
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    with LoopThread() as thread:
        workers = WorkerPool(1, worker.initialize, (rewards(folder), folder / "tokenizer"))
        thread.run(workers.start())
        yield folder, thread, workers
        thread.run(workers.close())


def rewards(folder: Path) -> list[RewardConfig]:
    return [
        RewardConfig(
            file=folder / "r.py",
            function=name,
            timeout_s=0.3,
            scope="sample" if name == "of_one" else "group",
        )
        for name in BODIES
    ]


@pytest.mark.parametrize("name", BODIES)
def test_what_a_reward_does_is_found(tried, name, caplog):
    folder, thread, workers = tried
    index = list(BODIES).index(name)
    built_in = RewardConfig(name="exact")  # not called, but counted
    given = [built_in] * index + [rewards(folder)[index]]
    prompt = Prompt(0, np.arange(3, dtype=np.int32), "1+1", "2", location="p.jsonl:1")
    completions = [random_completion(np.random.default_rng(0), size) for size in (2, 3)]
    call = try_rewards(given, workers, prompt, completions)
    message = BODIES[name][1]
    if message is None:
        thread.run(call)
        told = f"{name} returned None in a trial call on p.jsonl:1, no opinion on any response"
        assert (told in caplog.text) == (name in ("of_another_task", "of_no_response"))
        return
    line = 3 + 2 * index
    place = {"file": folder / "r.py", "line": line, "next": line + 1}
    for key, value in place.items():
        message = message.replace(f"{{{key}}}", str(value))
    with pytest.raises(ConfigError, match=rf"rewards\[{index}\]: {message}") as caught:
        thread.run(call)
    if name not in ("hanging", "dying", "nothing", "printing"):
        assert "correct it, it is called with (prompt, texts, token_ids), " in str(caught.value)
    assert "in a trial call on p.jsonl:1; " in str(caught.value)
    assert str(caught.value).endswith("(or set scoring.on_reward_error=zero)")
