"""Real processes over gloo, of which one ends while another waits for it."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from easyrl.engines.group.channel import GroupLost
from easyrl.runtime.lost_process import lost_process
from easyrl.runtime.machine import free_port
from easyrl.schema import TEMPORARY_FAILURE, InterruptedRun
from easyrl.train import _lost_processes_told


def process(rank: int, port: int, kind: str, said: Any) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        os._exit(0)
    tensor = torch.zeros(1)
    try:
        with _lost_processes_told():
            if kind == "collective":
                dist.all_reduce(tensor)
            else:
                dist.recv(tensor, 1)
    except InterruptedRun as error:
        said.put((error.status, str(error)))
    os._exit(0)


@pytest.mark.parametrize("kind", ["collective", "message"])
def test_a_process_that_is_gone_interrupts_the_run(kind: str) -> None:
    context = multiprocessing.get_context("spawn")
    said = context.SimpleQueue()
    port = free_port()
    processes = [
        context.Process(target=process, args=(rank, port, kind, said)) for rank in range(2)
    ]
    for each in processes:
        each.start()
    status, text = said.get()
    assert status == TEMPORARY_FAILURE
    assert text.startswith("another process of the run has ended (") and "--resume" in text
    for each in processes:
        each.join()


def test_what_a_group_says_of_a_process_that_is_gone_is_told() -> None:
    with (
        pytest.raises(InterruptedRun, match="another process.*closed") as told,
        _lost_processes_told(),
    ):
        raise GroupLost("closed")
    assert told.value.status == TEMPORARY_FAILURE


def test_other_errors_go_on_as_they_are() -> None:
    assert lost_process(RuntimeError("expected a tensor of another shape")) is None
    with pytest.raises(RuntimeError, match="another shape"), _lost_processes_told():
        raise RuntimeError("another shape")
    with pytest.raises(InterruptedRun, match="stopped"), _lost_processes_told():
        raise InterruptedRun("stopped", status=0)
