"""Which endpoints a run is wanted to use, changed from outside while it goes on.

``RUN_DIR/endpoints.json`` is the wanted list; ``easyrl endpoints`` replaces it, every rank follows
it. ``RUN_DIR/endpoints_state.json`` is what rank 0 says of them. Imports nothing heavy: the command
has to answer at once.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from easyrl.runtime.small_files import read_small

log = logging.getLogger(__name__)

WANTED_FILE = "endpoints.json"
STATE_FILE = "endpoints_state.json"
LOCK_FILE = "endpoints.lock"
MOST_BYTES = 2**24
SILENT_AFTER_S = 15.0  # a run that has written no state for so long is not running


class MembershipError(ValueError):
    """A file of a run's endpoints is missing or cannot be read."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wanted list."""

    version: int  # counts changes
    added: dict[str, int]  # URL → the version with which it came
    api_key_envs: dict[str, str] = field(default_factory=dict)  # URL → variable with its own key

    def with_added(self, url: str, api_key_env: str | None = None) -> Wanted:
        version = self.version + 1
        named = {} if api_key_env is None else {url: api_key_env}
        return Wanted(version, self.added | {url: version}, self.api_key_envs | named)

    def without(self, url: str) -> Wanted:
        added = {other: since for other, since in self.added.items() if other != url}
        named = {other: name for other, name in self.api_key_envs.items() if other != url}
        return Wanted(self.version + 1, added, named)


@dataclass(frozen=True, slots=True)
class EndpointState:
    """What the run says of one endpoint."""

    url: str
    state: str  # in words
    confirmed_version: str | None
    in_flight: int  # of this rank
    failures: int
    served: int  # responses


@dataclass(frozen=True, slots=True)
class RunState:
    """What the run says of all, and when it did."""

    updated_s: float  # seconds since 1970
    running: bool
    endpoints: tuple[EndpointState, ...]

    @property
    def is_alive(self) -> bool:
        return self.running and time.time() - self.updated_s < SILENT_AFTER_S


class Members(Protocol):
    """The endpoints of a rank (``EndpointPool``)."""

    def add(self, url: str, api_key_env: str | None = None) -> Any: ...
    def remove(self, url: str) -> None: ...
    def states(self) -> list[EndpointState]: ...


def begin_membership(run_dir: Path, urls: Sequence[str]) -> Wanted:
    """Writes the list that an attempt of the run starts with. On one rank, before others follow."""
    with _locked(run_dir):
        try:
            version = read_wanted(run_dir).version + 1
        except MembershipError:
            version = 1
        wanted = Wanted(version, dict.fromkeys(urls, version))
        _write_wanted(run_dir, wanted)
    return wanted


def change_wanted(run_dir: Path, change: Callable[[Wanted], Wanted]) -> Wanted:
    """Replaces the list by what ``change`` makes of it. Raises ``MembershipError``."""
    read_wanted(run_dir)  # no lock file where there is no run
    with _locked(run_dir):
        wanted = change(read_wanted(run_dir))
        _write_wanted(run_dir, wanted)
    return wanted


def read_wanted(run_dir: Path) -> Wanted:
    """The wanted list. Raises ``MembershipError``."""
    content = _read(run_dir / WANTED_FILE)
    try:
        added = {str(entry["url"]): int(entry["added"]) for entry in content["endpoints"]}
        named = {
            str(entry["url"]): str(entry["api_key_env"])
            for entry in content["endpoints"]
            if "api_key_env" in entry
        }
        return Wanted(int(content["version"]), added, named)
    except (KeyError, TypeError, ValueError) as error:
        raise MembershipError(f"{run_dir / WANTED_FILE} is not a list of endpoints") from error


def read_state(run_dir: Path) -> RunState:
    """What the run wrote last. Raises ``MembershipError``."""
    content = _read(run_dir / STATE_FILE)
    try:
        endpoints = tuple(EndpointState(**entry) for entry in content["endpoints"])
        return RunState(float(content["updated_s"]), bool(content["running"]), endpoints)
    except (KeyError, TypeError, ValueError) as error:
        raise MembershipError(f"{run_dir / STATE_FILE} is not a state of endpoints") from error


def write_state(run_dir: Path, endpoints: Sequence[EndpointState], *, running: bool) -> None:
    state = RunState(time.time(), running, tuple(endpoints))
    _replace(run_dir / STATE_FILE, asdict(state))


def _write_wanted(run_dir: Path, wanted: Wanted) -> None:
    entries: list[dict[str, Any]] = []
    for url, since in wanted.added.items():
        name = wanted.api_key_envs.get(url)
        entry = {"url": url, "added": since}
        entries.append(entry if name is None else entry | {"api_key_env": name})
    _replace(run_dir / WANTED_FILE, {"version": wanted.version, "endpoints": entries})


def _read(path: Path) -> Any:
    try:
        return json.loads(read_small(path, MOST_BYTES))
    except (OSError, ValueError) as error:
        raise MembershipError(f"{path} cannot be read: {error}") from error


def _replace(path: Path, content: Any) -> None:
    """Readers see the old file or the new one, never half of one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1))
    temporary.replace(path)


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Two commands at a time do not undo each other's changes."""
    with (run_dir / LOCK_FILE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(eq=False)
class MembershipFollower:
    """Keeps a rank's endpoints as the wanted list says.

    Asks for changes of ``endpoints.json`` every ``poll_s``, and writes the state file if it
    ``writes_state``. An unreadable file changes nothing and is told once.
    """

    members: Members
    run_dir: Path
    wanted: Wanted  # at first what the rank's endpoints were made from
    _: KW_ONLY
    writes_state: bool
    poll_s: float = 1.0
    state_interval_s: float = 2.0
    _warned: bool = field(default=False, init=False)
    _following: asyncio.Task[None] | None = field(default=None, init=False)

    async def start(self) -> None:
        """On the loop of the endpoints."""
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def close(self) -> None:
        """Notes that the run has ended. Safe to call twice."""
        if self._following is None:
            return
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        self._following = None
        if self.writes_state:
            self._write_state(running=False)

    async def _follow(self) -> None:
        written_s = float("-inf")
        while True:
            await self._look()
            if self.writes_state and time.monotonic() - written_s >= self.state_interval_s:
                written_s = time.monotonic()
                self._write_state(running=True)
            await asyncio.sleep(self.poll_s)

    async def _look(self) -> None:
        try:
            wanted = await asyncio.to_thread(read_wanted, self.run_dir)  # disks may hang
        except MembershipError as error:
            if not self._warned:
                log.warning("%s; the endpoints stay as they are", error)
                self._warned = True
            return
        self._warned = False
        if wanted.version != self.wanted.version:
            self._apply(wanted)

    def _apply(self, wanted: Wanted) -> None:
        before, self.wanted = self.wanted.added, wanted
        for url in before:
            if before[url] != wanted.added.get(url):  # gone, or gone and come again
                self._tell(f"endpoint {url} is removed", self.members.remove, url)
        for url, since in wanted.added.items():
            if before.get(url) != since:
                add = partial(self.members.add, api_key_env=wanted.api_key_envs.get(url))
                self._tell(f"endpoint {url} is added", add, url)

    def _tell(self, what: str, change: Callable[[str], object], url: str) -> None:
        try:
            change(url)
            log.warning("%s", what)
        except ValueError as error:  # written by hand, or a variable that is not set
            log.warning("%s: %s: %s", self.run_dir / WANTED_FILE, url, error)

    def _write_state(self, *, running: bool) -> None:
        try:
            write_state(self.run_dir, self.members.states(), running=running)
        except OSError as error:
            log.warning("the state of the endpoints could not be written: %s", error)
