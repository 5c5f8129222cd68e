"""Whether a server owes a proof, by what came to it; and what vLLM's engine core makes of it."""

from __future__ import annotations

import pytest

from easyrl.inference_client.vllm_plugin.easyrl_vllm.core_guard import CoreGuard
from easyrl.inference_client.vllm_plugin.easyrl_vllm.owed_proof import OwedProof

PROMISED, CHECKED = {"file": "a", "proof_follows": True}, {"file": "b"}
FIRST, SECOND = "01" * 32, "02" * 32


def updated(owed: OwedProof, *chunks: dict, finishes: bool = True) -> OwedProof:
    owed.begin()
    for chunk in chunks:
        owed.take([chunk])
    if finishes:
        owed.finish()
    return owed


def test_one_chunk_with_the_promise_owes_it_and_whole_weights_without_it_do_not() -> None:
    owed = OwedProof()
    assert not owed.is_owed
    assert not updated(owed, CHECKED, CHECKED).is_owed
    assert updated(owed, CHECKED, PROMISED, CHECKED).is_owed
    assert updated(owed, CHECKED, finishes=False).is_owed
    assert not updated(owed, CHECKED).is_owed
    assert updated(owed, PROMISED, finishes=False).is_owed
    assert not updated(owed, CHECKED, {"proof_follows": "true"}).is_owed  # as the receiver reads it


def test_only_a_proof_of_these_weights_is_accepted() -> None:
    owed = updated(OwedProof(), PROMISED)
    with pytest.raises(ValueError, match="other weights"):
        owed.accept(FIRST)
    owed.answered(FIRST)
    owed.answered(SECOND)  # another rank asks, too
    updated(owed, PROMISED)
    for nonce in (FIRST, SECOND):
        with pytest.raises(ValueError, match="other weights"):
            owed.accept(nonce)
    owed.answered(FIRST)
    owed.answered(SECOND)
    owed.accept(FIRST)
    assert not owed.is_owed
    owed.accept("03" * 32)  # nothing is owed
    assert updated(owed, PROMISED).is_owed


def test_the_core_hears_what_succeeded_and_expects_the_worst_of_what_did_not() -> None:
    guard = CoreGuard()

    def call(method: str, *, succeeds: bool = True, is_paused: bool = True, **kwargs: object):
        guard.before(method, kwargs, is_paused=is_paused)
        if succeeds:
            guard.after(method, kwargs)

    call("start_weight_update")
    call("update_weights", update_info={"artifact": "v", "chunks": [PROMISED]}, succeeds=False)
    assert guard.owed.is_owed
    call("finish_weight_update", succeeds=False)
    call("update_weights", update_info={"abandon": True}, succeeds=False)
    call("easyrl_prove_weights", nonce=FIRST, tensors="{}")  # shows nothing
    call("easyrl_prove_weights", nonce=SECOND, tensors='{"a": 1}', succeeds=False)
    for nonce in (FIRST, SECOND):
        with pytest.raises(ValueError, match="other weights"):
            guard.owed.accept(nonce)
    call("start_weight_update")
    call("update_weights", update_info=[{"chunks": [CHECKED]}, {"chunks": [PROMISED]}])
    call("start_weight_update", succeeds=False)  # one is open
    call("finish_weight_update")
    call("easyrl_prove_weights", nonce=SECOND, tensors='{"a": 1}')
    assert guard.owed.is_owed
    guard.owed.accept(SECOND)
    assert not guard.owed.is_owed


def test_a_core_that_generates_takes_no_chunk_whose_proof_follows() -> None:
    """Resumed by another trainer in the middle of a push: layers are served as they come."""
    guard = CoreGuard()
    guard.after("start_weight_update", {})
    with pytest.raises(ValueError, match="generation goes on"):
        guard.before("update_weights", {"update_info": {"chunks": [PROMISED]}}, is_paused=False)
    assert not guard.owed.is_owed
    guard.before("update_weights", {"update_info": {"chunks": [CHECKED]}}, is_paused=False)
    guard.before("update_weights", {"update_info": {"names": ["a"]}}, is_paused=False)  # NCCL's
    assert not guard.owed.is_owed
