"""A user's mistake as a record, and the small, good set-up that it is made in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Three times are shorter than by default (docs/benchmarks.md): startup_timeout_s, grace_s and, in
# rewards.py, timeout_s. They end what only waiting can show to be a mistake.
CONFIG = """\
run: {output_dir: {folder}/run, console: false, trackers: []}
model: {path: {model}, dtype: fp32}
data: {files: [{folder}/prompts.jsonl], apply_chat_template: false}
rollout: {num_generations: 2, max_tokens: 8}
inference: {endpoints: ["{url:good}"], startup_timeout_s: 2}
rewards: [{name: exact}]
scoring: {num_workers: 1}
recipe: {name: grpo, kl_coef: 0.0}
trainer: {zero_stage: 0, batch_size: 4, max_steps: 1, grace_s: 1}
checkpoint: {export_at_end: false}
"""
PROMPTS = "".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(8))
TRAIN = ("train", "{folder}/config.yaml")


@dataclass(frozen=True)
class Mistake:
    """One kind of mistake. In all texts ``{folder}``, ``{model}`` and ``{url:NAME}`` stand for the
    kind's own folder, the good model's, and the URL of a server of ``servers``.
    """

    title: str
    location: str | tuple[str, ...]  # where it is: a key, file:line, a path, a URL, an option
    overrides: tuple[str, ...] = ()
    config: str = CONFIG
    files: Mapping[str, str | bytes] = field(default_factory=dict)  # by name, in the kind's folder
    prepare: Callable[[Path], None] | None = None  # called with the kind's folder
    command: tuple[str, ...] = TRAIN  # of ``easyrl``; "python" runs a script
    environment: Mapping[str, str] = field(default_factory=dict)
    status: int = 2  # README.md, Exit statuses: what cannot be used

    @property
    def locations(self) -> tuple[str, ...]:
        return (self.location,) if isinstance(self.location, str) else self.location


SCRIPT = ("python", "{folder}/script.py")


def script(body: str) -> dict[str, str]:
    """The files of a user's script, with a reward ``length`` in a file of its own."""
    reward = "def length(prompt, texts, token_ids):\n    return [float(len(t)) for t in texts]\n"
    head = "import sys\nsys.path.insert(0, '{folder}')\nfrom easyrl import train_policy\n"
    guard = "if __name__ == '__main__':\n    try:\n"
    end = "    except ValueError as error:\n        sys.exit(f'easyrl: {error}')\n"
    source = head + "from lengths import length\n" + guard + f"        {body}\n" + end
    return {"script.py": source, "lengths.py": reward}


@dataclass(frozen=True)
class Scene:
    """What the placeholders stand for."""

    folder: Path
    model: Path
    urls: Mapping[str, str]

    def fill(self, text: str) -> str:
        text = text.replace("{folder}", str(self.folder)).replace("{model}", str(self.model))
        for name, url in self.urls.items():
            text = text.replace(f"{{url:{name}}}", url)
        return text

    def set_up(self, mistake: Mistake) -> list[str]:
        """Writes the files of ``mistake``; its command line."""
        self.folder.mkdir(parents=True)
        files = {"config.yaml": mistake.config, "prompts.jsonl": PROMPTS} | dict(mistake.files)
        for name, content in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                content = self.fill(content).encode()
            path.write_bytes(content)
        if mistake.prepare is not None:
            mistake.prepare(self.folder)
        return [self.fill(word) for word in (*mistake.command, *mistake.overrides)]
