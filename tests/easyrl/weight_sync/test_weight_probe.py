"""The probe against servers that keep a copy of a weight which nobody can read back.

The servers start with the weights that they have to serve: every proof but the probe passes.
"""

import pytest

from easyrl.schema import NoEndpointServes, PolicyVersion
from tests.easyrl.weight_sync.weight_sync_parts import PlainEngine, serve, wait_until, weight_sync
from tests.tiny_models import save_tiny_model

V0, V1 = PolicyVersion("sync", 0, 0), PolicyVersion("sync", 0, 1)
COPIED = ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("probe") / "model", "qwen3", tied=True)


@pytest.mark.parametrize(
    ("copied", "tolerance"),
    [*((name, 1e-3) for name in COPIED), ("lm_head", 5e-2)],  # defaults for fp32, bf16
)
def test_a_hidden_copy_is_caught_at_the_start(copied, tolerance, model_dir, tmp_path):
    with serve(model_dir, copied) as url:
        with weight_sync(PlainEngine(model_dir), [url], tmp_path, tolerance=tolerance) as rank:
            with pytest.raises(NoEndpointServes) as caught:
                rank.sync.publish(V0)
            assert url in str(caught.value)


@pytest.mark.parametrize("copied", COPIED)
def test_nothing_else_catches_it(copied, model_dir, tmp_path):
    """Neither version nor checksums nor canary: it is a difference that has yet to grow."""
    with serve(model_dir, copied) as url:
        with weight_sync(PlainEngine(model_dir), [url], tmp_path, probe=False) as rank:
            rank.sync.publish(V0)
            assert rank.statuses() == {url: "confirmed sync:0:0"}


@pytest.mark.parametrize("copied", COPIED)
def test_a_hidden_copy_that_comes_in_mid_batch_is_caught_without_the_trainer(
    copied, model_dir, tmp_path
):
    engine = PlainEngine(model_dir)
    with serve(model_dir) as honest, serve(model_dir, copied) as url:
        with weight_sync(engine, [honest], tmp_path) as rank:
            rank.sync.publish(V0)
            engine.train(1e-7)
            rank.sync.publish(V1)
            rank.add(url)
            wait_until(lambda: "with the probe's weights" in rank.statuses()[url])
            assert rank.statuses()[honest] == "confirmed sync:0:1"
            assert engine.num_probes == 1
