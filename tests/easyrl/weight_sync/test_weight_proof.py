"""What counts as proof, on numbers made by hand."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
import torch

from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.inference_client.client import WorkerProof
from easyrl.inference_client.errors import EndpointUnavailable
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.transfer.artifact import Chunk, tensor_checksum
from easyrl.inference_client.transfer.artifact_reader import ArtifactReader
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from easyrl.schema import Completion, Prompt, VersionSpan
from easyrl.weight_sync.canary import GROSS_DIFFERENCE, Canary, CanaryReading, Expected
from easyrl.weight_sync.proof import (
    OtherVersionShown,
    Probe,
    ProofFailed,
    Prover,
    Shown,
    prove_weights,
)
from easyrl.weight_sync.target import Target
from tests.inference_client.served_tensors import ArtifactInMemory, entries, rows, shapes, whole
from tests.recipes import pack_groups

URL = "http://endpoint:8000"
SERVED = {"embed": torch.randn(4, 3), "layer": torch.randn(2), "norm": torch.randn(1)}
OTHER = SERVED | {"layer": torch.nextafter(SERVED["layer"], torch.tensor(9.0))}


class Client:
    """Answers the two questions of the proof; each worker gives what ``answer(nonce)`` says."""

    url = URL

    def __init__(self, *answers: Callable[[bytes], WorkerProof], version: str = "run:0:1") -> None:
        self.answers, self.version = answers, version
        self.asked: list[tuple[bytes, dict]] = []

    async def weight_version(self, timeout_s=None) -> str:
        return self.version

    async def prove_weights(self, nonce, tensors):
        self.asked.append((nonce, tensors))
        return [answer(nonce) for answer in self.answers]


def serves(weights=SERVED, **problems: str) -> Callable[[bytes], WorkerProof]:
    return lambda nonce: whole(weights, nonce, **problems)


def weights(artifact: ArtifactReader | None = None) -> Target:
    stream = Target("run:0:1")
    for number, names in enumerate((("embed", "layer"), ("norm",))):
        held = {name: SERVED[name] for name in names}
        stream.add(Chunk(f"chunk-{number}", 8, dict.fromkeys(held, "00"), entries(held)))
    stream.complete(artifact or ArtifactInMemory(SERVED))
    return stream


def prove(client: Client, bits: bool = True, target: Target | None = None):
    target = target or weights()
    return asyncio.run(prove_weights(Endpoint(client, 1), target, stamp="run:0:1", bits=bits))


def test_every_tensor_of_every_worker_passes():
    client = Client(serves(), serves())
    shown = prove(client)
    ((nonce, tensors),) = client.asked
    assert tensors == shapes(SERVED) and len(nonce) == 32
    record = shown.record()
    assert record.nonce == nonce.hex()
    assert (record.num_tensors, record.num_workers, record.whole) == (3, 2, False)
    assert prove(Client(serves())).record().whole


def test_the_question_does_not_hold_its_answer():
    """Every question has a nonce of its own, but the first to each endpoint of a version."""
    target = weights()
    clients = [Client(serves()), Client(serves())]
    clients[1].url = "http://other"
    for client in [*clients, *clients]:
        prove(client, target=target)
    (first, again), (shared, other) = ([nonce for nonce, _ in c.asked] for c in clients)
    assert first == shared and len({first, again, other}) == 3
    target = weights()
    target.published()  # who joins now is asked anew
    prove(clients[0], target=target)
    assert clients[0].asked[-1][0] != target.nonce
    told = str(clients[0].asked)
    assert not any(tensor_checksum(weight) in told for weight in SERVED.values())


@pytest.mark.parametrize("answer", ["before", "plain checksums", "another nonce"])
def test_what_was_hashed_before_is_no_answer(answer):
    """The weights are right, the digests were not formed for this question."""
    kept: list[WorkerProof] = []

    def repeated(nonce: bytes) -> WorkerProof:
        if answer == "plain checksums":
            proof = whole(SERVED, nonce)
            for name, (served,) in proof.slices.items():
                proof.slices[name] = [replace(served, digest=tensor_checksum(SERVED[name]))]
            return proof
        kept.append(whole(SERVED, nonce if answer == "before" else bytes(32)))
        return kept[0]

    client, target = Client(repeated), weights()
    if answer == "before":
        prove(client, target=target)
    with pytest.raises(ProofFailed, match="serves other weights .* 3 of 3 tensors, first embed"):
        prove(client, target=target)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([serves(), serves(OTHER)], r"worker 1 of 2 .* 1 of 3 .* layer \(checksum "),
        ([serves({"norm": SERVED["norm"]})], r"no worker proved 2 of 3 tensors .* first embed"),
        ([], "none of its workers"),
    ],
    ids=["other", "missing", "nobody"],
)
def test_what_is_not_served_is_named(answers, message):
    with pytest.raises(ProofFailed, match=message) as caught:
        prove(Client(*answers))
    assert URL in str(caught.value)


def test_the_workers_own_words_are_passed_on():
    some = {name: SERVED[name] for name in ("embed", "norm")}
    with pytest.raises(ProofFailed, match=r"layer \(shape \[2\] for \[3\]\)"):
        prove(Client(serves(some, layer="shape [2] for [3]")))


def test_a_tensor_may_be_in_one_of_the_workers_only():
    """Pipeline and expert parallelism."""
    parts = [{name: SERVED[name] for name in names} for names in (("embed", "layer"), ("norm",))]
    prove(Client(*map(serves, parts)))


def test_what_is_served_beside_the_artefact_is_a_problem():
    beside = {"lm_head.weight": "512 numbers are not in it"}
    with pytest.raises(ProofFailed, match=r"first lm_head.weight \(512 numbers are not in it"):
        prove(Client(serves(**beside)))


def test_a_copy_on_this_host_that_was_damaged_is_not_the_endpoints_fault():
    damaged = weights(ArtifactInMemory(OTHER, frozenset({"layer"})))
    with pytest.raises(EndpointUnavailable, match="'layer' was changed after it was written"):
        prove(Client(serves()), target=damaged)


def test_another_rank_knows_the_answers_of_proven_endpoints_and_no_others():
    """It has no copy of the weights: it is told nonce and digests."""
    target = weights()
    prove(Client(serves()), target=target)
    told = Target.from_json(orjson.loads(orjson.dumps(target.to_json())))
    for _ in range(2):
        prove(Client(serves()), target=told)
    with pytest.raises(ProofFailed, match="first layer"):
        prove(Client(serves(OTHER)), target=told)

    def in_rows(nonce: bytes) -> WorkerProof:
        proof = whole(SERVED, nonce)
        embed = SERVED["embed"]
        halves = [rows(embed, 0, 2, nonce), rows(embed, 2, 4, nonce)]
        return replace(proof, slices=dict(proof.slices) | {"embed": halves})

    prove(Client(in_rows))
    with pytest.raises(EndpointUnavailable, match="embed: its slices are others"):
        prove(Client(in_rows), target=told)


def test_another_version_fails_with_or_without_bits():
    for bits in (True, False):
        with pytest.raises(OtherVersionShown, match="serves version 'default', not 'run:0:1'"):
            prove(Client(version="default"), bits)
        with pytest.raises(OtherVersionShown, match=r"'other:0:2', not .*another run \(other\)"):
            prove(Client(version="other:0:2"), bits)
    client = Client()
    assert prove(client, bits=False) is None
    assert client.asked == []


def sample(tokens, logprobs, version="run:0:1") -> Completion:
    return Completion(
        np.array(tokens, dtype=np.int32),
        np.array(logprobs, dtype=np.float32),
        "length",
        (VersionSpan(version, 0, len(tokens)),),
        URL,
        np.ones(len(tokens), dtype=bool),
    )


def expected(*responses: tuple[list[int], list[float]]) -> Expected:
    return Expected(
        tuple(np.array(tokens, dtype=np.int32) for tokens, _ in responses),
        tuple(np.array(logprobs, dtype=np.float32) for _, logprobs in responses),
    )


def test_only_tokens_before_the_first_that_differs_are_compared():
    said = expected(([5, 6, 7], [-1.0, -2.0, -3.0]), ([8, 9], [-1.0, -1.0]))
    reading = said.reading([sample([5, 6, 9], [-1.1, -2.3, -9.0]), sample([9, 9], [-5.0, -5.0])])
    assert reading.num_tokens == 2
    assert reading.mean == pytest.approx(0.2, abs=1e-6)
    assert reading.maximum == pytest.approx(0.3, abs=1e-6)


def test_nothing_to_compare_and_nan_do_not_agree():
    said = expected(([5], [-1.0]))
    assert said.reading([sample([6], [-1.0])]) == CanaryReading(np.inf, np.inf, np.inf, 0)
    assert said.reading([sample([5], [np.nan])]).mean == np.inf
    assert CanaryReading(np.nan, np.nan, 0.0, 1).problem(1.0) is not None
    assert CanaryReading(0.5, 0.4, 0.6, 1).problem(0.5) is None


@pytest.mark.parametrize(
    ("nats", "bits", "fails"),
    [(0.04, True, False), (0.06, True, False), (0.49, True, False), (0.51, True, True),
     (4.0, True, True), (np.nan, True, True), (0.04, False, False), (0.06, False, True)],
)  # fmt: skip
def test_with_proved_bits_the_canary_warns_up_to_half_a_nat(nats, bits, fails, caplog):
    """32 tokens; without the proof of the bits the tolerance decides."""
    said = expected(*[([5, 6], [-1.0, -2.0])] * 16)

    class Sampling:
        async def sample(self, url):
            return [sample([5, 6], [-1.0 - nats, -2.0 + nats])] * 16

    async def expect(url, samples):
        return said

    prover = Prover(Sampling(), tolerance=0.05, reads_bits=bits)  # type: ignore[arg-type]
    endpoint = Endpoint(Client(serves()), 1)

    def prove():
        asyncio.run(prover.compare_samples(endpoint, "run:0:1", expect, Shown()))

    if fails:
        with pytest.raises(ProofFailed, match="canary: log-probabilities differ.* 32 tokens"):
            prove()
        assert not caplog.records
        return
    for _ in range(2):
        prove()
    if nats < 0.05:
        assert not caplog.records
    else:
        [said_once] = caplog.messages
        assert said_once.startswith(f"{URL}: canary: log-probabilities differ")


def test_single_tokens_that_are_off_by_nats_do_not_fail_a_canary():
    """Four of 32, as a router that flips has them: the four tokens of two prompts decided once."""
    said = expected(*[([5, 6], [-1.0, -2.0])] * 16)
    samples = [sample([5, 6], [-4.0, -5.0])] * 2 + [sample([5, 6], [-1.0, -2.0])] * 14
    reading = said.reading(samples)
    assert reading.maximum == 3.0 and reading.problem(GROSS_DIFFERENCE) is None


@pytest.mark.parametrize(
    ("off", "nats", "problem"),
    [
        (4, 3.0, None),  # a mean of 0.375
        (8, 3.0, "with the probe's weights, canary: log-probabilities differ"),  # of 0.75
        (32, 0.06, "by 6.00e-02 nats"),  # a stale copy moves all tokens
        (32, 0.04, None),
    ],
)
def test_single_tokens_that_are_off_by_nats_do_not_fail_the_probe_before_the_canary(
    off, nats, problem
):
    """At bf16's tolerance. What it would cost at the start it would be granted after a step."""
    true, changed = [[-1.0] * 32], [[-2.0] * 32]
    served = [-2.0 - nats] * off + [-2.0] * (32 - off)
    probe = Probe(weights(), expected(([5] * 32, *changed)), expected(([5] * 32, *true)))
    found = probe.check([sample([5] * 32, served)], tolerance=0.05, limit=0.5)
    assert (found is None) if problem is None else (found is not None and problem in found)


def test_where_bits_are_not_proved_the_probe_grants_what_the_canary_does():
    """The tolerance, single tokens or not."""
    probe = Probe(weights(), expected(([5] * 32, [-2.0] * 32)), expected(([5] * 32, [-1.0] * 32)))
    samples = [sample([5] * 32, [-5.0] * 4 + [-2.0] * 28)]
    found = probe.check(samples, tolerance=0.05, limit=0.05)
    assert found is not None and "with the probe's weights, canary" in found


@pytest.mark.parametrize(("off", "nats", "fails"), [(4, 3.0, False), (32, 0.3, True)])
def test_after_the_probe_it_comes_back_nearer_than_half_way(off, nats, fails):
    """The probe moved it by half a nat: a mean of 0.375 on four tokens is no stale cache."""
    tokens, logprobs = [5] * 32, [-1.0] * 32
    served = [-1.0 - nats] * off + logprobs[off:]

    class Sampling:
        async def sample(self, url):
            return [sample(tokens, served)]

    async def expect(url, samples):
        return expected((tokens, logprobs))

    prover = Prover(Sampling(), tolerance=0.05, reads_bits=True)  # type: ignore[arg-type]
    prover.probe_shifts[URL] = 0.5
    endpoint = Endpoint(Client(serves()), 1)
    proof = prover.compare_samples(endpoint, "run:0:1", expect, Shown())
    if fails:
        with pytest.raises(ProofFailed, match="differ from .* by 3.00e-01 .* tolerance 2.5e-01"):
            asyncio.run(proof)
    else:
        asyncio.run(proof)
        assert prover.probe_shifts[URL] == np.inf


def test_samples_of_other_weights_are_refused():
    responses = [sample([5], [-1.0])]

    class Sampling:
        async def sample(self, url):
            return responses

    prover = Prover(Sampling(), tolerance=0.1, reads_bits=True)  # type: ignore[arg-type]
    endpoint = Endpoint(Client(), 1)
    asyncio.run(prover.sample(endpoint, "run:0:1"))
    responses.append(sample([5], [-1.0], "default"))
    with pytest.raises(OtherVersionShown, match="tokens of default, not of run:0:1"):
        asyncio.run(prover.sample(endpoint, "run:0:1"))
    responses[-1] = sample([5], [-1.0], "other:0:1:updating")
    with pytest.raises(OtherVersionShown, match=r"not of run:0:1: another run \(other\)"):
        asyncio.run(prover.sample(endpoint, "run:0:1"))


@pytest.mark.parametrize(
    ("served", "problem"),
    [
        (-2.0, None),
        (-2.05, None),  # noise 0.05, visible 0.95
        (-1.0, "with the probe's weights, canary: log-probabilities differ"),  # the old weights
        (-1.7, "moved log-probabilities by 7.00e-01 nats only, not visible above 1.50e+00"),
    ],
)
def test_the_probe_wants_an_answer_of_the_changed_weights(served, problem):
    probe = Probe(weights(), expected(([5], [-2.0])), expected(([5], [-1.0])))
    found = probe.check([sample([5], [served])], tolerance=0.5, limit=0.5)
    assert (found is None) if problem is None else (found is not None and problem in found)


def test_a_probe_that_changes_nothing_proves_nothing():
    probe = Probe(weights(), expected(([5], [-1.0])), expected(([5], [-1.0])))
    found = probe.check([sample([5], [-1.0])], tolerance=0.5, limit=0.5)
    assert found is not None and "not visible above 1.00e-04" in found


# ---- the trainer's side of the canary ------------------------------------------------------------


class CountingEngine:
    """Its log-probability of a token is minus the token."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def logprobs(self, micro_batch) -> torch.Tensor:
        self.num_tokens += micro_batch.num_tokens
        return -micro_batch.label_ids.float()


def canary(mask_truncated: bool = False) -> Canary:
    def pack(groups):
        return pack_groups(
            groups,
            [np.zeros(1, dtype=np.float32)] * len(groups),
            aggregation="token",
            max_tokens=4,
            mask_truncated=mask_truncated,
            max_tokens_per_micro_batch=8,
        )

    async def ask(endpoint, token_ids, sampling, seed):
        raise AssertionError

    prompts = [Prompt(i, np.array([20 + i, 30], dtype=np.int32), "", None) for i in range(2)]
    return Canary(prompts, 1.0, pack, ask, 1.0)


def test_the_trainer_is_asked_once_about_equal_samples():
    engine = CountingEngine()
    equal = [sample([1, 2], [0, 0]), sample([3, 4], [0, 0])]
    other = [sample([1, 2], [0, 0]), sample([3, 5], [0, 0])]
    asked = {"a": equal, "b": list(equal), "c": other}
    found = canary().ask_trainer(
        asked, engine, Collectives(Ranks.data_parallel(0, 1)), dummy_micro_batch
    )
    assert engine.num_tokens == 2 * 8  # of two, not of three
    for url, last in (("a", 4), ("b", 4), ("c", 5)):
        assert [part.tolist() for part in found[url].logprobs] == [[-1, -2], [-3, -last]]
        assert [part.tolist() for part in found[url].token_ids] == [[1, 2], [3, last]]


def test_tokens_that_are_not_packed_are_not_compared():
    asked = {"a": [sample([1, 2], [0, 0]), sample([3, 4], [0, 0])]}
    found = canary(mask_truncated=True).ask_trainer(
        asked, CountingEngine(), Collectives(Ranks.data_parallel(0, 1)), dummy_micro_batch
    )
    assert found["a"].reading(asked["a"]).num_tokens == 0


def test_nobody_to_ask_about():
    collectives = Collectives(Ranks.data_parallel(0, 1))
    assert canary().ask_trainer({}, CountingEngine(), collectives, dummy_micro_batch) == {}


def test_other_ranks_run_as_many_forwards():
    class OtherRank:
        ranks = Ranks.data_parallel(1, 2)

        def broadcast(self, value):
            return 3

    engine = CountingEngine()
    assert canary().ask_trainer({}, engine, OtherRank(), dummy_micro_batch) == {}  # type: ignore[arg-type]
    assert engine.num_tokens == 3 * dummy_micro_batch().num_tokens


def test_a_canary_that_takes_too_long_is_the_endpoints_fault():
    async def ask(endpoint, token_ids, sampling, seed):
        await asyncio.Event().wait()

    prompts = [Prompt(0, np.array([20, 30], dtype=np.int32), "", None)]
    slow = Canary(prompts, 1.0, SimpleNamespace, ask, 0.01)  # type: ignore[arg-type]
    with pytest.raises(EndpointUnavailable, match=f"{URL}: the canary's responses took longer"):
        asyncio.run(slow.sample(SimpleNamespace(url=URL)))  # type: ignore[arg-type]
