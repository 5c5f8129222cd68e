"""Rollouts that hang, raise, never end, or leave behind what they should not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time

from benchmarks.parts.hostile.episodes.catalogue import behaviour
from benchmarks.parts.hostile.episodes.scene import FIRST, TOKENS, Scene
from benchmarks.parts.hostile.episodes.turns import behave, first_turn

GIGABYTE = 2**30
LONG_S = 1000.0
NUM_THREADS, NUM_PROCESSES = 100, 5
NUM_HUNG = 40  # more than a host may have before it is replaced
_tasks: list[asyncio.Task[None]] = []  # the loop itself does not keep them


@behaviour("life", "fails")
async def hangs(scene: Scene) -> None:
    """It asks for nothing any more behind its first turn."""
    await first_turn(scene)
    scene.happened()
    await asyncio.Event().wait()


@behaviour("life", "silent")
async def hangs_before_it_asks(scene: Scene) -> None:
    """It asks for nothing at all."""
    scene.happened()
    await asyncio.Event().wait()


@behaviour("life", "fails")
async def does_not_let_itself_be_cancelled(scene: Scene) -> None:
    """It hangs, and goes on hanging when it is cancelled."""
    await first_turn(scene)
    scene.happened()
    while True:
        try:
            await asyncio.sleep(LONG_S)
        except asyncio.CancelledError:
            continue


@behaviour("life", once=True)
async def blocks_its_loop(scene: Scene) -> None:
    """It sleeps for long in the thread of all rollouts of its host."""
    await first_turn(scene)
    scene.happened()
    time.sleep(LONG_S)


@behaviour("life", "silent")
async def raises_before_it_asks(scene: Scene) -> None:
    """An exception before the first turn."""
    scene.happened()
    raise ValueError("nothing will come of this")


@behaviour("life", "excluded")
async def none_of_a_group_asks(scene: Scene) -> None:
    """All samples of a prompt raise before their first turn."""
    scene.happened()
    raise KeyError("the record has no board")


@behaviour("life", "rejected")
async def all_of_a_group_fail(scene: Scene) -> None:
    """All samples of a prompt raise behind their first turn."""
    await first_turn(scene)
    scene.happened()
    raise KeyError("the board has no such field")


@behaviour("life")
async def cannot_connect_at_first(scene: Scene) -> float:
    """What it needs refuses connections until it has tried three times."""
    tries = scene.folder / f"tries-{scene.prompt.seed}"
    with tries.open("a") as file:
        file.write(".")
    if len(tries.read_text()) <= 2:
        try:
            await asyncio.open_connection("127.0.0.1", 1)
        except OSError as error:
            raise RuntimeError("the sandbox cannot be had") from error
    scene.happened()
    return await behave(scene)


@behaviour("life")
async def leaves_threads_that_hang(scene: Scene) -> float:
    """Calls in threads run out of time, more than there are threads in asyncio's own pool."""
    calls = [asyncio.to_thread(time.sleep, LONG_S) for _ in range(NUM_HUNG)]
    ended = await asyncio.gather(
        *(asyncio.wait_for(call, 1.0) for call in calls), return_exceptions=True
    )
    scene.check({type(each) for each in ended} == {TimeoutError}, str(ended))
    await asyncio.wait_for(asyncio.to_thread(int), 10.0)  # there is one for this
    scene.happened()
    return await behave(scene)


@behaviour("life", "fails")
async def raises_behind_its_first_turn(scene: Scene) -> None:
    """An exception behind the first turn."""
    await first_turn(scene)
    scene.happened()
    raise RuntimeError("\x00 \ud800 odd " + "x" * 100_000)


@behaviour("life", "fails")
async def raises_what_cannot_be_told(scene: Scene) -> None:
    """An exception whose text raises."""

    class Untold(Exception):
        def __str__(self) -> str:
            raise KeyError

    await first_turn(scene)
    scene.happened()
    raise Untold


@behaviour("life", "fails")
async def exits_politely(scene: Scene) -> None:
    """``sys.exit`` in a rollout."""
    await first_turn(scene)
    scene.happened()
    sys.exit(3)


@behaviour("life", "fails")
async def raises_keyboard_interrupt(scene: Scene) -> None:
    """``KeyboardInterrupt`` out of a rollout."""
    await first_turn(scene)
    scene.happened()
    raise KeyboardInterrupt


@behaviour("life", "fails")
async def raises_cancelled_error(scene: Scene) -> None:
    """It says that it was cancelled, and nobody has."""
    await first_turn(scene)
    scene.happened()
    raise asyncio.CancelledError


@behaviour("life")
async def never_ends(scene: Scene) -> float:
    """It asks until it is refused: ``max_turns``."""
    for number in range(100):
        body = {"token_ids": [*FIRST, number % 9 + 5], "sampling_params": {"max_tokens": 2}}
        status, answer = await scene.ask(TOKENS, {**body, "return_token_ids": True})
        if status != 200:
            scene.check(status == 400 and "turns" in str(answer), f"{status}: {answer}")
            scene.happened(f"{number} turns")
            break
        scene.answered(answer)
    return scene.reward


@behaviour("life")
async def removes_its_folder(scene: Scene) -> float:
    """It changes the working directory to one that it removes."""
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    scene.happened()
    return await behave(scene)


@behaviour("life")
async def starts_processes(scene: Scene) -> float:
    """It starts processes, in sessions of their own, that do not end."""
    for _ in range(NUM_PROCESSES):
        subprocess.Popen(["sleep", str(LONG_S)], start_new_session=True)
    scene.happened()
    return await behave(scene)


@behaviour("life")
async def starts_threads(scene: Scene) -> float:
    """It starts threads that do not end."""
    for _ in range(NUM_THREADS):
        threading.Thread(target=time.sleep, args=(LONG_S,)).start()
    scene.happened()
    return await behave(scene)


@behaviour("life")
async def prints_a_gigabyte(scene: Scene) -> float:
    """It writes a gigabyte to standard output."""
    block, num_parts = b"noise " * (2**20 // 6), 8

    def write() -> None:
        for _ in range(GIGABYTE // num_parts // len(block)):
            os.write(1, block)

    for _ in range(num_parts):
        await asyncio.to_thread(write)
        await first_turn(scene)  # it does not hang
    scene.happened()
    return scene.reward


@behaviour("life")
async def ends_with_requests_open(scene: Scene) -> float:
    """It returns while turns that it asked for are still sampled."""
    await first_turn(scene)
    for number in range(3):
        _tasks.append(asyncio.create_task(_without_answer(scene, number)))
    await asyncio.sleep(0.05)
    scene.happened()
    return scene.reward


async def _without_answer(scene: Scene, number: int) -> None:
    body = {"token_ids": [*FIRST, 11 + number], "sampling_params": {"max_tokens": 4}}
    await scene.ask(TOKENS, body)


@behaviour("life")
async def asks_when_it_has_ended(scene: Scene) -> float:
    """It asks again and again behind its end: 410 each time."""
    _tasks.append(asyncio.create_task(_ask_later(scene)))
    return await behave(scene)


async def _ask_later(scene: Scene) -> None:
    for _ in range(600):
        await asyncio.sleep(0.1)
        status, _ = await scene.ask("/v1/chat/completions", b"{}")
        if status == 410:
            for _ in range(20):
                await scene.refused(410, TOKENS, {"token_ids": FIRST})
            scene.happened()
            return
        if status == 404:  # of another gateway's process
            return
        scene.check(status == 400, f"{status} to an empty body")
    scene.check(False, "its session did not end within a minute")
