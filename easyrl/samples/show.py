"""A kept group as text: the prompt, and its responses side by side where the terminal is wide."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from easyrl.samples.records import SampledGroup, SampledResponse
from easyrl.samples.turns import Decode, shown_turns

LEAST_WIDTH = 44  # columns of a response beside another one


def print_group(group: SampledGroup, decode: Decode, console: Console) -> None:
    """On a terminal in boxes; elsewhere in plain lines, as the model has broken them."""
    if console.is_terminal:
        console.print(_boxes(group, decode, console.width))
        return
    print_plain = console.file.write
    print_plain(f"==== {heading(group)}\n{readable(decode(group.prompt_ids))}\n")
    for number, response in enumerate(group.responses):
        text = "\n".join(text for text, _ in response_texts(response, decode))
        print_plain(f"---- {response_heading(number, response)}\n{text}\n")
    console.file.flush()


def heading(group: SampledGroup) -> str:
    """One line on the group."""
    mean = group.mean_reward
    parts = [
        f"step {group.step}",
        f"prompt {group.index} of epoch {group.epoch}",
        group.location,
        "" if mean is None else f"mean reward {mean:.3f}",
        f"kept as {group.why}",
        "" if group.answer is None else f"answer {group.answer}",
        f"weights {group.version}",
        "" if group.has_signal else "no signal",
        "step skipped" if group.skipped else "",
    ]
    return readable(" | ".join(filter(None, parts)), lines=False)


def response_heading(number: int, response: SampledResponse) -> str:
    """One line on a response: reward by part, advantage, difference of log-probabilities."""
    if response.reward is None:
        reward = "no reward"
    else:
        named = [f"{n} {'?' if v is None else f'{v:.3f}'}" for n, v in response.components.items()]
        reward = f"reward {response.reward:.3f}" + (f" ({', '.join(named)})" if named else "")
    difference = response.logprob_diff
    parts = [
        f"response {number}",
        reward,
        "a reward function failed" if response.reward_failed else "",
        _advantage(response),
        f"\u0394 log-prob {'not compared' if difference is None else f'{difference:+.1e}'}",
        f"{len(response.token_ids)} tokens",
        f"environment {response.environment}" if response.environment else "",
        f"{response.num_turns} turns in {response.num_branches} branches"
        if response.num_turns
        else "",
        f"failed: {response.failure}" if response.failure else "",
        "truncated" if response.truncated else "",
    ]
    return readable(" | ".join(filter(None, parts)), lines=False)


def response_texts(response: SampledResponse, decode: Decode) -> Iterator[tuple[str, str]]:
    """A response's text, and how it is shown; of an episode several: a line on each turn ("bold"),
    what was written to it ("dim"), and what it sampled."""
    if not response.turns:
        yield readable(decode(response.token_ids)), ""
    for shown in shown_turns(response, decode):
        turn = shown.turn
        indent = "  " if shown.branch else ""  # all but the first branch
        yield readable(f"{indent}-- {shown.heading}", lines=False), "bold"
        if turn.sampled > turn.start:
            written = decode(response.token_ids[turn.start : turn.sampled])
            yield _told(f"{indent}[{shown.writer}] ", written), "dim"
        yield _told(f"{indent}[model] ", decode(response.token_ids[turn.sampled : turn.end])), ""


def _told(by: str, text: str) -> str:
    return by + readable(text)


def readable(text: str, *, lines: bool = True) -> str:
    """``text`` with whatever would steer the terminal written out; ``lines``: but for line ends."""
    kept = "\n\t" if lines else ""
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text
    )


def _advantage(response: SampledResponse) -> str:
    if response.advantage is None:
        return "not trained"
    text = f"advantage {response.advantage:+.3f}"
    if response.advantages is not None:
        least, most = (float("nan") if v is None else v for v in response.advantages)
        text += f" ({least:+.3f} to {most:+.3f} by token)"
    return text


def _boxes(group: SampledGroup, decode: Decode, width: int) -> RenderableType:
    prompt = Panel(Text(readable(decode(group.prompt_ids))), title=Text(heading(group)))
    beside = min(max(1, width // LEAST_WIDTH), len(group.responses)) or 1
    table = Table.grid(expand=True)
    for _ in range(beside):
        table.add_column(ratio=1, overflow="fold")
    boxes = [
        Panel(
            Group(
                Text(response_heading(number, response), style="bold"),
                *(Text(text, style=style) for text, style in response_texts(response, decode)),
            )
        )
        for number, response in enumerate(group.responses)
    ]
    for start in range(0, len(boxes), beside):
        table.add_row(*boxes[start : start + beside])
    return Group(prompt, table)
