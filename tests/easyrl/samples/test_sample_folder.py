"""Samples on disk: what is written is read back, bounded, and whole whatever kills the run."""

import gzip
import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from easyrl.build.samples import open_samples
from easyrl.config.samples import SamplesConfig
from easyrl.engines.base import ResponseDifference, StepResult
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.schedule import Due
from easyrl.samples.console import ConsoleSample
from easyrl.samples.folder import SampleFolder
from easyrl.samples.table import COLUMNS, SampleTable
from easyrl.samples.writer import SampleWriter
from easyrl.schema import Progress, SampleKey
from tests.easyrl.samples.sample_groups import sampled, trained, update_of

ROOT = Path(__file__).resolve().parents[3]
GOOD = StepResult(1.0, 1e-3, skipped=False)


def written(folder: SampleFolder) -> dict[int, list[int]]:
    """Prompts by step."""
    return {step: [group.index for group in folder.read(step)] for step in folder.steps()}


def test_what_is_written_is_read_back(tmp_path):
    folder = SampleFolder(tmp_path)
    update = update_of(
        trained(3, [0.0, 1.0], [-1.0, [0.5, 1.0, 1.5]], cut_off=[1], answer="42", location="a:7"),
        trained(1, [0.5, 0.5], [0.0, None], epoch=2),
    )
    update.result = GOOD
    key = SampleKey(0, 3, 1)
    of_tokens = (0.5, -0.123456, 0.373456)
    update.totals.samples.compared[key] = ResponseDifference(key, 3.0, 0.75, of_tokens)
    metrics = SampleWriter(folder, keep=5).close_batch(8, [update])
    assert set(metrics) == {"time/samples_s"} and metrics["time/samples_s"] > 0
    flat, learnt = folder.read(8)
    assert (learnt.step, learnt.epoch, learnt.index, learnt.version) == (8, 0, 3, "run:0:0")
    assert (learnt.answer, learnt.location, learnt.prompt_ids) == ("42", "a:7", [100, 3])
    assert learnt.has_signal and learnt.truncated and not learnt.skipped
    one, other = learnt.responses
    assert one.token_ids == [3, 0, 7] and other.token_ids == [3, 1, 7]
    assert (one.reward, one.advantage, one.advantages, one.truncated) == (0.0, -1.0, None, False)
    assert (other.reward, other.advantage, other.advantages) == (1.0, 1.0, (0.5, 1.5))
    assert other.components == {"exact": 1.0, "format": 1.0} and other.truncated
    assert (one.logprob_diff, other.logprob_diff) == (None, 0.25)
    assert (one.token_logprob_diffs, other.token_logprob_diffs) == ([], [0.5, -0.123, 0.373])
    assert (one.token_advantages, other.token_advantages) == ([], [0.5, 1.0, 1.5])
    assert not flat.has_signal and (flat.epoch, flat.mean_reward) == (2, 0.5)
    assert [response.advantage for response in flat.responses] == [0.0, None]
    assert {flat.why, learnt.why} == {"worst", "drawn"}  # of equal means


def test_a_file_is_plain_json_lines_in_gzip(tmp_path):
    folder = SampleFolder(tmp_path)
    folder.write(1, 0, 1, [sampled(1, 0, [0.5]), sampled(1, 1, [1.0])])
    (file,) = folder.path.iterdir()
    lines = gzip.decompress(file.read_bytes()).splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1]


def test_what_json_has_no_form_for_ends_no_run(tmp_path):
    folder = SampleFolder(tmp_path)
    strange = trained(0, [math.nan], [[math.nan, 1.0, 2.0]], answer="a\ud800", location="b\ud800")
    SampleWriter(folder, keep=1).close_batch(1, [update_of(strange)])
    (group,) = folder.read(1)
    (response,) = group.responses
    assert (group.answer, group.location) == ("a?", "b?")
    assert response.reward is None and response.advantage is None


def test_a_step_whose_update_was_skipped_says_so(tmp_path):
    folder = SampleFolder(tmp_path)
    update = update_of(trained(0, [1.0]))
    assert update.skipped
    SampleWriter(folder, keep=1).close_batch(1, [update])
    assert folder.read(1)[0].skipped


def test_no_more_groups_and_steps_are_kept_than_asked_for(tmp_path):
    folder = SampleFolder(tmp_path)
    writer = SampleWriter(folder, keep=3)
    for batch in range(5):
        updates = [
            update_of(*(trained(10 * batch + i, [i / 5]) for i in range(half, half + 5)), most=2)
            for half in (0, 5)
        ]
        writer.close_batch(2 * batch + 1, updates)
        assert folder.steps() == [s for s in range(1, 2 * batch + 3) if s > 2 * batch - 1]
    assert written(folder) == {8: [35, 39], 9: [40, 44], 10: [45, 49]}


def test_ranks_write_files_of_their_own_and_a_reader_has_them_together(tmp_path):
    folder = SampleFolder(tmp_path)
    for rank, index in enumerate([5, 2]):
        assert not folder.is_whole(1)
        SampleWriter(folder, 3, rank, 2).close_batch(1, [update_of(trained(index, [0.5]))])
    assert folder.is_whole(1) and written(folder) == {1: [2, 5]}


def test_a_batch_that_is_trained_again_replaces_its_samples(tmp_path):
    folder = SampleFolder(tmp_path)
    writer = SampleWriter(folder, keep=9)
    writer.close_batch(1, [update_of(trained(0, [0.0]), trained(1, [1.0]))])
    writer.close_batch(1, [update_of(trained(2, [0.5]))])
    assert written(folder) == {1: [2]}


# ---- resume --------------------------------------------------------------------------------------


def run_of(tmp_path, *, rank=0, **samples):
    return SimpleNamespace(
        config=SimpleNamespace(samples=SamplesConfig(**samples)),
        output=tmp_path,
        ranks=Ranks.data_parallel(rank, 2),
    )


def test_a_resumed_run_drops_what_will_come_again(tmp_path):
    folder = SampleFolder(tmp_path)
    for step in range(1, 6):
        folder.write(step, 0, 1, [sampled(step, step, [1.0])])
    (folder.path / "step-00000006-rank0of1.jsonl.gz.part").write_bytes(b"half")
    assert open_samples(run_of(tmp_path, rank=1), Progress(step=3)) is not None
    assert folder.steps() == [1, 2, 3, 4, 5]  # the first rank removes
    assert open_samples(run_of(tmp_path), Progress(step=3)) is not None
    assert folder.steps() == [1, 2, 3] and len(list(folder.path.iterdir())) == 3


def test_it_drops_them_where_it_keeps_none_itself(tmp_path):
    folder = SampleFolder(tmp_path)
    folder.write(4, 0, 1, [])
    assert open_samples(run_of(tmp_path, per_step=0), Progress(step=3)) is None
    assert folder.steps() == []


# ---- kills and disks -----------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from easyrl.samples.folder import SampleFolder
from easyrl.samples.table import COLUMNS, SampleTable
from easyrl.samples.writer import SampleWriter
from tests.easyrl.samples.sample_groups import trained, update_of

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def half(path, content):
    path.open("wb", buffering=0).write(content[: len(content) // 2])
    killed()

def batch(first):
    return [update_of(trained(first, [0.5])), update_of(trained(first + 1, [0.5]))]

writer = SampleWriter(SampleFolder(Path(sys.argv[1])), keep=9)
writer.close_batch(1, batch(10))
rename, write_bytes, unlink = Path.rename, Path.write_bytes, Path.unlink
of_second = lambda path: "00000002" in path.name
match sys.argv[2]:
    case "in the file":
        Path.write_bytes = lambda p, c: half(p, c) if of_second(p) else write_bytes(p, c)
    case "before its name":
        Path.rename = lambda p, to: killed() if of_second(p) else rename(p, to)
    case "behind it":
        Path.rename = lambda p, to: (rename(p, to), of_second(p) and killed())
writer.close_batch(1, batch(20))
"""


@pytest.mark.parametrize(
    "point, second", [("in the file", 11), ("before its name", 11), ("behind it", 21)]
)
def test_a_kill_leaves_whole_records_and_no_step_twice(tmp_path, caplog, point, second):
    """A batch of two steps is trained again, and the process is killed at its second file."""
    command = [sys.executable, "-c", KILLED, str(tmp_path), point]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    folder = SampleFolder(tmp_path)
    assert written(folder) == {1: [20], 2: [second]}
    assert bool(list(folder.path.glob("*.part"))) == (point != "behind it")
    assert not caplog.records
    open_samples(run_of(tmp_path), Progress(step=0))
    assert list(folder.path.iterdir()) == []


@pytest.mark.parametrize("damage", ["empty", "half", "no gzip", "other json"])
def test_a_damaged_file_is_left_out_and_named(tmp_path, caplog, damage):
    folder = SampleFolder(tmp_path)
    for rank in (0, 1):
        folder.write(1, rank, 2, [sampled(1, rank, [0.5])])
    file = folder.path / "step-00000001-rank0of2.jsonl.gz"
    content = file.read_bytes()
    left = {
        "empty": b"",
        "half": content[: len(content) // 2],
        "no gzip": b"no gzip",
        "other json": gzip.compress(b'{"step": "one"}\n'),
    }
    file.write_bytes(left[damage])
    assert written(folder) == {1: [1]}
    assert f"{file}: cannot be read and is left out" in caplog.text


def test_a_disk_that_takes_nothing_is_told_of_once_and_ends_nothing(tmp_path, caplog):
    (tmp_path / "samples").write_text("a file where the folder should be")
    writer = SampleWriter(SampleFolder(tmp_path), keep=3)
    for step in (1, 2):
        metrics = writer.close_batch(step, [update_of(trained(0, [1.0]))])
        assert metrics["time/samples_s"] > 0
    assert caplog.text.count("samples cannot be written (File exists)") == 1


# ---- console and tables --------------------------------------------------------------------------


def test_the_console_has_a_drawn_group_of_every_so_many_steps(tmp_path):
    folder = SampleFolder(tmp_path)
    for step in range(1, 8):
        worst, drawn = sampled(step, 1, [0.0], why="worst"), sampled(step, 2, [0.5, 1.0])
        folder.write(step, 0, 1, [worst, drawn])
    show = ConsoleSample(folder, lambda ids: f"<{list(ids)}>" + 2000 * "x", Due(3, 0))
    assert [bool(show(step)) for step in (0, 1, 2, 3, 3, 4, 7, 9)] == [
        *(False, False, False, True, False, False, True, False)  # 7: two updates at once; 9: none
    ]
    lines = ConsoleSample(folder, str, Due(1, 0))(1).splitlines()
    assert lines[0].startswith("step 1 | prompt 2 of epoch 0") and lines[1] == "[100, 2]"
    assert lines[2].startswith("response 0 | reward 0.500") and lines[3] == "[2, 0, 7]"
    short = ConsoleSample(folder, lambda ids: 2000 * "x", Due(1, 0))(1)
    assert short.count("x" * 1000 + " ...") == 2 and "x" * 1001 not in short


def test_a_table_has_a_row_for_each_response(tmp_path):
    folder = SampleFolder(tmp_path)
    for step in (1, 2):
        folder.write(step, 0, 1, [sampled(step, 5, [0.25, 0.75], answer="42", why="best")])
    table = SampleTable(folder, lambda ids: f"text of {list(ids)}", Due(2, 0))
    assert table(1) == []
    first, second = (dict(zip(COLUMNS, row, strict=True)) for row in table(2))
    assert first | {"response": 1, "text": "text of [5, 1, 7]", "reward": 0.75} == second
    assert (first["step"], first["prompt"], first["kept as"], first["answer"]) == (
        2,
        5,
        "best",
        "42",
    )
    assert (first["prompt text"], first["reward"]) == ("text of [100, 5]", 0.25)
    assert (first["tokens"], first["truncated"], first["advantage"]) == (3, False, None)
