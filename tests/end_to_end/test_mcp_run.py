"""A run whose tool is an MCP server's, which ends in the middle: by ``make test-verifiers``."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from transformers import AutoTokenizer

from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.metrics.trackers import read_metrics
from tests.easyrl.environments.installed import folder_with, python_with
from tests.end_to_end.test_episodes_two_ranks import episodes_of, sums
from tests.end_to_end.test_example_environments import build
from tests.end_to_end.trainer_run import ROOT, run_to_end, trainer_command

pytestmark = pytest.mark.runs

STEPS, BATCH, SAMPLES = 2, 4, 4
# Its first process dies in its third call, and takes those beside it along.
SERVER = '''
    import os
    from pathlib import Path
    try:
        from mcp.server.mcpserver import MCPServer as Server
    except ImportError:
        from mcp.server.fastmcp import FastMCP as Server

    server, died, calls = Server("sums"), Path(os.environ["DIED"]), []

    @server.tool()
    def calculate(expression: str) -> str:
        """Calculates."""
        calls.append(expression)
        if len(calls) == 3 and not died.exists():
            died.touch()
            os._exit(1)
        a, operator, b = expression.partition(next(c for c in expression if c in "+-*"))
        return str({"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operator])

    server.run()
'''


def test_a_server_that_ends_costs_no_episode(tmp_path: Path) -> None:
    library = folder_with("mcp")
    build(tmp_path / "model", sums, num_steps=80, batch_size=8)
    server_file, died = tmp_path / "server.py", tmp_path / "died"
    server_file.write_text(textwrap.dedent(SERVER))
    records = [json.dumps({"prompt": f"{n + 3}*{7 * n + 5}", "answer": "-"}) for n in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(records) + "\n")
    (tmp_path / "odd.py").write_text(
        "def reward_func(prompt, texts, token_ids):\n"
        "    return [float(text[-1:] in set('13579')) for text in texts]\n"
    )
    # the package behind the trainer's own, whose versions are others
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.path.append({str(library)!r})")
    environment = {
        "name": "sums",
        "tools": [
            {
                "command": [str(python_with(library, tmp_path)), str(server_file)],
                "env": {"DIED": str(died)},
            }
        ],
        "rewards": [{"file": str(tmp_path / "odd.py")}],
        "max_turns": 4,
    }
    run_dir = tmp_path / "run"
    with EmbeddedServerProcess(tmp_path / "model", ["--max-model-len", "256"]) as server:
        command = trainer_command(
            run_dir,
            tmp_path / "model",
            tmp_path / "prompts.jsonl",
            [server.url],
            *("rewards=[]", f"environments=[{json.dumps(environment)}]"),
            *("data.apply_chat_template=true", "data.max_prompt_tokens=64"),
            *(f"trainer.batch_size={BATCH}", f"trainer.max_steps={STEPS}"),
            *(f"rollout.num_generations={SAMPLES}", "rollout.max_tokens=48"),
        )
        ended = run_to_end(command, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', ROOT)}")
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert died.exists()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    played = episodes_of(run_dir)
    texts = [tokenizer.decode(completion.token_ids) for completion in played.values()]
    assert len(texts) == STEPS * BATCH * SAMPLES
    told = re.compile(r"<\|tool\|>error: (\w+:? \w+)")
    errors = {error for text in texts for error in told.findall(text)}
    # what the model has done wrong alone: a call that the server was lost in was answered
    assert errors <= {"there is", "McpToolFailed: Error", "invalid arguments"}, errors
    answered = [re.findall(r"<\|tool\|>\s*(-?\d+)", text) for text in texts]
    assert sum(map(len, answered)) >= 3
    steps = [m for m in read_metrics(run_dir / "metrics.jsonl") if m["step"] > 0]
    assert sum(m["environment/sums/failures"] for m in steps) == 0
    verified = run_to_end([sys.executable, "-m", "easyrl", "verify", str(run_dir)])
    assert verified.returncode == 0 and f"on-policy: {STEPS} batches" in verified.stdout
    left = [
        p for p in psutil.process_iter(["cmdline"]) if str(server_file) in (p.info["cmdline"] or ())
    ]
    assert left == []
