"""A verifiers environment of several turns with a state: guess a number between 1 and 20."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

RULES = "Guess my number between 1 and 20. Answer with a number alone."


class Guessing(vf.MultiTurnEnv):
    """The answer of a row is the number."""

    async def setup_state(self, state: Any, **kwargs: Any) -> Any:
        state["guesses"] = []
        return state

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        last = messages[-1]
        text = last["content"] if isinstance(last, dict) else last.content
        words = [word for word in str(text).split() if word.strip(".").isdigit()]
        guess = int(words[-1].strip(".")) if words else 0
        state["guesses"].append(guess)
        number = int(state["answer"])
        if guess == number:
            say = "right"
        else:
            say = "higher" if guess < number else "lower"
        answer = [{"role": "user", "content": say}]
        if say == "right":
            state["final_env_response"] = answer  # the model is not asked again
        return answer


def found_it(state: Any, **kwargs: Any) -> float:
    return float(bool(state["guesses"]) and state["guesses"][-1] == int(state["answer"]))


def speed(state: Any, **kwargs: Any) -> float:
    return 1.0 / max(1, len(state["guesses"]))


def load_environment(weight_of_speed: float = 0.0, max_turns: int = 8) -> vf.Environment:
    rows = Dataset.from_list([{"question": RULES, "answer": str(n)} for n in (3, 17)])
    rubric = vf.Rubric(funcs=[found_it, speed], weights=[1.0, weight_of_speed])
    return Guessing(dataset=rows, rubric=rubric, max_turns=max_turns)
