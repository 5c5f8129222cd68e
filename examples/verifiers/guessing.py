"""A verifiers environment of several turns: guess a number between 1 and 20."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

RULES = "Guess my number between 1 and 20. Answer with a number alone."


def field(message: Any, name: str) -> Any:
    """Messages are mappings or, in newer versions, objects."""
    return message[name] if isinstance(message, dict) else getattr(message, name)


def guess_in(message: Any) -> int:
    """The last number in a message; 0: there is none."""
    words = [word.strip(".") for word in str(field(message, "content")).split()]
    return int(next((word for word in reversed(words) if word.isdecimal()), 0))


def guesses_in(completion: Any) -> list[int]:
    """By the rollout's messages: the environment is not asked behind the last turn."""
    return [guess_in(message) for message in completion if field(message, "role") == "assistant"]


class Guessing(vf.MultiTurnEnv):
    """The answer of a row is the number."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        guess, number = guess_in(messages[-1]), int(state["answer"])
        if guess == number:
            answer = [{"role": "user", "content": "right"}]
            state["final_env_response"] = answer  # the model is not asked again
            return answer
        return [{"role": "user", "content": "higher" if guess < number else "lower"}]


def found_it(completion: Any, answer: str, **kwargs: Any) -> float:
    return float(guesses_in(completion)[-1:] == [int(answer)])


def speed(completion: Any, **kwargs: Any) -> float:
    return 1.0 / max(1, len(guesses_in(completion)))


def load_environment(weight_of_speed: float = 0.0, max_turns: int = 8) -> vf.Environment:
    rows = Dataset.from_list([{"question": RULES, "answer": str(n)} for n in (3, 17)])
    rubric = vf.Rubric(funcs=[found_it, speed], weights=[1.0, weight_of_speed])
    return Guessing(dataset=rows, rubric=rubric, max_turns=max_turns)
