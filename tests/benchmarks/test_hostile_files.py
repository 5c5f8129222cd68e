"""Every damage to a run's files changes something, and what has to be put back is put back."""

from __future__ import annotations

import json
import random
import stat
from pathlib import Path

import pytest

from benchmarks.parts.hostile.behaviour import FileBehaviour, NotNow
from benchmarks.parts.hostile.catalogue import BEHAVIOURS
from benchmarks.parts.hostile.files import RunFiles

DAMAGES = [behaviour for behaviour in BEHAVIOURS.values() if isinstance(behaviour, FileBehaviour)]


@pytest.fixture
def files(tmp_path) -> RunFiles:
    """Files of the right names; of their content no damage asks more than lines and sizes."""
    run, weights, prompts = (tmp_path / name for name in ("run", "weights", "prompts.jsonl"))
    lines = "".join(json.dumps({"prompt": f"{n:012}", "step": n}) + "\n" for n in range(40))
    contents = {
        run / "journal/batch-000001/attempt0-rank0.journal": "j" * 2000,
        run / "certificate.jsonl": lines,
        run / "metrics.jsonl": lines,
        run / "events-rank0.jsonl": lines,
        run / "attempt.json": '{"run": "run-1", "attempt": 0}',
        run / "endpoints.json": '{"version": 1, "endpoints": []}',
        run / "endpoints_state.json": "{}",
        run / "run.lock": "1 on here\n",
        run / "tensorboard/events.out.tfevents.1": "t" * 100,
        weights / "easyrl-run-1/announcement": "ab" * 32,
        weights / "easyrl-run-1/v-1/chunk-00000.safetensors": "w" * 2000,
        prompts: lines,
    }
    for step in (1, 2):
        contents |= {
            run / f"checkpoints/step-{step}/checkpoint.json": "{}",
            run / f"checkpoints/step-{step}/rank-00000-of-00001.safetensors": "t" * 500,
        }
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return RunFiles(run, weights, prompts)


def state(files: RunFiles) -> dict[str, object]:
    """Every name below the run's places, with its kind and content; sparse ones by their size."""
    found: dict[str, object] = {}
    for path in sorted(files.run_dir.parent.rglob("*")):
        mode, size = path.lstat().st_mode, path.lstat().st_size
        is_small = stat.S_ISREG(mode) and size < 2**22
        found[str(path)] = path.read_bytes() if is_small else (stat.S_IFMT(mode), size % 4096)
    return found


@pytest.mark.parametrize("behaviour", DAMAGES, ids=lambda behaviour: behaviour.name)
def test_it_changes_something_and_is_undone_where_it_has_to_be(behaviour, files):
    before = state(files)
    said = behaviour.damage(files, random.Random(1))
    assert said and state(files) != before
    if behaviour.refused is None:
        return
    assert behaviour.refused in f"{said} data"
    files.put_back()
    assert state(files) == before


@pytest.mark.parametrize("makes_another", [False, True])
@pytest.mark.parametrize("name", ["journal-is-a-dangling-link", "weights-root-is-a-file"])
def test_what_was_moved_aside_comes_back(name, makes_another, files):
    before = state(files)
    BEHAVIOURS[name].damage(files, random.Random(1))
    if makes_another:
        (moved,) = files.run_dir.parent.rglob("*.aside")
        (place := moved.with_suffix("")).unlink()
        (place / "below").mkdir(parents=True)
    files.put_back()
    assert state(files) == before


def test_without_a_run_there_is_nothing_to_damage(tmp_path):
    empty = RunFiles(tmp_path / "run", tmp_path / "weights", tmp_path / "prompts")
    for read in ("open_journal", "newest_checkpoint", "artefact_root"):
        with pytest.raises(NotNow):
            getattr(empty, read)


def test_the_journal_of_a_certified_batch_is_left_alone(files):
    """It is trained, and cannot be made again; one that a resume has opened again can."""
    assert files.open_journal.parent.name == "batch-000001"
    with (files.run_dir / "certificate.jsonl").open("a") as certificate:
        certificate.write('{"kind": "batch", "batch": 1}\n')
        certificate.flush()
        with pytest.raises(NotNow):
            files.open_journal  # noqa: B018
        certificate.write('{"kind": "attempt", "first_batch": 1}\n{"kind": "batch", "batch": 1')
    assert files.open_journal.parent.name == "batch-000001"


def test_a_kept_file_is_put_back(files):
    files.keep(path := Path(files.run_dir / "attempt.json"))
    path.write_text("other")
    files.put_back()
    assert path.read_text() == '{"run": "run-1", "attempt": 0}'
