"""``make demo``: builds a small model, serves it, trains it with GRPO, and measures what it learnt.

``--config`` names another run on the same task: ``configs/recipes`` has one for each recipe.
``--engine vllm`` serves it with real vLLM, whose environment's interpreter is named by the
environment variable EASYRL_VLLM_PYTHON. ``--parallel tp2pp2`` splits it over four processes. The
last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast, get_args

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from easyrl.config import Config, ConfigError
from easyrl.config.file import load_config
from easyrl.demo.build_model import build_model
from easyrl.demo.build_teacher import build_teacher
from easyrl.demo.layouts import NamedLayout, named_layout
from easyrl.demo.servers import SERVER_KEY, Engine, divided_cores, start_server, vllm_python
from easyrl.demo.task import END_THINK, write_splits
from easyrl.inference_client.api_keys import new_api_key
from easyrl.inference_client.servers.managed.server_process import ServerStartError
from easyrl.metrics.trackers import read_metrics
from easyrl.one_machine.launched_trainer import LaunchedTrainer
from easyrl.recipes.loading import load_recipe
from easyrl.runtime.machine import pin_process
from easyrl.runtime.run_files import LOCK_FILE
from easyrl.runtime.run_folder import locked_folder

CONFIG = "configs/demo.yaml"
PROOF_TIMES = ("time/proof_s", "time/canary_s", "time/probe_s")  # of what the endpoints serve
CERTIFICATE_TIMES = ("time/certificate_s", "time/journal_s")
SAMPLES_TIMES = ("time/samples_s",)
ACCURACY_BATCH_SIZE = 250


def main() -> int:
    arguments = _parse()
    run_dir: Path = arguments.run_dir
    # in order with the trainer's lines, in a log too
    cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    data = run_dir / "data"
    own = {
        "run.output_dir": run_dir,
        "model.path": run_dir / "base_model",
        "data.files": f"[{data / 'train.jsonl'}]",
        "evaluation.data.files": f"[{data / 'heldout.jsonl'}]",
    }
    overrides = [*(f"{key}={value}" for key, value in own.items())]
    own_keys = (*own, "inference.endpoints", "inference.api_key_env", "checkpoint.export_at_end")
    try:
        if arguments.parallel is not None:
            overrides += named_layout(arguments.parallel).overrides
        overrides += arguments.overrides
        for override in arguments.overrides:
            if override.startswith(tuple(f"{key}=" for key in own_keys)):
                raise ValueError(f"{override}: the demo sets this key itself")
        if arguments.engine == "vllm":
            vllm_python()  # before the minute of the warm start
        config = load_config(arguments.config, overrides)
        teacher = _own_teacher(config, arguments)
        if teacher is not None:
            overrides.append(f"recipe.teacher={teacher}")
    except ValueError as error:  # ConfigError is one
        print(f"easyrl demo: {error}", file=sys.stderr)
        return 2
    disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: servers and trainer end too
    with ExitStack() as held:
        try:
            model, heldout = _set_up(config, run_dir, held)
            if teacher is not None:
                _build_teacher(teacher, config.run.seed)
        except ConfigError as error:
            print(f"easyrl demo: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("easyrl demo: interrupted before training began", file=sys.stderr)
            return 130
        return _measure(config, model, teacher, heldout, overrides, arguments, held)


def _measure(
    config: Config,
    model: Path,
    teacher: Path | None,
    heldout: Path,
    overrides: list[str],
    arguments: argparse.Namespace,
    held: ExitStack,
) -> int:
    """Trains, and says what the model learnt by it."""
    run_dir = config.run.output_dir
    start = time.monotonic()
    num_heldout = len(heldout.read_text().splitlines())
    print(f"measuring the starting model on {num_heldout} held-out problems")
    sampling = {"seed": config.run.seed, "max_tokens": config.rollout.max_tokens}
    before = held_out_accuracy(model, heldout, **sampling)
    print(f"accuracy before: {before:.3f}")
    measured = {"accuracy_before": round(before, 4)}
    if teacher is not None:
        its = held_out_accuracy(teacher, heldout, **sampling)
        print(f"accuracy of the teacher: {its:.3f}")
        measured["accuracy_of_teacher"] = round(its, 4)
    _train(run_dir, model, overrides, arguments, config.trainer.grace_s, held)
    after = held_out_accuracy(run_dir / "model", heldout, **sampling)
    seconds = time.monotonic() - start

    def share(times: Sequence[str]) -> float:
        """Of the whole run, what ``times`` held the trainer up."""
        return round(sum(m.get(key, 0.0) for m in metrics for key in times) / seconds, 4)

    metrics = read_metrics(run_dir / "metrics.jsonl")
    steps = [m for m in metrics if "time/step_s" in m]
    rates = sorted(m["throughput/tokens_per_s_per_device"] for m in steps)
    result = {
        "engine": arguments.engine,
        **measured,
        "accuracy_after": round(after, 4),
        "seconds": round(seconds, 1),
        "steps": len(steps),
        "groups_drawn": int(sum(m["batch/groups_drawn"] for m in steps)),
        "groups_accepted": int(sum(m["batch/groups"] for m in steps)),
        "tokens_per_s_per_device": round(rates[len(rates) // 2], 1),
        "proof_share": share(PROOF_TIMES),
        "certificate_share": share(CERTIFICATE_TIMES),
        "samples_share": share(SAMPLES_TIMES),
        "run_dir": str(run_dir),
    }
    accuracies = f"{before:.3f} before, {after:.3f} after {len(steps)} steps"
    print(f"accuracy on held-out problems: {accuracies}")
    print(f"reward curve: {run_dir / 'reward.png'}; model: {run_dir / 'model'}")
    print(json.dumps(result))
    return 0


def _set_up(config: Config, run_dir: Path, held: ExitStack) -> tuple[Path, Path]:
    """A fresh run folder with the problems and the warm-started model, locked by ``held``.

    What an earlier demo has left there is moved beside it. Raises ``ConfigError`` if it holds
    something else, or another process uses it; then it is left as it was.
    """
    if run_dir.exists():
        left = {path.name for path in run_dir.iterdir()} - {LOCK_FILE}
        # one that was interrupted in its warm start has problems, and no model yet
        if left and not (run_dir / "base_model").is_dir() and left != {"data"}:
            raise ConfigError(
                f"{run_dir} holds something else; give another folder: make demo RUN=DIR, or "
                "--run-dir DIR"
            )
    run_dir.mkdir(parents=True, exist_ok=True)
    held.enter_context(locked_folder(run_dir, 0))
    earlier = [path for path in run_dir.iterdir() if path.name != LOCK_FILE]
    if earlier:
        aside = _free_name(run_dir)
        aside.mkdir()
        for path in earlier:
            shutil.move(path, aside)
        print(f"what an earlier demo has left in {run_dir} is now in {aside}")
    _, heldout = write_splits(run_dir / "data", seed=config.run.seed)
    print("warm start: a small Qwen3 sees estimates, careless and careful additions")
    start = time.monotonic()
    model = run_dir / "base_model"
    build_model(model, seed=config.run.seed)
    print(f"warm start took {time.monotonic() - start:.0f} s")
    return model, heldout


def _own_teacher(config: Config, arguments: argparse.Namespace) -> Path | None:
    """Where the demo makes a teacher: none if the recipe needs none, or another one was named."""
    is_named = any(each.startswith("recipe.teacher=") for each in arguments.overrides)
    if load_recipe(config).needs.teacher is None or is_named:
        return None
    run_dir: Path = arguments.run_dir
    return run_dir / "teacher"


def _build_teacher(folder: Path, seed: int) -> None:
    print("teacher: a larger Llama sees careful additions alone")
    start = time.monotonic()
    build_teacher(folder, seed=seed)
    print(f"the teacher took {time.monotonic() - start:.0f} s")


def _free_name(folder: Path) -> Path:
    """``folder`` with the first number behind it that no folder has."""
    numbers = itertools.count(1)
    return next(
        free for n in numbers if not (free := folder.with_name(f"{folder.name}-{n}")).exists()
    )


@torch.no_grad()
def held_out_accuracy(model_dir: Path, heldout: Path, seed: int, max_tokens: int) -> float:
    """Share of ``heldout``'s problems answered right by one response sampled at temperature 1.

    With plain ``transformers`` and nothing of EasyRL's own. Sampled, not greedy: the reward is an
    expectation under sampling, and greedy decoding would show a policy that merely got sharper as
    one that got better.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True)
    model.eval()
    records = [json.loads(line) for line in heldout.read_text().splitlines()]
    torch.manual_seed(seed)
    correct = 0
    for start in range(0, len(records), ACCURACY_BATCH_SIZE):
        batch = records[start : start + ACCURACY_BATCH_SIZE]
        inputs: Any = tokenizer.apply_chat_template(
            [[{"role": "user", "content": record["prompt"]}] for record in batch],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_tokens,
        )
        responses = output[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        correct += sum(
            text.rpartition(END_THINK)[2].strip() == record["answer"]
            for text, record in zip(texts, batch, strict=True)
        )
    return correct / len(records)


def _train(
    run_dir: Path,
    model: Path,
    overrides: list[str],
    arguments: argparse.Namespace,
    grace_s: float,
    held: ExitStack,
) -> None:
    """Servers as processes of their own, then the trainer through the ``deepspeed`` launcher.

    It locks the run's folder itself: what is ``held`` of it is given up then.
    """
    engine: Engine = arguments.engine
    layout = named_layout(arguments.parallel) if arguments.parallel else NamedLayout()
    with ExitStack() as servers:
        urls, api_key = [], new_api_key()
        cores = servers.enter_context(divided_cores(engine, run_dir))
        for number in range(arguments.num_servers):
            log = run_dir / f"server-{number}.log"
            try:
                server = start_server(engine, model, cores, api_key, log)
            except (ValueError, ServerStartError) as error:
                sys.exit(f"easyrl demo: {error}")
            urls.append(servers.enter_context(server).url)
        print(f"{arguments.num_servers} {engine} server(s): {', '.join(urls)}")
        command = [
            str(arguments.config),
            *(f"inference.endpoints=[{','.join(urls)}]", f"inference.api_key_env={SERVER_KEY}"),
            *overrides,
        ]
        held.close()
        with LaunchedTrainer(
            command,
            layout.num_processes,
            grace_s=grace_s,
            environment={SERVER_KEY: api_key, **cores.environment},
        ) as trainer:
            if cores.of_trainer is not None:
                pin_process(trainer.process.pid, cores.of_trainer)
            status = trainer.wait()
    if status != 0:
        sys.exit(f"easyrl demo: the trainer ended with status {status}; see above")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="easyrl.demo", description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(CONFIG))
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("--engine", choices=get_args(Engine), default="embedded")
    parser.add_argument("--num-servers", type=int, default=1)
    parser.add_argument("--parallel", metavar="LAYOUT", help="tp2pp2, tp2dp2, … default: 1 process")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    sys.exit(main())
