"""Whether weights would reach an endpoint, and whether it serves those of ``model.path`` now.

It is told where weights will lie, as at the start of a run, and has to show what it serves. Nothing
that it serves is changed; one that a run has given weights is left alone.
"""

from __future__ import annotations

from dataclasses import replace

from easyrl.config import Config
from easyrl.doctor.endpoints import Reached
from easyrl.doctor.finding import Finding, failed, not_checked, ok
from easyrl.doctor.policy_folder import PolicyFolder
from easyrl.inference_client.client import WorkerProof
from easyrl.inference_client.errors import EndpointError
from easyrl.weight_sync.challenge import Challenge, UnknownSlices
from easyrl.weight_sync.store import WeightStore


async def weight_route_finding(
    config: Config, reached: Reached, store: WeightStore, folder: PolicyFolder
) -> Finding:
    """``store``: has begun; endpoints are told where it is."""
    name, client = f"weight transfer to {reached.url}", reached.client
    remedy = (
        "start it with easyrl serve, or vllm serve with --weight-transfer-config "
        '\'{"backend": "easyrl"}\' --worker-extension-cls easyrl_vllm.WeightProof and '
        "VLLM_SERVER_DEV_MODE=1 (docs/endpoints.md)"
    )
    if reached.version is None:
        return failed(name, "it has no route for weights", remedy)
    if reached.has_run_weights:
        return not_checked(
            name,
            f"it serves {reached.version}, the weights of a run, which may be using it",
            "stop that run, or restart the server, to check it",
        )
    tensors = folder.some()
    try:
        await client.init_weight_transfer(await store.init_info(reached.url))
        challenge = Challenge(tensors, folder)
        proofs = await client.prove_weights(challenge.nonce, tensors)
    except (EndpointError, ValueError) as error:
        return failed(
            name,
            f"{error!s:.300}",
            f"{remedy}; weight_sync.transport, directory and advertise_host say how it reaches "
            "this machine",
        )
    ways = " and ".join(sorted({proof.transport for proof in proofs}))
    try:
        findings = challenge.check([_of(proof, tensors) for proof in proofs])
    except UnknownSlices as error:
        return not_checked(name, f"weights would go by {ways}; what it serves is not: {error}")
    wrong = {tensor: said for problems in findings.wrong for tensor, said in problems.items()}
    if not wrong:
        return ok(
            name,
            f"weights would go by {ways}; {len(tensors)} small tensors that it serves are those of "
            f"{config.model.path} to the bit",
        )
    first = min(wrong, key=list(tensors).index)
    return failed(
        name,
        f"weights would go by {ways}, but it serves others than {config.model.path}: "
        f"{len(wrong)} of {len(tensors)} tensors that were asked for, {first} first "
        f"({wrong[first]:.120})",
        f"start it with {config.model.path}; a run would replace them at its first step",
    )


def _of(proof: WorkerProof, tensors: object) -> WorkerProof:
    """What a worker says of those that were asked for; that it serves others too is no problem."""
    assert isinstance(tensors, dict)
    problems = {name: said for name, said in proof.problems.items() if name in tensors}
    return replace(proof, problems=problems)
