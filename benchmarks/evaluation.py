"""What an evaluation beside its batch costs: time that it adds to a run, before and now.

``python -m benchmarks.evaluation [--base REV] [--repeats 3] [--quick] [--shares 0 0.125 1]``

Both checkouts train the same random model with the same settings, in turn; every second step is
evaluated on held-out prompts. Generation is by an endpoint that sleeps instead of computing, as
servers on devices of their own do, and takes about half as long as training, so that it idles for
the rest of each batch. In *fits* that idle time suffices for the evaluation, in *exceeds* it does
not. A batch's time is that between the first request of it and of the next; added is what the
batches with an evaluation take longer than those without (medians of all repeats). The bound is
what no schedule can beat: the evaluation alone, as the base shows it, less the inference's idle
time in a batch without one. ``in_tail`` is the share of the evaluation's responses, in the present
code, that were asked for before the batch had its last one: where it is 0, nothing is measured of
an evaluation beside open groups. The last line printed is one JSON object. Its verdicts, null where
they ask for nothing: ``within_allowed``, added is at most 1.15 of the bound (``allowed_s``), where
the idle time does not suffice; ``within_before``, it is at most 0.2 of before, where it does.

With ``--shares`` the endpoint is an embedded server that computes, with one thread, and lengths are
those of a random model's end tokens. The present code alone is run, with each of these shares of
the endpoint's places for a batch and the evaluation beside it (``easyrl.build.evaluation.SHARE``):
0 waits until the batch is decided, else there is room for a group and a prompt at least.
``to_decided_s`` is from a batch's first request to its last
decided group.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.parts.overlap.endpoint import SleepingEndpoint
from benchmarks.parts.random_model import write_prompts, write_random_model
from benchmarks.parts.same_as_before.settings import present_form
from benchmarks.parts.same_as_before.side import Failed, Side, tail
from benchmarks.parts.worktree import BASE, ROOT, worktree
from easyrl.demo.build_model import build_tokenizer
from easyrl.metrics.event_log import read_events
from easyrl.metrics.trackers import read_metrics
from easyrl.timeline.reading import read_spans
from easyrl.timeline.spans import EVALUATION, REQUEST, Span

CONFIG = ROOT / "benchmarks" / "overlap.yaml"
BATCH, NUM_GENERATIONS, PROMPT_TOKENS = 8, 8, 32
# as many in flight as an endpoint takes by default: with few, an eighth of them is nothing
SECONDS_PER_TOKEN, MAX_INFLIGHT = 4e-2, 256
NUM_PROMPTS = {"fits": 32, "exceeds": 1024}  # held out
EVERY = 2  # steps
OF_BOUND, OF_BEFORE = 1.15, 0.2  # that an evaluation may add
RUN_TIMEOUT_S = 1800.0
SERVED_BATCH, SERVED_PROMPTS = 16, 128  # with ``--shares``; held-out prompts
TRAIN_WITH_SHARE = (
    "import runpy; from easyrl.build import evaluation;"
    " evaluation.SHARE, evaluation.FEWEST = {share}, {fewest};"
    " runpy.run_module('easyrl.train', run_name='__main__')"
)


@dataclass(frozen=True)
class Batches:
    """Seconds from one batch's first request to the next one's, and what inference idled."""

    evaluated: list[float]
    others: list[float]
    idle: list[float]  # of the others
    # of the evaluated: until every group was decided
    decided: list[float] = field(default_factory=list)
    # ... the share of the evaluation's responses that were asked for before the batch's last came
    in_tail: list[float] = field(default_factory=list)

    def __add__(self, more: Batches) -> Batches:
        return Batches(
            self.evaluated + more.evaluated,
            self.others + more.others,
            self.idle + more.idle,
            self.decided + more.decided,
            self.in_tail + more.in_tail,
        )

    @property
    def added(self) -> float:
        return statistics.median(self.evaluated) - statistics.median(self.others)


def main() -> int:
    arguments = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # endpoint and worktree go first
    if arguments.shares:
        return compare_shares(arguments)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="evaluation-")))
        tokenizer = build_tokenizer()
        endpoint = opened.enter_context(SleepingEndpoint(len(tokenizer), tokenizer.eos_token_id))
        endpoint.seconds_per_token = SECONDS_PER_TOKEN
        write_random_model(folder / "model", hidden_size=256, num_layers=4)
        try:
            base = arguments.base_dir or opened.enter_context(
                worktree(arguments.base, folder / "checkout")
            )
            sides = {"before": base.resolve(), "now": ROOT}
            rows = [measure(name, sides, folder, endpoint, arguments) for name in arguments.cases]
        except Failed as error:
            print(f"evaluation: {error}", file=sys.stderr)
            return 1
    print(json.dumps({"rows": rows}))
    return 0


def compare_shares(arguments: argparse.Namespace) -> int:
    """The present code with each share in turn, on an embedded server."""
    num_batches = 6 if arguments.quick else 12
    found: defaultdict[float, Batches] = defaultdict(lambda: Batches([], [], []))
    with tempfile.TemporaryDirectory(prefix="evaluation-") as temporary:
        folder = Path(temporary)
        write_random_model(folder / "model", hidden_size=256, num_layers=4)
        for repeat in range(arguments.repeats):
            shares = arguments.shares if repeat % 2 == 0 else arguments.shares[::-1]
            for share in shares:
                try:
                    found[share] += run_served(folder / f"{share:g}-{repeat}", share, num_batches)
                except Failed as error:
                    print(f"evaluation: {error}", file=sys.stderr)
                    return 1
                print(f"share {share:g}: an evaluation adds {found[share].added:.2f} s", flush=True)
    rows = [
        {
            "share": share,
            "evaluated_s": round(statistics.median(batches.evaluated), 3),
            "others_s": round(statistics.median(batches.others), 3),
            "added_s": round(batches.added, 3),
            "to_decided_s": round(statistics.median(batches.decided), 3),
            "in_tail": round(statistics.mean(batches.in_tail), 3),
        }
        for share, batches in found.items()
    ]
    print(json.dumps({"rows": rows}))
    return 0


def train_with_share(share: float) -> str:
    """A program that trains so."""
    return TRAIN_WITH_SHARE.format(share=share, fewest=1 if share else 0)


def run_served(run_dir: Path, share: float, num_batches: int) -> Batches:
    """One run on an embedded server of its own. Raises ``Failed``."""
    run_dir.mkdir()
    side = Side(run_dir.name, ROOT, present_form, run_dir)
    prompts = write_prompts(run_dir / "prompts.jsonl", SERVED_BATCH * num_batches, PROMPT_TOKENS)
    held_out = write_prompts(run_dir / "held-out.jsonl", SERVED_PROMPTS, PROMPT_TOKENS, seed=1)
    data = f"files: [{held_out}], apply_chat_template: false, max_prompt_tokens: {PROMPT_TOKENS}"
    command = [
        *(sys.executable, "-c", train_with_share(share), str(CONFIG)),
        *(f"run.output_dir={run_dir / 'run'}", f"model.path={run_dir.parent / 'model'}"),
        *(f"data.files=[{prompts}]", f"data.max_prompt_tokens={PROMPT_TOKENS}"),
        "inference.endpoints=[]",
        "inference.launch={engine: embedded, options: [--num-threads=1]}",
        *(f"trainer.batch_size={SERVED_BATCH}", f"trainer.max_steps={num_batches}"),
        f"rollout.num_generations={NUM_GENERATIONS}",
        "rollout.max_tokens=160",
        f"evaluation={{data: {{{data}}}, sampling: {{max_tokens: 160}}, every_steps: {EVERY},"
        " at_start: false, at_end: false}",
    ]
    log = run_dir / "trainer.log"
    with side.process(command, log) as trainer:
        if status := trainer.wait(RUN_TIMEOUT_S):
            raise Failed(f"{run_dir.name}: exit status {status}\n{tail(log)}")
    return read_batches(run_dir / "run", is_beside=True)


def measure(
    case: str,
    sides: dict[str, Path],
    folder: Path,
    endpoint: SleepingEndpoint,
    arguments: argparse.Namespace,
) -> dict[str, float | str | bool | None]:
    """Both sides in turn; seconds."""
    num_batches = 6 if arguments.quick else 12
    found: defaultdict[str, Batches] = defaultdict(lambda: Batches([], [], []))
    for repeat in range(arguments.repeats):
        order = list(sides.items())
        for name, checkout in order if repeat % 2 == 0 else reversed(order):
            run_dir = folder / f"{case}-{name}-{repeat}"
            batches = run_once(case, name, checkout, run_dir, endpoint.url, num_batches)
            found[name] += batches
            print(f"{case}, {name}: an evaluation adds {batches.added:.2f} s", flush=True)
    alone, idle = found["before"].added, statistics.median(found["now"].idle)
    bound = max(0.0, alone - idle)
    row: dict[str, float | str | bool | None] = {
        "workload": case,
        "before_s": round(alone, 3),
        "added_s": round(found["now"].added, 3),
        "idle_s": round(idle, 3),
        "bound_s": round(bound, 3),
        "of_before": round(found["now"].added / alone, 3),
        "in_tail": round(statistics.mean(found["now"].in_tail), 3),
        **verdicts(found["now"].added, alone, bound),
    }
    print("  " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def verdicts(added_s: float, before_s: float, bound_s: float) -> dict[str, float | bool | None]:
    """Whether an evaluation adds no more than it may; None: not asked where idle time suffices, or
    where it does not."""
    allowed_s = OF_BOUND * bound_s
    suffices = bound_s == 0
    return {
        "allowed_s": round(allowed_s, 3),
        "within_allowed": None if suffices else added_s <= allowed_s,
        "within_before": added_s <= OF_BEFORE * before_s if suffices else None,
    }


def run_once(
    case: str, name: str, checkout: Path, run_dir: Path, url: str, num_batches: int
) -> Batches:
    """One run with the code of ``checkout``. Raises ``Failed``."""
    run_dir.mkdir()
    side = Side(run_dir.name, checkout, present_form, run_dir)
    side.check()
    prompts = write_prompts(run_dir / "prompts.jsonl", BATCH * num_batches, PROMPT_TOKENS)
    held_out = write_prompts(run_dir / "held-out.jsonl", NUM_PROMPTS[case], PROMPT_TOKENS, seed=1)
    tokens = "min_tokens: 32, max_tokens: 64"
    data = f"files: [{held_out}], apply_chat_template: false, max_prompt_tokens: {PROMPT_TOKENS}"
    command = [
        *(sys.executable, "-m", "easyrl.train", str(CONFIG)),
        *(f"run.output_dir={run_dir / 'run'}", f"model.path={run_dir.parent / 'model'}"),
        *(f"data.files=[{prompts}]", f"data.max_prompt_tokens={PROMPT_TOKENS}"),
        *(f"inference.endpoints=[{url}]", f"inference.max_inflight={MAX_INFLIGHT}"),
        *(f"trainer.batch_size={BATCH}", f"trainer.max_steps={num_batches}"),
        "trainer.max_tokens_per_micro_batch=1000",
        *(f"rollout.num_generations={NUM_GENERATIONS}", "rollout.min_tokens=32"),
        *("rollout.max_tokens=64", "rollout.allow_off_policy_sampling=true"),
        *(f"weight_sync.{proof}=false" for proof in ("prove", "probe", "canary")),
        f"evaluation={{data: {{{data}}}, sampling: {{{tokens}}}, every_steps: {EVERY},"
        " at_start: false, at_end: false}",
    ]
    log = run_dir / "trainer.log"
    with side.process(command, log) as trainer:
        if status := trainer.wait(RUN_TIMEOUT_S):
            raise Failed(f"{run_dir.name}: exit status {status}\n{tail(log)}")
    return read_batches(run_dir / "run", is_beside=name == "now")


def read_batches(run_dir: Path, *, is_beside: bool) -> Batches:
    """Of a run whose evaluations were beside the batch of their version, or before it."""
    events = list(read_events(run_dir / "events-rank0.jsonl"))
    starts = [event["t"] for event in events if event["event"] == "batch_dispatched"]
    decided = [event["t"] for event in events if event["event"] == "batch_generated"]
    metrics = {int(m["step"]): m for m in read_metrics(run_dir / "metrics.jsonl")}
    found = Batches([], [], [])
    for step in range(1, len(starts) - 1):  # batch number ``step`` is made by the weights behind it
        evaluated = step if is_beside else step + 1
        seconds = starts[step + 1] - starts[step]
        if evaluated % EVERY == 0:
            found.evaluated.append(seconds)
            found.decided.append(decided[step] - starts[step])
            if is_beside:
                found.in_tail.append(share_in_tail(read_spans(run_dir, step)))
        else:
            found.others.append(seconds)
            found.idle.append(metrics[step + 1]["time/inference_idle_s"])
    return found


def share_in_tail(spans: Sequence[Span]) -> float:
    """Of an evaluation's requests, those that began before the last response of its batch."""
    decided_s = max(span.end_s for span in spans if span.name == REQUEST)
    began = [span.start_s for span in spans if span.name == EVALUATION]
    return sum(start_s < decided_s for start_s in began) / len(began)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time that an evaluation adds.")
    parser.add_argument("--base", default=BASE, metavar="REV", help=f"default: {BASE}")
    parser.add_argument("--base-dir", type=Path, metavar="DIR", help="a checkout of the base")
    parser.add_argument("--cases", nargs="+", choices=NUM_PROMPTS, default=list(NUM_PROMPTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="+", metavar="SHARE")
    parser.add_argument("--quick", action="store_true", help="fewer batches")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
