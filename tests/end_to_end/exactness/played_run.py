"""A whole run of the agents, and all that is to be compared of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from easyrl.build.recipe import group_functions
from easyrl.config.file import load_config
from easyrl.ledger.journal.reading import read_batch
from easyrl.schema import Completion, MicroBatch, RolloutGroup
from tests.end_to_end.exactness import agents
from tests.end_to_end.exactness.agents import Behaviour
from tests.end_to_end.exactness.endpoint_log import LoggedTurn, RecordingProxy, recorded_turns
from tests.end_to_end.exactness.model import QUESTIONS
from tests.end_to_end.trainer_run import run_trainer, trainer_command

STEPS, SAMPLES = 2, 2
LENGTH = ["--max-model-len", "1024"]  # options of a server
# Numbers of the turns that turns continue, in the order in which they were asked for.
TREES: dict[Behaviour, list[int | None]] = {
    "retokenised": [None, 0, None, None, None, 4, None],
    "compacted": [None, 0, None, 2],
    "reasoned": [None, 0, 1],
    "as_template": [None, None, 1],
    "tools": [None, 0],
    "sub_agent": [None, None, 0, 1, 2],  # of two at a time in any order
    "forked": [None, 0, 0],
    "retried": [None, None, 1],
    "hung_up": [None, None, None, None],
    "streamed": [None, 0],
    "stopped": [None, 0, 1],
}
NUM_TURNS = STEPS * SAMPLES * sum(map(len, TREES.values()))


@dataclass(frozen=True)
class PlayedRun:
    """A run that has ended, and what its endpoints were asked for."""

    folder: Path
    server: str
    tokenizer: PreTrainedTokenizerBase
    log: list[LoggedTurn]
    groups: list[RolloutGroup]  # from the journal
    said: str  # what was printed

    @property
    def recorded(self) -> list[LoggedTurn]:
        """All turns of the journal."""
        return turns_of(self.groups)

    def episodes(self, behaviour: Behaviour) -> list[Completion]:
        number = list(QUESTIONS).index(behaviour)
        return [
            completion
            for group in self.groups
            if group.prompt.index % len(QUESTIONS) == number
            for completion in group.completions
        ]

    def rows(self, groups: Sequence[RolloutGroup] | None = None) -> list[MicroBatch]:
        """As the trainer packs the journal's groups, or these."""
        functions = group_functions(load_config(self.folder / "config.yaml"))
        return functions.pack(functions.trained(self.groups if groups is None else groups, (), ()))


def turns_of(groups: Sequence[RolloutGroup]) -> list[LoggedTurn]:
    return [turn for g in groups for c in g.completions for turn in recorded_turns(c)]


def played(
    folder: Path, server: str, model: Path, proxies: Sequence[RecordingProxy], *options: str
) -> PlayedRun:
    """A run in ``folder`` with ``proxies`` as its endpoints; ``model``: from ``write_model``."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    for proxy in proxies:
        proxy.slow = tokenizer.encode(QUESTIONS["hung_up"], add_special_tokens=False)
    prompts = write_records(folder / "prompts.jsonl", model / "tokenizer.json")
    urls = [proxy.url for proxy in proxies]
    command = trainer_command(folder / "run", model, prompts, urls, *own_options(), *options)
    said = run_trainer(command, timeout_s=400.0)
    groups = [g for v in range(STEPS) for g in read_batch(folder / "run" / "journal", v)]
    log = [turn for proxy in proxies for turn in proxy.log]
    return PlayedRun(folder / "run", server, tokenizer, log, groups, said)


def write_records(path: Path, tokenizer: Path) -> Path:
    """Each behaviour once for each step."""
    environments = {"retokenised": "ids", "as_template": "as_template"}
    records = [
        {
            "prompt": question,
            "answer": "-",
            "behaviour": behaviour,
            "environment": environments.get(behaviour, "agents"),
            "tokenizer": str(tokenizer),
        }
        for _ in range(STEPS)
        for behaviour, question in QUESTIONS.items()
    ]
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return path


def own_options() -> list[str]:
    file = agents.__file__
    environments = [
        f"{{name: agents, file: {file}}}",
        f"{{name: as_template, file: {file}, history: as_template}}",
        f"{{name: ids, file: {file}, function: retokenised}}",
    ]
    return [
        "rewards=[]",
        f"environments=[{', '.join(environments)}]",
        "data.max_prompt_tokens=64",
        *(f"trainer.batch_size={len(QUESTIONS)}", f"trainer.max_steps={STEPS}"),
        *(f"rollout.num_generations={SAMPLES}", "rollout.max_tokens=160"),
        "rollout.temperature=0.7",
        # what these sample is not trained
        *("weight_sync.probe=false", "weight_sync.canary=false"),
        "journal.keep=all",
    ]
