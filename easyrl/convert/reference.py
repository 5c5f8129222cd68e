"""The page for who comes from TRL or verl.

``python -m easyrl.convert.reference > docs/moving.md``
"""

from __future__ import annotations

from collections.abc import Iterator

from easyrl.convert.convert import PEERS
from easyrl.convert.peer import Peer, Row

HEAD = """# Moving from TRL and verl

`easyrl convert FILE` makes a configuration of a `GRPOConfig` as `to_json_string()` writes it, or of
a verl run's YAML, Hydra's `overrides.yaml`, or a script with `key.path=value`. What a key has no
counterpart for is said, where it is not the other trainer's default. This page is made from the
same tables (`easyrl/convert/`) by `python -m easyrl.convert.reference`. Reward functions of both
run unchanged ([rewards](rewards.md#your-own)); their names for [metrics](metrics.md) are an option.

## What counts otherwise

A **batch** here is what is generated between two weight syncs, counted in prompts; an optimizer
step takes its slice of it, so that each response is trained once.

| | TRL | verl | here |
|---|---|---|---|
| prompts of a batch | B · W · S ÷ G | `train_batch_size` | `trainer.batch_size` |
| of an optimizer step | B · W · A ÷ G | `ppo_mini_batch_size` | batch_size ÷ updates_per_batch |
| a step | an optimizer step | a batch | an optimizer step |
| several passes over a batch | `num_iterations` | `ppo_epochs` | none |

B is `per_device_train_batch_size`, W the number of processes, A `gradient_accumulation_steps`, S
`steps_per_generation` (default A), G `num_generations`. Where S is below A, a batch is the
optimizer step's.

## Tools and environments

Tools are Python objects in the other trainers, of which a file of settings does not tell; here they
are named in the section `environments` ([own environments](own_environment.md)), by hand:
"""
TOOLS = (  # of TRL, of verl, and here
    (
        "`tools=[function]`",
        "`multi_turn.function_tool_path`",
        "an entry with `tools: [{file, functions}]`: typed functions with the same docstrings run "
        "unchanged, without verl's decorator",
    ),
    (
        "methods of `environment_factory`",
        "`multi_turn.tool_config_path`",
        "a coroutine with a state of its own that calls what it likes: `file`",
    ),
    (
        "`rollout_func`",
        "`agent.agent_loop_config_path`",
        "the same; it asks over HTTP and returns a reward, tokens are recorded as they are sampled",
    ),
    (
        "`get_reward` of an environment",
        "rewards of tools",
        "what the coroutine returns: a number, or one for each turn",
    ),
    (
        "`reward_funcs` beside tools",
        "`custom_reward_function`",
        "`rewards` of the entry, on the last message; the run's own `rewards` are refused",
    ),
    (
        "a mapping of factories",
        "`agent_name` of a record",
        "several entries; a record's field `environment` names one",
    ),
    (
        "`max_tool_calling_iterations`",
        "`multi_turn.max_assistant_turns`",
        "`max_turns`, turns of the model: of TRL one more, the last one without a call",
    ),
    (
        "`max_completion_length`",
        "`max_response_length` of `data`",
        "bound all turns with the tools' results there; `rollout.max_tokens` bounds each turn, the "
        "servers' context all together",
    ),
    (
        "all calls of a message",
        "the first `multi_turn.max_parallel_calls`",
        "all, at the same time",
    ),
    (
        "whole results of tools",
        "`multi_turn.max_tool_response_length`",
        "20,000 characters of a result",
    ),
)


def markdown() -> str:
    """``docs/moving.md``."""
    lines = [
        HEAD,
        "| TRL | verl | here |",
        "|---|---|---|",
        *(f"| {' | '.join(r)} |" for r in TOOLS),
    ]
    for peer in PEERS.values():
        lines += [f"\n## {peer.title}\n", "| key | default | here | how |", "|---|---|---|---|"]
        lines += _rows(peer)
    return "\n".join(lines) + "\n"


def _rows(peer: Peer) -> Iterator[str]:
    for row in peer.rows:
        if row.is_silent and "*" in row.theirs and row.how.startswith("nothing of"):
            continue
        # no code span: those are of our keys, which a test looks up
        cells = (f"<code>{row.theirs}</code>", _default(row), _ours(row), row.how)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(row: Row) -> str:
    if row.default is None:
        return ""
    return f"`{str(row.default).lower() if isinstance(row.default, bool) else row.default}`"


def _ours(row: Row) -> str:
    return ", ".join(f"`{key}`" for key in row.ours.split(", ")) if row.ours else "–"


if __name__ == "__main__":
    print(markdown(), end="")
