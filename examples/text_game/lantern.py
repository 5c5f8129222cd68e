"""A text game with state: find the key in a house, and open the door that it fits.

``rollout`` is an environment of its own kind: a coroutine that plays one game with the model. The
record says how the house is: ``{"prompt": "...", "rooms": 5, "start": 0, "key": 3, "door": 1}``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from easyrl.environments.client import Client, RequestFailed

NAMES = ("cellar", "kitchen", "hall", "library", "bedroom", "attic", "tower")
RULES = (
    "You are in a dark house whose rooms are in a row. Find the key and open the locked door. "
    "Answer with one command alone: left, right, take or open."
)
MOST_TURNS = 12
OF_KEY, OF_DOOR = 0.3, 0.7  # rewards


@dataclass
class Game:
    """A row of rooms, one with the key and one with the door."""

    rooms: int
    place: int
    key: int
    door: int
    has_key: bool = False
    is_won: bool = False

    def look(self) -> str:
        """What the player sees."""
        seen = [f"You are in the {NAMES[self.place]}."]
        if self.place == self.key and not self.has_key:
            seen.append("A key hangs on the wall.")
        if self.place == self.door:
            seen.append("Here is the locked door.")
        ways = [name for name, step in STEPS.items() if 0 <= self.place + step < self.rooms]
        return " ".join([*seen, f"You can go {' or '.join(ways)}."])

    def play(self, command: str) -> tuple[str, float]:
        """What a command does, and its reward."""
        if command in STEPS:
            goal = self.place + STEPS[command]
            if not 0 <= goal < self.rooms:
                return f"There is a wall. {self.look()}", 0.0
            self.place = goal
            return self.look(), 0.0
        if command == "take":
            if self.place != self.key or self.has_key:
                return f"There is nothing to take. {self.look()}", 0.0
            self.has_key = True
            return f"You have the key. {self.look()}", OF_KEY
        if command == "open":
            if self.place != self.door:
                return f"There is no door. {self.look()}", 0.0
            if not self.has_key:
                return f"It is locked, and you have no key. {self.look()}", 0.0
            self.is_won = True
            return "The door opens. You are free.", OF_DOOR
        return f"That is no command: left, right, take or open. {self.look()}", 0.0


STEPS = {"left": -1, "right": 1}


async def rollout(client: Client, prompt: Any) -> dict[str, Any]:
    """One game: a turn for each command, and a reward for each turn."""
    record = prompt.metadata
    game = Game(record["rooms"], record["start"], record["key"], record["door"])
    messages = [
        {"role": "system", "content": RULES},
        {"role": "user", "content": f"{prompt.text} {game.look()}"},
    ]
    turn_rewards: list[float] = []
    while not game.is_won and len(turn_rewards) < MOST_TURNS:
        try:
            reply = await client.chat(messages)
        except RequestFailed as error:
            if not error.is_context_end:
                raise
            break
        words = reply.text.rpartition("</think>")[2].lower().split()
        seen, reward = game.play(words[-1].strip(".!\"'") if words else "")
        turn_rewards.append(reward)
        messages += [reply.message, {"role": "user", "content": seen}]
    return {
        "reward": sum(turn_rewards),
        "turn_rewards": turn_rewards,
        "components": {"won": game.is_won, "key": game.has_key, "turns": len(turn_rewards)},
    }
