"""A small cluster: two trainer hosts, an inference host with two servers, and a stranger's host.

All but the stranger are on the network ``cluster``; ``train0`` and ``infer0`` are on ``office``
too, where the stranger is. Each host's own name leads to its loopback, as Debian sets it up.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.parts.random_model import write_prompts, write_random_model
from tests.hosts.documented import ROOT, documented, replaced
from tests.hosts.namespaces import Host, Network
from tests.hosts.ssh import start_sshd, write_keys
from tests.waiting import wait_until

HOSTS = {
    "train0": {"cluster": "10.83.0.1", "office": "10.84.0.1"},
    "train1": {"cluster": "10.83.0.2"},
    "infer0": {"cluster": "10.83.0.3", "office": "10.84.0.3"},
    "stranger": {"office": "10.84.0.9"},
}
PORTS = (8000, 8001)
ENDPOINTS = [f"http://infer0:{port}" for port in PORTS]
BIN = Path(sys.executable).parent
KEY = "EASYRL_API_KEY"  # environment variable with the servers' key
SERVER_UP_S, RUN_S = 180.0, 240.0
PROMPT_TOKENS = 12


class Cluster:
    """The hosts, and the folder of the disk that they share."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.folder = folder
        self.networks = {name: Network(name) for name in ("cluster", "office")}
        self.hosts = {}
        for name, addresses in HOSTS.items():
            self.hosts[name] = Host(name, addresses, folder / name)
            opened.callback(self.hosts[name].close)
            for network in addresses:
                self.networks[network].join(self.hosts[name])
        for network in self.networks.values():
            opened.callback(network.close)
        for name, host in self.hosts.items():
            with host.hosts_file.open("a") as file:
                file.write(f"127.0.1.1 {name}\n")
                for other, addresses in HOSTS.items():
                    if other != name and "cluster" in addresses:
                        file.write(f"{addresses['cluster']} {other}\n")
        write_keys(folder / "keys")
        self.trainers = [self.hosts["train0"], self.hosts["train1"]]
        self.model = write_random_model(folder / "model", hidden_size=32, num_layers=1)
        self.work = folder / "work"  # where the commands are typed: a checkout
        self.work.mkdir()
        for part in ("benchmarks", "configs"):
            (self.work / part).symlink_to(ROOT / part)
        (self.work / "hosts").write_text("".join(f"{h.name} slots=1\n" for h in self.trainers))
        self.environment = {
            KEY: "the-key-of-the-cluster",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        }
        for host in self.trainers:  # what does not travel over ssh
            (host.home / ".bashrc").write_text(f"export {KEY}='{self.environment[KEY]}'\n")
        travels = ("OMP_NUM_THREADS", "DS_ACCELERATOR")
        settings = "".join(f"{key}={self.environment[key]}\n" for key in travels)
        (self.trainers[0].home / ".deepspeed_env").write_text(settings)

    def start(
        self, host: Host, command: Sequence[str], log: Path, **environment: str
    ) -> subprocess.Popen[bytes]:
        return host.start(command, log, self.work, **self.environment, **environment)

    def start_servers(self, *options: str) -> None:
        """``easyrl serve`` as often as there are ports; returns when all of them are up."""
        infer = self.hosts["infer0"]
        logs = []
        for port in PORTS:
            where = ["--host", "0.0.0.0", "--port", str(port), "--dtype", "float32"]
            more = ["--num-threads", "1", "--max-model-len", "160", *options]
            logs.append(self.folder / f"server-{port}.log")
            self.start(infer, ["easyrl", "serve", str(self.model), *where, *more], logs[-1])
        for log in logs:
            wait_until(lambda log=log: "http://" in log.read_text(), SERVER_UP_S)

    def start_sshd(self) -> None:
        start_sshd(self.trainers, self.folder / "keys")

    def command(self, beginning: str, run_dir: Path, num_prompts: int, *options: str) -> list[str]:
        """The documentation's command for several nodes, with this run's model, data and paths."""
        words = documented("docs/several_nodes.md", beginning)
        ours = {
            "configs/gsm8k_qwen3.yaml": "benchmarks/overlap.yaml",
            "inference.endpoints": f"[{','.join(ENDPOINTS)}]",
        }
        if "--master_addr" in words:
            ours["10.0.0.1"] = HOSTS["train0"]["cluster"]
        return [
            *replaced(words, ours),
            *self._settings(run_dir, num_prompts),
            *(f"inference.api_key_env={KEY}", *options),
        ]

    def _settings(self, run_dir: Path, num_prompts: int) -> list[str]:
        prompts = write_prompts(run_dir.with_suffix(".jsonl"), num_prompts, PROMPT_TOKENS)
        return [
            *(f"run.output_dir={run_dir}", f"run.name={run_dir.name}", f"model.path={self.model}"),
            *(f"data.files=[{prompts}]", "data.max_prompt_tokens=16", "trainer.batch_size=4"),
            *("rollout.num_generations=4", "rollout.max_tokens=12", "trainer.learning_rate=1e-3"),
            "inference.health_interval_s=0.5",
        ]

    def start_ranks(
        self, run_dir: Path, num_prompts: int, *options: str
    ) -> list[tuple[subprocess.Popen[bytes], Path]]:
        """The documentation's command on each trainer host, without ssh: processes and logs."""
        started = []
        for number, host in enumerate(self.trainers):
            beginning = f"deepspeed --hostfile hosts --no_ssh --node_rank {number} "
            command = self.command(beginning, run_dir, num_prompts, *options)
            log = run_dir.with_name(f"{run_dir.name}-{host.name}.log")
            started.append((self.start(host, command, log), log))
        return started

    def start_alone(
        self, host: Host, run_dir: Path, num_prompts: int, *options: str
    ) -> tuple[subprocess.Popen[bytes], Path]:
        """A run of one rank that starts its server itself: process and log."""
        server = ["--num-threads=1", "--max-model-len=160"]
        launch = ["inference.endpoints=[]", "inference.launch.engine=embedded"]
        launch.append(f"inference.launch.options=[{','.join(server)}]")
        log = run_dir.with_suffix(".log")
        command = [sys.executable, "-m", "easyrl.train", "benchmarks/overlap.yaml", *launch]
        command += [*self._settings(run_dir, num_prompts), *options]
        return self.start(host, command, log), log

    def verify(self, run_dir: Path) -> str:
        """What ``easyrl verify`` says; it must be content."""
        done = subprocess.run(
            [str(BIN / "easyrl"), "verify", str(run_dir)],
            cwd=self.work,
            env={**self.environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def end_run(self) -> None:
        """Nothing runs on the trainer hosts afterwards."""
        for host in self.trainers:
            host.end_processes()


@contextmanager
def cluster(folder: Path, *server_options: str) -> Iterator[Cluster]:
    with ExitStack() as opened:
        made = Cluster(folder, opened)
        made.start_servers(*server_options)
        yield made


def wait_for_ranks(started: Sequence[tuple[subprocess.Popen[bytes], Path]], status: int) -> None:
    """Each of them ends with ``status``."""
    for process, log in started:
        said = process.wait(RUN_S)
        assert said == status, f"status {said}: {log.read_text()[-5000:]}"
