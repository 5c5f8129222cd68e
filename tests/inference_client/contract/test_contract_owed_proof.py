"""Weights that came on the promise of a proof: no token before it was right; what mends that."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from easyrl.config import SHARED_MEMORY
from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.errors import EndpointError, EndpointUnavailable
from easyrl.inference_client.transfer.artifact import Chunk
from easyrl.inference_client.transfer.artifact_reader import ArtifactReader
from easyrl.weight_sync.challenge import Challenge, shapes_of
from tests.inference_client.contract.calls import (
    LOGPROB_TOLERANCE,
    PROMPT,
    logprob_error,
    long_response,
    sample,
    versions,
)
from tests.inference_client.contract.conftest import Server
from tests.inference_client.contract.sender import Sender, open_sender
from tests.inference_client.contract.served_models import contract_model
from tests.inference_client.written_artifact import WeightArtifact


@pytest.fixture(scope="module")
def opened() -> Iterator[Sender]:
    with open_sender(SHARED_MEMORY / f"easyrl-contract-{os.getpid()}", "file") as sender:
        yield sender


@pytest.fixture
async def sender(opened: Sender, server: Server, client: EndpointClient) -> AsyncIterator[Sender]:
    """Whatever a test leaves behind, the next whole update is served."""
    await opened.announce(client)
    yield opened
    await client.abandon_weight_update()
    artifact = await opened.push(server, client, seed=8)
    await assert_serves(server, client, artifact)


def promised(artifact: WeightArtifact, chunks: Sequence[Chunk]) -> dict[str, Any]:
    described = [chunk.describe(proof_follows=True) for chunk in chunks]
    return {"artifact": artifact.name, "chunks": described}


async def push_promised(
    server: Server, client: EndpointClient, sender: Sender, seed: int
) -> WeightArtifact:
    """All but the proof, and what follows it."""
    artifact = sender.write(server.tied, seed)
    await client.pause("wait")
    await client.start_weight_update()
    await client.update_weights(promised(artifact, artifact.chunks))
    await client.finish_weight_update(artifact.version)
    return artifact


async def prove(client: EndpointClient, artifact: WeightArtifact) -> bytes:
    """The nonce of a question that was answered right."""
    reader = ArtifactReader(artifact.directory, artifact.chunks)
    asked = Challenge(shapes_of(artifact.chunks), reader)
    findings = asked.check(await client.prove_weights(asked.nonce, asked.tensors))
    assert not any(findings.wrong) and not findings.uncovered
    return asked.nonce


async def assert_refuses(client: EndpointClient) -> None:
    """At once, whoever has resumed it, and again; the server is alive."""
    await client.resume()
    for seed in (1, 2):
        with pytest.raises(EndpointUnavailable):
            await sample(client, seed=seed, **long_response(4))
    await client.health()


async def assert_serves(server: Server, client: EndpointClient, artifact: WeightArtifact) -> None:
    (completion,) = await sample(client, **long_response(20))
    assert versions(completion) == [artifact.version]
    assert logprob_error(server.model, PROMPT, completion) < LOGPROB_TOLERANCE


async def test_no_token_before_the_proof_was_right(
    server: Server, client: EndpointClient, sender: Sender
) -> None:
    for seed in (11, 12):  # once it was proved, what comes is not hashed on arrival
        artifact = await push_promised(server, client, sender, seed)
        await assert_refuses(client)
        nonce = await prove(client, artifact)
        await assert_refuses(client)  # only the trainer knows whether it was right
        with pytest.raises(EndpointError, match="other weights"):
            await client.accept_proof(bytes(32))
        await client.prove_weights(bytes(32), {})  # shows nothing
        with pytest.raises(EndpointError, match="other weights"):
            await client.accept_proof(bytes(32))
        await assert_refuses(client)
        await client.accept_proof(nonce)
        await client.resume()
        server.model = contract_model(server.tied, seed)
        await assert_serves(server, client, artifact)
        await client.accept_proof(bytes(32))  # nothing is owed: says nothing new


async def test_requests_that_waited_are_refused_too(
    server: Server, client: EndpointClient, sender: Sender
) -> None:
    await push_promised(server, client, sender, 13)
    waiting = [asyncio.create_task(sample(client, seed=seed)) for seed in range(3)]
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in waiting)
    await client.resume()
    async with asyncio.timeout(30):
        found = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, EndpointUnavailable) for error in found), found


async def test_a_proof_of_the_weights_before_says_nothing_of_these(
    server: Server, client: EndpointClient, sender: Sender
) -> None:
    """As where another trainer pushes between a proof and what it permits."""
    first = await push_promised(server, client, sender, 14)
    nonce = await prove(client, first)
    await push_promised(server, client, sender, 15)
    with pytest.raises(EndpointError, match="other weights"):
        await client.accept_proof(nonce)
    await assert_refuses(client)


async def test_an_update_that_ends_half_way_owes_it_too(
    server: Server, client: EndpointClient, sender: Sender
) -> None:
    artifact = sender.write(server.tied, 16)
    await client.pause("wait")
    await client.start_weight_update()
    await client.update_weights(promised(artifact, artifact.chunks[:2]))
    await client.abandon_weight_update()
    await assert_refuses(client)


async def test_a_second_start_does_not_forget_the_promise(
    server: Server, client: EndpointClient, sender: Sender
) -> None:
    artifact = sender.write(server.tied, 17)
    await client.pause("wait")
    await client.start_weight_update()
    await client.update_weights(promised(artifact, artifact.chunks))
    with pytest.raises(EndpointError):
        await client.start_weight_update()
    await client.finish_weight_update(artifact.version)
    await assert_refuses(client)


async def test_whole_weights_without_the_promise_mend_it(
    server: Server, client: EndpointClient, sender: Sender
) -> None:
    """A trainer that proves nothing, behind one that died: they were checked on arrival."""
    await push_promised(server, client, sender, 18)
    artifact = await sender.push(server, client, seed=19)
    await assert_serves(server, client, artifact)


async def test_part_of_the_weights_without_the_promise_does_not(
    server: Server, client: EndpointClient, sender: Sender
) -> None:
    await push_promised(server, client, sender, 18)
    artifact = sender.write(server.tied, 19)
    await client.start_weight_update()
    await client.update_weights(artifact.update_info(artifact.chunks[:-1]))
    with pytest.raises(EndpointError):
        await client.finish_weight_update(artifact.version)
    await client.abandon_weight_update()
    await assert_refuses(client)


async def test_a_restart_owes_nothing(
    server: Server, client: EndpointClient, sender: Sender
) -> None:
    await push_promised(server, client, sender, 18)
    server.crash_and_restart()
    (completion,) = await sample(client, **long_response(8))
    assert versions(completion) == ["default"]
    await sender.announce(client)
