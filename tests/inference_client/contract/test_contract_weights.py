"""New weights in a running server: what is served, how it is stamped and proven, what is refused.

After each test that fails an update on purpose the next whole update must succeed: ``healed``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from easyrl.inference_client.client import EndpointClient, WorkerProof
from easyrl.inference_client.errors import EndpointError
from easyrl.inference_client.transfer.artifact_reader import ArtifactReader
from easyrl.weight_sync.challenge import Challenge, shapes_of
from tests.inference_client.contract.calls import (
    LOGPROB_TOLERANCE,
    PROMPT,
    in_flight,
    logprob_error,
    long_response,
    sample,
    versions,
)
from tests.inference_client.contract.conftest import Server
from tests.inference_client.contract.sender import Sender, altered, open_sender
from tests.inference_client.contract.served_models import contract_model, true_logprobs
from tests.inference_client.written_artifact import WeightArtifact

LONG_PROMPT = [1 + 5 * i % 60 for i in range(100)]  # several blocks of a prefix cache


@pytest.fixture(scope="module", params=["file", "http"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Sender]:
    root = tmp_path_factory.mktemp("weights") / "easyrl-contract"
    with open_sender(root, request.param) as sender:
        yield sender


@pytest.fixture(scope="module")
def file_sender(tmp_path_factory: Any) -> Iterator[Sender]:
    with open_sender(tmp_path_factory.mktemp("weights") / "easyrl-contract", "file") as sender:
        yield sender


@pytest.fixture
async def sender(opened: Sender, client: EndpointClient) -> Sender:
    await opened.announce(client)
    return opened


@pytest.fixture
async def healed(
    server: Server, file_sender: Sender, client: EndpointClient
) -> AsyncIterator[Sender]:
    """A sender over files; afterwards what a trainer does when an update has failed."""
    await file_sender.announce(client)
    yield file_sender
    await client.abandon_weight_update()
    await client.resume()
    await file_sender.announce(client)
    artifact = await file_sender.push(server, client, seed=8)
    assert await client.weight_version() == artifact.version
    (completion,) = await sample(client, **long_response(20))
    assert versions(completion) == [artifact.version]
    assert logprob_error(server.model, PROMPT, completion) < LOGPROB_TOLERANCE


async def prove(client: EndpointClient, artifact: WeightArtifact) -> Shown:
    """What the only worker answers, and what the trainer finds wrong with it."""
    reader = ArtifactReader(artifact.directory, artifact.chunks)
    asked = Challenge(shapes_of(artifact.chunks), reader)
    (proof,) = await client.prove_weights(asked.nonce, asked.tensors)
    findings = asked.check([proof])
    (wrong,) = findings.wrong
    problems = dict(wrong) | dict.fromkeys(findings.uncovered, "not shown")
    return Shown(proof, problems, proof.slices.keys() - problems.keys())


@dataclass(frozen=True)
class Shown:
    proof: WorkerProof
    problems: dict[str, str]
    names: Set[str]  # tensors that are shown, and right


# ---- a whole update ------------------------------------------------------------------------------


async def test_an_update_is_served_stamped_and_proven(
    server: Server, client: EndpointClient, sender: Sender
) -> None:
    for seed in (1, 2):  # the second over weights that were themselves pushed
        before = await sample(client, LONG_PROMPT, **long_response(30))
        artifact = await sender.push(server, client, seed)
        assert len(artifact.chunks) > 2
        assert await client.weight_version() == artifact.version
        (after,) = await sample(client, LONG_PROMPT, **long_response(30))
        assert versions(after) == [artifact.version]
        # neither a head that kept its old copy nor a prefix cache of the old weights
        assert logprob_error(server.model, LONG_PROMPT, after) < LOGPROB_TOLERANCE
        assert logprob_error(server.model, LONG_PROMPT, before[0]) > 100 * LOGPROB_TOLERANCE
        proof = await prove(client, artifact)
        assert proof.problems == {}
        assert proof.names == artifact.checksums.keys()
        assert proof.proof.transport == sender.transport


async def test_the_proof_names_what_is_not_served(
    server: Server, client: EndpointClient, healed: Sender
) -> None:
    """Also a change of one bit in one number, which no log-probability would show."""
    await healed.push(server, client, seed=3)
    name = "model.layers.1.mlp.up_proj.weight"
    weight = dict(contract_model(server.tied, 3).state_dict())[name].clone()
    weight.view(torch.int32)[2, 3] ^= 1
    other = healed.write(server.tied, 3, {name: weight})
    proof = await prove(client, other)
    assert list(proof.problems) == [name]
    assert proof.names == other.checksums.keys() - {name}


async def test_a_missed_update_is_seen_in_every_tensor(
    server: Server, client: EndpointClient, healed: Sender
) -> None:
    await healed.push(server, client, seed=3)
    missed = healed.write(server.tied, 4)
    proof = await prove(client, missed)
    assert proof.problems.keys() == missed.checksums.keys() and not proof.names


async def test_the_head_is_proven_apart_from_what_it_is_tied_to(
    server: Server, client: EndpointClient, healed: Sender
) -> None:
    """The output projection's tensor, shared or not, is among those proven."""
    artifact = await healed.push(server, client, seed=5)
    proof = await prove(client, artifact)
    head = "model.embed_tokens.weight" if server.tied else "lm_head.weight"
    assert head in proof.names
    assert ("lm_head.weight" in proof.names) != server.tied


async def test_responses_in_flight_show_where_the_weights_changed(
    server: Server, client: EndpointClient, healed: Sender, http: aiohttp.ClientSession
) -> None:
    for _ in range(4):  # a busy machine may have finished it before it hears of the pause
        old = await healed.push(server, client, seed=6)
        new = healed.write(server.tied, 7)
        old_model = server.model
        (running,) = await in_flight(client, http, 1, length=1800)
        await client.pause("keep")
        await healed.send(client, new)
        await client.resume()
        server.model = contract_model(server.tied, 7)
        (completion,) = await running
        if versions(completion) != [old.version]:
            break
    assert versions(completion) == [old.version, new.version]
    change = completion.version_spans[0].end
    assert 0 < change < 1800
    tokens = completion.token_ids.tolist()
    error = np.abs(completion.logprobs - true_logprobs(old_model, PROMPT, tokens))
    assert error[:change].max() < LOGPROB_TOLERANCE
    assert error[change:].max() > 100 * LOGPROB_TOLERANCE
    (later,) = await sample(client, **long_response(8))
    assert versions(later) == [new.version]


async def test_an_answer_serves_once(
    client: EndpointClient, healed: Sender, server: Server
) -> None:
    """Digests are keyed with the question's nonce; a question without one is refused."""
    artifact = await healed.push(server, client, seed=5)
    first, second = [await prove(client, artifact) for _ in range(2)]
    assert first.names == second.names == artifact.checksums.keys()
    name = min(artifact.checksums)
    digests = {shown.proof.slices[name][0].digest for shown in (first, second)}
    assert len(digests) == 2 and artifact.checksums[name] not in digests
    with pytest.raises(EndpointError, match="nonce"):
        await client.prove_weights(b"short", shapes_of(artifact.chunks))


# ---- updates that must not happen ----------------------------------------------------------------


async def assert_refused(client: EndpointClient, update_info: dict[str, Any]) -> None:
    """With an error; the version stays, and the server is alive."""
    version = await client.weight_version()
    await client.start_weight_update()
    with pytest.raises(EndpointError):
        await client.update_weights(update_info)
    assert await client.weight_version() == version
    await client.health()


@pytest.mark.parametrize(
    "changes",
    [
        {"artifact": "../easyrl-contract"},
        {"artifact": ".."},
        {"artifact": "."},
        {"artifact": ""},
        {"artifact": "/tmp"},
        {"artifact": "no-such-artifact"},
        {"file": "../artifact-1/chunk-00000.safetensors"},
        {"file": "/etc/passwd"},
        {"file": "sub/chunk-00000.safetensors"},
        {"file": "manifest.json"},
        {"file": "no-such-file"},
        {"file": ""},
        {"num_bytes": 1},
        {"checksums": {}},
    ],
    ids=str,
)
async def test_what_the_trainer_did_not_announce_is_refused(
    server: Server, client: EndpointClient, healed: Sender, changes: dict[str, Any]
) -> None:
    artifact = healed.write(server.tied, 4)
    await assert_refused(client, altered(artifact.update_info(artifact.chunks[:1]), **changes))


async def test_a_link_out_of_the_directory_is_refused(
    server: Server, client: EndpointClient, healed: Sender
) -> None:
    artifact = healed.write(server.tied, 4)
    file = artifact.directory / artifact.chunks[0].file
    elsewhere = healed.announcement.root.parent / "elsewhere.safetensors"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    await assert_refused(client, artifact.update_info(artifact.chunks[:1]))


async def test_other_bytes_than_announced_are_refused(
    server: Server, client: EndpointClient, healed: Sender
) -> None:
    artifact = healed.write(server.tied, 4)
    file = artifact.directory / artifact.chunks[0].file
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    await assert_refused(client, artifact.update_info(artifact.chunks[:1]))


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("model.no_such.weight", torch.zeros(4)),
        ("model.norm.weight", torch.zeros(33)),
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(32, 48)),
    ],
    ids=["unknown-name", "wrong-length", "transposed"],
)
async def test_weights_of_another_model_are_refused(
    server: Server, client: EndpointClient, healed: Sender, name: str, weight: torch.Tensor
) -> None:
    """At the chunk that holds them, or at the end of the update at the latest."""
    version = await client.weight_version()
    artifact = healed.write(server.tied, 4, {name: weight})
    with pytest.raises(EndpointError):
        await healed.send(client, artifact)
    assert await client.weight_version() == version
    await client.health()


async def test_an_update_that_lacks_a_weight_is_not_finished(
    server: Server, client: EndpointClient, healed: Sender
) -> None:
    version = await client.weight_version()
    artifact = healed.write(server.tied, 4)
    await client.start_weight_update()
    for chunk in artifact.chunks[:-1]:
        await client.update_weights(artifact.update_info([chunk]))
    with pytest.raises(EndpointError):
        await client.finish_weight_update(artifact.version)
    assert await client.weight_version() == version


async def test_an_update_can_be_given_up_half_way(
    server: Server, client: EndpointClient, healed: Sender
) -> None:
    version = await client.weight_version()
    artifact = healed.write(server.tied, 4)
    await client.start_weight_update()
    await client.update_weights(artifact.update_info(artifact.chunks[:1]))
    await client.abandon_weight_update()
    assert await client.weight_version() == version
    with pytest.raises(EndpointError):  # it is no longer open
        await client.update_weights(artifact.update_info(artifact.chunks[1:]))
    with pytest.raises(EndpointError):
        await client.finish_weight_update(artifact.version)
    await client.abandon_weight_update()  # nothing is open: harmless
    await healed.push(server, client, seed=4)


async def test_a_refusal_does_not_break_the_next_request(
    server: Server, client: EndpointClient, healed: Sender
) -> None:
    """vLLM closes the connection behind an error of a worker; who keeps it open must not trip."""
    artifact = healed.write(server.tied, 4)
    unknown = altered(artifact.update_info(artifact.chunks[:1]), file="no-such-file")
    async with aiohttp.ClientSession() as session:  # connections are kept and used again
        kept = EndpointClient(server.url, session, timeout_s=60)
        await kept.pause("wait")
        await kept.start_weight_update()
        with pytest.raises(EndpointError):
            await kept.update_weights(unknown)
        await kept.abandon_weight_update()
        await kept.resume()


async def test_a_second_start_leaves_a_server_that_can_be_updated(
    server: Server, client: EndpointClient, healed: Sender
) -> None:
    """It is refused, or starts over; giving up first works with either."""
    artifact = healed.write(server.tied, 4)
    await client.start_weight_update()
    await client.update_weights(artifact.update_info(artifact.chunks[:1]))
    try:
        await client.start_weight_update()
    except EndpointError:
        pass
    await client.abandon_weight_update()
    await healed.push(server, client, seed=4)


async def test_nothing_is_finished_that_was_not_started(
    client: EndpointClient, healed: Sender
) -> None:
    version = await client.weight_version()
    with pytest.raises(EndpointError):
        await client.finish_weight_update("contract:0:999")
    assert await client.weight_version() == version


@pytest.mark.parametrize("transport", ["file", "http"])
async def test_a_wrong_token_is_refused(
    server: Server, client: EndpointClient, healed: Sender, tmp_path: Path, transport: Any
) -> None:
    """The directory does not announce it, the HTTP server does not answer to it."""
    with open_sender(tmp_path / "easyrl-other", transport) as other:
        artifact = other.write(server.tied, 4)
        with pytest.raises(EndpointError):  # at once, or when the first chunk is asked for
            await client.init_weight_transfer(other.init_info | {"token": "guessed"})
            await other.send(client, artifact)
    await client.health()


# ---- a restart -----------------------------------------------------------------------------------


async def test_a_restarted_server_says_so_and_takes_its_weights_again(
    server: Server, client: EndpointClient, file_sender: Sender
) -> None:
    server.crash_and_restart()
    assert await client.weight_version() == "default"
    (completion,) = await sample(client, **long_response(20))
    assert versions(completion) == ["default"]
    assert logprob_error(server.model, PROMPT, completion) < LOGPROB_TOLERANCE
    artifact = file_sender.write(server.tied, 2)
    with pytest.raises(EndpointError):  # nobody has announced himself
        await file_sender.send(client, artifact)
    await client.abandon_weight_update()
    with pytest.raises(EndpointError):
        await prove(client, artifact)
    assert await client.weight_version() == "default"
    await file_sender.announce(client)
    await file_sender.push(server, client, seed=2)
    (completion,) = await sample(client, **long_response(20))
    assert logprob_error(server.model, PROMPT, completion) < LOGPROB_TOLERANCE
