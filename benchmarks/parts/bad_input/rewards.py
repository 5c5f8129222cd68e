"""Mistakes in reward functions: their file, their name, how they are called, what they return."""

from __future__ import annotations

from benchmarks.parts.bad_input.scene import SCRIPT, Mistake, script

FILE = "{folder}/reward.py"
SIGNATURE = "def reward_func(prompt, texts, token_ids):\n"


def _reward(
    title: str,
    source: str | bytes,
    location: str | tuple[str, ...],
    *overrides: str,
    more: str = "",
) -> Mistake:
    rewards = f"rewards=[{{file: {FILE}, timeout_s: 1{more}}}]"
    return Mistake(title, location, (rewards, *overrides), files={"reward.py": source})


def _body(title: str, body: str, location: str | tuple[str, ...] = f"{FILE}:1") -> Mistake:
    """A function whose fault shows when it is called; where it is defined, unless it raises."""
    return _reward(title, SIGNATURE + f"    {body}\n", location)


MISTAKES = [
    Mistake("a file that is missing", "rewards[0].file", ("rewards=[{file: {folder}/rewrd.py}]",)),
    Mistake("an unknown built-in", "rewards[0].name", ("rewards=[{name: exakt}]",)),
    Mistake("both a name and a file", "rewards[0]", ("rewards=[{name: exact, file: x.py}]",)),
    Mistake("neither a name nor a file", "rewards[0]", ("rewards=[{weight: 1.0}]",)),
    Mistake("a mistyped key", "rewards[0].wieght", ("rewards=[{name: exact, wieght: 2.0}]",)),
    Mistake("a weight as text", "rewards[0].weight", ("rewards=[{name: exact, weight: high}]",)),
    Mistake(
        "a time limit of 0", "rewards[0].timeout_s", ("rewards=[{name: exact, timeout_s: 0}]",)
    ),
    Mistake("a scope that is none", "rewards[0].scope", ("rewards=[{name: exact, scope: batch}]",)),
    Mistake(
        "unknown arguments of a built-in",
        "rewards[0].kwargs",
        ("rewards=[{name: exact, kwargs: {tolerance: 1}}]",),
    ),
    _reward("a syntax error", SIGNATURE + "    return [1.0 for _ in texts\n", f"{FILE}:2"),
    _reward(
        "an import that is missing",
        "import no_such_package\n" + SIGNATURE + "    ...\n",
        f"{FILE}:1",
    ),
    _reward("an error at import", "TABLE = {}['key']\n" + SIGNATURE + "    ...\n", f"{FILE}:1"),
    _reward("an exit at import", "import sys\nsys.exit(0)\n", f"{FILE}:2"),
    _reward("a file in Latin-1", b"NAME = 'caf\xe9'\ndef reward_func(): ...\n", FILE),
    _reward(
        "a function of another name",
        "def reward(prompt, texts, token_ids): ...\n",
        ("rewards[0].function", "reward"),
    ),
    _reward("a constant instead of a function", "reward_func = 1.0\n", "rewards[0].function"),
    _reward("too few arguments", "def reward_func(text):\n    return 1.0\n", "rewards[0].function"),
    _reward(
        "an argument too many",
        "def reward_func(prompt, texts, token_ids, answer): ...\n",
        "rewards[0].function",
    ),
    _reward(
        "arguments that it does not take",
        SIGNATURE + "    ...\n",
        "rewards[0].kwargs",
        more=", kwargs: {alpha: 1}",
    ),
    Mistake(
        "a notebook as a file",
        "rewards[0].file",
        ("rewards=[{file: {folder}/reward.ipynb}]",),
        files={"reward.ipynb": '{"cells": []}'},
    ),
    _body("text instead of numbers", "return 'good'"),
    _body("texts in the list", "return ['1.0' for _ in texts]"),
    _body("nothing", "pass"),
    _body("one number for a group", "return 1.0"),
    _body("NaN", "return [float('nan') for _ in texts]"),
    _body("infinity", "return [float('inf') for _ in texts]"),
    _body("too few numbers", "return [1.0]"),
    _body("a dictionary", "return {text: 1.0 for text in texts}"),
    _body("a generator", "yield 1.0"),
    _body("what it prints", "print(1.0)"),
    _body("an exception", "raise RuntimeError('no judge')", f"{FILE}:2"),
    _body("a name that is not defined", "return [score(text) for text in texts]", f"{FILE}:2"),
    _body("a missing field", "return [prompt.metadata['level'] for _ in texts]", f"{FILE}:2"),
    _body("the prompt taken for text", "return [len(prompt.split()) for _ in texts]", f"{FILE}:2"),
    _body("an endless loop", "while True: pass", ("rewards[0].timeout_s", f"{FILE}:1")),
    _body(
        "a judge that does not answer",
        "import time; time.sleep(60)",
        ("rewards[0].timeout_s", f"{FILE}:1"),
    ),
    _body("an exit of the process", "import os; os._exit(3)"),
    _body("a call of sys.exit", "import sys; sys.exit('bye')", f"{FILE}:2"),
    _body("a crash", "import ctypes; ctypes.string_at(0)"),
    _reward(
        "arguments of two signatures",
        "def reward_func(prompt, completions, token_ids): ...\n",
        "rewards[0].signature",
    ),
    Mistake(
        "a script's function that cannot be pickled",
        "reward",
        command=SCRIPT,
        files=script(
            "import threading; judge = threading.Lock(); "
            "train_policy('{model}', ['1+1='], lambda p, t, i: [judge.locked()] * len(t), "
            "output_dir='{folder}/run')"
        ),
        status=1,
    ),
]
