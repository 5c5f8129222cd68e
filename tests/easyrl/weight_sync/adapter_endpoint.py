"""An endpoint that takes adapters, as vLLM with the plugin does, over the embedded server."""

import contextlib
import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import orjson
import torch
from safetensors.torch import load_file

from easyrl.config import LoraConfig, ModelConfig
from easyrl.engines.weight_names import adapter_weights, saved_weights
from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from easyrl.inference_client.servers.embedded.routes import EmbeddedServer
from easyrl.inference_client.servers.embedded.server import start_site
from easyrl.models.loading import load_policy_model
from easyrl.models.lora import TRAINED, adapter_change, adapter_layers, adapter_parameters, factors
from easyrl.runtime.loop_thread import LoopThread
from tests.easyrl.weight_sync.weight_sync_parts import PlainEngine, Watched
from tests.end_to_end.proxy import GENERATE, reply
from tests.inference_client.served_tensors import whole

LORA = LoraConfig(rank=4, alpha=12.0)  # all linear layers; B is scaled by 3
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "easyrl:"


class LoraEngine(PlainEngine):
    """The part of ``TrainEngine`` that weight sync uses, over a model with adapters."""

    def __init__(self, model_dir: Path, lora: LoraConfig = LORA, dtype: str = "fp32") -> None:
        self.policy = load_policy_model(ModelConfig(path=model_dir, dtype=dtype, lora=lora), seed=3)
        self.num_probes = 0

    def named_weights(self, kind="full"):
        model = self.policy.model
        if kind == "adapter":
            return adapter_weights(model, is_writer=True)
        return saved_weights(model, is_writer=True, merged=kind == "full")

    @contextmanager
    def perturbed_weights(self, kind="full"):
        self.num_probes += 1
        if kind == "full":
            with super().perturbed_weights():
                yield
            return
        saved = [p.detach().clone() for p in adapter_parameters(self.policy.model)]
        with torch.no_grad():
            for layer in adapter_layers(self.policy.model).values():
                a, b = factors(layer)
                rank, scaling = layer.r[TRAINED], layer.scaling[TRAINED]
                weight = layer.get_base_layer().weight
                b.add_(adapter_change(weight, a, b, rank=rank, scaling=scaling))
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(
                    adapter_parameters(self.policy.model), saved, strict=True
                ):
                    parameter.copy_(value)

    @torch.no_grad()
    def train(self, size: float) -> None:
        """Moves each number of the adapters by about ``size``, and never by nothing."""
        for parameter in adapter_parameters(self.policy.model):
            parameter.add_(size * torch.randn_like(parameter))
            first = parameter.view(-1)[0]
            first.copy_(torch.nextafter(first, torch.tensor(9.0)))


class AdapterEndpoint(Watched):
    """Honest. Holds adapters by name, and has the embedded ``engine`` compute with them merged.

    Attributes:
        limits: what it says that it takes.
        base: what it proves to be below its adapters, and computes with.
        loaded: names that requests may give, and the tensors behind each.
        num_bytes: of all tensors that it was sent.
    """

    def __init__(self, url: str, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self.limits = {"max_rank": 8, "modules": list(MODULES), "problem": None}
        self.base = {n: p.detach().clone() for n, p in engine._model.named_parameters()}
        self.loaded: dict[str, dict[str, torch.Tensor]] = {}
        self.folders: dict[str, str] = {}  # by name, of those that the plugin has not loaded
        self.received: dict[str, dict[str, torch.Tensor]] = {}
        self.asked_base = 0  # proofs of the model below
        self.base_nonces: set[str] = set()  # of these
        self.unloaded: list[str] = []
        self.num_bytes = 0
        self.named: list[str | None] = []  # by requests for rollouts, in their order
        super().__init__(url)

    async def answer(self, request, body):
        await super().answer(request, body)
        said = orjson.loads(body) if body.startswith(b"{") else {}
        if request.path == "/v1/models":
            card = orjson.loads((await self.forward("GET", request.path)).body)
            card["data"][0]["owned_by"] = "vllm"
            model = card["data"][0]["id"]
            for name in self.loaded:
                root = self.folders.get(name, PREFIX + name)
                card["data"].append({"id": name, "root": root, "parent": model})
            return reply(card)
        # of one that was sent whole models, the server behind says what it serves
        is_given = "/start_weight_update" in self.seen
        if request.path == "/collective_rpc" and not is_given:
            return reply({"results": [self.call(said["method"], said["kwargs"])]})
        if request.path == "/v1/load_lora_adapter":
            assert said["lora_path"] == PREFIX + said["lora_name"]
            return self.load(said["lora_name"])
        if request.path == "/v1/unload_lora_adapter":
            name = said["lora_name"]
            if name not in self.loaded:
                return no_such_model(name)
            del self.loaded[name]
            self.unloaded.append(name)
            return reply("Success")
        if request.path == GENERATE:
            return await self.generate(request, said)
        return None

    async def generate(self, request, said):
        name = said.pop("model", None)
        self.named.append(name)
        if name is not None and name not in self.loaded:
            return no_such_model(name)
        assert name in (None, next(reversed(self.loaded), None)), "of another version"
        return await self.forward("POST", request.path_qs, said)

    def call(self, method, kwargs):
        if method == "easyrl_adapter_limits":
            return self.limits
        if method == "easyrl_receive_adapter":
            update = json.loads(kwargs["update"])
            if update["begins"]:
                self.received[update["adapter"]] = {}
            folder = Path(self.inits[-1]["root"]) / update["artifact"]
            for chunk in update["chunks"]:
                tensors = load_file(folder / chunk["file"])
                assert tensors.keys() == chunk["checksums"].keys()
                self.num_bytes += sum(tensor.nbytes for tensor in tensors.values())
                self.received[update["adapter"]] |= copy.deepcopy(tensors)
            return {"transport": "file"}
        if method == "easyrl_accept_proof":  # it owes none: adapters are hashed on arrival
            assert kwargs["nonce"] in self.base_nonces
            return {}
        nonce, tensors = bytes.fromhex(kwargs["nonce"]), json.loads(kwargs["tensors"])
        if method == "easyrl_prove_weights":
            self.asked_base += bool(tensors)
            self.base_nonces.add(kwargs["nonce"])
            assert tensors.keys() <= self.base.keys()
            return asdict(whole({name: self.base[name] for name in tensors}, nonce))
        assert method == "easyrl_prove_adapter"
        return asdict(whole(self.held(kwargs["adapter"]), nonce))

    def held(self, name):
        """The tensors that it proves to have under ``name``."""
        return self.loaded[name]

    def load(self, name):
        self.loaded[name] = self.received.pop(name)
        self.serve(self.loaded[name])
        return reply("Success")

    @torch.no_grad()
    def serve(self, adapter):
        """Merges ``adapter`` into the model; the endpoint is paused."""
        for name, parameter in self.engine._model.named_parameters():
            owner = f"base_model.model.{name.removesuffix('.weight')}"
            weight = self.base[name].clone()
            if f"{owner}.lora_A.weight" in adapter:
                weight += adapter[f"{owner}.lora_B.weight"] @ adapter[f"{owner}.lora_A.weight"]
            parameter.copy_(weight)

    def restart(self) -> None:
        """As a server that was killed and started again: what it had loaded is gone."""
        self.loaded, self.received, self.inits = {}, {}, []
        self.serve({})
        self.engine.set_weight_version("default").result()


def no_such_model(name):
    said = {"message": f"The model `{name}` does not exist. Valid aliases: model."}
    return reply({"error": said}, status=404)


class KeepsItsAdapter(AdapterEndpoint):
    """Goes on with the adapter that it had, under each new name, from the ``first``th on.

    If it ``lies``, it answers proofs from what it was sent.
    """

    def __init__(self, url, engine, first: int = 2, *, lies: bool = False) -> None:
        self.first, self.lies = first, lies
        self.num_loads = 0
        self.sent: dict[str, dict[str, torch.Tensor]] = {}
        super().__init__(url, engine)

    def load(self, name):
        self.num_loads += 1
        self.sent[name] = self.received[name]
        if self.num_loads >= self.first and self.loaded:
            self.loaded[name] = next(reversed(self.loaded.values()))
            return reply("Success")
        return super().load(name)

    def held(self, name):
        return self.sent[name] if self.lies else super().held(name)


class AnswersFromAnotherNamesCache(AdapterEndpoint):
    """Its prefix cache knows no names, and is not reset: it goes on from what another adapter's
    request has computed of the same prompt, under the present stamp."""

    def __init__(self, url, engine) -> None:
        self.kept: dict[bytes, list] = {}
        self.version = ""
        super().__init__(url, engine)

    async def answer(self, request, body):
        if request.path == "/update_weight_version":
            self.version = orjson.loads(body)["new_version"]
        return await super().answer(request, body)

    async def generate(self, request, said):
        key = orjson.dumps({**said, "model": None})
        num_prompt = len(said["token_ids"])
        if key not in self.kept:
            response = await super().generate(request, said)
            self.kept[key] = orjson.loads(response.body)["choices"]
        for choice in self.kept[key]:
            for span in choice["weight_versions"]:
                span["version"] = self.version
        return reply({"choices": self.kept[key], "usage": {"prompt_tokens": num_prompt}})


@contextmanager
def adapter_endpoint(model_dir: Path, kind=AdapterEndpoint, **options) -> Iterator[AdapterEndpoint]:
    """An endpoint of this ``kind`` over an embedded server of its own."""
    engine = EmbeddedEngine(model_dir)
    with LoopThread("server") as thread:
        runner, url = thread.run(start_site(EmbeddedServer(engine, "model").app(), "127.0.0.1", 0))
        try:
            with contextlib.closing(kind(url, engine, **options)) as endpoint:
                yield endpoint
        finally:
            thread.run(runner.cleanup())
            engine.close()
