"""Models by Hub id: from the cache, from a hub over HTTP, or neither, which is told."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from easyrl.config import ConfigError
from easyrl.config.file import validate_config
from easyrl.hub.models import local_model, with_local_models
from tests.easyrl.hub.hub_cache import COMMIT, cache_model

REPO = "some-lab/tiny-model"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text(f'{{"is": "{name}"}}')
    (folder / "pytorch_model.bin").write_text("the same weights once more")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty, and nothing else is asked."""
    home = tmp_path / "home"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return home


def test_a_folder_is_what_it_is(model: Path, cache: Path) -> None:
    assert local_model(model, "model.path") == model


@pytest.mark.parametrize("name", ["one", "a/b/c", "/nowhere/model", "../x/y", "a b/c"])
def test_what_is_no_id_is_left_to_others(name: str, cache: Path) -> None:
    assert local_model(Path(name), "model.path") == Path(name)


def test_a_cached_model_needs_no_network(model: Path, cache: Path) -> None:
    snapshot = cache_model(cache, REPO, model)
    assert local_model(Path(REPO), "model.path") == snapshot
    assert local_model(Path(f"{REPO}@{COMMIT}"), "model.path") == snapshot


def test_a_folder_of_that_name_comes_first(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_model(cache, REPO, model)
    monkeypatch.chdir(tmp_path)
    Path(REPO).mkdir(parents=True)
    assert local_model(Path(REPO), "model.path") == Path(REPO)


def test_one_that_is_not_to_be_had_is_named_with_the_command(cache: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        local_model(Path(f"{REPO}@v2"), "critic.path")
    told = str(caught.value)
    assert told.startswith(f"critic.path: {REPO}@v2 is not a directory here")
    assert f"hf download {REPO} --revision v2 --local-dir models/tiny-model" in told


def test_all_models_of_a_configuration(model: Path, cache: Path) -> None:
    snapshot = cache_model(cache, REPO, model)
    config = validate_config(
        {
            "run": {"output_dir": "runs/x"},
            "model": {"path": REPO, "tokenizer": REPO},
            "data": {"files": ["a.jsonl"]},
            "inference": {"endpoints": ["http://h:1"]},
            "rewards": [{"name": "exact"}],
            "critic": {"path": REPO},
            "recipe": {"name": "distillation", "teacher": REPO},
        }
    )
    local = with_local_models(config)
    assert local.model.path == local.model.tokenizer == local.critic.path == snapshot
    assert local.recipe.settings["teacher"] == str(snapshot)
    assert config.model.path == Path(REPO)


def test_a_cache_that_lacks_files_is_not_taken_for_the_model(model: Path, cache: Path) -> None:
    """Others have asked for the configuration alone, or for one of the shards."""
    snapshot = cache_model(cache, REPO, model)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"hf download {REPO}"):
        local_model(Path(REPO), "model.path")
    assert local_model(Path(REPO), "model.tokenizer", has_weights=False) == snapshot
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (snapshot / "model-1.safetensors").touch()
    with pytest.raises(ConfigError, match=f"hf download {REPO}"):
        local_model(Path(REPO), "model.path")
    (snapshot / "model-2.safetensors").touch()
    assert local_model(Path(REPO), "model.path") == snapshot


def test_a_run_that_is_resumed_has_the_commit_that_it_was_begun_with(
    model: Path, cache: Path, tmp_path: Path
) -> None:
    before = cache_model(cache, REPO, model)
    newest = cache_model(cache, REPO, model, commit="f" * 40)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"model: {{path: {before}, tokenizer: null}}")
    config = validate_config(
        {
            "run": {"output_dir": str(run)},
            "model": {"path": REPO},
            "data": {"files": ["a.jsonl"]},
            "inference": {"endpoints": ["http://h:1"]},
            "rewards": [{"name": "exact"}],
        }
    )
    assert with_local_models(config).model.path == newest
    assert with_local_models(config, resume=True).model.path == before
    other = config.model_copy(
        update={"model": config.model.model_copy(update={"path": Path("some-lab/other")})}
    )
    with pytest.raises(ConfigError, match="some-lab/other is not a directory"):
        with_local_models(other, resume=True)


class Hub(BaseHTTPRequestHandler):
    """The routes of the Hub that a download asks for, over the files of one folder."""

    folder: Path
    asked: list[str]

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        files = sorted(self.folder.iterdir())
        if self.path.startswith(f"/api/models/{REPO}/tree"):
            tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40}
                    for f in files]  # fmt: skip
            self._answer(json.dumps(tree).encode())
        elif self.path.startswith(f"/api/models/{REPO}"):
            names = [{"rfilename": file.name} for file in files]
            self._answer(json.dumps({"id": REPO, "sha": COMMIT, "siblings": names}).encode())
        else:
            self._file()

    def do_HEAD(self) -> None:
        self._file()

    def _file(self) -> None:
        file = self.folder / self.path.rpartition("/")[2]
        if not self.path.startswith(f"/{REPO}/resolve/") or not file.is_file():
            self._answer(b"", 404, {"X-Error-Code": "RepoNotFound"})
            return
        content = file.read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        self._answer(content, 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def _answer(
        self, content: bytes, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(model: Path) -> Iterator[tuple[str, list[str]]]:
    """Its URL, and the paths that are asked for."""
    handler = type("Handler", (Hub,), {"folder": model, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler.asked
    server.shutdown()


def test_a_download_fetches_what_a_run_reads(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    """By ``huggingface_hub`` itself, which reads its environment as it is imported."""
    url, asked = hub
    code = (
        "from pathlib import Path; from easyrl.hub.models import local_model; "
        f"print(local_model(Path({REPO!r}), 'model.path')); "
        f"local_model(Path('some-lab/other'), 'model.path')"
    )
    environment = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), "PATH": ""}
    environment |= {"PYTHONPATH": ":".join(sys.path), "HF_HUB_DISABLE_TELEMETRY": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    folder = Path(result.stdout.strip())
    assert folder.name == COMMIT, result.stderr[-2000:]
    names = {file.name for file in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    assert not any(path.endswith(".bin") for path in asked)
    assert "ConfigError: model.path: some-lab/other is not a directory here" in result.stderr
