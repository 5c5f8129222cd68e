"""Checkpoints on disk: what is damaged, interrupted or without room leaves the last good one."""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from easyrl.engines import state_file
from easyrl.engines.base import StateFile, StatePiece
from easyrl.engines.state_file import EngineState, StateReader, write_state_file
from easyrl.ledger.checkpoints import checkpoints as module
from easyrl.ledger.checkpoints.checkpoints import CheckpointError
from easyrl.ledger.checkpoints.folder import MANIFEST
from tests.easyrl.ledger.checkpoint_fakes import FakeEngine, checkpoints, load, save

STATE_FILE = "rank-00000-of-00001.safetensors"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- what stays ----------------------------------------------------------------------------------


def test_the_newest_are_kept_and_loaded(tmp_path: Path) -> None:
    assert load(tmp_path) is None
    save(tmp_path, 1, 2, 30)
    assert names(tmp_path) == ["step-2", "step-30"]
    assert names(tmp_path / "step-30") == [MANIFEST, STATE_FILE]
    assert load(tmp_path) == 30
    engine, saved = checkpoints(tmp_path)
    assert [record["state"] for _, record in saved.folder.readable()] == [{"at": 2}, {"at": 30}]
    assert saved.load_latest(at_most=29) == {"at": 2} and engine.step == 2
    assert saved.load_latest(at_most=1) is None


def test_a_step_is_saved_again_in_another_attempt(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    save(tmp_path, 2, num_elements=1001)
    assert names(tmp_path) == ["step-1", "step-2"]
    engine, saved = checkpoints(tmp_path, num_elements=1001)
    assert saved.load_latest() == {"at": 2} and engine.step == 2


def test_later_steps_of_an_attempt_left_behind_go(tmp_path: Path) -> None:
    """Step 9 cannot be read, the run goes on from 3 and must not keep 9 rather than 4."""
    save(tmp_path, 3, 9)
    (tmp_path / "step-9" / STATE_FILE).unlink()
    save(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["step-4"]
    assert load(tmp_path) == 4


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    save(tmp_path, 1)
    expected = draw()
    draw()
    load(tmp_path)
    assert draw() == expected


def test_the_state_is_that_of_the_call(tmp_path: Path) -> None:
    """Neither JSON nor tensors change when the caller goes on with them."""
    gate = threading.Event()
    engine, saved = checkpoints(tmp_path, background=True)
    state: dict[str, Any] = {"at": 0, "cursor": [1]}
    with slow_disk(gate):
        saved.save(0, state)
        state["cursor"].append(2)
        engine.step = 5
        gate.set()
        saved.wait()
    assert checkpoints(tmp_path)[1].load_latest() == {"at": 0, "cursor": [1]}


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [STATE_FILE, MANIFEST])
def test_any_flipped_byte_is_seen(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2)
    path = tmp_path / "step-2" / file
    content = path.read_bytes()
    places = [0, len(content) - 1, *random.Random(1).sample(range(len(content)), 30)]
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert load(tmp_path) == 1, place
        (warning,) = caplog.messages
        assert str(path) in warning and "skipped" in warning
    path.write_bytes(content)
    assert load(tmp_path) == 2


def damage_cut(folder: Path) -> None:
    with (folder / STATE_FILE).open("r+b") as file:
        file.truncate(1000)


def damage_missing(folder: Path) -> None:
    (folder / STATE_FILE).unlink()


def damage_no_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def damage_other_layout(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "trainer.json").write_text("{}")


@pytest.mark.parametrize(
    "damage", [damage_cut, damage_missing, damage_no_manifest, damage_other_layout]
)
def test_damaged_checkpoints_are_skipped_or_named(tmp_path: Path, damage: Any) -> None:
    save(tmp_path, 1, 2)
    damage(tmp_path / "step-2")
    assert load(tmp_path) == 1
    assert next(checkpoints(tmp_path)[1].folder.readable())[1]["state"] == {"at": 1}
    damage(tmp_path / "step-1")
    with pytest.raises(ValueError, match="no checkpoint in .* can be used") as error:
        load(tmp_path)
    assert "step-1/" in str(error.value) and "step-2/" in str(error.value)
    assert "initial model" in str(error.value)


# ---- no room, no permission ----------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_no_room_leaves_the_last_good_one(tmp_path: Path, background: bool) -> None:
    engine, saved = checkpoints(tmp_path, background=background)
    saved.save(1, {"at": 0})
    saved.wait()
    with room_of(2000), pytest.raises(CheckpointError, match="rank 0: .*no room for") as error:
        saved.save(2, {"at": 0})
        saved.wait()
    assert "from step 1" in str(error.value)
    assert names(tmp_path) == ["step-1"]
    assert load(tmp_path) == 0
    saved.save(2, {"at": 0})  # there is room again
    saved.wait()
    assert names(tmp_path) == ["step-1", "step-2"]


def test_a_full_disk_and_one_that_cannot_be_written(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        save(disk, 1, num_elements=50_000)  # 400 kB of a megabyte
        with pytest.raises(CheckpointError, match="no room for .*No space left") as error:
            save(disk, 2, 3, num_elements=50_000)
        assert "of step 3" in str(error.value)
        assert names(disk) == ["step-1", "step-2"]
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(CheckpointError, match="Read-only"):
            save(disk, 3, num_elements=50_000)
        engine, saved = checkpoints(disk, num_elements=50_000)
        assert saved.load_latest() == {"at": 2} and engine.step == 2


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="from the start"):
        save(tmp_path / "file" / "checkpoints", 1)


def test_an_old_one_that_cannot_be_removed_does_not_make_the_new_one_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2)
    rename = Path.rename

    def busy(path: Path, target: Path) -> Path:
        if path.name == "step-1":
            raise OSError(16, "Device or resource busy", str(path))
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", busy)
        save(tmp_path, 3, 4)
    assert names(tmp_path) == ["step-1", "step-3", "step-4"]
    assert "step-1" in caplog.text and "busy" in caplog.text
    save(tmp_path, 5)
    assert names(tmp_path) == ["step-4", "step-5"]


@contextmanager
def room_of(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond ``num_bytes``; the kernel answers EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A megabyte of its own, where mounting is allowed."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


# ---- several files of one rank -------------------------------------------------------------------


class TwoFiles(FakeEngine):
    """A model-parallel group: its head's share and a follower's, which may have no room."""

    problem: str | None = None

    def snapshot(self) -> EngineState:
        return SharesOfTwo(super().snapshot(), self.problem)  # type: ignore[return-value]


class SharesOfTwo:
    def __init__(self, both: EngineState, problem: str | None) -> None:
        self.description = both.description
        self._problem = problem
        self._shares = [EngineState(part, {}) for part in (both.pieces[:1], both.pieces[1:])]

    def write(self, folder: Path, stem: str) -> list[StateFile]:
        files = self._shares[0].write(folder, stem)
        if self._problem is not None:
            raise OSError(self._problem)
        return files + self._shares[1].write(folder, f"{stem}-process-00001")


def test_all_files_of_a_rank_are_named_checked_and_read(tmp_path: Path) -> None:
    engine, saved = checkpoints(tmp_path, engine=TwoFiles())
    for engine.step in (1, 2):
        saved.save(engine.step, {"at": engine.step})
    second = "rank-00000-of-00001-process-00001.safetensors"
    assert names(tmp_path / "step-2") == [MANIFEST, second, STATE_FILE]
    record = json.loads((tmp_path / "step-2" / MANIFEST).read_text())["record"]
    assert set(record["files"]) == {STATE_FILE, second} and len(record["random_states"]) == 1
    assert record["files"][second].keys() == {"num_bytes", "blake3"}
    assert load(tmp_path) == 2  # one that has a single file reads both
    damage_flipped(tmp_path / "step-2" / second)
    assert load(tmp_path) == 1


def test_a_file_of_a_rank_that_cannot_be_written_fails_the_checkpoint(tmp_path: Path) -> None:
    engine, saved = checkpoints(tmp_path, engine=TwoFiles())
    saved.save(1, {"at": 0})
    engine.problem = "rank 1: no room"  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="rank 0: rank 1: no room"):
        saved.save(2, {"at": 0})
    assert names(tmp_path) == ["step-1"]


def damage_flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


# ---- in the background ---------------------------------------------------------------------------


@contextmanager
def slow_disk(gate: threading.Event) -> Iterator[None]:
    """Nothing is written before ``gate`` is set."""

    def gated(*args: Any) -> Any:
        assert gate.wait(10)
        return write_state_file(*args)

    with mock.patch.object(state_file, "write_state_file", gated):
        yield


def test_training_goes_on_while_it_is_written(tmp_path: Path) -> None:
    """The next save waits for the one before; closing without an error waits for the last."""
    gate, events = threading.Event(), []

    def record(event: str, **fields: Any) -> None:
        events.append((event, fields["step"]))

    engine, saved = checkpoints(tmp_path, background=True, record=record)
    with slow_disk(gate), saved:
        saved.save(1, {"at": 0})
        record("trained", step=2)
        opener = threading.Timer(0.1, gate.set)
        opener.start()
        saved.save(2, {"at": 0})
        assert gate.is_set() and load(tmp_path) == 0
    opener.join()
    written = [("checkpoint_written", 1), ("checkpoint_copied", 2), ("checkpoint_written", 2)]
    assert events == [("checkpoint_copied", 1), ("trained", 2), *written]


def test_without_background_it_is_on_disk_at_once(tmp_path: Path) -> None:
    gate = threading.Event()
    _, saved = checkpoints(tmp_path)
    gate.set()
    saved.save(1, {"at": 0})
    assert load(tmp_path) == 0


def test_a_run_that_ends_by_an_error_keeps_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What writing raises is then told in the log only; else it is raised."""
    for error in (None, KeyError("of the run")):
        _, saved = checkpoints(tmp_path / "x", background=True)
        with room_of(2000), pytest.raises((CheckpointError, KeyError)) as raised, saved:
            saved.save(1, {"at": 0})
            if error is not None:
                raise error
        assert isinstance(raised.value, KeyError if error else CheckpointError)
    assert "was not written" in caplog.text


def test_closing_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.05)
    gate = threading.Event()
    _, saved = checkpoints(tmp_path, background=True)
    with slow_disk(gate):
        saved.save(1, {"at": 0})
        saved.close()
        assert "not written within" in caplog.text
        gate.set()
        saved.wait()


# ---- the files -----------------------------------------------------------------------------------


def test_ranges_are_read_across_files(tmp_path: Path) -> None:
    """Three ranks' uneven parts, read in other parts; also by torch.distributed.checkpoint."""
    whole = {"a": torch.randn(100), "b": torch.randn(3).bfloat16(), "c": torch.randn(1)}
    cuts = {"a": [0, 33, 33, 100], "b": [0, 1, 2, 3], "c": [0, 0, 0, 1]}
    files = []
    for rank in range(3):
        pieces = [
            StatePiece(key, cuts[key][rank], whole[key][cuts[key][rank] : cuts[key][rank + 1]])
            for key in ("b", "a", "c")
            if cuts[key][rank] < cuts[key][rank + 1]
        ]
        files.append(tmp_path / f"rank-{rank}.safetensors")
        write_state_file(files[-1], pieces)
    reader = StateReader(files, {})
    for start, stop in ((0, 100), (10, 40), (33, 34), (90, 100), (5, 5)):
        got = reader.read("a", start, stop - start)
        assert torch.equal(got, whole["a"][start:stop])
    assert torch.equal(reader.read("b", 0, 3), whole["b"]) and reader.numel("b") == 3
    assert reader.numel("missing") == 0
    for key, start, numel in (("a", 90, 11), ("missing", 0, 1)):
        with pytest.raises(ValueError, match=f"lacks elements .* of {key}"):
            reader.read(key, start, numel)
    reader.close()
    incomplete = StateReader([files[0], files[2]], {})
    assert torch.equal(incomplete.read("b", 2, 1), whole["b"][2:])
    with pytest.raises(ValueError, match="lacks elements 1 and on of b"):
        incomplete.read("b", 0, 3)
    incomplete.close()

    loaded = {key: torch.zeros_like(value) for key, value in whole.items()}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(torch.equal(loaded[key], value) for key, value in whole.items())


def test_the_manifest_names_what_it_is_of(tmp_path: Path) -> None:
    save(tmp_path, 4)
    record = json.loads((tmp_path / "step-4" / MANIFEST).read_text())["record"]
    assert record["step"] == 4 and record["state"] == {"at": 4}
    assert record["engine"] == {"step": 4}
    size = (tmp_path / "step-4" / STATE_FILE).stat().st_size
    assert record["files"][STATE_FILE]["num_bytes"] == size
    assert len(record["random_states"]) == 1
