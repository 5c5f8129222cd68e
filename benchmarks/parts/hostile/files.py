"""A run's files, changed under it: while it trains, or between a kill and the resume."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.parts.hostile.behaviour import NotNow, file
from easyrl.inference_client.pool.endpoint_list import STATE_FILE, WANTED_FILE
from easyrl.inference_client.transfer.announcement import OWNER
from easyrl.ledger.checkpoints.folder import MANIFEST, CheckpointFolder
from easyrl.ledger.journal.reading import batch_folder, journal_files, journalled_batches
from easyrl.ledger.traces import JOURNAL_FOLDER
from easyrl.runtime.run_files import ATTEMPT_FILE, CERTIFICATE_FILE, LOCK_FILE, METRICS_FILE

TERABYTE = 2**40


@dataclass
class RunFiles:
    """Where a run keeps what.

    Attributes:
        run_dir: ``run.output_dir``.
        weights: ``weight_sync.directory``, of this run alone.
        prompts: the dataset.
    """

    run_dir: Path
    weights: Path
    prompts: Path
    _undo: list[Callable[[], object]] = field(default_factory=list)

    @property
    def open_journal(self) -> Path:
        """The file that was written last, of the open batch; ``NotNow`` if it holds little.

        What a certified batch was trained on cannot be made again: damage there is for
        ``easyrl verify`` to find.
        """
        journal = self.run_dir / "journal"
        batches = [v for v in journalled_batches(journal) if v >= self._open_batch]
        files = journal_files(batch_folder(journal, batches[-1])) if batches else []
        if not files or files[-1].path.stat().st_size < 1000:
            raise NotNow
        return files[-1].path

    @property
    def _open_batch(self) -> int:
        """The batch behind the last that the certificate holds."""
        number, path = 0, self.run_dir / CERTIFICATE_FILE
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for line in lines:
            record = json.loads(line) if line.endswith(b"\n") else {}
            if record.get("kind") == "attempt":
                number = record["first_batch"]
            elif record.get("kind") == "batch":
                number = record["batch"] + 1
        return number

    @property
    def newest_checkpoint(self) -> Path:
        """``NotNow`` if there are less than two."""
        folder = CheckpointFolder(self.run_dir / "checkpoints")
        if len(steps := folder.steps()) < 2:
            raise NotNow
        return folder.path(steps[-1])

    @property
    def artefact_root(self) -> Path:
        """Of the attempt that runs, or was killed; ``NotNow`` if there is none."""
        for root in sorted(self.weights.glob("easyrl-*")):
            if (root / "announcement").exists():
                return root
        raise NotNow

    def keep(self, path: Path) -> None:
        """``put_back`` writes ``path`` as it is now."""
        content = path.read_bytes()
        self._undo.append(lambda: path.write_bytes(content))

    def on_put_back(self, undo: Callable[[], object]) -> None:
        self._undo.append(undo)

    def move_aside(self, path: Path) -> None:
        """``path`` is free for something else until ``put_back``."""
        aside = path.with_name(f"{path.name}.aside")
        path.rename(aside)

        def undo() -> None:
            if path.is_dir() and not path.is_symlink():  # the run has made another one
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            aside.rename(path)

        self._undo.append(undo)

    def put_back(self) -> None:
        """Undoes what was to be undone."""
        while self._undo:
            self._undo.pop()()


def _flip(path: Path, at: int, bit: int) -> str:
    with path.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ (1 << bit)]))
    return f"bit {bit} of byte {at} of {path.name}"


def _cut_last_line(path: Path, rng: random.Random) -> str:
    """A part of the last line is there, without its end."""
    content = path.read_bytes()
    start = content.rstrip(b"\n").rfind(b"\n") + 1
    end = rng.randrange(start + 1, len(content) - 1)
    os.truncate(path, end)
    return f"{path.name} ends at byte {end} of {len(content)}"


# ---- while it trains -----------------------------------------------------------------------------


@file("live", may_end_75=True)
def artefact_changed(files: RunFiles, rng: random.Random) -> str:
    """A bit of the weights in shared memory flips while endpoints read them."""
    chunks = sorted(files.artefact_root.glob("*/chunk-*"))
    if not chunks:
        raise NotNow
    path = rng.choice(chunks)
    return _flip(path, path.stat().st_size - 1 - rng.randrange(1000), rng.randrange(8))


@file("live", may_end_75=True)
def artefact_removed(files: RunFiles, rng: random.Random) -> str:
    """The weights in shared memory are removed (a clean-up of /dev/shm)."""
    chunks = sorted(files.artefact_root.glob("*/chunk-*"))
    if not chunks:
        raise NotNow
    for path in chunks:
        path.unlink(missing_ok=True)
    return f"{len(chunks)} chunks"


@file("live")
def endpoint_list_of_garbage(files: RunFiles, rng: random.Random) -> str:
    """The list of endpoints becomes noise."""
    (files.run_dir / WANTED_FILE).write_bytes(rng.randbytes(300))
    return WANTED_FILE


@file("live")
def endpoint_list_without_urls(files: RunFiles, rng: random.Random) -> str:
    """The list of endpoints names what are no URLs."""
    path = files.run_dir / WANTED_FILE
    wanted = json.loads(path.read_bytes())
    names = ["", "ftp://example.org", "http://", "http://[::1", "http://a b:99999", "\u0000"]
    wanted["endpoints"] += [{"url": name, "added": wanted["version"] + 1} for name in names]
    path.write_text(json.dumps(wanted | {"version": wanted["version"] + 1}))
    return f"{len(names)} names"


@file("live")
def endpoint_list_is_huge(files: RunFiles, rng: random.Random) -> str:
    """The list of endpoints becomes a sparse file of a terabyte."""
    os.truncate(files.run_dir / WANTED_FILE, TERABYTE)
    return WANTED_FILE


@file("live")
def state_file_is_a_folder(files: RunFiles, rng: random.Random) -> str:
    """A folder lies where the state of the endpoints is written."""
    path = files.run_dir / STATE_FILE
    path.unlink(missing_ok=True)
    path.mkdir()
    return STATE_FILE


@file("live")
def unfinished_checkpoint_appears(files: RunFiles, rng: random.Random) -> str:
    """A folder of an unfinished checkpoint appears beside those that are written."""
    left = files.run_dir / "checkpoints" / "step-999.tmp"
    left.mkdir(parents=True, exist_ok=True)
    (left / "junk").write_bytes(rng.randbytes(100))
    return left.name


@file("live", may_end_75=True)
def journal_is_a_dangling_link(files: RunFiles, rng: random.Random) -> str:
    """The journal's folder becomes a link that leads nowhere (a file system that went away)."""
    files.move_aside(path := files.run_dir / JOURNAL_FOLDER)
    path.symlink_to(files.run_dir / "nowhere" / JOURNAL_FOLDER)
    return path.name


@file("live", may_end_75=True)
def weights_root_is_a_file(files: RunFiles, rng: random.Random) -> str:
    """A file lies where the folder of the run's weights was."""
    files.move_aside(root := files.artefact_root)
    root.write_text("not a folder")
    return root.name


@file("live")
def tensorboard_is_a_file(files: RunFiles, rng: random.Random) -> str:
    """A file lies where the folder of TensorBoard was."""
    path = files.run_dir / "tensorboard"
    if not path.is_dir():
        raise NotNow
    shutil.rmtree(path)
    path.write_text("not a folder")
    return path.name


# ---- between a kill and the resume ---------------------------------------------------------------


@file("killed")
def journal_cut(files: RunFiles, rng: random.Random) -> str:
    """The open batch's journal ends in the middle of its last record."""
    path = files.open_journal
    os.truncate(path, path.stat().st_size - rng.randrange(1, 60))
    return path.name


@file("killed")
def journal_of_zeros(files: RunFiles, rng: random.Random) -> str:
    """The end of the open batch's journal reads as zeros, as after a power cut."""
    path = files.open_journal
    size = path.stat().st_size
    os.truncate(path, size - 50)
    os.truncate(path, size + 4096)
    return path.name


@file("killed")
def journal_with_noise_behind(files: RunFiles, rng: random.Random) -> str:
    """Noise behind the last record of the open batch's journal."""
    with files.open_journal.open("ab") as opened:
        opened.write(rng.randbytes(500))
    return files.open_journal.name


@file("killed")
def journal_bit_flipped(files: RunFiles, rng: random.Random) -> str:
    """A bit of a record of the open batch's journal flips."""
    path = files.open_journal
    return _flip(path, rng.randrange(300, path.stat().st_size - 50), rng.randrange(8))


@file("killed")
def certificate_cut(files: RunFiles, rng: random.Random) -> str:
    """The certificate's last line has no end."""
    return _cut_last_line(files.run_dir / CERTIFICATE_FILE, rng)


@file("killed")
def metrics_cut(files: RunFiles, rng: random.Random) -> str:
    """The last line of the metrics has no end."""
    path = files.run_dir / METRICS_FILE
    if not path.stat().st_size:
        raise NotNow
    return _cut_last_line(path, rng)


@file("killed")
def metrics_line_of_zeros(files: RunFiles, rng: random.Random) -> str:
    """Behind the first line of the metrics is one of zeros."""
    path = files.run_dir / METRICS_FILE
    first, newline, rest = path.read_bytes().partition(b"\n")
    if not newline:
        raise NotNow
    path.write_bytes(first + newline + bytes(300) + newline + rest)
    return path.name


@file("killed", refused=ATTEMPT_FILE)
def attempt_file_cut(files: RunFiles, rng: random.Random) -> str:
    """The file that counts the attempts is half there; it is put back after a refusal."""
    path = files.run_dir / ATTEMPT_FILE
    files.keep(path)
    os.truncate(path, path.stat().st_size // 2)
    return ATTEMPT_FILE


@file("killed", refused="data")
def prompts_changed(files: RunFiles, rng: random.Random) -> str:
    """Another question in the dataset; it is put back after a refusal."""
    files.keep(files.prompts)
    lines = files.prompts.read_text().splitlines(keepends=True)
    at = rng.randrange(len(lines))
    lines[at] = lines[at].replace('"prompt": "', '"prompt": "7')
    files.prompts.write_text("".join(lines))
    return f"line {at + 1}"


@file("killed", refused="other.journal")
def stray_journal(files: RunFiles, rng: random.Random) -> str:
    """A file that no rank wrote lies in the open batch's journal; it is removed after a refusal."""
    path = files.open_journal.with_name("other.journal")
    path.write_bytes(rng.randbytes(1000))
    files.on_put_back(lambda: path.unlink())
    return path.name


@file("killed")
def newest_checkpoint_flipped(files: RunFiles, rng: random.Random) -> str:
    """A bit of the newest checkpoint's largest file flips."""
    path = max(files.newest_checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    return _flip(path, rng.randrange(path.stat().st_size), rng.randrange(8))


@file("killed")
def newest_manifest_gone(files: RunFiles, rng: random.Random) -> str:
    """The newest checkpoint's manifest is missing."""
    path = files.newest_checkpoint / MANIFEST
    path.unlink()
    return f"{path.parent.name}/{path.name}"


@file("killed")
def newest_checkpoint_empty(files: RunFiles, rng: random.Random) -> str:
    """All files of the newest checkpoint are empty, as after a power cut without fsync."""
    paths = list(files.newest_checkpoint.iterdir())
    for path in paths:
        os.truncate(path, 0)
    return f"{len(paths)} files"


@file("killed")
def foreign_checkpoint(files: RunFiles, rng: random.Random) -> str:
    """A folder of a later step with noise for a manifest lies beside the checkpoints."""
    folder = files.run_dir / "checkpoints" / "step-98"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_bytes(rng.randbytes(2000))
    return folder.name


@file("killed")
def huge_owner_file(files: RunFiles, rng: random.Random) -> str:
    """Beside the run's weights lies a root whose owner file is sparse, of a terabyte."""
    root = files.weights / "easyrl-somebody-else"
    root.mkdir()
    (root / OWNER).touch()
    os.truncate(root / OWNER, TERABYTE)
    return str(root.name)


@file("killed")
def owner_file_is_a_pipe(files: RunFiles, rng: random.Random) -> str:
    """Beside the run's weights lies a root whose owner file is a named pipe."""
    root = files.weights / "easyrl-with-a-pipe"
    root.mkdir()
    os.mkfifo(root / OWNER)
    return str(root.name)


@file("killed")
def weights_root_is_a_link(files: RunFiles, rng: random.Random) -> str:
    """Where the killed attempt had its weights is a link to a folder of somebody else."""
    root = files.artefact_root
    root.rename(aside := files.weights / "aside")
    (elsewhere := files.weights / "somebody").mkdir()
    (elsewhere / "precious").write_text("not the run's")
    root.symlink_to(elsewhere)
    return f"{root.name}, was {aside.name}"


@file("killed")
def lock_file_of_noise(files: RunFiles, rng: random.Random) -> str:
    """A megabyte of noise in the file by which the run's folder is held."""
    (files.run_dir / LOCK_FILE).write_bytes(rng.randbytes(2**20))
    return LOCK_FILE


@file("killed")
def event_log_cut(files: RunFiles, rng: random.Random) -> str:
    """The last line of the event log has no end."""
    return _cut_last_line(files.run_dir / "events-rank0.jsonl", rng)
