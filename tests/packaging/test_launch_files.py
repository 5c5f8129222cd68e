"""Files of ``configs/launch``: what can be tried without SLURM, Kubernetes or Ray.

Servers and launcher are replaced by a recorder of their command lines, but for one real
``deepspeed``.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from easyrl.config.file import load_config
from tests.hosts.documented import documented
from tests.packaging.doc_references import Project, wrong_references

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "configs" / "launch"
SHELL = sorted(path for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch"))
RECORDER = """#!{python}
import json, os, sys, time
line = {{"argv": sys.argv[1:], "devices": os.environ.get("CUDA_VISIBLE_DEVICES")}}
if "--hostfile" in sys.argv:
    line["hosts"] = open(sys.argv[sys.argv.index("--hostfile") + 1]).read()
with open({log!r}, "a") as log:
    log.write(json.dumps(line) + "\\n")
time.sleep(2)  # a server runs on
"""


@pytest.fixture
def recorder(tmp_path):
    """A command that writes down how it was called, and a function that reads it."""
    log, command = tmp_path / "calls.jsonl", tmp_path / "recorder"
    command.write_text(RECORDER.format(python=sys.executable, log=str(log)))
    command.chmod(0o755)
    return command, lambda: [json.loads(line) for line in log.read_text().splitlines()]


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_a_shell_script_parses(path):
    run("bash", "-n", str(path))
    assert os.access(path, os.X_OK) and "set -" in path.read_text()


def test_a_broken_script_does_not_parse(tmp_path):
    broken = tmp_path / "broken.sh"
    broken.write_text((LAUNCH / "serve.sh").read_text().replace("done", "", 1))
    assert subprocess.run(["bash", "-n", str(broken)], capture_output=True).returncode


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda path: path.name)
def test_paths_and_keys_that_a_file_names_are_there(path):
    assert wrong_references(path.read_text(), Project.here()) == []


def test_a_server_has_its_own_devices_and_the_documented_flags(recorder):
    command, calls = recorder
    run("configs/launch/serve.sh", "models/M", "2", VLLM=str(command), DEVICES="4")
    got = sorted(calls(), key=lambda call: call["devices"])
    assert [call["devices"] for call in got] == ["0,1", "2,3"]
    documentation = documented("docs/endpoints.md", "CUDA_VISIBLE_DEVICES=0 ")
    flags = {word for word in documentation if word.startswith("--")}
    for number, call in enumerate(got):
        words = call["argv"]
        assert words[:2] == ["serve", "models/M"]
        assert words[words.index("--port") + 1] == str(8000 + number)
        assert words[words.index("--tensor-parallel-size") + 1] == "2"
        assert flags <= set(words)
    urls = run("configs/launch/endpoint_urls.sh", "2", "infer0", "infer1", DEVICES="4")
    assert urls.split(",") == [f"http://infer{n}:800{port}" for n in (0, 1) for port in (0, 1)]


def test_a_node_is_started_as_documented(recorder):
    command, calls = recorder
    endpoints = "http://infer0:8000,http://infer0:8001,http://infer1:8000,http://infer1:8001"
    run(
        *("configs/launch/train_node.sh", "1", "2", "10.0.0.1", endpoints),
        *("configs/gsm8k_qwen3.yaml", "trainer.max_steps=3"),
        DEEPSPEED=str(command),
    )
    (call,) = calls()
    assert call["hosts"] == "node0 slots=8\nnode1 slots=8\n"
    words = documented("docs/several_nodes.md", "deepspeed --hostfile hosts --no_ssh --node_rank 1")
    expected = [word for word in words[1:] if word != "hosts"]
    expected[expected.index("weight_sync.advertise_host=train0")] = (
        "weight_sync.advertise_host=10.0.0.1"
    )
    got = [word for word in call["argv"] if not word.startswith("/")]
    port = got.index("--master_port")
    assert got[:port] + got[port + 2 :] == [*expected, "trainer.max_steps=3"]


def test_deepspeed_takes_the_command_of_a_node():
    output = run(
        *("configs/launch/train_node.sh", "0", "1", "127.0.0.1", "http://infer0:8000"),
        *("configs/laptop_cpu.yaml", "--print-config"),
        DEEPSPEED=str(Path(sys.executable).with_name("deepspeed")),
        DEVICES="1",
        DS_ACCELERATOR="cpu",
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    assert "- http://infer0:8000" in output and "advertise_host: 127.0.0.1" in output


def test_a_server_that_ends_ends_the_others(tmp_path):
    """And the script with them, by its status."""
    server = tmp_path / "server"
    server.write_text('#!/bin/bash\n[ "$CUDA_VISIBLE_DEVICES" = 1 ] && exit 3\nexec sleep 60\n')
    server.chmod(0o755)
    done = subprocess.run(
        ["configs/launch/serve.sh", "models/M", "1"],
        cwd=ROOT,
        env=os.environ | {"VLLM": str(server), "DEVICES": "3"},
        timeout=20,
    )
    assert done.returncode == 3


def test_the_manifest_is_of_one_piece():
    """Names that its parts know each other by, and the run that its folder belongs to."""
    parts = list(yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text()))
    assert [(part["kind"], part["metadata"]["name"]) for part in parts] == [
        ("Service", "easyrl"),
        ("Job", "easyrl-infer"),
        ("Job", "easyrl-train"),
    ]
    service, *jobs = parts
    assert service["spec"]["clusterIP"] == "None"
    for job in jobs:
        assert job["spec"]["completionMode"] == "Indexed"
        pod = job["spec"]["template"]
        assert pod["metadata"]["labels"] == service["spec"]["selector"]
        assert pod["spec"]["subdomain"] == service["metadata"]["name"]
        (container,) = pod["spec"]["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    script = jobs[1]["spec"]["template"]["spec"]["containers"][0]["args"][0]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    (config_file,) = set(re.findall(r"configs/\w+\.yaml", script))
    config = load_config(ROOT / config_file)
    assert f"{config.run.output_dir}/certificate.jsonl" in script
    model = jobs[0]["spec"]["template"]["spec"]["containers"][0]["command"][1]
    assert Path(model) == config.model.path


def test_the_batch_script_names_what_there_is():
    """Both settings: the configuration, its model, and nodes that make the number of devices."""
    text = (LAUNCH / "slurm.sbatch").read_text()
    (line,) = re.findall(r"sbatch (--nodes.*)", text)
    nodes, exported, file = shlex.split(line)
    assert ROOT / file == LAUNCH / "slurm.sbatch"
    values = dict(pair.split("=", 1) for pair in exported.split(",")[1:])
    small = load_config(ROOT / re.findall(r"CONFIG:-([\w/.]+)", text)[0])
    large = load_config(ROOT / values["CONFIG"])
    assert str(small.model.path) == re.findall(r"MODEL:-([\w/.-]+)", text)[0]
    assert str(large.model.path) == values["MODEL"]
    assert re.findall(r"#SBATCH --nodes=(\d+)", text) == ["2"] and nodes == "--nodes=6"
    servers = (6 - int(values["TRAIN_NODES"])) * 8 // int(values["PER_SERVER"])
    assert len(large.inference.urls) == servers and len(small.inference.urls) == 8


def test_the_ray_job_is_python_that_shows_its_help():
    file = LAUNCH / "ray_job.py"
    ast.parse(file.read_text())
    assert "--train-nodes" in run(sys.executable, str(file), "--help")
