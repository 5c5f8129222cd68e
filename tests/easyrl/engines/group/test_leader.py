"""A head and its followers, real processes over gloo, with an engine that notes its calls."""

import asyncio
import os
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from blake3 import blake3

from easyrl.config import WeightSyncConfig
from easyrl.engines.base import MetricSums, NonFiniteLossError, StateFile, StatePiece, StepResult
from easyrl.engines.group.calls import END
from easyrl.engines.group.channel import GroupChannel, GroupLost
from easyrl.engines.group.follower import Follower
from easyrl.engines.group.leader import GroupLeader
from easyrl.engines.state_file import EngineState, StateReader
from easyrl.inference_client.transfer.artifact import bytes_of
from easyrl.runtime import shared_folder
from easyrl.runtime.machine import free_port
from easyrl.runtime.model_spans import ModelSpans
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.shared_folder import marked
from easyrl.schema import FrozenLogprobs
from easyrl.weight_sync.shares import ShareWriter
from easyrl.weight_sync.store import WeightStore
from tests.easyrl.engines.group.test_codec import row
from tests.waiting import wait_until

SIZE, TELLER = 3, 2
SLOW_S = 0.5  # that a slow teller works on a call


@dataclass
class NotingEngine:
    """Says of each call what only the teller may be asked for."""

    rank: int
    calls: list = field(default_factory=list)
    refuses: bool = False
    dies: bool = False
    is_slow: bool = False

    def __post_init__(self):
        self.ranks = Ranks(self.rank, SIZE, 0, 1, self.rank == 0, (0,))
        self.device, self.lockstep, self.can_look_ahead = torch.device("cpu"), False, True
        self.has_frozen_models = True
        self.spans = ModelSpans()

    def _note(self, *call):
        self.calls.append(call)

    def set_controls(self, controls):
        self._note("set_controls", dict(controls))

    def begin_batch(self):
        self._note("begin_batch")

    def prepare(self, rows):
        return rows

    def forward_backward(self, rows):
        self._note("forward_backward", len(rows), rows[0].sequences)
        if self.is_slow and self.rank == TELLER:
            time.sleep(SLOW_S)
        if self.rank == TELLER and len(rows) == 3:
            raise NonFiniteLossError("row 2 is infinite")
        return [MetricSums({"rank": float(self.rank), "rows": float(len(rows))}) for _ in rows]

    def finish_backwards(self):
        self._note("finish_backwards")
        return []

    def optimizer_step(self, denominator, value_denominator=0.0):
        self._note("optimizer_step", denominator, value_denominator)
        return StepResult(float(self.rank), 1e-3, False)

    def discard_gradients(self):
        self._note("discard_gradients")

    def frozen_logprobs(self, row):
        return FrozenLogprobs(torch.full((2,), float(self.rank)), None)

    def evaluate(self, row):
        return MetricSums({"rank": float(self.rank)})

    def logprobs(self, row):
        return torch.full((2,), float(self.rank)) if self.rank == TELLER else None

    def named_weights(self, kind="full"):
        self._note("named_weights", kind)
        for name in ("a", "b"):
            shared = torch.tensor([float(self.rank)])
            dist.all_reduce(shared)  # as gathering is: all have to iterate
            yield name, shared

    @contextmanager
    def perturbed_weights(self, kind="full"):
        self._note("perturbed")
        yield
        self._note("restored")

    def stage_weights(self):
        self._note("stage_weights")
        for number in range(3):
            if self.dies and self.rank == 2 and number == 2:
                os._exit(0)  # in the middle of a push
            yield f"{self.rank}.{number}", torch.full((2**14,), float(self.rank))

    def snapshot(self):
        time.sleep(0.5 * (self.rank > 0))  # the head may ask for it before it is there
        return EngineState([StatePiece(f"of {self.rank}", 0, torch.ones(4) * self.rank)], {})

    def restore(self, saved):
        if self.refuses and self.rank == 1:
            raise ValueError("it does not fit rank 1")
        self._note("restore", float(saved.read(f"of {self.rank}", 0, 1)), saved.description)


def process(rank, port, folder, scenario, results):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE
    )
    shared_folder.VISIBLE_S = 0.2
    calls, files = GroupChannel(range(SIZE)), GroupChannel(range(SIZE))
    engine = NotingEngine(
        rank, refuses=scenario == "refuses", dies=scenario == "dies", is_slow=scenario == "slow"
    )
    if rank > 0:
        # rank 1 shares its stage with the head, rank 2 writes one of its own
        write_share = partial(ShareWriter().write, 1) if rank == 2 else None
        follower = Follower(engine, calls, files, TELLER, write_share)
        with suppress(GroupLost) if engine.dies else nullcontext():
            follower.serve()
        results[rank] = engine.calls
    else:
        under_way = 2 if engine.is_slow else 0
        leader = GroupLeader(engine, calls, files, TELLER, (0, 2), under_way)
        results["head"] = SCENARIOS[scenario](leader, Path(folder))
        files.tell_last(None)
        calls.tell_last((END, ()))
        results[rank] = engine.calls
    if engine.dies:
        os._exit(0)  # a group that is broken is not left in order
    dist.destroy_process_group()


def a_batch(leader, folder):
    """Every call of a batch."""
    leader.set_controls({"entropy": 0.5})
    leader.begin_batch()
    said = SimpleNamespace()
    said.metrics = [each.sums["rank"] for each in leader.forward_backward([row(), row()])]
    try:
        leader.forward_backward([row()] * 3)
    except NonFiniteLossError as error:
        said.problem = str(error)
    said.norm = leader.optimizer_step(7.0).grad_norm
    leader.discard_gradients()
    said.reference = leader.frozen_logprobs(row()).reference.tolist()
    said.evaluated = leader.evaluate(row()).sums["rank"]
    said.logprobs = leader.logprobs(row()).tolist()
    with leader.perturbed_weights():
        said.weights = [(name, float(values)) for name, values in leader.named_weights()]
    return vars(said)


def a_slow_teller(leader, folder):
    """Rows go on while it is at work on those before; what it says is not lost to other calls."""
    start = time.monotonic()
    told = [leader.forward_backward([row()] * number) for number in (1, 2)]
    seconds = time.monotonic() - start
    told.append(leader.forward_backward([row()]))
    logprobs = leader.logprobs(row()).tolist()
    told.append(leader.finish_backwards())
    leader.forward_backward([row()] * 3)  # infinite
    told.append(leader.forward_backward([row()]))
    with pytest.raises(NonFiniteLossError, match="row 2 is infinite"):
        leader.finish_backwards()
    told.append(leader.finish_backwards())
    rows = [[each.sums["rows"] for each in metrics] for metrics in told]
    ranks = {each.sums["rank"] for metrics in told for each in metrics}
    return SimpleNamespace(
        rows=rows, ranks=ranks, logprobs=logprobs, waited=seconds > SLOW_S
    ).__dict__


def a_folder(leader, folder):
    """That the others share, and one that they do not."""
    with marked(folder) as mark:
        return leader.group_sees(mark), leader.group_sees(folder / "missing" / mark.name)


def a_checkpoint(leader, folder):
    snapshot = leader.snapshot()
    leader.begin_batch()  # training goes on before it is written
    files = snapshot.write(folder, "rank-00000-of-00001")
    reader = StateReader([folder / file.name for file in files], {"engine": "noting"})
    leader.restore(reader)
    reader.close()
    return sorted(file.name for file in files), all(isinstance(f, StateFile) for f in files)


def a_full_disk(leader, folder):
    snapshot = leader.snapshot()
    with pytest.raises(OSError) as error:
        snapshot.write(folder / "missing", "rank")
    return str(error.value), len(leader.snapshot().write(folder, "again"))


def shares(leader, folder):
    """Of a version that is pushed."""
    config = WeightSyncConfig(directory=folder, chunk_bytes=2**16)
    store, target = WeightStore(config, "run"), None
    loop = asyncio.new_event_loop()
    try:
        target = store.begin("run:0:1")
        store.write_shares(target, leader, loop)
        loop.run_until_complete(target.completed())
        whole = {
            f"{rank}.{number}": torch.full((2**14,), float(rank))
            for rank in (0, 2)
            for number in range(3)
        }
        expected = {
            name: blake3(bytes_of(weight).data).hexdigest() for name, weight in whole.items()
        }
        found = {name: value for chunk in target.chunks for name, value in chunk.checksums.items()}
        files = [chunk.file for chunk in target.chunks]
        damage = loop.run_until_complete(target.damage())
        return found == expected, len(files) == len(set(files)), damage
    finally:
        store.close()
        loop.close()


def a_writer_dies(leader, folder):
    """What is left of the version that was on its way."""
    store = WeightStore(WeightSyncConfig(directory=folder, chunk_bytes=2**16), "run")
    loop = asyncio.new_event_loop()
    target = store.begin("run:0:1")
    try:
        store.write_shares(target, leader, loop)
    except GroupLost as error:
        loop.run_until_complete(asyncio.sleep(0))
        left = [path.name for path in folder.rglob("manifest.json")]
        whole = asyncio.wait_for(target.completed(), 0.2)
        try:
            loop.run_until_complete(whole)
        except TimeoutError:  # no endpoint is asked for a proof of it: none is stamped with it
            return type(error).__name__, left, "never whole"
    finally:
        store.close()
        loop.close()
    return "nothing was raised"


def refused(leader, folder):
    files = leader.snapshot().write(folder, "rank")
    reader = StateReader([folder / file.name for file in files], {})
    with pytest.raises(ValueError) as error:
        leader.restore(reader)
    reader.close()
    return str(error.value)


SCENARIOS = {
    "a_batch": a_batch,
    "slow": a_slow_teller,
    "sees": a_folder,
    "a_checkpoint": a_checkpoint,
    "a_full_disk": a_full_disk,
    "refuses": refused,
    "shares": shares,
    "dies": a_writer_dies,
}


def run(scenario, folder):
    with multiprocessing.Manager() as manager:
        results = manager.dict()
        multiprocessing.spawn(
            process, (free_port(), str(folder), scenario, results), nprocs=SIZE, join=True
        )
        return dict(results)


def test_all_processes_make_the_calls_and_the_teller_is_heard(tmp_path):
    said = run("a_batch", tmp_path)
    assert said["head"] == {
        "metrics": [float(TELLER)] * 2,
        "problem": "row 2 is infinite",
        "norm": 0.0,  # a step is the same on all
        "reference": [float(TELLER)] * 2,
        "evaluated": float(TELLER),
        "logprobs": [float(TELLER)] * 2,
        "weights": [("a", 3.0), ("b", 3.0)],
    }
    assert said[0] == said[1] == said[2]
    names = [call[0] for call in said[0]]
    assert names.count("forward_backward") == 2 and names[-2:] == ["named_weights", "restored"]


@pytest.mark.runs
def test_calls_go_on_while_the_teller_is_at_work(tmp_path):
    said = run("slow", tmp_path)
    assert said["head"] == {
        "rows": [[], [], [1.0], [2.0, 2.0, 1.0], [], []],
        "ranks": {float(TELLER)},
        "logprobs": [float(TELLER)] * 2,
        "waited": False,
    }
    assert said[0] == said[1] == said[2]


@pytest.mark.runs
def test_processes_say_whether_they_share_a_folder(tmp_path):
    assert run("sees", tmp_path)["head"] == (True, False)


@pytest.mark.runs
def test_a_checkpoint_has_a_file_of_each_process(tmp_path):
    said = run("a_checkpoint", tmp_path)
    names, are_files = said["head"]
    assert len(names) == len(set(names)) == SIZE and are_files
    for rank in range(SIZE):
        assert said[rank][-1] == ("restore", float(rank), {"engine": "noting"})


@pytest.mark.runs
def test_what_a_follower_cannot_write_is_raised_and_the_next_is_written(tmp_path):
    problem, num_files = run("a_full_disk", tmp_path)["head"]
    assert "missing" in problem and num_files == SIZE


@pytest.mark.runs
def test_each_stage_writes_its_weights_and_the_head_merges_the_lists(tmp_path):
    said = run("shares", tmp_path)
    assert said["head"] == (True, True, None)
    assert [said[rank] for rank in range(SIZE)] == [[("stage_weights",)]] * SIZE


@pytest.mark.runs
def test_a_writer_that_dies_in_a_push_leaves_no_version(tmp_path):
    assert run("dies", tmp_path)["head"] == ("GroupLost", [], "never whole")


@pytest.mark.runs
def test_what_a_follower_refuses_is_raised_on_the_head(tmp_path):
    assert run("refuses", tmp_path)["head"] == "it does not fit rank 1"


def killed_head(rank, port, results):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    calls, files = GroupChannel(range(2)), GroupChannel(range(2))
    results[rank] = "has its channels"
    if rank == 0:
        wait_until(lambda: 1 in results)  # it needs this one's store for them
        calls.tell(("begin_batch", ()))
        import os

        os._exit(0)
    try:
        Follower(NotingEngine(1), calls, files, 1).serve()
    except GroupLost as error:
        results["follower"] = f"{type(error).__name__}: {error}"
    import os

    os._exit(0)


def test_a_follower_notices_that_its_head_is_gone():
    with multiprocessing.Manager() as manager:
        results = manager.dict()
        multiprocessing.spawn(killed_head, (free_port(), results), nprocs=2, join=True)
        assert results["follower"].startswith("GroupLost")
