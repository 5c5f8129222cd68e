"""Environments that end their own process, the gateway's, or what is between them and the run."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.parts.hostile.episodes.catalogue import behaviour
from benchmarks.parts.hostile.episodes.scene import TOKENS, Scene
from benchmarks.parts.hostile.episodes.turns import first_turn

GATEWAY = b"easyrl.gateway.process"
MOST_DESCRIPTORS = 4096
NUM_IDS = 4_000_000  # of a long request


@behaviour("process", once=True)
async def kills_its_host(scene: Scene) -> None:
    """SIGKILL to its own process."""
    await first_turn(scene)
    scene.happened()
    os.kill(os.getpid(), signal.SIGKILL)


@behaviour("process", once=True)
async def exits_at_once(scene: Scene) -> None:
    """``os._exit``: no handler runs."""
    await first_turn(scene)
    scene.happened()
    os._exit(7)


@behaviour("process", once=True)
async def reads_address_zero(scene: Scene) -> None:
    """A segmentation fault."""
    await first_turn(scene)
    scene.happened()
    ctypes.string_at(0)


@behaviour("process", once=True)
async def stops_its_host(scene: Scene) -> None:
    """SIGSTOP to its own process, which stays."""
    await first_turn(scene)
    scene.happened()
    os.kill(os.getpid(), signal.SIGSTOP)


@behaviour("process", "silent")
async def dies_every_time(scene: Scene) -> None:
    """Its host ends whenever the episode is played."""
    await first_turn(scene)
    scene.happened()
    os._exit(1)


@behaviour("process", once=True)
async def leaves_its_sockets_to_a_fork(scene: Scene) -> None:
    """It forks a process that keeps all sockets, in a session of its own, and ends."""
    await first_turn(scene)
    scene.happened()
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
        os._exit(0)
    os._exit(1)


@behaviour("process", once=True)
async def closes_its_descriptors(scene: Scene) -> None:
    """It closes all file descriptors of its process, those of the event loop too."""
    await first_turn(scene)
    scene.happened()
    os.closerange(0, MOST_DESCRIPTORS)


@behaviour("process", once=True)
async def sends_noise_to_the_run(scene: Scene) -> None:
    """It writes bytes of its own to the socket that its host talks to the trainer with."""
    await first_turn(scene)
    scene.happened()
    _tell_the_trainer(b"\xff\xfe{\n" + os.urandom(4096) + b"\n")
    await asyncio.Event().wait()


@behaviour("process", once=True)
async def sends_forged_lines_to_the_run(scene: Scene) -> None:
    """It writes lines there that are JSON and no message: other types, missing keys, no rollout."""
    await first_turn(scene)
    scene.happened()
    _tell_the_trainer(
        b'[]\n{"type": "beat"}\n{"type": "done", "id": 99999, "reward": "much"}\n'
        b'{"type": "done", "id": [1], "reward": 1}\n{"type": "output"}\n7\n'
    )
    await asyncio.Event().wait()


@behaviour("process", once=True)
async def kills_the_gateway(scene: Scene) -> float:
    """SIGKILL to the gateway's process, in which all sessions of the run are."""
    return await _signal_gateway(scene, signal.SIGKILL)


@behaviour("process", once=True)
async def stops_the_gateway(scene: Scene) -> float:
    """SIGSTOP to the gateway's process, which stays."""
    return await _signal_gateway(scene, signal.SIGSTOP)


@behaviour("process", "silent")
async def kills_the_gateway_again_and_again(scene: Scene) -> None:
    """The gateway dies of a long request of its, whenever the episode is played."""
    await first_turn(scene)
    body = b'{"token_ids": [' + b"7," * NUM_IDS + b"7]}"
    head = (
        f"POST {scene.url.partition(str(scene.port))[2]}{TOKENS} HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {scene.key}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", scene.port)
    writer.write(head + body[: len(body) // 2])
    await asyncio.sleep(0.4)  # it is being read
    for pid in _gateways(scene):
        scene.happened()
        os.kill(pid, signal.SIGKILL)
    with suppress(ConnectionError):
        scene.check(await reader.read() == b"", "the request was answered")
    writer.close()
    await first_turn(scene)  # which has no answer any more


async def _signal_gateway(scene: Scene, number: signal.Signals) -> float:
    await first_turn(scene)
    for pid in _gateways(scene):  # none where it has just been killed
        scene.happened()
        os.kill(pid, number)
    await first_turn(scene)  # which has no answer any more
    return scene.reward


def _gateways(scene: Scene) -> list[int]:
    found = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if _parent_of(path.parent) == os.getppid() and GATEWAY in path.read_bytes()
    ]
    scene.check(len(found) <= 1, f"{len(found)} gateways")
    return found


def _parent_of(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def _tell_the_trainer(data: bytes) -> None:
    """Over each pair of sockets that this process has inherited."""
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            with socket.socket(fileno=os.dup(descriptor)) as found:
                is_pair = found.family == socket.AF_UNIX and not found.getsockname()
                inherited = not fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
                if is_pair and inherited:
                    found.sendall(data)
        except OSError:
            continue
