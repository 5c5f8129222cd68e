"""What the tests of the weight sync are made of: an engine, a sync, and servers that lie."""

import asyncio
import copy
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import torch
from safetensors.torch import load_file

from easyrl.config import InferenceConfig, ModelConfig, SamplingConfig, WeightSyncConfig
from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.inference_client.adapter_names import AdapterNames
from easyrl.inference_client.fetching.fetcher_process import local_fetch
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from easyrl.inference_client.servers.embedded.routes import EmbeddedServer
from easyrl.inference_client.servers.embedded.server import start_site
from easyrl.models.loading import load_policy_model
from easyrl.models.policy_model import run_micro_batch
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import Completion, Prompt
from easyrl.weight_sync.canary import CANARY_PROMPT_TOKENS, Canary, canary_prompts
from easyrl.weight_sync.publish import WeightSync
from tests.end_to_end.proxy import GENERATE, Proxy, reply
from tests.inference_client.served_tensors import whole
from tests.recipes import pack_groups

TOLERANCE = 1e-3
NOWHERE = "http://127.0.0.1:1"  # nobody listens there
PROVE = "/collective_rpc"


class PlainEngine:
    """The part of ``TrainEngine`` that weight sync uses, over one unsharded model."""

    ranks = Ranks.data_parallel()
    lockstep = False

    def __init__(self, model_dir: Path, dtype: str = "fp32") -> None:
        self.policy = load_policy_model(ModelConfig(path=model_dir, dtype=dtype))
        self.num_probes = 0

    def named_weights(self, kind="full"):
        for name, parameter in self.policy.model.named_parameters():
            yield name, parameter.detach()

    @torch.no_grad()
    def logprobs(self, micro_batch):
        return run_micro_batch(self.policy, micro_batch, 1.0)[0]

    @contextmanager
    def perturbed_weights(self):
        self.num_probes += 1
        saved = [p.detach().clone() for p in self.policy.parameters()]
        with torch.no_grad():
            for number, parameter in enumerate(self.policy.parameters()):
                parameter.mul_(1.05 if number % 2 else 0.95)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(self.policy.parameters(), saved, strict=True):
                    parameter.copy_(value)

    @torch.no_grad()
    def train(self, size: float) -> None:
        """Moves each weight by about ``size`` times itself, and never by nothing."""
        for parameter in self.policy.parameters():
            parameter.mul_(1 + size * torch.randn_like(parameter))
            first = parameter.view(-1)[0]
            first.copy_(torch.nextafter(first, torch.tensor(9.0)))


@contextmanager
def serve(model_dir: Path, copied: str | None = None, dtype: str = "auto", host: str = "127.0.0.1"):
    """The embedded server in this process; its URL.

    Its module ``copied`` is a copy that never hears of new weights, and that nobody can read back.
    """
    engine = EmbeddedEngine(model_dir, dtype=dtype)
    if copied is not None:
        model = engine._model
        model.set_submodule(copied, copy.deepcopy(model.get_submodule(copied)))
        engine._batch._decode = None  # decoded by the modules, the copy among them
    with LoopThread("server") as thread:
        app = EmbeddedServer(engine, "model").app()
        runner, url = thread.run(start_site(app, host, 0))
        try:
            yield url
        finally:
            thread.run(runner.cleanup())
            engine.close()


class Rank:
    """What one trainer rank has: its sync, pool and loop."""

    def __init__(self, sync: WeightSync, pool: EndpointPool, thread: LoopThread) -> None:
        self.sync, self.pool, self.thread = sync, pool, thread

    def generate(self, version: str, seed: int = 3):
        """A request in the middle of a batch; its future."""
        prompt = np.arange(8, 16, dtype=np.int32)
        sampling = SamplingConfig(max_tokens=8)

        async def sample():
            async with self.pool.group(len(prompt), 4, version, num_samples=1) as group:
                return await self.pool.generate(prompt, sampling, seed, group)

        return self.thread.submit(sample())

    def statuses(self) -> dict[str, str]:
        return {
            e.url: e.excluded or e.down or f"confirmed {e.confirmed_version}"
            for e in self.pool.endpoints
        }

    def add(self, url: str) -> None:
        async def add() -> None:
            self.pool.add(url)

        self.thread.run(add())


@contextmanager
def weight_sync(
    engine,
    urls,
    directory: Path,
    *,
    collectives: Collectives | None = None,
    tolerance=TOLERANCE,
    startup_timeout_s=60.0,
    max_outage_s=60.0,
    probe_timeout_s=10.0,
    mask_truncated=False,
    open_group=None,
    lora_config=None,
    **options,
):
    """A ``WeightSync`` over ``urls``; ``options`` are those of its configuration."""
    with ExitStack() as opened:
        thread = opened.enter_context(LoopThread())
        adapters = AdapterNames()

        async def open_fetch():
            session = aiohttp.ClientSession()
            return session, local_fetch(session, adapters=adapters)

        session, fetch = thread.run(open_fetch())
        opened.callback(lambda: thread.run(session.close()))
        config = InferenceConfig(endpoints=urls, health_interval_s=0.1, startup_timeout_s=60.0)
        sync_config = WeightSyncConfig(directory=directory, **options)
        pool = EndpointPool(
            config, fetch, update_timeout_s=sync_config.timeout_s, adapters=adapters
        )
        pool.back_off_s, pool.probe_timeout_s = 0.1, probe_timeout_s
        thread.run(pool.start())
        opened.callback(lambda: thread.run(pool.close()))
        thread.run(pool.wait_until_healthy())
        prompts = [Prompt(i, np.arange(6, 16, dtype=np.int32) % 10 + 8, "", None) for i in range(8)]

        def pack(groups):
            return pack_groups(
                groups,
                [np.zeros(1, dtype=np.float32)] * len(groups),
                aggregation="token",
                max_tokens=16,
                mask_truncated=mask_truncated,
                max_tokens_per_micro_batch=512,
            )

        stop = StopRequest(60.0)
        opened.callback(stop.close)
        sync = WeightSync(
            config=sync_config,
            tolerance=tolerance,
            run_name="sync",
            engine=engine,
            pool=pool,
            thread=thread,
            collectives=collectives or Collectives(Ranks.data_parallel(0, 1)),
            canary=Canary(canary_prompts(prompts, None), 1.0, pack, pool.ask, 60.0),
            dummy=dummy_micro_batch,
            stop=stop,
            startup_timeout_s=startup_timeout_s,
            max_outage_s=max_outage_s,
            open_group=open_group,
            lora=lora_config,
        )
        opened.callback(sync.close)
        pool.set_repair(sync.confirmed.repair)
        yield Rank(sync, pool, thread)


def stamps(completion: Completion) -> set[str]:
    return {span.version for span in completion.version_spans}


def wait_until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


# ---- servers that lie ----------------------------------------------------------------------------


class Watched(Proxy):
    """Honest; notes the versions it was given, and what else the tests ask about."""

    def __init__(self, upstream: str) -> None:
        self.given: list[str] = []  # versions that were loaded, under a stamp that nobody wants
        self.stamped: list[str] = []  # versions that it was told to stamp after that
        self.inits: list[dict] = []
        self.seen: list[str] = []  # paths
        super().__init__(upstream)

    async def answer(self, request, body):
        self.seen.append(request.path)
        if request.path == "/finish_weight_update":
            version, updating = orjson.loads(body)["weight_version"].rsplit(":", 1)
            assert updating == "updating"
            self.given.append(version)
        if request.path == "/update_weight_version":
            version = orjson.loads(body)["new_version"]
            if not version.endswith(":updating"):
                self.stamped.append(version)
        if request.path == "/init_weight_transfer_engine":
            self.inits.append(orjson.loads(body)["init_info"])
        return None


class MissesUpdates(Watched):
    """Acknowledges ``num_missed`` updates after ``first`` honest ones, stamps their versions, and
    keeps its old weights. If it ``lies``, it answers the proof from the artefact, which no nonce
    tells from the truth; if it ``repeats``, with what it was told and what it answered before."""

    def __init__(
        self,
        upstream: str,
        *,
        lies: bool = False,
        repeats: bool = False,
        first: int = 0,
        num_missed: int = 1000,
    ) -> None:
        self.pushed: list[Path] = []  # files of the last artefact
        self.told: dict[str, str] = {}  # checksums
        self.lies, self.repeats = lies, repeats
        self.first, self.num_missed = first, num_missed
        super().__init__(upstream)

    @property
    def is_missing(self) -> bool:
        return self.first <= len(self.given) < self.first + self.num_missed

    async def answer(self, request, body):
        missing = self.is_missing
        await super().answer(request, body)
        if b"easyrl_prove_weights" in body and (self.lies or self.repeats):
            await self.forward(request.method, request.path_qs, body)  # it is told of the outcome
            asked = orjson.loads(body)["kwargs"]
            proof = whole(self._artefact(), bytes.fromhex(asked["nonce"]))
            if self.repeats:
                for name, (served,) in proof.slices.items():
                    proof.slices[name] = [replace(served, digest=self.told[name])]
            return reply({"results": [asdict(proof)]})
        if request.path == "/update_weights" and b"abandon" not in body:
            info = orjson.loads(body)["update_info"]
            folder = Path(self.inits[-1]["root"]) / info["artifact"]
            if self.pushed and self.pushed[0].parent != folder:
                self.pushed = []
            self.pushed += [folder / chunk["file"] for chunk in info["chunks"]]
            for chunk in info["chunks"]:
                self.told |= chunk["checksums"]
        if not missing:
            return None
        if request.path == "/start_weight_update":
            return reply({"message": "started"})
        if request.path == "/update_weights":
            return reply({"message": "updated"})
        if request.path == "/finish_weight_update":
            version = orjson.loads(body)["weight_version"]
            await self.forward("POST", "/update_weight_version", {"new_version": version})
            return reply({"message": "finished"})
        return None

    def _artefact(self) -> dict[str, torch.Tensor]:
        return {name: w for file in self.pushed for name, w in load_file(file).items()}


class WrongSamples(Watched):
    """Its bits are right, and its log-probabilities off by a nat while it ``is_wrong``.

    If it ``hangs``, it answers requests of the canary's length not at all.
    """

    def __init__(self, upstream: str) -> None:
        self.is_wrong = self.hangs = False
        self.num_answered = 0  # responses, wrong or right
        super().__init__(upstream)

    async def answer(self, request, body):
        await super().answer(request, body)
        if request.path != GENERATE:
            return None
        if self.hangs and len(orjson.loads(body)["token_ids"]) in CANARY_PROMPT_TOKENS:
            await asyncio.Event().wait()
        response = await self.forward(request.method, request.path_qs, body)
        said = orjson.loads(response.body)
        if self.is_wrong:
            for choice in said["choices"]:
                for token in choice["logprobs"]["content"]:
                    token["logprob"] -= 1.0
        self.num_answered += 1
        return reply(said)


class ForgetsItsVersion(Proxy):
    async def answer(self, request, body):
        if request.path == "/weight_info":
            return reply({"weight_version": "default"})
        return None


class FailsAt(Watched):
    """Answers an error to the first ``times`` requests to ``path``."""

    def __init__(self, upstream: str, path: str, *, times: int = 1, status: int = 500) -> None:
        self.path, self.times, self.status = path, times, status
        super().__init__(upstream)

    async def answer(self, request, body):
        await super().answer(request, body)
        if request.path == self.path and self.times and b"abandon" not in body:
            self.times -= 1
            return reply({"error": "out of luck"}, status=self.status)
        return None


class FailsHalfWay(Watched):
    """Takes some of an update's chunks, and no more of them, while it ``fails``."""

    fails = False
    num_taken = 0

    async def answer(self, request, body):
        await super().answer(request, body)
        if request.path == "/start_weight_update":
            self.num_taken = 0
        if request.path == "/update_weights" and self.fails and b"abandon" not in body:
            self.num_taken += 1
            if self.num_taken > 1:
                return reply({"error": "out of luck"}, status=500)
        return None


class AnswersFromItsPrefixCache(Proxy):
    """Says that it has reset its prefix cache, and goes on from what it had computed of a prompt
    under the weights before; under the present ones' name."""

    def __init__(self, upstream: str) -> None:
        self.kept: dict[bytes, list] = {}
        self.version = ""
        super().__init__(upstream)

    async def answer(self, request, body):
        if request.path == "/finish_weight_update":
            self.version = orjson.loads(body)["weight_version"]
        if request.path == "/update_weight_version":
            self.version = orjson.loads(body)["new_version"]
        if request.path != GENERATE:
            return None
        if body in self.kept:
            choices = self.kept[body]
            for choice in choices:
                for span in choice["weight_versions"]:
                    span["version"] = self.version
            num_prompt = len(orjson.loads(body)["token_ids"])
            return reply({"choices": choices, "usage": {"prompt_tokens": num_prompt}})
        response = await self.forward(request.method, request.path_qs, body)
        self.kept[body] = orjson.loads(response.body)["choices"]
        return response


class KeepsItsPrefixCache(Proxy):
    async def answer(self, request, body):
        if request.path == "/reset_prefix_cache":
            return reply({"success": False})
        return None


class Restarting(Watched):
    """Its server can be exchanged; holds requests for rollouts back until ``released``."""

    def __init__(self, upstream: str) -> None:
        self.released = threading.Event()
        self.released.set()
        self.num_waiting = 0
        super().__init__(upstream)

    async def answer(self, request, body):
        await super().answer(request, body)
        if request.path == GENERATE and not self.released.is_set():
            self.num_waiting += 1
            await asyncio.to_thread(self.released.wait)
            return reply({"error": "the server is gone"}, status=502)
        return None

    def move_to(self, upstream: str) -> None:
        self._upstream = upstream


class DamagesArtefacts(Watched):
    """Changes a byte of each of ``times`` artefacts, before its server reads of them."""

    times = 0

    async def answer(self, request, body):
        await super().answer(request, body)
        if request.path == "/update_weights" and self.times and b"abandon" not in body:
            self.times -= 1
            info = orjson.loads(body)["update_info"]
            folder = Path(self.inits[-1]["root"]) / info["artifact"]
            with (folder / info["chunks"][0]["file"]).open("r+b") as file:
                file.seek(-1, 2)
                last = file.read(1)[0]
                file.seek(-1, 2)
                file.write(bytes([last ^ 1]))
        return None


class HangsAt(Watched):
    """Never answers requests to ``path`` once it has one; everything else it does."""

    path: str | None = None

    async def answer(self, request, body):
        await super().answer(request, body)
        if request.path == self.path:
            await asyncio.Event().wait()
        return None


class Dripping(Watched):
    """Answers rightly, every request for weights or proofs ``late_s`` seconds late."""

    late_s = 0.0

    async def answer(self, request, body):
        await super().answer(request, body)
        if request.path not in (GENERATE, "/health", "/v1/models", "/metrics"):
            await asyncio.sleep(self.late_s)
        return None


class Hanging(Watched):
    """Answers nothing at all while it ``hangs``; reaching ``at`` makes it hang."""

    def __init__(self, upstream: str, at: str | None = None) -> None:
        self.hangs = False
        self.at = at
        super().__init__(upstream)

    async def answer(self, request, body):
        await super().answer(request, body)
        if request.path == self.at:
            self.hangs, self.at = True, None
        while self.hangs:
            await asyncio.sleep(0.01)
        return None
