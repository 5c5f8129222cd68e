"""Logins without a password between hosts: keys, an sshd on each, what ssh has to know."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.hosts.namespaces import Host
from tests.waiting import wait_until

SSHD = "/usr/sbin/sshd"
PROGRAMS = {SSHD: "openssh-server", "ssh": "openssh-client", "pdsh": "pdsh"}  # and their packages
_SERVER = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/id.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
"""
_CLIENT = """
IdentityFile {folder}/id
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking accept-new
"""


def why_missing() -> str | None:
    """Which program is not installed, or None."""
    missing = [
        f"{program} (apt-get install {package})"
        for program, package in PROGRAMS.items()
        if shutil.which(program) is None
    ]
    return f"not installed: {', '.join(missing)}" if missing else None


def write_keys(folder: Path) -> None:
    """A key of all hosts, and one of the user who logs in on each."""
    folder.mkdir()
    for name in ("host_key", "id"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(key, check=True)
    (folder / "sshd_config").write_text(_SERVER.format(folder=folder))


def start_sshd(hosts: Sequence[Host], folder: Path) -> None:
    """Each of ``hosts`` lets root of any other in, as soon as this returns."""
    for host in hosts:
        settings = host.home / ".ssh" / "config"
        settings.parent.mkdir(mode=0o700, exist_ok=True)
        settings.write_text(_CLIENT.format(folder=folder))
        log = folder / f"sshd-{host.name}.log"
        host.start([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], log, folder)
    for host in hosts:
        wait_until(lambda host=host: ":22 " in host.run("ss", "-ltn"))
