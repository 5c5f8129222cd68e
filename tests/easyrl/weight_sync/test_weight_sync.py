"""Weight sync against real servers, some of them behind a proxy that lies."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import pytest
import torch

from benchmarks.parts.random_model import write_random_model
from easyrl.config import SHARED_MEMORY, WeightSyncConfig
from easyrl.inference_client.errors import Outage
from easyrl.inference_client.transfer.announcement import OWNER
from easyrl.inference_client.vllm_plugin.easyrl_vllm.mapping import is_memory
from easyrl.schema import NoEndpointServes, PolicyVersion, Prompt
from easyrl.weight_sync.canary import canary_prompts
from easyrl.weight_sync.store import WeightStore, listen_address, local_address_towards
from tests.easyrl.weight_sync.weight_sync_parts import (
    AnswersFromItsPrefixCache,
    DamagesArtefacts,
    FailsAt,
    FailsHalfWay,
    ForgetsItsVersion,
    KeepsItsPrefixCache,
    MissesUpdates,
    PlainEngine,
    Watched,
    serve,
    stamps,
    wait_until,
    weight_sync,
)

V0, V1 = PolicyVersion("sync", 0, 0), PolicyVersion("sync", 0, 1)
PROBE0 = "sync:0:0:probe"


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    if not is_memory(SHARED_MEMORY):
        pytest.skip(f"{SHARED_MEMORY} is not in memory")
    with TemporaryDirectory(prefix="easyrl-test-sync-", dir=SHARED_MEMORY) as folder:
        yield Path(folder)


# ---- honest endpoints ----------------------------------------------------------------------------


def test_an_honest_endpoint_is_confirmed_at_each_version(model_dir, server, tmp_path):
    engine = PlainEngine(model_dir)
    (tmp_path / "easyrl-sync" / "of-a-crashed-attempt").mkdir(parents=True)
    (tmp_path / "easyrl-sync" / OWNER).write_text(socket.gethostname())
    with closing(Watched(server)) as proxy, weight_sync(engine, [proxy.url], tmp_path) as rank:
        metrics = rank.sync.publish(V0).metrics
        assert rank.statuses() == {proxy.url: "confirmed sync:0:0"}
        assert metrics["sync/canary_mean"] < 1e-5
        assert metrics["sync/endpoints"] == 1
        size = sum(p.nbytes for p in engine.policy.model.parameters())
        assert metrics["sync/bytes"] == size
        assert metrics["time/probe_s"] > 0
        engine.train(1e-3)
        metrics = rank.sync.publish(V1).metrics
        assert rank.statuses() == {proxy.url: "confirmed sync:0:1"}
        spans = [metrics[f"time/{name}_s"] for name in ("proof", "canary", "probe")]
        assert min(spans[:2]) > 0 and sum(spans) < metrics["time/sync_s"]
        assert spans[2] == 0
        # version v stays, served without the trainer, and the weights that probe who comes later
        artifacts = {p.name for p in (tmp_path / "easyrl-sync").iterdir() if p.name[0] == "s"}
        assert artifacts == {"sync-0-1", "sync-0-0-probe"}
        assert proxy.given == [PROBE0, "sync:0:0", "sync:0:1"]
    assert list(tmp_path.iterdir()) == []


def test_weights_are_those_of_before_the_probe(model_dir, server, tmp_path):
    engine = PlainEngine(model_dir)
    before = [p.detach().clone() for p in engine.policy.parameters()]
    with weight_sync(engine, [server], tmp_path) as rank:
        rank.sync.publish(V0)
    for parameter, value in zip(engine.policy.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_bf16_weights_pass_and_the_probe_sees_their_change(model_dir, tmp_path):
    engine = PlainEngine(model_dir, dtype="bf16")
    with serve(model_dir, dtype="bfloat16") as url:
        with weight_sync(engine, [url], tmp_path, tolerance=5e-2) as rank:
            metrics = rank.sync.publish(V0).metrics
            assert rank.statuses() == {url: "confirmed sync:0:0"}
            assert metrics["sync/canary_mean"] < 1e-2  # bf16 noise is 3e-3


def test_chunks_are_loaded_while_later_ones_are_gathered(model_dir, server, tmp_path):
    """The engine does not go on before the endpoint has its first chunk."""

    class Waiting(PlainEngine):
        proxy: Watched

        def named_weights(self, kind="full"):
            for number, item in enumerate(super().named_weights()):
                if number == 2:
                    wait_until(lambda: "/update_weights" in self.proxy.seen)
                yield item

    engine = Waiting(model_dir)
    with closing(Watched(server)) as engine.proxy:
        options = {"chunk_bytes": 1, "probe": False}  # a chunk for each tensor
        with weight_sync(engine, [engine.proxy.url], tmp_path, **options) as rank:
            rank.sync.publish(V0)
            assert rank.statuses() == {engine.proxy.url: "confirmed sync:0:0"}
        assert engine.proxy.seen.count("/update_weights") > 1


def test_an_endpoint_that_does_not_see_the_folder_streams(model_dir, server, tmp_path):
    with closing(Watched(server)) as proxy:
        with weight_sync(PlainEngine(model_dir), [proxy.url], tmp_path, transport="http") as rank:
            rank.sync.publish(V0)
            assert rank.statuses() == {proxy.url: "confirmed sync:0:0"}
        assert [init["root"] for init in proxy.inits] == [None]
        assert proxy.inits[0]["url"].startswith("http://127.0.0.1:")


def test_streams_listen_where_the_endpoint_comes_from():
    assert local_address_towards("http://127.0.0.1:8000") == "127.0.0.1"
    assert local_address_towards("http://localhost:8000/") in ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "127.0.0.1"),
        ({"advertise_host": "localhost"}, "127.0.0.1"),
        ({"advertise_host": "127.0.0.3"}, "127.0.0.3"),
        ({"advertise_host": "forwards-to-here.invalid"}, "127.0.0.1"),
        ({"advertise_host": "forwards-to-here.invalid", "bind_host": "127.0.0.2"}, "127.0.0.2"),
        ({"advertise_host": "localhost", "bind_host": "0.0.0.0"}, "0.0.0.0"),
    ],
)
def test_the_stream_listens_at_one_address(settings, expected, tmp_path):
    config = WeightSyncConfig(directory=tmp_path, transport="http", **settings)
    with closing(WeightStore(config, "run")) as store:
        store.begin("run:0:0")
        info = asyncio.run(store.init_info("http://127.0.0.1:1"))
        name = settings.get("advertise_host", expected)
        assert info["url"].startswith(f"http://{name}:")
        (server,) = store._servers.values()
        found = [c.laddr.ip for c in psutil.Process(server.pid).net_connections()]
        assert found == [expected]


def test_a_name_that_is_the_loopback_only_here_is_not_listened_at(monkeypatch):
    """Debian's hosts file gives a machine's own name 127.0.1.1; others know its real address."""
    monkeypatch.setattr("easyrl.weight_sync.store.own_address", lambda name: "127.0.1.1")
    assert listen_address("train0", "http://127.0.0.1:8000") == "127.0.0.1"
    monkeypatch.setattr("easyrl.weight_sync.store.own_address", lambda name: "192.0.2.7")
    assert listen_address("train0", "http://127.0.0.1:8000") == "192.0.2.7"


@pytest.mark.parametrize("transport", ["auto", "http"])
def test_a_port_that_is_in_use_leaves_the_folder(transport, tmp_path, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = WeightSyncConfig(directory=tmp_path, transport=transport, port=port)
        with closing(WeightStore(config, "run")) as store:
            store.begin("run:0:0")
            if transport == "http":
                with pytest.raises(ValueError, match=f"weight_sync.port: {port} "):
                    asyncio.run(store.init_info("http://127.0.0.1:1"))
                return
            for _ in range(2):
                info = asyncio.run(store.init_info("http://127.0.0.1:1"))
                assert info["url"] is None and info["root"].startswith(str(tmp_path))
            (said,) = caplog.messages  # once
            assert said.startswith(f"weight_sync.port: {port} ")


def test_another_name_may_be_advertised(model_dir, server, tmp_path):
    options = {"transport": "http", "advertise_host": "localhost", "probe": False}
    with closing(Watched(server)) as proxy:
        with weight_sync(PlainEngine(model_dir), [proxy.url], tmp_path, **options) as rank:
            rank.sync.publish(V0)
        assert proxy.inits[0]["url"].startswith("http://localhost:")


def test_an_endpoint_and_a_trainer_with_ipv6_addresses(model_dir, tmp_path):
    options = {"transport": "http", "advertise_host": "::1", "probe": False}
    with serve(model_dir, host="::1") as url:
        assert url.startswith("http://[::1]:")
        with closing(Watched(url)) as proxy:  # its own address is IPv4
            engine = PlainEngine(model_dir)
            for number, endpoint in enumerate((url, proxy.url)):  # in turn: it is one server
                with weight_sync(engine, [endpoint], tmp_path / f"{number}", **options) as rank:
                    rank.sync.publish(V0)
                    assert rank.statuses() == {endpoint: "confirmed sync:0:0"}
            assert proxy.inits[0]["url"].startswith("http://[::1]:")


# ---- planted faults ------------------------------------------------------------------------------


def first_tensor(engine) -> str:
    return next(iter(engine.named_weights()))[0]


@pytest.mark.parametrize(
    ("make_proxy", "options", "message"),
    [
        (MissesUpdates, {"probe": False}, r"serves other weights than version sync:0:0"),
        (
            lambda url: MissesUpdates(url, lies=True),
            {"probe": False},
            "canary: log-probabilities differ",
        ),
        (
            lambda url: MissesUpdates(url, lies=True),
            {"canary": False},
            "canary: log-probabilities differ",
        ),
        (
            lambda url: MissesUpdates(url, lies=True, first=1),
            {},
            "canary: log-probabilities differ",
        ),
        (
            lambda url: MissesUpdates(url, repeats=True),
            {"probe": False, "canary": False},
            "serves other weights than version sync:0:0: 24 of 24 tensors, first model.embed",
        ),
        (ForgetsItsVersion, {"probe": False}, "serves version 'default'"),
        (AnswersFromItsPrefixCache, {}, "canary: log-probabilities differ"),
        (KeepsItsPrefixCache, {}, "did not reset its prefix cache"),
    ],
    ids=[
        *("missed", "missed-and-lying", "missed-and-lying-at-the-probe", "kept-the-probe"),
        "repeats-what-it-was-told",
        *("version", "stale-prefix-cache", "prefix-cache-not-reset"),
    ],
)
def test_a_lying_endpoint_is_excluded_and_named(
    make_proxy, options, message, model_dir, server, tmp_path
):
    engine = PlainEngine(model_dir)
    engine.train(20.0)  # unlike what the server was started with, by nats
    with closing(make_proxy(server)) as proxy:
        with weight_sync(engine, [proxy.url], tmp_path, **options) as rank:
            with pytest.raises(NoEndpointServes, match=message) as caught:
                rank.sync.publish(V0)
            assert proxy.url in str(caught.value)
            assert message in rank.statuses()[proxy.url]


@pytest.mark.parametrize("num_missed", [1, 2], ids=["healed", "excluded"])
def test_a_tiny_step_that_was_missed_is_caught(
    num_missed, model_dir, server, second_server, tmp_path, caplog
):
    """Too small for the canary; the proof names endpoint and tensor."""
    engine = PlainEngine(model_dir)
    with closing(MissesUpdates(second_server, first=2, num_missed=num_missed)) as proxy:
        with weight_sync(engine, [server, proxy.url], tmp_path) as rank:
            rank.sync.publish(V0)
            engine.train(1e-7)
            metrics = rank.sync.publish(V1).metrics
            caught = f"{proxy.url}: worker 0 of 1 serves other weights than version sync:0:1"
            assert caught in caplog.text
            assert f"first {first_tensor(engine)} (" in caplog.text
            assert rank.statuses()[server] == "confirmed sync:0:1"
            if num_missed == 1:
                assert rank.statuses()[proxy.url] == "confirmed sync:0:1"
            else:
                assert "serves other weights" in rank.statuses()[proxy.url]
            assert metrics["sync/endpoints"] == 3 - num_missed


def test_without_the_proof_the_same_step_is_not_noticed(model_dir, server, tmp_path):
    """Why the canary is not the proof."""
    engine = PlainEngine(model_dir)
    with closing(MissesUpdates(server, first=2)) as proxy:
        with weight_sync(engine, [proxy.url], tmp_path, prove=False) as rank:
            rank.sync.publish(V0)
            engine.train(1e-7)
            rank.sync.publish(V1)
            assert rank.statuses() == {proxy.url: "confirmed sync:0:1"}


def test_a_wrong_model_is_named_with_the_tensor(model_dir, server, tmp_path):
    other = write_random_model(tmp_path / "other", hidden_size=32, num_layers=2)
    engine = PlainEngine(model_dir)
    with serve(other) as wrong:
        with weight_sync(engine, [server, wrong], tmp_path) as rank:
            rank.sync.publish(V0)
            assert rank.statuses()[server] == "confirmed sync:0:0"
            assert "shape" in rank.statuses()[wrong]
            assert first_tensor(engine) in rank.statuses()[wrong]


def test_a_stale_prefix_cache_is_caught_below_the_tolerance_of_bf16(model_dir, server, tmp_path):
    """The small model's log-probabilities move by less than that tolerance at the probe."""
    engine = PlainEngine(model_dir)
    with closing(AnswersFromItsPrefixCache(server)) as proxy:
        with weight_sync(engine, [proxy.url], tmp_path, tolerance=5e-2) as rank:
            with pytest.raises(NoEndpointServes, match="canary: log-probabilities differ"):
                rank.sync.publish(V0)


def test_a_change_that_cannot_be_seen_proves_nothing(model_dir, server, tmp_path):
    class Unperturbed(PlainEngine):
        def perturbed_weights(self):
            return ExitStack()

    with weight_sync(Unperturbed(model_dir), [server], tmp_path) as rank:
        with pytest.raises(NoEndpointServes, match="not visible above 1.00e-04"):
            rank.sync.publish(V0)


def test_a_canary_without_a_token_to_compare_does_not_pass(model_dir, server, tmp_path):
    """``mask_truncated`` drops the canary's responses, all of which end with "length"."""
    options = {"probe": False, "mask_truncated": True}
    with weight_sync(PlainEngine(model_dir), [server], tmp_path, **options) as rank:
        with pytest.raises(NoEndpointServes, match="no token to compare"):
            rank.sync.publish(V0)


@pytest.mark.parametrize(
    ("path", "status"),
    [("/update_weights", 500), ("/finish_weight_update", 400), ("/collective_rpc", 500)],
)
def test_a_failed_push_is_repeated(path, status, model_dir, server, tmp_path):
    with closing(FailsAt(server, path, status=status)) as proxy:
        with weight_sync(PlainEngine(model_dir), [proxy.url], tmp_path, probe=False) as rank:
            rank.sync.publish(V0)
            assert proxy.times == 0
            assert rank.statuses() == {proxy.url: "confirmed sync:0:0"}


# Of two, one that comes back late is pushed to in mid-batch, where nothing is written again.
@pytest.mark.parametrize("times, num_endpoints", [(1, 2), (2, 1)])
def test_weights_that_were_damaged_here_are_written_again_and_cost_no_endpoint(
    times, num_endpoints, model_dir, server, second_server, tmp_path, caplog
):
    with ExitStack() as opened:
        urls = [server, second_server][:num_endpoints]
        proxies = [opened.enter_context(closing(DamagesArtefacts(url))) for url in urls]
        engine, urls = PlainEngine(model_dir), [proxy.url for proxy in proxies]
        rank = opened.enter_context(weight_sync(engine, urls, tmp_path))
        rank.sync.publish(V0)
        engine.train(1e-3)
        proxies[0].times = times
        rank.sync.publish(V1)
        confirmed = dict.fromkeys(urls, "confirmed sync:0:1")
        wait_until(lambda: rank.statuses() == confirmed)
        assert caplog.text.count("the weights are written again") == times
        assert "was changed after it was written" in caplog.text
        assert "is excluded" not in caplog.text


def test_no_token_is_made_of_a_bit_that_flipped_in_shared_memory(
    model_dir, server, shared_memory, caplog
):
    """It is not looked for on arrival; the proof finds it while the endpoint is paused."""
    engine = PlainEngine(model_dir)
    with closing(DamagesArtefacts(server)) as proxy:
        with weight_sync(engine, [proxy.url], shared_memory) as rank:
            rank.sync.publish(V0)
            engine.train(1e-3)
            proxy.times = 1
            proxy.seen.clear()
            proxy.given.clear()
            rank.sync.publish(V1)
            assert rank.statuses() == {proxy.url: "confirmed sync:0:1"}
            assert "was changed after it was written" in caplog.text
            # it arrived both times; who failed shows the probe once more
            assert proxy.given == ["sync:0:1", PROBE0, "sync:0:1"]
            again = proxy.seen.index("/pause", proxy.seen.index("/collective_rpc"))
            assert "/resume" not in proxy.seen[:again] and "/resume" in proxy.seen[again:]
            assert not any("generate" in path for path in proxy.seen[:again])
            assert stamps(rank.generate("sync:0:1").result(60)) == {"sync:0:1"}


def test_weights_that_are_damaged_again_and_again_end_in_an_outage(model_dir, server, tmp_path):
    with closing(DamagesArtefacts(server)) as proxy:
        with weight_sync(PlainEngine(model_dir), [proxy.url], tmp_path, probe=False) as rank:
            proxy.times = 100
            with pytest.raises(Outage, match="damaged .* 3 times.*weight_sync.directory"):
                rank.sync.publish(V0)
            assert all(endpoint.excluded is None for endpoint in rank.pool.endpoints)


def test_a_probe_that_was_damaged_here_is_learned_again(model_dir, server, second_server, tmp_path):
    """Who restarts meanwhile is not excluded, nor used without having shown it."""
    engine = PlainEngine(model_dir)
    with closing(DamagesArtefacts(second_server)) as proxy:
        with weight_sync(engine, [server], tmp_path) as rank:
            rank.sync.publish(V0)
            proxy.times = 1
            rank.add(proxy.url)  # the probe is what it is pushed first
            wait_until(lambda: "was changed after" in rank.statuses().get(proxy.url, ""))
            engine.train(1e-3)
            rank.sync.publish(V1)
            wait_until(lambda: rank.statuses()[proxy.url] == "confirmed sync:0:1")
            assert proxy.given[-2:] == ["sync:0:1:probe", "sync:0:1"] and engine.num_probes == 2


def test_an_update_that_fails_half_way_leaves_no_version(
    model_dir, server, second_server, tmp_path
):
    engine = PlainEngine(model_dir)
    options = {"chunk_bytes": 1, "probe": False}  # a chunk for each tensor
    with closing(FailsHalfWay(second_server)) as proxy:
        with weight_sync(engine, [server, proxy.url], tmp_path, **options) as rank:
            rank.sync.publish(V0)
            engine.train(1e-1)
            proxy.fails = True
            rank.sync.publish(V1)
            assert rank.statuses()[server] == "confirmed sync:0:1"
            assert "out of luck" in rank.statuses()[proxy.url]
            clients = {e.url: e.client for e in rank.pool.endpoints}
            assert rank.thread.run(clients[proxy.url].weight_version()) == f"{V1}:updating"
            assert rank.thread.run(clients[server].weight_version()) == str(V1)


def test_an_endpoint_that_fails_every_push_is_excluded(model_dir, server, tmp_path):
    with closing(FailsAt(server, "/update_weights", times=1000)) as proxy:
        with weight_sync(PlainEngine(model_dir), [proxy.url], tmp_path) as rank:
            with pytest.raises(NoEndpointServes, match="out of luck"):
                rank.sync.publish(V0)


def test_an_update_that_a_dead_trainer_left_open_is_given_up(model_dir, server, tmp_path):
    engine = PlainEngine(model_dir)
    with weight_sync(engine, [server], tmp_path / "dead", probe=False) as dead:
        dead.sync.publish(V0)
        client = dead.pool.endpoints[0].client
        dead.thread.run(client.pause("wait"))
        dead.thread.run(client.start_weight_update())
    with weight_sync(engine, [server], tmp_path / "next", probe=False) as rank:
        rank.sync.publish(V1)
        assert rank.statuses() == {server: "confirmed sync:0:1"}
        assert stamps(rank.generate(str(V1)).result(60)) == {str(V1)}


# ---- the canary's prompts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "lengths"),
    [
        (8, [6] * 16),
        (26, [24] * 16),
        (27, [25, *[24] * 15]),
        (145, [143, *[24] * 15]),
        (146, [144, *[24] * 15]),
        (None, [144, *[24] * 15]),
    ],
)
def test_canary_fits_into_the_context(limit, lengths):
    data = np.arange(5, dtype=np.int32)
    prompts = canary_prompts([Prompt(0, data, "", None)], limit)
    assert [len(prompt.token_ids) for prompt in prompts] == lengths
    stream = np.concatenate([prompt.token_ids for prompt in prompts])
    assert np.array_equal(stream, np.resize(data, sum(lengths)))


def test_the_canary_of_embedded_servers_is_shorter():
    prompts = canary_prompts([Prompt(0, np.arange(5, dtype=np.int32), "", None)], 10, embedded=True)
    assert [len(prompt.token_ids) for prompt in prompts] == [8] * 16
    whole = canary_prompts([Prompt(0, np.arange(5, dtype=np.int32), "", None)], None, embedded=True)
    assert [len(prompt.token_ids) for prompt in whole] == [11] * 16


def test_a_context_too_short_for_a_canary_is_refused():
    with pytest.raises(ValueError, match="--max-model-len"):
        canary_prompts([Prompt(0, np.arange(5, dtype=np.int32), "", None)], 7)


def test_the_canarys_tokens_are_foreseen_where_a_step_leaves_them_as_they_were(
    model_dir, server, tmp_path
):
    """The trainer is asked before they come; once more only if others come."""
    engine = PlainEngine(model_dir)
    forward, asked = engine.logprobs, []
    engine.logprobs = lambda row: asked.append(row) or forward(row)
    with weight_sync(engine, [server], tmp_path) as rank:
        rank.sync.publish(V0)
        asked.clear()
        first = rank.sync.publish(V1).metrics["sync/canary_mean"]
        once = len(asked)
        engine.train(0.5)
        asked.clear()
        second = rank.sync.publish(PolicyVersion("sync", 0, 2)).metrics["sync/canary_mean"]
    assert once > 0 and len(asked) == 2 * once
    assert 0 < max(first, second) < 1e-5
