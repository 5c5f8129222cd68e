"""Adapters travel alone: what is proved, what is caught, and when the whole model is sent."""

import logging
from contextlib import ExitStack

import orjson
import pytest
import torch

from easyrl.inference_client.transfer.artifact import Chunk, tensor_checksum, weights_digest
from easyrl.schema import APART, BASE_PROOF_HOLDS, NoEndpointServes, PolicyVersion
from easyrl.weight_sync.target import ServedAdapter, Target
from tests.easyrl.weight_sync.adapter_endpoint import (
    LORA,
    AdapterEndpoint,
    AnswersFromAnotherNamesCache,
    KeepsItsAdapter,
    LoraEngine,
    adapter_endpoint,
)
from tests.easyrl.weight_sync.weight_sync_parts import serve, stamps, wait_until, weight_sync
from tests.tiny_models import save_tiny_model

V = [PolicyVersion("sync", 0, v) for v in range(BASE_PROOF_HOLDS + 3)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("adapters") / "model", "qwen3", tied=True)


@pytest.fixture
def engine(model_dir):
    torch.manual_seed(0)
    return LoraEngine(model_dir)


def sync_of(engine, urls, directory, **options):
    return weight_sync(engine, urls, directory, lora_config=LORA, **{"lora": "auto"} | options)


# ---- what works --------------------------------------------------------------------------------


def test_only_the_adapter_travels_and_each_version_is_proved(engine, model_dir, tmp_path):
    with adapter_endpoint(model_dir) as endpoint:
        with sync_of(engine, [endpoint.url], tmp_path, chunk_bytes=2**12) as rank:
            for v in range(3):
                engine.train(1e-2)
                published = rank.sync.publish(V[v])
                assert rank.statuses() == {endpoint.url: f"confirmed {V[v]}"}
                assert published.metrics["sync/canary_mean"] < 1e-5
                (shown,) = rank.sync.confirmations
                adapter = dict(engine.named_weights("adapter"))
                num_bytes = sum(w.nbytes for w in adapter.values())
                assert published.metrics["sync/bytes"] == num_bytes
                assert shown.proof.num_tensors == len(adapter) and shown.proof.whole
                assert shown.base.num_tensors == len(dict(engine.named_weights("base")))
                made = rank.generate(str(V[v])).result(30)
                assert stamps(made) == {str(V[v])} and endpoint.named[-1] == f"sync-0-{v}"
                assert list(endpoint.loaded) == [f"sync-0-{v}"]  # the one before is gone
            full = sum(w.nbytes for w in dict(engine.named_weights()).values())
            assert endpoint.num_bytes == 4 * num_bytes < full  # the probe, and three versions
            assert "/start_weight_update" not in endpoint.seen
            assert endpoint.unloaded == ["sync-0-0-probe", "sync-0-0", "sync-0-1"]


def test_the_scaling_is_folded_in_and_the_digest_is_of_the_model_below_too(
    engine, model_dir, tmp_path
):
    engine.train(1e-2)
    expected = {n: w.clone() for n, w in engine.named_weights("base")}
    for name, weight in engine.named_weights("adapter"):
        factor = LORA.alpha / LORA.rank if ".lora_B." in name else 1.0
        expected[name] = weight * factor
    with adapter_endpoint(model_dir) as endpoint:
        with sync_of(engine, [endpoint.url], tmp_path) as rank:
            published = rank.sync.publish(V[0])
        for name, weight in endpoint.loaded["sync-0-0"].items():
            assert torch.equal(weight, expected[name])
    checksums = {name: tensor_checksum(weight) for name, weight in expected.items()}
    assert published.served.digest == APART + weights_digest([Chunk("", 0, checksums)])


def test_other_ranks_know_name_and_digest_and_ask_about_the_adapter_alone():
    base, target = Target("sync:0:base"), Target("sync:0:3")
    base.add(Chunk("a", 1, {"model": "a" * 64}))
    target.add(Chunk("b", 1, {"adapter": "b" * 64}))
    target.adapter = ServedAdapter("sync-0-3", 4, base)
    other = Target.from_json(orjson.loads(orjson.dumps(target.to_json())))
    both = [Chunk("", 0, {"model": "a" * 64}), Chunk("", 0, {"adapter": "b" * 64})]
    assert other.digest == target.digest == APART + weights_digest(both)
    assert other.model == "sync-0-3" and other.base is None
    whole = Target.from_json(orjson.loads(orjson.dumps(base.to_json())))
    assert whole.model is None and whole.digest == weights_digest(both[:1])


def test_the_model_below_is_proved_at_the_start_and_again_from_time_to_time(
    engine, model_dir, tmp_path
):
    with adapter_endpoint(model_dir) as endpoint:
        with sync_of(engine, [endpoint.url], tmp_path, probe=False, canary=False) as rank:
            rank.sync.publish(V[0])
            asked = endpoint.asked_base
            first = rank.sync.confirmations[0].base
            for v in V[1:BASE_PROOF_HOLDS]:
                rank.sync.publish(v)
                assert endpoint.asked_base == asked and rank.sync.confirmations[0].base == first
            name = next(iter(endpoint.base))
            endpoint.base[name].view(-1)[0] += 1e-3  # a bit flips in its memory
            with pytest.raises(NoEndpointServes, match="does not serve the model below") as found:
                for v in V[BASE_PROOF_HOLDS:]:
                    rank.sync.publish(v)
            assert name in str(found.value)


def test_versions_that_an_endpoint_has_missed_count_for_the_age_of_its_proof(
    engine, model_dir, tmp_path
):
    with adapter_endpoint(model_dir) as endpoint:
        with sync_of(engine, [endpoint.url], tmp_path, probe=False, canary=False) as rank:
            rank.sync.publish(V[0])
            asked, first = endpoint.asked_base, rank.sync.confirmations[0].base
            rank.sync.publish(V[BASE_PROOF_HOLDS - 1])
            assert (endpoint.asked_base, rank.sync.confirmations[0].base) == (asked, first)
            rank.sync.publish(V[BASE_PROOF_HOLDS])
            assert endpoint.asked_base == asked + 1 and rank.sync.confirmations[0].base != first


def test_one_that_restarts_in_mid_batch_is_given_the_adapter_and_proves_the_model(
    engine, model_dir, tmp_path
):
    engine.train(1e-2)
    with adapter_endpoint(model_dir) as endpoint:
        with sync_of(engine, [endpoint.url], tmp_path) as rank:
            rank.sync.publish(V[0])
            asked = endpoint.asked_base
            endpoint.restart()
            made = rank.generate(str(V[0])).result(60)  # 404 first: its adapter is not there
            assert stamps(made) == {str(V[0])} and "sync-0-0" in endpoint.loaded
            assert endpoint.asked_base > asked


def test_a_damaged_copy_of_the_model_below_is_written_again_and_costs_no_endpoint(
    engine, model_dir, tmp_path, caplog
):
    with adapter_endpoint(model_dir) as endpoint:
        with sync_of(engine, [endpoint.url], tmp_path) as rank:
            rank.sync.publish(V[0])
            (file, *_) = sorted(tmp_path.glob("easyrl-sync*/sync-0-base/*.safetensors"))
            content = file.read_bytes()
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            endpoint.restart()  # it is asked about the model again
            engine.train(1e-2)
            rank.sync.publish(V[1])
            assert rank.statuses() == {endpoint.url: f"confirmed {V[1]}"}
            assert "the weights are written again" in caplog.text
            assert "is excluded" not in caplog.text and file.read_bytes() == content


def test_names_that_a_killed_trainer_left_are_unloaded_and_strangers_are_not(
    engine, model_dir, tmp_path
):
    with adapter_endpoint(model_dir) as endpoint:
        adapter = dict(engine.named_weights("adapter"))
        endpoint.loaded = {"other-run-0-7": adapter, "sync-0-9": adapter, "theirs": adapter}
        endpoint.folders = {"theirs": "/adapters/theirs"}
        with sync_of(engine, [endpoint.url], tmp_path, probe=False) as rank:
            rank.sync.publish(V[0])
            assert set(endpoint.loaded) == {"sync-0-0", "theirs"}


def test_one_that_joins_late_is_given_the_adapter(engine, model_dir, tmp_path):
    with ExitStack() as opened:
        first = opened.enter_context(adapter_endpoint(model_dir))
        second = opened.enter_context(adapter_endpoint(model_dir))
        rank = opened.enter_context(sync_of(engine, [first.url], tmp_path))
        rank.sync.publish(V[0])
        rank.add(second.url)
        wait_until(lambda: rank.statuses().get(second.url) == f"confirmed {V[0]}")
        assert second.asked_base > 0 and list(second.loaded) == ["sync-0-0"]


# ---- what is caught ----------------------------------------------------------------------------


def test_a_stale_adapter_under_the_new_name_is_caught_by_the_proof(
    engine, model_dir, tmp_path, caplog
):
    options = {"probe": False, "canary": False}  # the bits alone
    with adapter_endpoint(model_dir, KeepsItsAdapter) as endpoint:
        with sync_of(engine, [endpoint.url], tmp_path, **options) as rank:
            rank.sync.publish(V[0])
            engine.train(1e-7)
            with pytest.raises(
                NoEndpointServes, match="serves other weights than version sync:0:1"
            ):
                rank.sync.publish(V[1])
    assert "lora_A.weight (checksum" in caplog.text


def test_a_stale_adapter_of_one_that_lies_is_caught_by_the_probe(engine, model_dir, tmp_path):
    with adapter_endpoint(model_dir, KeepsItsAdapter, lies=True) as endpoint:
        with sync_of(engine, [endpoint.url], tmp_path) as rank:
            # it shows the probe's change, and keeps it
            with pytest.raises(NoEndpointServes, match="canary: log-probabilities differ"):
                rank.sync.publish(V[0])


def test_a_prefix_cached_under_another_adapter_is_caught(engine, model_dir, tmp_path):
    with adapter_endpoint(model_dir, AnswersFromAnotherNamesCache) as endpoint:
        with sync_of(engine, [endpoint.url], tmp_path) as rank:
            with pytest.raises(NoEndpointServes, match="canary: log-probabilities differ"):
                rank.sync.publish(V[0])


# ---- auto --------------------------------------------------------------------------------------


def test_auto_sends_the_whole_model_where_an_endpoint_takes_no_adapter(
    engine, model_dir, tmp_path, caplog
):
    engine.train(1e-2)
    with ExitStack() as opened:
        caplog.set_level(logging.WARNING)
        able = opened.enter_context(adapter_endpoint(model_dir))
        embedded = opened.enter_context(serve(model_dir))
        urls = [able.url, embedded]
        rank = opened.enter_context(sync_of(engine, urls, tmp_path, probe=False))
        rank.sync.publish(V[0])
        assert set(rank.statuses().values()) == {f"confirmed {V[0]}"}
        told = [r.getMessage() for r in caplog.records if "weight_sync.lora" in r.getMessage()]
        assert len(told) == 1 and embedded in told[0] and "embedded server" in told[0]
        assert able.named[-1] is None and able.num_bytes == 0


@pytest.mark.parametrize(
    "limits, said",
    [
        ({"max_rank": 2}, "up to rank 2, model.lora.rank is 4: start it with --max-lora-rank 8"),
        ({"modules": ["q_proj", "o_proj"]}, "no adapter on k_proj, v_proj, gate_proj, up_proj"),
        ({"problem": "was started without --enable-lora"}, "started without --enable-lora"),
    ],
)
def test_what_an_endpoint_cannot_take_is_told_by_name(
    engine, model_dir, tmp_path, caplog, limits, said
):
    with adapter_endpoint(model_dir) as endpoint:
        endpoint.limits |= limits
        with sync_of(engine, [endpoint.url], tmp_path, lora="adapter") as rank:
            with pytest.raises(NoEndpointServes, match="weight_sync.lora=merged") as found:
                rank.sync.publish(V[0])
            assert said in str(found.value) and endpoint.url in str(found.value)
        with sync_of(engine, [endpoint.url], tmp_path) as rank:
            rank.sync.publish(V[0])
            assert rank.statuses() == {endpoint.url: f"confirmed {V[0]}"}
            assert said in caplog.text and "/start_weight_update" in endpoint.seen


def test_auto_sends_the_whole_model_over_another_one(engine, model_dir, tmp_path, caplog):
    with adapter_endpoint(model_dir) as endpoint:
        name = next(iter(endpoint.base))
        endpoint.base[name] = endpoint.base[name] + 1e-3
        with sync_of(engine, [endpoint.url], tmp_path, lora="adapter") as rank:
            with pytest.raises(NoEndpointServes, match=f"model below the adapter.*{name}"):
                rank.sync.publish(V[0])
        with sync_of(engine, [endpoint.url], tmp_path, probe=False) as rank:
            rank.sync.publish(V[0])
            assert rank.statuses() == {endpoint.url: f"confirmed {V[0]}"}
            assert "the whole model is sent at every sync" in caplog.text
            assert not list(tmp_path.glob("easyrl-sync*/sync-0-base"))


def test_auto_sends_the_whole_model_where_nobody_proves_the_one_below(engine, model_dir, tmp_path):
    with adapter_endpoint(model_dir) as endpoint:
        with sync_of(engine, [endpoint.url], tmp_path, prove=False, probe=False) as rank:
            served = rank.sync.publish(V[0]).served
            assert not served.digest.startswith(APART)
            assert "/start_weight_update" in endpoint.seen and endpoint.named[-1] is None


def test_merged_asks_nobody_for_adapters(engine, model_dir, tmp_path):
    with serve(model_dir) as url:
        engine.train(1e-2)
        with sync_of(engine, [url], tmp_path, lora="merged", probe=False) as rank:
            published = rank.sync.publish(V[0])
            assert rank.statuses() == {url: f"confirmed {V[0]}"}
            (shown,) = rank.sync.confirmations
            full = sum(w.nbytes for w in dict(engine.named_weights()).values())
            assert shown.base is None and published.metrics["sync/bytes"] == full


def test_the_endpoint_of_these_tests_is_honest(model_dir):
    """It serves the model as it was, and refuses names that nothing was loaded under."""
    with adapter_endpoint(model_dir) as endpoint:
        assert isinstance(endpoint, AdapterEndpoint) and not endpoint.loaded
        for name, parameter in endpoint.engine._model.named_parameters():
            assert torch.equal(parameter, endpoint.base[name])
