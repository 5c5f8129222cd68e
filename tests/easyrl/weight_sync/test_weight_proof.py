"""What counts as proof, on numbers made by hand."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.inference_client.client import WorkerProof
from easyrl.inference_client.errors import EndpointUnavailable
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.transfer.artifact import Chunk
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
from tests.recipes import pack_groups

URL = "http://endpoint:8000"
HASHES = {"embed": "e0", "layer": "f0", "norm": "a0"}


class Client:
    """Answers the two questions of the proof."""

    url = URL

    def __init__(self, proofs: list[WorkerProof], version: str = "run:0:1") -> None:
        self.proofs, self.version = proofs, version
        self.asked: tuple[str, list[dict]] | None = None

    async def weight_version(self, timeout_s=None) -> str:
        return self.version

    async def prove_weights(self, artifact, chunks):
        self.asked = artifact, chunks
        return self.proofs


def weights() -> Target:
    stream = Target("run:0:1")
    stream.add(Chunk("chunk-0", 8, {"embed": "e0", "layer": "f0"}))
    stream.add(Chunk("chunk-1", 4, {"norm": "a0"}))
    return stream


def prove(client: Client, bits: bool = True) -> None:
    asyncio.run(prove_weights(Endpoint(client, 1), weights(), stamp="run:0:1", bits=bits))


def test_every_tensor_of_every_worker_passes():
    client = Client([WorkerProof(dict(HASHES), {}, "file"), WorkerProof(dict(HASHES), {}, "http")])
    prove(client)
    assert client.asked is not None
    name, chunks = client.asked
    assert name == "run-0-1"
    assert [chunk["file"] for chunk in chunks] == ["chunk-0", "chunk-1"]


@pytest.mark.parametrize(
    ("proofs", "message"),
    [
        ([HASHES, HASHES | {"layer": "ff"}], r"worker 1 of 2 .* 1 of 3 .* layer \(checksum ff"),
        ([{"norm": "a0"}], r"no worker proved 2 of 3 tensors .* first embed"),
        ([], "none of its workers"),
    ],
    ids=["other", "missing", "nobody"],
)
def test_what_is_not_served_is_named(proofs, message):
    with pytest.raises(ProofFailed, match=message) as caught:
        prove(Client([WorkerProof(dict(checksums), {}, "file") for checksums in proofs]))
    assert URL in str(caught.value)


def test_the_workers_own_words_are_passed_on():
    proof = WorkerProof({"embed": "e0", "norm": "a0"}, {"layer": "shape [2] for [3]"}, "file")
    with pytest.raises(ProofFailed, match=r"layer \(shape \[2\] for \[3\]; checksum missing"):
        prove(Client([proof]))


def test_a_tensor_may_be_in_one_of_the_workers_only():
    """Pipeline and expert parallelism."""
    parts = [{"embed": "e0", "layer": HASHES["layer"]}, {"norm": "a0"}]
    prove(Client([WorkerProof(part, {}, "file") for part in parts]))


def test_what_is_served_beside_the_artefact_is_a_problem():
    proof = WorkerProof(dict(HASHES), {"lm_head.weight": "512 numbers are not in it"}, "file")
    with pytest.raises(ProofFailed, match=r"first lm_head.weight \(512 numbers are not in it"):
        prove(Client([proof]))


def test_another_version_fails_with_or_without_bits():
    for bits in (True, False):
        with pytest.raises(OtherVersionShown, match="serves version 'default', not 'run:0:1'"):
            prove(Client([], version="default"), bits)
    client = Client([])
    prove(client, bits=False)
    assert client.asked is None


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
    assert said.reading([sample([6], [-1.0])]) == CanaryReading(np.inf, np.inf, 0)
    assert said.reading([sample([5], [np.nan])]).mean == np.inf
    assert CanaryReading(np.nan, 0.0, 1).problem(1.0) is not None
    assert CanaryReading(0.5, 0.6, 1).problem(0.5) is None


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
    endpoint = Endpoint(Client([WorkerProof(dict(HASHES), {}, "file")]), 1)

    def prove():
        asyncio.run(prover.prove(endpoint, weights(), "run:0:1", expect, Shown()))

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


def test_samples_of_other_weights_are_refused():
    responses = [sample([5], [-1.0])]

    class Sampling:
        async def sample(self, url):
            return responses

    prover = Prover(Sampling(), tolerance=0.1, reads_bits=True)  # type: ignore[arg-type]
    endpoint = Endpoint(Client([]), 1)
    asyncio.run(prover.sample(endpoint, "run:0:1"))
    responses.append(sample([5], [-1.0], "default"))
    with pytest.raises(OtherVersionShown, match="tokens of default, not of run:0:1"):
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
    found = probe.check([sample([5], [served])], tolerance=0.5)
    assert (found is None) if problem is None else (found is not None and problem in found)


def test_a_probe_that_changes_nothing_proves_nothing():
    probe = Probe(weights(), expected(([5], [-1.0])), expected(([5], [-1.0])))
    found = probe.check([sample([5], [-1.0])], tolerance=0.5)
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

    async def fetch(url, token_ids, sampling, seed):
        raise AssertionError

    prompts = [Prompt(i, np.array([20 + i, 30], dtype=np.int32), "", None) for i in range(2)]
    return Canary(prompts, 1.0, pack, fetch, 1.0)


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
    async def fetch(url, token_ids, sampling, seed):
        await asyncio.Event().wait()

    prompts = [Prompt(0, np.array([20, 30], dtype=np.int32), "", None)]
    slow = Canary(prompts, 1.0, SimpleNamespace, fetch, 0.01)  # type: ignore[arg-type]
    with pytest.raises(EndpointUnavailable, match=f"{URL}: the canary's responses took longer"):
        asyncio.run(slow.sample(URL))
