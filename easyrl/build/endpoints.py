"""The endpoints of a run: those that can be used, who joins and leaves, how weights reach them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from easyrl.build.data import TrainingData
from easyrl.build.inference import Inference, Scoring, open_inference
from easyrl.build.invariant_endpoints import require_invariant_endpoints
from easyrl.build.recipe import pack_in_order
from easyrl.build.run import OpenRun
from easyrl.build.same_architecture import require_same_architecture
from easyrl.build.servers import StartedServers
from easyrl.config import Config, ConfigError
from easyrl.config.weight_sync import SHARED_MEMORY
from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.doctor.endpoints import context_needs
from easyrl.engines.base import TrainEngine
from easyrl.engines.group.leader import GroupLeader
from easyrl.inference_client.errors import EndpointError, EndpointUnavailable, RequestRejected
from easyrl.inference_client.pool.endpoint_list import (
    MembershipFollower,
    Wanted,
    begin_membership,
)
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.runtime.collectives import on_rank_zero
from easyrl.runtime.rank_store import spans_hosts
from easyrl.runtime.shared_cores import SharedCores
from easyrl.runtime.shared_folder import marked
from easyrl.schema import Prompt
from easyrl.weight_sync.canary import FEWEST_TOKENS, Canary, canary_prompts
from easyrl.weight_sync.publish import WeightSync
from easyrl.weight_sync.shares import Shares

logger = logging.getLogger(__name__)

DEFAULT_CANARY_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}  # mean |Δ log-prob|; bf16 noise is 3e-3


@dataclass(frozen=True)
class Endpoints:
    """Endpoints that can be used, and the way of the weights to them."""

    urls: list[str]
    inference: Inference
    weight_sync: WeightSync


def open_endpoints(
    run: OpenRun,
    scoring: Scoring,
    data: TrainingData,
    engine: TrainEngine,
    servers: StartedServers,
    cores: SharedCores,
) -> Endpoints:
    """Waits for an endpoint that can be used; writes nothing. Collective.

    Raises ``ConfigError`` if there is none.
    """
    config = run.config
    urls, own_keys = run.collectives.broadcast([servers.urls, servers.api_keys])
    inference = open_inference(
        config,
        run.opened,
        scoring,
        vocabulary=data.vocabulary,
        servers=servers._replace(urls=urls, api_keys=own_keys),
        num_shares=run.ranks.dp_size,
        record=run.record,
    )
    require_weight_routes(inference)
    on_rank_zero(run.collectives, lambda: require_same_architecture(config, inference))
    warn_of_short_contexts(config, inference, rollout=True)
    weight_sync = _build_weight_sync(run, engine, inference, data.prompts, cores)
    run.opened.callback(weight_sync.close)
    inference.pool.set_repair(weight_sync.confirmed.repair)
    require_invariant_endpoints(config, inference.pool, run.output if run.ranks.is_first else None)
    return Endpoints(urls, inference, weight_sync)


async def set_aside(pool: EndpointPool, doubted: Mapping[str, str | None]) -> None:
    """Endpoints that failed on some rank, and why they are not used any more, by URL.

    None: they failed a proof, and are not used until they prove themselves anew.
    """
    for endpoint in pool.endpoints:
        problem = doubted.get(endpoint.url)
        if problem is not None and endpoint.excluded is None:
            pool.exclude(endpoint, f"{problem}; likely causes: docs/endpoints.md")
        elif endpoint.url in doubted and endpoint.confirmed_version is not None:
            pool.set_aside(endpoint, EndpointUnavailable(endpoint.url, "failed a proof"))


def follow_membership(run: OpenRun, endpoints: Endpoints) -> None:
    """From now on ``easyrl endpoints`` adds and removes endpoints. Collective."""
    inference, is_first = endpoints.inference, run.ranks.is_first
    begun = asdict(begin_membership(run.output, endpoints.urls)) if is_first else None
    wanted = Wanted(**run.collectives.broadcast(begun))
    follower = MembershipFollower(inference.pool, run.output, wanted, writes_state=is_first)
    inference.thread.run(follower.start())
    run.opened.callback(lambda: inference.thread.run(follower.close()))


def require_weight_routes(inference: Inference) -> None:
    """Raises ``ConfigError`` if all endpoints that are up refuse to say what weights they serve.

    One among others is left to the weight sync, which excludes it.
    """

    async def refusals() -> list[RequestRejected]:
        found = []
        for endpoint in inference.pool.endpoints:
            if endpoint.is_up:
                try:
                    await endpoint.client.weight_version(inference.pool.probe_timeout_s)
                    return []
                except RequestRejected as error:
                    found.append(error)
                except EndpointError:  # was up a moment ago
                    return []
        return found

    if found := inference.thread.run(refusals()):
        lines = "".join(f"\n  {error}" for error in found)
        raise ConfigError(f"inference.endpoints: cannot be given weights:{lines}")


def warn_of_short_contexts(config: Config, inference: Inference, *, rollout: bool) -> None:
    """Warns where an endpoint's context ends before the longest prompt with its response."""
    needs = context_needs(config, rollout=rollout)
    for url, limit in _limits(inference.pool).items():
        for key, needed in needs.items():
            if needed > limit:
                logger.warning(
                    "%s is %d, but %s serves at most %d tokens: it gets only what it has room for; "
                    "where none has more, longer responses are cut and count as truncated, prompts "
                    "without room for a token are excluded; lower one of them or raise the "
                    "server's --max-model-len",
                    key,
                    needed,
                    url,
                    limit,
                )


def _build_weight_sync(
    run: OpenRun,
    engine: TrainEngine,
    inference: Inference,
    prompts: Sequence[Prompt],
    cores: SharedCores,
) -> WeightSync:
    config = run.config
    limits = _limits(inference.pool).values()
    whole = [limit for limit in limits if limit >= FEWEST_TOKENS] or limits  # one may say nonsense
    embedded = all(e.served is not None and e.served.is_embedded for e in inference.pool.endpoints)
    try:
        asked = canary_prompts(prompts, min(whole, default=None), embedded=embedded)
    except ValueError as error:
        raise ConfigError(f"weight_sync.canary: {error}") from error
    inference.pool.canary.token_ids = asked[-1].token_ids  # the shortest, asked for at every sync
    canary = Canary(
        asked,
        config.rollout.temperature,
        # its responses all end at max_tokens; it reads the rows' tokens in their order
        pack_in_order(config),
        inference.pool.ask,
        config.weight_sync.timeout_s,
    )
    try:
        return WeightSync(
            config=config.weight_sync,
            tolerance=config.weight_sync.canary_tolerance
            or DEFAULT_CANARY_TOLERANCE[config.model.dtype],
            run_name=run.version.run,
            startup_timeout_s=config.inference.startup_timeout_s,
            max_outage_s=config.inference.max_outage_s,
            engine=engine,
            pool=inference.pool,
            thread=inference.thread,
            collectives=run.collectives,
            canary=canary,
            dummy=dummy_micro_batch,
            stop=run.signals.stop,
            api_keys=inference.api_keys,
            cores=cores,
            lora=config.model.lora,
            shares=_shares(run, engine),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _shares(run: OpenRun, engine: TrainEngine) -> Shares | None:
    """None where one process writes all: of a model in one piece, and on several hosts that do not
    share ``weight_sync.directory``. Collective."""
    if not isinstance(engine, GroupLeader):
        return None
    is_shared, folder = not spans_hosts(), run.config.weight_sync.directory
    if not is_shared and folder != SHARED_MEMORY:
        seen = None
        if run.ranks.is_first:  # the first group writes
            folder.mkdir(parents=True, exist_ok=True)
            with marked(folder) as mark:
                seen = engine.group_sees(mark)
        is_shared = run.collectives.broadcast(seen)
    return engine if is_shared else None


def _limits(pool: EndpointPool) -> dict[str, int]:
    """Prompt and response tokens together that an endpoint serves, by URL, where it says so."""
    served = {endpoint.url: endpoint.served for endpoint in pool.endpoints}
    return {url: s.max_model_len for url, s in served.items() if s and s.max_model_len is not None}
