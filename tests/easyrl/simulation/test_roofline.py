"""Rates of a model on a device, against the same arithmetic done by hand from config.json."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from easyrl.simulation.cluster import Workload, divide, lengths_of_mean
from easyrl.simulation.devices import DEVICES, Assumed, Device, device_named
from easyrl.simulation.known_models import KNOWN, shape_named
from easyrl.simulation.roofline import ModelWork, Server, Trainer, rates_of

# numbers that are easily divided by
DEVICE = Device("plain", 1e14, 1e12, 100e9, 1e11, 1e10)
IDEAL = Assumed(
    decode_bandwidth=1.0,
    training=0.5,
    forward=0.5,
    mixture=0.5,
    links=1.0,
    message_s=1e-5,
    server_memory=1.0,
    server_reserve=0.0,
)


@pytest.fixture(scope="module")
def works() -> dict[str, ModelWork]:
    return {name: ModelWork.of(shape_named(name)) for name in KNOWN}


def test_the_sizes_are_those_of_the_model_cards(works) -> None:
    """Qwen3-30B-A3B: 30.5 B parameters, 3.3 B activated, of which 0.31 B are the embedding's."""
    assert works["8b"].parameters == 8_190_735_360
    assert works["8b"].active == 8_190_735_360 - 151_936 * 4096
    assert works["32b"].parameters == 32_763_876_352
    mixture = works["30b-a3b"]
    assert mixture.parameters == pytest.approx(30.5e9, rel=0.005)
    assert mixture.experts == 48 * 128 * 3 * 2048 * 768
    assert mixture.active + 151_936 * 2048 == pytest.approx(3.35e9, rel=0.01)
    assert works["8b"].key_value == 2 * 2 * 36 * 8 * 128  # 147 kB a token
    assert [works[name].key_heads for name in KNOWN] == [8, 8, 4]


def test_a_decoding_step_reads_weights_and_keys(works) -> None:
    server = Server(works["8b"], DEVICE, IDEAL, devices=1, context=1000)
    weights, keys = 2 * 7_568_405_504, 1000 * 147_456
    assert server.decode_s(1) == pytest.approx((weights + keys) / 1e12)
    assert server.decode_s(10) == pytest.approx((weights + 10 * keys) / 1e12)
    split = replace(server, devices=2)
    of_two = (weights + 10 * keys) / 2 / 1e12 + 2 * 36 * 1e-5
    assert split.decode_s(10) == pytest.approx(of_two)
    assert split.tokens_held == pytest.approx((100e9 - 8_190_735_360) * 2 / 147_456)
    # 16 devices and 8 heads: each head is there twice
    assert replace(server, devices=16).tokens_held == pytest.approx(
        (100e9 - 2 * 8_190_735_360 / 16) * 8 / 147_456
    )


def test_many_short_sequences_are_bound_by_their_products(works) -> None:
    server = Server(works["8b"], DEVICE, IDEAL, devices=1, context=1)
    flops = 200 * (2 * 7_568_405_504 + 4 * 36 * 4096)
    assert server.decode_s(200) == pytest.approx(flops / 5e13)
    assert server.decode_s(200) > server.decode_s(1) * 1.1


def test_a_mixture_reads_the_experts_that_are_drawn(works) -> None:
    mixture = works["30b-a3b"]
    all_of_it = 2 * (mixture.parameters - 151_936 * 2048)
    one = all_of_it - 2 * mixture.experts * (1 - 8 / 128)
    assert mixture.read(1) == pytest.approx(one)
    assert mixture.read(1) == pytest.approx(2 * mixture.active)
    two = all_of_it - 2 * mixture.experts * (120 / 128) ** 2
    assert mixture.read(2) == pytest.approx(two)
    assert mixture.read(1000) == pytest.approx(all_of_it)


def trainer(work: ModelWork, **changed: int) -> Trainer:
    own = {"ranks": 1, "tensor": 1, "pipeline": 1, "zero_stage": 1, "row_tokens": 16_384}
    own |= {"context": 4000, "frozen": 1} | changed
    return Trainer(work, DEVICE, IDEAL, **own)  # type: ignore[arg-type]


def test_a_trained_token_takes_six_flops_a_parameter_and_a_frozen_model_two(works) -> None:
    forward = 2 * 7_568_405_504 + 4 * 36 * 4096 * 4000
    assert trainer(works["8b"], frozen=0).token_s == pytest.approx(3 * forward / 5e13)
    assert trainer(works["8b"]).token_s == pytest.approx(4 * forward / 5e13)
    assert trainer(works["8b"], frozen=2).token_s == pytest.approx(5 * forward / 5e13)
    exchanged = 4 * 4 * 36 * 2 * 4096 * 3 / 4 / 1e11  # forward, again, backward, the reference's
    by_four = trainer(works["8b"], tensor=4).token_s
    assert by_four == pytest.approx(4 * forward / 2e14 + exchanged)
    mixture = works["30b-a3b"]
    of_mixture = 4 * (2 * mixture.active + 4 * 48 * 4096 * 4000) / 2.5e13
    assert trainer(mixture).token_s == pytest.approx(of_mixture)


def test_zero_3_over_a_slow_network_is_bound_by_it(works) -> None:
    """16 ranks on two nodes: weights three times with a reference, gradients once, a row."""
    slow = trainer(works["30b-a3b"], ranks=16, zero_stage=3, row_tokens=8192)
    sent = 4 * 2 * works["30b-a3b"].parameters * 15 / 16
    assert slow.token_s == pytest.approx(sent / 1e10 / 8192)
    in_a_node = trainer(works["30b-a3b"], ranks=8, zero_stage=3)
    assert in_a_node.token_s == trainer(works["30b-a3b"]).token_s  # hidden behind computing


def test_the_border_reduces_gathers_and_pushes(works) -> None:
    weights = 2 * 8_190_735_360
    one = trainer(works["8b"])
    assert one.border_s == pytest.approx(weights / 1e10)
    two = trainer(works["8b"], ranks=2)  # fp32 gradients twice, bf16 weights once
    assert two.border_s == pytest.approx(weights / 1e10 + (8 + 2) * 8_190_735_360 / 2 / 1e11)
    pipeline = trainer(works["8b"], tensor=1, pipeline=2)
    filling_s = 16_384 * pipeline.token_s
    assert pipeline.border_s == pytest.approx(weights / 1e10 + filling_s)


def test_rates_are_those_of_the_server_and_the_trainer(works) -> None:
    server = Server(works["8b"], DEVICE, IDEAL, devices=1, context=1000)
    own = trainer(works["8b"])
    rates = rates_of(server, own, prompt_tokens=100)
    assert rates.train_token_s == own.token_s and rates.border_s == own.border_s
    assert rates.decode_s(7) == pytest.approx(server.decode_s(7))
    assert len(rates.decode_by_running) == server.most_running == 256


def test_lengths_have_their_mean_behind_the_cut() -> None:
    lengths = lengths_of_mean(8800, 0.5, 15_360)
    drawn = lengths.draw(20_000, 16, np.random.default_rng(1))
    assert drawn.mean() == pytest.approx(8800, rel=0.005) and drawn.max() == 15_360
    assert lengths_of_mean(100, 0.0, 200).mean == pytest.approx(100)
    with pytest.raises(ValueError, match="from 1 to below 15,360, and is 15360"):
        lengths_of_mean(15_360, 0.5)


def test_every_division_fits_the_devices_and_the_first_is_the_fastest() -> None:
    workload = Workload(lengths_of_mean(8800, 0.5), batch_size=16)
    found = divide(shape_named("8b"), DEVICES["h100"], 16, workload, Assumed())
    seconds = [each.outcome.step_s for each in found]
    assert seconds == sorted(seconds)
    for setting, split, outcome in found:
        assert setting.devices <= 16 and setting.devices_per_rank == split.devices
        least_s = setting.rates.border_s + 8800 * setting.rates.decode_s(1)
        assert outcome.step_s > least_s
    slower = divide(shape_named("8b"), DEVICES["910b"], 16, workload, Assumed())
    assert slower[0].outcome.step_s > 1.5 * seconds[0]
    synchronous = replace(workload, mode="sync")
    behind = divide(shape_named("8b"), DEVICES["h100"], 16, synchronous, Assumed())
    assert behind[0].outcome.step_s > seconds[0]


def test_what_does_not_fit_is_refused_and_says_what_is_missing() -> None:
    shape, workload = shape_named("32b"), Workload(lengths_of_mean(8800, 0.5))
    small = replace(DEVICES["h100"], memory=8e9)
    with pytest.raises(
        ValueError, match=r"66 GB of weights and a sequence of 15,510 tokens do not"
    ):
        divide(shape, small, 64, workload, Assumed())
    with pytest.raises(ValueError, match=r"no division of 4 devices of 80 GB .* has the memory"):
        divide(shape, DEVICES["h100"], 4, workload, Assumed())


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'tpu' is not known; one of 910b, h100"):
        device_named("tpu")
    with pytest.raises(ValueError, match=r"'7b' is no folder, and none of 8b \(Qwen3-8B\)"):
        shape_named("7b")
