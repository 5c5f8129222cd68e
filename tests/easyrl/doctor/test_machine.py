"""Checks of this machine: versions, devices, memory, space."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from easyrl.build.space import warn_of_little_space
from easyrl.config import ConfigError
from easyrl.config.file import load_config
from easyrl.doctor.architecture import count_parameters, weight_shapes
from easyrl.doctor.devices import device_finding
from easyrl.doctor.finding import failed, findings_of, ok
from easyrl.doctor.memory import check_memory
from easyrl.doctor.sizes import size
from easyrl.doctor.space import disk_finding, weight_space_finding
from easyrl.doctor.versions import check_versions
from tests.easyrl.doctor.parts import config, settings
from tests.easyrl.memory_plan.test_plan import QWEN3_8B

VLLM = {"engine": "vllm", "python": "/usr/bin/python3", "count": 2, "tensor_parallel": 2}


def test_versions(model: Path) -> None:
    found = list(check_versions(config(model)))
    assert [f.verdict for f in found] == ["ok"] * 4
    assert found[1].seen == f"torch {importlib.metadata.version('torch')}"


def test_a_package_that_only_a_split_model_needs(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "megatron-core":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr("easyrl.doctor.versions.version", version)
    assert all(f.verdict == "ok" for f in check_versions(config(model)))
    split = config(model, parallel={"tensor": 2}, trainer={"zero_stage": 1})
    last = list(check_versions(split))[-1]
    assert (last.name, last.verdict) == ("megatron-core", "failed")
    assert "pip install" in last.remedy and "parallel" in last.remedy


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda **_: SimpleNamespace(type="cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("world_size", "is_given", "launch", "verdict"),
    [
        (2, False, None, "ok"),
        (4, False, None, "failed"),
        (4, True, None, "not checked"),  # on several machines
        (1, False, VLLM, "failed"),  # two servers of two devices
        (1, False, VLLM | {"devices": [[0, 1], [0, 1]]}, "failed"),
        (1, False, VLLM | {"count": 1, "tensor_parallel": 1}, "ok"),
        (2, False, {"engine": "embedded", "count": 3}, "ok"),
    ],
)
def test_devices(model: Path, two_devices: None, world_size, is_given, launch, verdict) -> None:
    inference = {"endpoints": ["http://127.0.0.1:1"], "launch": launch}
    checked = config(model, inference=inference)
    found = device_finding(checked, world_size, is_given=is_given)
    assert found.verdict == verdict, found
    assert "2 cuda devices" in found.seen and bool(found.remedy) == (verdict == "failed")


def test_a_machine_without_accelerators(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert device_finding(config(model), 2, is_given=False).verdict == "ok"


def test_memory(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    small = config(model)
    (host,) = check_memory(small, 1, lambda _: small)
    assert (host.name, host.verdict) == ("memory of the host", "ok")
    QWEN3_8B.save_pretrained(tmp_path / "8b")
    large = config(tmp_path / "8b")
    (host,) = check_memory(large, 1000, lambda _: large)  # 8 · 10⁹ parameters, a thousand times
    assert host.verdict == "failed" and " TB needed" in host.seen and host.remedy


def test_memory_of_a_device(
    tmp_path: Path, two_devices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    QWEN3_8B.save_pretrained(tmp_path / "8b")

    model = {"path": str(tmp_path / "8b"), "activation_checkpointing": "layer"}
    file = tmp_path / "config.json"  # which is YAML too
    file.write_text(json.dumps(settings(tmp_path / "8b", model=model, trainer={})))

    def load(more):
        return load_config(file, more)

    for device_gb, verdict in ((500, "ok"), (80, "failed")):
        monkeypatch.setattr("easyrl.doctor.memory.device_bytes", lambda b=device_gb: b * 1e9)
        found = next(iter(check_memory(load([]), 2, load)))
        assert (found.name, found.verdict) == ("memory of a rank", verdict), found
    assert "=" in found.remedy or "processes" in found.remedy


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=num_bytes))


def test_disk_space(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32: 4 + 8 bytes of a checkpoint, 4 of the model; three checkpoints at a time."""
    number = count_parameters(weight_shapes(config(model).model))
    keeps = config(model, checkpoint={"every_steps": 5, "keep": 2})
    needed = number * (3 * 12 + 4)
    free(monkeypatch, needed)
    assert disk_finding(keeps, number).verdict == "ok"
    free(monkeypatch, needed - 1)
    found = disk_finding(keeps, number)
    assert found.verdict == "failed" and "checkpoint.keep" in found.remedy
    assert size(needed) in found.seen
    # none but on SIGTERM, nothing exported
    few = config(model, checkpoint={"export_at_end": False})
    free(monkeypatch, number * 12)
    assert disk_finding(few, number).verdict == "ok"
    free(monkeypatch, number * 12 - 1)
    assert disk_finding(few, number).verdict == "failed"


def test_space_for_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16: the served version, the next, the probe's."""
    checked = config(model, model={"path": str(model), "dtype": "bf16"}, trainer={})
    number = count_parameters(weight_shapes(checked.model))
    free(monkeypatch, number * 6)
    assert weight_space_finding(checked, number).verdict == "ok"
    free(monkeypatch, number * 6 - 1)
    found = weight_space_finding(checked, number)
    assert found.verdict == "failed" and "weight_sync.directory" in found.remedy


def test_a_run_warns_of_little_space(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checked = config(model)
    warn_of_little_space(checked)
    assert caplog.text == ""
    free(monkeypatch, 1000)
    warn_of_little_space(checked)
    disk, weights = (record.getMessage() for record in caplog.records)
    assert disk.startswith("disk space: ") and "run.output_dir" in disk
    assert weights.startswith("space for weight sync: ") and "weight_sync.directory" in weights


def test_parameters_are_counted_as_they_are_sent(model: Path) -> None:
    saved = load_file(model / "model.safetensors")
    shapes = weight_shapes(config(model).model)
    assert {name: list(shape) for name, (_, shape) in shapes.items()} == {
        name: list(tensor.shape) for name, tensor in saved.items()
    }
    assert count_parameters(shapes) == sum(prod(t.shape) for t in saved.values())


def test_a_check_that_breaks_is_a_finding() -> None:
    def breaks():
        yield ok("first", "seen")
        raise ZeroDivisionError("by zero")

    first, second = findings_of("arithmetic", breaks)
    assert first == ok("first", "seen")
    assert (second.name, second.verdict) == ("arithmetic", "failed")
    assert "ZeroDivisionError: by zero" in second.seen and second.remedy


def test_what_names_its_remedy_keeps_it() -> None:
    def refuses():
        raise ConfigError("data.files[0]: a.jsonl is empty; give another")

    assert list(findings_of("data", refuses)) == [
        failed("data", "data.files[0]: a.jsonl is empty", "give another")
    ]
