"""The four ways of running, each from a fresh process (docs/architecture.md)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from easyrl.runtime.machine import free_port

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "easyrl.dataloaders.packing.groups",
    "easyrl.inference_client.transfer.artifact",
    "easyrl.kernels.logprobs.linear_logprob",
    "easyrl.trainer.loop",
)
SHOW_FILES = (
    "import importlib, kernels\n"
    f"for name in {MODULES!r}: print(importlib.import_module(name).__file__)\n"
    "print(kernels.__file__)\n"
)


def run(*command: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def imported_from(output: str, folder: Path) -> None:
    """All of ours come from ``folder``, and ``kernels`` is Hugging Face's."""
    *ours, hf_kernels = output.split()
    assert len(ours) == len(MODULES)
    for file in ours:
        assert Path(file).is_relative_to(folder), file
    assert "site-packages" in hf_kernels and not Path(hf_kernels).is_relative_to(folder / "easyrl")


@pytest.fixture(scope="module")
def wheel_install(tmp_path_factory) -> Path:
    """The wheel, unpacked where ``pip install --target`` puts it."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--no-deps", "--quiet"]
    source = folder / "source"  # setuptools would leave a build folder in the checkout
    tracked = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).split("\n")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    run(*pip, "wheel", *offline, "--no-build-isolation", "-w", str(folder), str(source), cwd=folder)
    (wheel,) = folder.glob("easyrl-*.whl")
    run(*pip, "install", *offline, "--target", str(folder / "site"), str(wheel), cwd=folder)
    return folder / "site"


def test_wheel(wheel_install, tmp_path):
    output = run(sys.executable, "-c", SHOW_FILES, cwd=tmp_path, PYTHONPATH=str(wheel_install))
    imported_from(output, wheel_install)


def test_the_wheel_has_the_presets(wheel_install, tmp_path):
    code = "from easyrl.config import presets; print(presets.__file__, *presets.preset_names())"
    output = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(wheel_install))
    file, *names = output.split()
    assert Path(file).is_relative_to(wheel_install)
    assert names == sorted(p.stem for p in (ROOT / "easyrl/recipes/presets").glob("*.yaml"))


def test_editable_install(tmp_path):
    imported_from(run(sys.executable, "-c", SHOW_FILES, cwd=tmp_path), ROOT)


def test_python_dash_m_from_the_checkout():
    imported_from(run(sys.executable, "-c", SHOW_FILES, cwd=ROOT), ROOT)
    help_text = run(sys.executable, "-m", "easyrl", "--help", cwd=ROOT)
    for command in ("train", "serve", "eval"):
        assert command in help_text


def test_checkout_without_any_install(tmp_path):
    # -S leaves out site-packages' .pth files, and with them the editable install.
    code = "import easyrl.schema, easyrl.dataloaders, easyrl.kernels; print(easyrl.__file__)"
    output = run(sys.executable, "-S", "-c", code, cwd=ROOT, PYTHONPATH=_site_packages())
    assert Path(output.strip()).is_relative_to(ROOT)


def test_deepspeed_launcher_from_the_checkout(tmp_path):
    launcher = Path(sys.executable).with_name("deepspeed")
    output = run(
        sys.executable,
        str(launcher),
        *("--num_accelerators", "1", "--master_port", str(free_port())),
        *("--module", "easyrl.train", "configs/laptop_cpu.yaml", "--print-config"),
        "trainer.learning_rate=3e-6",
        cwd=ROOT,
        DS_ACCELERATOR="cpu",
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    assert "learning_rate: 3.0e-06" in output


def _site_packages() -> str:
    return next(path for path in sys.path if path.endswith("site-packages"))
