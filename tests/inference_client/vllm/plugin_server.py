"""A real vLLM server with the plugin, tiny artifacts to push to it, and what it should answer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import requests
import torch
from blake3 import blake3
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from easyrl.inference_client.client import WorkerProof
from easyrl.runtime.machine import free_port
from easyrl.weight_sync.challenge import Challenge, Findings
from tests.inference_client.served_tensors import ArtifactInMemory, shapes
from tests.vllm_environment import VLLM_PYTHON

# this checkout's plugin, whichever is installed, and the workers beside this file
PLUGIN_PATH = os.pathsep.join(
    [str(Path(__file__).parents[3] / "inference_client/vllm_plugin"), str(Path(__file__).parent)]
)
START_TIMEOUT_S = 240
VERSION = "test:0:"


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    body: dict
    text: str


class PluginServer:
    """``vllm serve`` of ``model`` on a free port, as a trainer starts it."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *options: str,
        dtype: str = "float32",
        backend: str = "easyrl",
        extension: str = "easyrl_vllm.WeightProof",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.model = model
        self.log = log
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [
            *(VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--dtype", dtype, "--enforce-eager", "--max-model-len", "128"),
            *("--host", "127.0.0.1", "--port", self.url.rpartition(":")[2]),
            *("--max-num-seqs", "8", "--skip-tokenizer-init", "--enable-scale-out"),
            *("--weight-transfer-config", json.dumps({"backend": backend})),
            *("--worker-extension-cls", extension),
            *("--logprobs-mode", "processed_logprobs", *options),
        ]
        settings = {
            "VLLM_SERVER_DEV_MODE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
        }
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | settings | dict(env or {}),
                start_new_session=True,
            )

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"vLLM ended:\n{self.log.read_text()[-4000:]}")
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.5)
        raise TimeoutError(f"vLLM did not become healthy:\n{self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def post(self, route: str, body: dict | None = None) -> Answer:
        response = requests.post(f"{self.url}{route}", json=body, timeout=120)
        try:
            parsed = response.json()
        except ValueError:
            parsed = {}
        return Answer(response.status_code, parsed, response.text)

    def must(self, route: str, body: dict | None = None) -> dict:
        answer = self.post(route, body)
        assert answer.status == 200, f"{route}: {answer.status} {answer.text}"
        return answer.body

    def update(self, artifact: Artifact, version: str | None = None) -> None:
        """A whole update as a trainer does it, one chunk per request."""
        self.must("/pause?mode=wait")
        self.must("/start_weight_update")
        for chunk in artifact.chunks:
            self.must("/update_weights", {"update_info": artifact.update_info([chunk])})
        self.must("/finish_weight_update", {"weight_version": version or artifact.name})
        self.must("/reset_prefix_cache")
        self.must("/resume")

    def abandon(self) -> Answer:
        return self.post("/update_weights", {"update_info": {"abandon": True}})

    def version(self) -> str:
        return requests.get(f"{self.url}/weight_info", timeout=30).json()["weight_version"]

    def prove(self, artifact: Artifact) -> Shown:
        """What the workers answer of ``artifact``, and what the trainer finds wrong with it."""
        asked = Challenge(shapes(artifact.weights), ArtifactInMemory(artifact.weights))
        request = proof_request(artifact, asked.nonce)
        results = self.must("/collective_rpc", request)["results"]
        proofs = msgspec.convert(results, list[WorkerProof])
        return Shown(proofs, asked.check(proofs))

    def logprobs(self, prompt: list[int], num_tokens: int) -> tuple[list[int], Tensor]:
        """Tokens sampled after ``prompt`` and their log-probabilities ``[num_tokens]``."""
        sampling = {"max_tokens": num_tokens, "temperature": 1.0, "logprobs": 0, "seed": 1}
        body = {
            "model": str(self.model),
            "token_ids": prompt,
            "sampling_params": sampling | {"ignore_eos": True, "detokenize": False},
        }
        choice = self.must("/inference/v1/generate", body)["choices"][0]
        values = [token["logprob"] for token in choice["logprobs"]["content"]]
        return choice["token_ids"], torch.tensor(values)


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A directory of chunk files, and what a trainer says of it."""

    directory: Path
    chunks: list[dict]
    weights: Mapping[str, Tensor]  # as they were written

    @property
    def name(self) -> str:
        return self.directory.name

    def update_info(self, chunks: list[dict] | None = None) -> dict:
        return {"artifact": self.name, "chunks": self.chunks if chunks is None else chunks}

    @property
    def checksums(self) -> dict[str, str]:
        return {n: h for chunk in self.chunks for n, h in chunk["checksums"].items()}


@dataclasses.dataclass(frozen=True)
class Shown:
    """A proof and what the trainer makes of it."""

    proofs: list[WorkerProof]
    findings: Findings

    @property
    def names(self) -> set[str]:
        """Tensors of which all that was shown is right, and all was shown."""
        shown = {name for proof in self.proofs for name in proof.slices}
        return shown - self.problems.keys()

    @property
    def problems(self) -> dict[str, str]:
        """By tensor, of all workers, and what none of them has shown."""
        found = {name: text for wrong in self.findings.wrong for name, text in wrong.items()}
        return found | dict.fromkeys(self.findings.uncovered, "not shown")


def proof_request(artifact: Artifact, nonce: bytes = bytes(32)) -> dict:
    arguments = {"nonce": nonce.hex(), "tensors": json.dumps(shapes(artifact.weights))}
    return {"method": "easyrl_prove_weights", "kwargs": arguments}


class TrainerSide:
    """The announced directory; written here anew, so that both sides of the wire are checked."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.token = secrets.token_hex(16)
        root.mkdir(parents=True)
        (root / "announcement").write_text(blake3(self.token.encode()).hexdigest())

    def init_info(self, url: str | None = None) -> dict:
        root = str(self.root) if url is None else None
        return {"run": "test", "token": self.token, "root": root, "url": url}

    def write(self, name: str, weights: Mapping[str, Tensor], per_chunk: int = 5) -> Artifact:
        """``per_chunk`` tensors to a file, so that the parts of fused layers come apart."""
        directory = self.root / name
        directory.mkdir()
        chunks = []
        names = list(weights)
        for start in range(0, len(names), per_chunk):
            part = {n: weights[n].contiguous() for n in names[start : start + per_chunk]}
            file = f"chunk-{len(chunks):05d}.safetensors"
            save_file(part, directory / file)
            num_bytes = sum(t.nbytes for t in part.values())
            hashes = {n: checksum(t) for n, t in part.items()}
            chunks.append({"file": file, "num_bytes": num_bytes, "checksums": hashes})
        return Artifact(directory, chunks, dict(weights))


def checksum(tensor: Tensor) -> str:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return blake3(data).hexdigest()


def saved_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors that ``save_pretrained`` writes: a tied head has none of its own."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def changed(weights: Mapping[str, Tensor], seed: int, scale: float = 0.1) -> dict[str, Tensor]:
    """Every tensor a bit different."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight + scale * torch.randn(weight.shape, generator=generator).to(weight.dtype)
        for name, weight in weights.items()
    }


@torch.no_grad()
def reference_logprobs(
    directory: Path, weights: Mapping[str, Tensor], prompt: list[int], tokens: list[int]
) -> Tensor:
    """Log-probabilities ``[len(tokens)]`` of Hugging Face's forward with ``weights``, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    state = {name: weight.float() for name, weight in weights.items()}
    result = model.load_state_dict(state, strict=False)
    assert not result.unexpected_keys and set(result.missing_keys) <= {"lm_head.weight"}
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@contextlib.contextmanager
def running(server: PluginServer) -> Iterator[PluginServer]:
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()
