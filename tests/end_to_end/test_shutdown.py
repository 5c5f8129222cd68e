"""Ctrl-C and SIGTERM in the middle of a batch leave no process and no weights behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.random_model import write_prompts, write_random_model
from easyrl.inference_client.launch import EmbeddedServerProcess
from tests.end_to_end.proxy import GatedProxy

ROOT = Path(__file__).resolve().parents[2]


def marked_processes(mark: int) -> dict[int, str]:
    """Living processes of a run, by the mark in their environment: pid → command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if f"EASYRL_TEST_RUN={mark}".encode() in environment and state != "Z":
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


@pytest.mark.parametrize(
    ("stop", "num_ranks"),
    [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGTERM, 1), (signal.SIGINT, 2)],
    ids=["ctrl-c", "sigterm", "sigterm-to-launcher", "ctrl-c-two-ranks"],
)
def test_nothing_is_left_behind(stop, num_ranks, tmp_path):
    """``num_ranks`` 0: without the launcher. Ctrl-C goes to the group, as from a terminal."""
    model = write_random_model(tmp_path / "model", hidden_size=32, num_layers=1)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8, 12)
    name = f"shutdown-{stop.name}-{num_ranks}"
    start = ["-m", "easyrl.train"]
    if num_ranks:
        launcher = Path(sys.executable).with_name("deepspeed")
        start = [str(launcher), "--num_accelerators", str(num_ranks), "--module", "easyrl.train"]
    with EmbeddedServerProcess(model, ["--num-threads", "1", "--max-model-len", "160"]) as server:
        # the last responses never come: the run is in the middle of its first batch
        proxy = GatedProxy(server.url, held=lambda token_ids: len(token_ids) == 12)
        command = [
            *(sys.executable, *start, "benchmarks/overlap.yaml"),
            *(f"run.output_dir={tmp_path / 'run'}", f"run.name={name}", f"model.path={model}"),
            *(f"data.files=[{prompts}]", "data.max_prompt_tokens=16", "trainer.batch_size=8"),
            *(f"inference.endpoints=[{proxy.url}]", "rollout.max_tokens=24"),
        ]
        log = tmp_path / "log"
        mark = os.getpid() * 100 + stop * 3 + num_ranks
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "EASYRL_TEST_RUN": str(mark),
        }
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 90
            while proxy.num_waiting < 8 * 8:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            assert len(marked_processes(mark)) >= 2  # the trainer and at least one worker
            if stop == signal.SIGINT:
                os.killpg(process.pid, stop)
            else:
                process.send_signal(stop)
            process.wait(30)
            deadline = time.monotonic() + 10
            while (left := marked_processes(mark)) and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            for pid in marked_processes(mark):
                os.kill(pid, signal.SIGKILL)
            process.wait()
            proxy.close()
    assert process.returncode != 0
    assert not left, log.read_text()
    assert not list(Path("/dev/shm").glob(f"easyrl-{name}*")), log.read_text()
