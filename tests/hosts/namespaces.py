"""Hosts of a network on one machine: Linux namespaces joined by virtual Ethernet and a bridge.

Each host has its own addresses, loopback, hostname, ``/etc/hosts``, home, ``/dev/shm``, ``/run``
and process ids; the disk is shared. Nothing of it lies in the machine's own network, and the kernel
removes all of it when the process that made it ends, in whatever way.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

TOOLS = ("ip", "ss", "nsenter", "unshare", "setpriv")
ALL = ("--net", "--uts", "--ipc", "--mount", "--pid")
UP_S = 20.0

# In the new namespaces: what a host has of its own, then a process that lives as long as the host.
_SETUP = """
set -e
hostname "$1"
mount --make-rprivate /
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/passwd" /etc/passwd
ip link set lo up
echo ready
exec sleep infinity
"""


def why_closed() -> str | None:
    """Why this process cannot make hosts, or None if it can."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "namespaces need root"
    bridge = ["ip", "link", "add", "name", "a", "type", "bridge"]
    made = subprocess.run(
        ["unshare", *ALL, "--fork", "--mount-proc", *bridge], capture_output=True, text=True
    )
    return None if made.returncode == 0 else f"namespaces are closed: {made.stderr.strip()}"


class Namespace:
    """A process that holds namespaces of its own, until ``close`` or the end of this process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *ALL, "--fork", "--kill-child"]
            + ["--mount-proc", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline()
        if said != "ready\n":
            self._holder.kill()
            raise OSError(f"no namespace: {said}{self._holder.stdout.read()}")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self.pid = int(children.read_text())

    def close(self) -> None:
        """Ends all its processes; the kernel removes what they were in."""
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()


class Host:
    """One host: where commands are run, and whose links can be cut."""

    def __init__(self, name: str, addresses: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self.addresses = addresses  # by the network's name
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        (folder / "hosts").write_text("127.0.0.1 localhost\n")
        (folder / "passwd").write_text(_passwd(self.home))
        self.hosts_file = folder / "hosts"
        setup = ["bash", "-c", _SETUP, "host", name, str(folder)]
        self.namespace = Namespace(setup)

    def enter(self, *command: str) -> list[str]:
        """``command`` as it is run on this host."""
        return ["nsenter", "--target", str(self.namespace.pid), *ALL, "--wd=.", "--", *command]

    def start(
        self, command: Sequence[str], log: Path, cwd: Path, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Starts ``command``; what it prints goes behind ``log``'s end."""
        with log.open("ab") as file:
            return subprocess.Popen(
                self.enter(*command),
                cwd=cwd,
                env={**os.environ, "HOME": str(self.home), **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def run(self, *command: str) -> str:
        """What ``command`` prints; it must succeed."""
        done = subprocess.run(self.enter(*command), capture_output=True, text=True, timeout=UP_S)
        assert done.returncode == 0, f"{self.name}: {command}: {done.stdout}{done.stderr}"
        return done.stdout

    def end_processes(self) -> None:
        """Kills all that runs on this host; the host stays."""
        self.run("bash", "-c", "kill -KILL -1 || true")  # but itself; nothing else may run

    def close(self) -> None:
        self.namespace.close()


class Network:
    """A switch with one port per host. A host is joined to it under the network's name."""

    def __init__(self, name: str) -> None:
        self.name = name
        script = f"ip link add name {name} type bridge && ip link set {name} up && echo ready"
        self._switch = Namespace(["bash", "-c", f"{script}; exec sleep infinity"])

    def join(self, host: Host) -> None:
        port = self._port(host)
        cable = ["ip", "link", "add", "name", port, "type", "veth", "peer", "name", self.name]
        self._on_switch(*cable, "netns", str(host.namespace.pid))
        self._on_switch("ip", "link", "set", port, "master", self.name, "up")
        host.run("ip", "address", "add", f"{host.addresses[self.name]}/24", "dev", self.name)
        host.run("ip", "link", "set", self.name, "up")

    def cut(self, host: Host) -> None:
        """As if the cable was pulled out at the switch."""
        self._on_switch("ip", "link", "set", self._port(host), "down")

    def mend(self, host: Host) -> None:
        self._on_switch("ip", "link", "set", self._port(host), "up")

    def close(self) -> None:
        self._switch.close()

    def _port(self, host: Host) -> str:
        return f"to-{host.name}"

    def _on_switch(self, *command: str) -> None:
        entered = ["nsenter", "--target", str(self._switch.pid), "--net", "--", *command]
        subprocess.run(entered, check=True, timeout=UP_S)


def _passwd(home: Path) -> str:
    """The machine's users, root with another home: ssh and sshd look it up here."""
    users = []
    for line in Path("/etc/passwd").read_text().splitlines():
        fields = line.split(":")
        if fields[0] == "root":
            fields[5], fields[6] = str(home), "/bin/bash"
        users.append(":".join(fields))
    return "\n".join(users) + "\n"
