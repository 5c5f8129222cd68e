"""The embedded server's routes for weights: vLLM's, and the proof of the vLLM plugin."""

from __future__ import annotations

from dataclasses import asdict

from aiohttp import web

from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from easyrl.inference_client.servers.embedded.http import done, json_response, parse
from easyrl.inference_client.servers.embedded.protocol import (
    CheckerBody,
    FinishBody,
    InitBody,
    RpcBody,
    UpdateBody,
    VersionBody,
)


class WeightRoutes:
    """Updates, versions and checks of one engine's weights."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._updates = engine.updates

    def all(self) -> list[web.RouteDef]:
        return [
            web.post("/init_weight_transfer_engine", self._init_weight_transfer),
            web.post("/start_weight_update", self._start_weight_update),
            web.post("/update_weights", self._update_weights),
            web.post("/finish_weight_update", self._finish_weight_update),
            web.post("/collective_rpc", self._collective_rpc),
            web.post("/update_weight_version", self._update_weight_version),
            web.get("/weight_info", self._weight_info),
            web.post("/weight_checker", self._weight_checker),
            web.post("/reset_prefix_cache", self._reset_prefix_cache),
        ]

    async def _init_weight_transfer(self, http: web.Request) -> web.Response:
        body = await parse(http, InitBody)
        await done(self._updates.announce(body.init_info))
        return json_response({"message": "Weight transfer initialized"})

    async def _start_weight_update(self, http: web.Request) -> web.Response:
        await done(self._updates.start())
        return json_response({"message": "Weight update started"})

    async def _update_weights(self, http: web.Request) -> web.Response:
        body = await parse(http, UpdateBody)
        info = body.update_info
        if info.abandon:
            await done(self._updates.abandon())
            raise web.HTTPBadRequest(text="the weight update was abandoned, as asked for")
        await done(self._updates.load(info.artifact, info.chunks))
        return json_response({"message": "Weights updated"})

    async def _finish_weight_update(self, http: web.Request) -> web.Response:
        body = await parse(http, FinishBody)
        await done(self._updates.finish(body.weight_version))
        return json_response({"message": "Weight update finished"})

    async def _collective_rpc(self, http: web.Request) -> web.Response:
        """The one method that the vLLM plugin adds to vLLM's workers."""
        body = await parse(http, RpcBody)
        proof = await done(self._updates.prove(body.kwargs.checksums))
        return json_response({"results": [asdict(proof)]})

    async def _update_weight_version(self, http: web.Request) -> web.Response:
        body = await parse(http, VersionBody)
        await done(self._engine.set_weight_version(body.new_version))
        return json_response({"success": True, "new_version": body.new_version})

    async def _weight_info(self, http: web.Request) -> web.Response:
        return json_response({"weight_version": await done(self._engine.weight_version())})

    async def _weight_checker(self, http: web.Request) -> web.Response:
        body = await parse(http, CheckerBody)
        served = await done(self._updates.checksums())
        if body.action == "checksum":
            return json_response({"checksums": served})
        baseline = body.baseline or {}
        differing = sorted(
            name
            for name in served.keys() | baseline.keys()
            if served.get(name) != baseline.get(name)
        )
        return json_response({"match": not differing, "mismatches": differing})

    async def _reset_prefix_cache(self, http: web.Request) -> web.Response:
        await done(self._engine.reset_prefix_cache())
        return json_response({"success": True})
