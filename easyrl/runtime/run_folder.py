"""The run's folder: who may use it, attempt count, resolved configuration, event log, metrics."""

from __future__ import annotations

import difflib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from easyrl.config import Config, ConfigError
from easyrl.config.file import dump_config
from easyrl.metrics.event_log import EventLog, Record, ignore
from easyrl.runtime.collectives import Collectives, on_rank_zero
from easyrl.runtime.durable_files import write_durably
from easyrl.runtime.run_files import (
    ATTEMPT_FILE,
    CERTIFICATE_FILE,
    CONFIG_FILE,
    LOCK_FILE,
    METRICS_FILE,
    attempt_config_file,
)
from easyrl.runtime.shared_folder import require_shared
from easyrl.runtime.small_files import read_small
from easyrl.schema import PolicyVersion

logger = logging.getLogger(__name__)

LOCK_POLL_S = 0.2
NAMES_SHOWN = 8
MOST_ATTEMPT_BYTES = 2**16
IDENTITY_BYTES = 8  # of a run's random part
# a file system that has none, or none of a folder, which is not open for writing
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)


def prepare_output(
    config: Config, collectives: Collectives, opened: ExitStack, *, resume: bool
) -> Path:
    """The folder, which is this run's alone until ``opened`` closes. Collective.

    Nothing may be written there, or be read to go on from, before this returns. Raises
    ``ConfigError`` on every rank if it holds a run that is not to be resumed, or none that could
    be, if another process still uses it after ``trainer.grace_s``, or if it is another folder on
    one of the nodes.
    """
    output = config.run.output_dir

    def prepare() -> None:
        if resume:
            _refuse_to_resume_nothing(output)
        else:
            _refuse_earlier_run(output)  # before waiting for it
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # a file system that cannot be written, /proc
            raise ConfigError(
                f"run.output_dir: {output} cannot be made ({error.strerror}); name another folder"
            ) from error
        opened.enter_context(locked_folder(output, config.trainer.grace_s))
        if not resume:
            _refuse_earlier_run(output)  # of the process that was waited for

    on_rank_zero(collectives, prepare)
    require_shared(output, collectives)
    return output


def next_attempt(config: Config, output: Path, collectives: Collectives) -> PolicyVersion:
    """Which run and which of its attempts this is, with v 0; writes nothing. Collective.

    The run is its name and a random number drawn when it began, kept in its folder, so that no two
    share versions or files, on whatever machines and paths. Raises ``ConfigError`` on every rank if
    the count cannot be read.
    """

    def count() -> tuple[str, int]:
        file = output / ATTEMPT_FILE
        if file.exists() or (output / CERTIFICATE_FILE).exists():
            run, last = _read_attempt(file)
            return run, last + 1
        return f"{config.run.name}-{secrets.token_hex(IDENTITY_BYTES)}", 0

    run, attempt = on_rank_zero(collectives, count)
    return PolicyVersion(run, attempt, 0)


def keep_attempt(version: PolicyVersion, output: Path) -> None:
    """The attempt of ``version`` counts from now on; rank 0 only."""
    write_durably(
        output / ATTEMPT_FILE, json.dumps({"run": version.run, "attempt": version.attempt})
    )


def keep_config(config: Config, output: Path, attempt: int) -> None:
    """Keeps the configuration of an attempt that is in the certificate; rank 0 only."""
    text = dump_config(config)
    write_durably(output / attempt_config_file(attempt), text)
    write_durably(output / CONFIG_FILE, text)


def open_event_log(
    config: Config, output: Path, collectives: Collectives, opened: ExitStack
) -> Record:
    """Where this rank's events go."""
    if not config.run.event_log:
        return ignore
    log = EventLog(output / f"events-rank{collectives.ranks.dp_rank}.jsonl")
    opened.callback(log.close)
    return log.record


@contextmanager
def locked_folder(folder: Path, patience_s: float) -> Iterator[None]:
    """Inside, ``folder`` is this process's; it is given up when the process ends in whatever way.

    The folder itself is locked, which lasts when somebody takes the file for a leftover and removes
    it; and the file, which names the holder, and which a network file system locks between hosts
    (folders only within one). The file stays behind.

    Raises ``ConfigError`` naming the other process if it holds the folder longer than
    ``patience_s``, and ``OSError`` where nothing can be written.
    """
    with ExitStack() as opened:
        _take(folder, patience_s, opened)
        yield


def _take(folder: Path, patience_s: float, opened: ExitStack) -> None:
    deadline = time.monotonic() + patience_s
    told = False
    # closed when a child process starts (os.open sees to it)
    itself = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    opened.callback(os.close, itself)
    file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    opened.callback(os.close, file)
    while not _is_taken(folder, itself, file):
        in_use = f"{folder} is in use by {_holder(file)}"
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"run.output_dir: {in_use}, for more than the {patience_s:g} s (trainer.grace_s) "
                "that this one has waited; end it, or name another folder"
            )
        if not told:
            logger.warning(
                "run.output_dir: %s; waiting up to %g s (trainer.grace_s) for its end; to go on "
                "now, end it, or name another folder",
                in_use,
                patience_s,
            )
            told = True
        time.sleep(LOCK_POLL_S)


def _is_taken(folder: Path, itself: int, file: int) -> bool:
    try:
        # where folders have no locks, not even within the host, the file's is all there is
        _flock(itself)
        lacks = _flock(file)
    except BlockingIOError:
        return False
    if lacks is not None:
        logger.warning(
            "%s: this file system has no locks (%s); make sure that no other process runs in "
            "the folder",
            folder,
            lacks.strerror,
        )
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return True


def _flock(descriptor: int) -> OSError | None:
    """Locks it, or says why nobody can. Raises ``BlockingIOError`` if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return error
    return None


def _holder(descriptor: int) -> str:
    """For people: who wrote the file last."""
    text = os.pread(descriptor, 256, 0).decode(errors="replace").strip()
    return f"process {text}" if text else "another process"


def _refuse_earlier_run(output: Path) -> None:
    if (output / METRICS_FILE).exists() or (output / CERTIFICATE_FILE).exists():
        raise ConfigError(
            f"run.output_dir: {output} holds an earlier run; add --resume (resume=True) to go on "
            "with it, or name another folder"
        )


def _refuse_to_resume_nothing(output: Path) -> None:
    """A mistyped name must not begin a new run."""
    if _was_started(output):
        return
    if output.is_dir():
        names = sorted(path.name for path in output.iterdir())
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        found = f"it has {', '.join(names[:NAMES_SHOWN])}{more}" if names else "it is empty"
        problem = f"{output} holds no run; {found}"
    else:
        missing = output
        while not missing.parent.is_dir():
            missing = missing.parent
        problem = f"{missing} does not exist"
    raise ConfigError(
        f"run.output_dir: {problem}{_runs_near(output)}; name the folder of the run that is to go "
        "on, or leave --resume off to start a new one"
    )


def _was_started(folder: Path) -> bool:
    """Whether a run has taken the folder, however far it came."""
    return any(
        (folder / name).exists()
        for name in (CERTIFICATE_FILE, METRICS_FILE, ATTEMPT_FILE, LOCK_FILE)
    )


def _runs_near(output: Path) -> str:
    """The runs beside ``output``, that of the most similar name as a question."""
    if not output.parent.is_dir():
        return ""
    names = sorted(path.name for path in output.parent.iterdir() if _was_started(path))
    if close := difflib.get_close_matches(output.name, names, n=1):
        return f"; did you mean {output.parent / close[0]}?"
    if not names:
        return f"; {output.parent} has no run"
    more = ", ..." if len(names) > NAMES_SHOWN else ""
    return f"; runs in {output.parent}: {', '.join(names[:NAMES_SHOWN])}{more}"


def _read_attempt(file: Path) -> tuple[str, int]:
    """The run, and its newest attempt."""
    try:
        said = json.loads(read_small(file, MOST_ATTEMPT_BYTES))
        run, attempt = said["run"], said["attempt"]
        if not isinstance(run, str) or not isinstance(attempt, int):
            raise TypeError("run has to be a text and attempt a number")
    except (OSError, ValueError, KeyError, TypeError) as error:
        certificate = file.with_name(CERTIFICATE_FILE)
        raise ConfigError(
            f"{file}: cannot be read ({type(error).__name__}: {error}); "
            + (
                'write {"run": "RUN", "attempt": N} into it, RUN from the first line and N from '
                f'the last line with "kind":"attempt" of {certificate}'
                if certificate.exists()
                else "remove it: this run has no certificate yet, so nothing depends on it"
            )
        ) from error
    return run, attempt
