"""Inference servers that a run starts, watches and restarts itself (``inference.launch``)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from easyrl.config import LaunchConfig
from easyrl.inference_client.api_keys import new_api_key
from easyrl.inference_client.servers.managed.launch import (
    EmbeddedServerProcess,
    VllmServerProcess,
    visible_devices,
)
from easyrl.inference_client.servers.managed.server_process import ServerProcess, ServerStartError
from easyrl.runtime.machine import free_port

logger = logging.getLogger(__name__)

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class RestartPolicy:
    """When a server counts as ended or hanging, and how often it is tried again."""

    interval_s: float = 0.5  # between two looks at a process
    health_interval_s: float = 5.0  # between two health probes of one that is up
    start_timeout_s: float = 600.0  # it has not answered since its start: killed
    hang_s: float = 120.0  # it was up, and has not answered for so long: killed
    min_uptime_s: float = 30.0  # up for less than this, or never: an early exit
    max_early_exits: int = 3  # in a row; then it is given up
    back_off_s: float = 1.0  # before the first restart, doubled by each early exit


@dataclass(eq=False)
class ManagedServers:
    """The servers of one machine, each with its devices, on ports that stay."""

    config: LaunchConfig
    model: Path  # folder; its weights are replaced at the first sync
    log_dir: Path  # receives ``server-0.log`` and so on
    dtype: str  # ``fp32`` or ``bf16``, the trainer's
    policy: RestartPolicy = RestartPolicy()
    _: KW_ONLY
    batch_invariant: bool = False  # no request may change a bit of another's response; vLLM has
    # that on devices only, and not on all
    env: Mapping[str, str] = field(default_factory=dict)  # of embedded servers
    lora_rank: int | None = None  # vLLM is started for adapters of this rank
    _watched: list[_WatchedServer] = field(default_factory=list, init=False)

    def start(self) -> list[str]:
        """Starts all and returns their URLs at once, in the order of ``devices``.

        Raises ``ValueError`` naming the configuration's key if they cannot be started.
        """
        assert not self._watched
        self.log_dir.mkdir(parents=True, exist_ok=True)
        try:
            for number, devices in enumerate(self._devices()):
                server = self._start_server(number, devices)
                self._watched.append(
                    _WatchedServer(f"server {number}", server, self.config.restart, self.policy)
                )
        except (ValueError, ServerStartError) as error:
            self.close()
            raise ValueError(f"inference.launch: {error}") from error
        except BaseException:
            self.close()
            raise
        return [watched.server.url for watched in self._watched]

    @property
    def api_keys(self) -> dict[str, str]:
        """The key of each server, by URL; it stays when the server is started again."""
        servers = [watched.server for watched in self._watched]
        return {s.url: s.api_key for s in servers if s.api_key is not None}

    @property
    def given_up(self) -> dict[str, str]:
        """Servers that will not come back, by URL, and why."""
        return {w.server.url: w.given_up for w in self._watched if w.given_up is not None}

    @property
    def last_ends(self) -> list[str]:
        """How servers have ended that are not up, a line each."""
        return [w.last_end for w in self._watched if w.last_end is not None and not w.is_up]

    def close(self) -> None:
        """Stops the watch, then all servers. Safe to call twice."""
        for watched in self._watched:
            watched.end_watch()
        stops = [threading.Thread(target=watched.server.close) for watched in self._watched]
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join()
        self._watched = []

    def _devices(self) -> Sequence[Sequence[int] | None]:
        """Per server the indices of its devices; None leaves the choice to the environment."""
        config = self.config
        if config.devices is not None:
            return config.devices
        if config.engine == "embedded":  # runs on the CPU unless told otherwise
            return [None] * config.count
        size = config.tensor_parallel  # where vLLM runs on the CPU these do no harm
        return [range(number * size, (number + 1) * size) for number in range(config.count)]

    def _start_server(self, number: int, devices: Sequence[int] | None) -> ServerProcess:
        config, env = self.config, self.config.env
        log = self.log_dir / f"server-{number}.log"
        options = [f"--dtype={DTYPES[self.dtype]}", *config.options]
        if config.engine == "vllm":
            assert config.python is not None
            return VllmServerProcess(
                self.model,
                config.python,
                options,
                devices=devices,
                tensor_parallel=config.tensor_parallel,
                env=env,
                batch_invariant=self.batch_invariant,
                lora_rank=self.lora_rank,
                api_key=new_api_key(),
                log=log,
                wait=False,
            )
        if self.batch_invariant:
            options.insert(0, "--batch-invariant")
        if devices:
            options.insert(0, "--device=cuda")
            env = visible_devices(devices) | env
        return EmbeddedServerProcess(
            self.model,
            options,
            port=free_port(),
            env={**self.env, **env},
            api_key=new_api_key(),
            log=log,
            wait=False,
        )


@dataclass
class _WatchedServer:
    """One server and the thread that watches and restarts it."""

    name: str
    server: ServerProcess
    restart: bool
    policy: RestartPolicy
    given_up: str | None = None
    last_end: str | None = None  # how it ended the last time, on one line
    _started: float = field(default_factory=time.monotonic)  # of its last start
    _up_since: float | None = None  # time.monotonic() of the first answer since then
    _answered: float = 0.0  # ... of the last one of all starts
    _early_exits: int = 0
    _closing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._watch, name=f"easyrl {self.name}", daemon=True)
        self._thread.start()

    @property
    def is_up(self) -> bool:
        return self._up_since is not None

    def end_watch(self) -> None:
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while self.given_up is None and not self._closing.wait(self.policy.interval_s):
                if self.server.has_ended:
                    self._restart(f"ended with status {self.server.process.returncode}")
                else:
                    self._probe()
        except Exception as error:  # nobody watches it any more; that has to be seen
            logger.exception("the watch over %s at %s failed", self.name, self.server.url)
            self._give_up(
                f"{self.name} at {self.server.url} is not watched any more: "
                f"{type(error).__name__}: {error}"
            )

    def _probe(self) -> None:
        now = time.monotonic()
        if self._up_since is not None and now - self._answered < self.policy.health_interval_s:
            return
        if self.server.is_healthy():
            self._answered = time.monotonic()
            if self._up_since is None:
                self._up_since = self._answered
                logger.info("%s is up at %s", self.name, self.server.url)
        elif self._up_since is None and now - self._started > self.policy.start_timeout_s:
            self._kill_and_restart(
                f"did not answer within {self.policy.start_timeout_s:.0f} s of its start"
            )
        elif self._up_since is not None and now - self._answered > self.policy.hang_s:
            self._kill_and_restart(f"did not answer for {self.policy.hang_s:.0f} s")

    def _kill_and_restart(self, why: str) -> None:
        self.server.kill()
        self._restart(f"{why} and was killed")

    def _restart(self, what: str) -> None:
        """Starts it again after a pause, unless it has died too often."""
        uptime_s = 0.0 if self._up_since is None else time.monotonic() - self._up_since
        self._up_since = None
        self._early_exits = self._early_exits + 1 if uptime_s < self.policy.min_uptime_s else 0
        where = f"{self.name} at {self.server.url} {what}"
        report = self.server.failure_report()
        self.last_end = f"{where}: {self.server.last_line()}"
        self.server.stop()  # what the server forked goes with it, restarted or not
        if not self.restart:
            self._give_up(f"{where}; it stays down (inference.launch.restart=false){report}")
        elif self.server.refused_options and not self._answered:  # the next start has the same
            self._give_up(f"{where}, a mistake in its options; it stays down{report}")
        elif self._early_exits >= self.policy.max_early_exits:
            self._give_up(f"{where}, {self._early_exits} times in a row; it stays down{report}")
        else:
            logger.warning("%s; starting it again%s", where, report)
            if self._closing.wait(self.policy.back_off_s * 2**self._early_exits):
                return
            self._started = time.monotonic()
            try:
                self.server.restart(wait=False)
            except ServerStartError as error:  # counts as an exit at the next look
                logger.warning("%s: %s", self.name, error)

    def _give_up(self, why: str) -> None:
        logger.error("%s", why)
        self.given_up = why  # last: whoever reads it may look for the message
