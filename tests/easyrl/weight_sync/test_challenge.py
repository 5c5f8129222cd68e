"""What counts as an answer to a proof's question: slices, forms, and answers that are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from easyrl.inference_client.client import WorkerProof
from easyrl.inference_client.transfer.artifact import HEADER_BYTES
from easyrl.inference_client.transfer.artifact_reader import ArtifactReader, DamagedArtifact
from easyrl.inference_client.transfer.keyed_hasher import FEWEST_BYTES, KeyedHasher
from easyrl.inference_client.vllm_plugin.easyrl_vllm.keyed_digests import (
    parse_nonce,
    slice_digest,
    whole_slice,
)
from easyrl.inference_client.vllm_plugin.easyrl_vllm.slices import ServedSlice, Slice
from easyrl.weight_sync.challenge import (
    MOST_SLICES,
    Challenge,
    answers_digest,
    shapes_of,
)
from tests.inference_client.served_tensors import ArtifactInMemory, rows, shapes, whole
from tests.inference_client.written_artifact import write_artifact

WEIGHTS = {
    "embed": torch.randn(6, 4),
    "norm": torch.randn(4).bfloat16(),
    "scale": torch.tensor(0.5),
    "empty": torch.zeros(0, 4),
    "flag": torch.tensor([True, False, True]),
    "after": torch.randn(2, 3, 2),  # behind three bytes: not aligned
}
ASKED = shapes(WEIGHTS)


def challenge(weights=WEIGHTS) -> Challenge:
    return Challenge(shapes(weights), ArtifactInMemory(weights))


def columns(weight: torch.Tensor, first: int, last: int, nonce: bytes) -> ServedSlice:
    part = Slice((0, first), (weight.shape[0], last - first), "F32")
    return ServedSlice(part, slice_digest(weight[:, first:last], nonce))


def answer(asked: Challenge, **slices: list[ServedSlice]) -> WorkerProof:
    """All of it in one piece but for ``slices``."""
    proof = whole(WEIGHTS, asked.nonce)
    return replace(proof, slices=dict(proof.slices) | slices)


def problems(asked: Challenge, *proofs: WorkerProof) -> list[dict[str, str]]:
    return [dict(wrong) for wrong in asked.check(proofs).wrong]


# ---- what is right -------------------------------------------------------------------------------


def test_shards_of_rows_and_of_columns_pass_if_they_cover_the_tensor() -> None:
    asked, embed = challenge(), WEIGHTS["embed"]
    by_rows = [[rows(embed, 0, 3, asked.nonce)], [rows(embed, 3, 6, asked.nonce)]]
    by_columns = [[columns(embed, 0, 1, asked.nonce)], [columns(embed, 1, 4, asked.nonce)]]
    for first, second in (by_rows, by_columns):
        workers = [answer(asked, embed=first), answer(asked, embed=second)]
        assert problems(asked, *workers) == [{}, {}] and not asked.check(workers).uncovered
        assert asked.check(workers[:1]).uncovered == ["embed"]
    replicas = [answer(asked, embed=by_rows[0]), answer(asked, embed=by_rows[1])] * 2
    assert not asked.check(replicas).uncovered


def test_each_digest_is_formed_once() -> None:
    asked = challenge()
    artifact = asked.artifact
    assert isinstance(artifact, ArtifactInMemory)
    asked.check([answer(asked), answer(asked)])
    assert artifact.num_read == len(WEIGHTS)
    asked.check([answer(asked)])
    assert artifact.num_read == len(WEIGHTS)


def test_another_dtype_passes_if_it_holds_the_numbers_exactly() -> None:
    asked, norm = challenge(), WEIGHTS["norm"]
    wider = ServedSlice(replace(whole_slice(norm.dtype, norm.shape), dtype="F32"),
                        slice_digest(norm.float(), asked.nonce))  # fmt: skip
    assert problems(asked, answer(asked, norm=[wider])) == [{}]
    embed = WEIGHTS["embed"]
    rounded = ServedSlice(replace(whole_slice(embed.dtype, embed.shape), dtype="BF16"),
                          slice_digest(embed.bfloat16(), asked.nonce))  # fmt: skip
    (found,) = problems(asked, answer(asked, embed=[rounded]))
    assert found.keys() == {"embed"} and "rounded from torch.float32" in found["embed"]
    assert "--dtype" in found["embed"]


def test_what_a_kernel_may_flush_counts_as_zero_where_the_answer_says_so() -> None:
    tiny = torch.finfo(torch.float32).tiny
    weights = {"w": torch.tensor([1.0, -0.0, tiny / 2, tiny])}
    asked = challenge(weights)
    read_back = torch.tensor([1.0, 0.0, 0.0, tiny])
    part = whole_slice(torch.float32, (4,))
    for flushed, passes in ((True, True), (False, False)):
        digest = slice_digest(read_back, asked.nonce, flushed=flushed)
        served = ServedSlice(replace(part, flushed=flushed), digest)
        found = problems(asked, WorkerProof({"w": [served]}, {}, "file"))
        assert (found == [{}]) == passes
    read_back[3] = 0
    digest = slice_digest(read_back, asked.nonce, flushed=True)
    proof = WorkerProof({"w": [ServedSlice(replace(part, flushed=True), digest)]}, {}, "file")
    assert problems(asked, proof)[0].keys() == {"w"}


# ---- what is wrong -------------------------------------------------------------------------------


def test_a_changed_bit_names_the_slice_the_copy_and_the_worker() -> None:
    asked = challenge()
    embed = WEIGHTS["embed"].clone()
    embed.view(torch.int32)[4, 1] ^= 1
    lower = replace(rows(embed, 3, 6, asked.nonce), copy="packed copy in Head: ")
    upper = rows(embed, 0, 3, asked.nonce)
    found = problems(asked, answer(asked, embed=[upper]), answer(asked, embed=[lower]))
    assert found[0] == {} and found[1].keys() == {"embed"}
    assert found[1]["embed"].startswith("packed copy in Head: [3, 4] from [3, 0]: checksum ")


@pytest.mark.parametrize(
    "part",
    [
        Slice((0,), (6,), "F32"),
        Slice((0, 0), (6, 5), "F32"),
        Slice((-1, 0), (6, 4), "F32"),
        Slice((0, 0), (0, 4), "F32"),
        Slice((0, 0), (6, 4), "F31"),
        Slice((2**62, 0), (2**62, 4), "F32"),
    ],
    ids=str,
)
def test_slices_that_a_tensor_cannot_have_are_wrong_and_not_read(part: Slice) -> None:
    asked = challenge()
    (found,) = problems(asked, answer(asked, embed=[ServedSlice(part, "0" * 64)]))
    assert found.keys() == {"embed"} and "answers with" in found["embed"]
    assert ("embed", part) not in asked.digests


@pytest.mark.parametrize("many", ["slices", "copies"])
def test_the_work_that_an_answer_makes_is_bounded(many: str) -> None:
    weights = {"w": torch.zeros(MOST_SLICES + 1, 4)}
    asked = challenge(weights)
    sizes = (1, 4) if many == "slices" else (MOST_SLICES, 4)
    num = MOST_SLICES + 1 if many == "slices" else 2
    parts = [Slice((i, 0), sizes, d) for i in range(num) for d in ("F32", "F64", "F16", "BF16",
             "I8", "U8")]  # fmt: skip
    served = [ServedSlice(part, "0" * 64) for part in parts]
    (found,) = problems(asked, WorkerProof({"w": served}, {}, "file"))
    assert "more slices than workers can have" in found["w"]
    assert not asked.digests


def test_names_that_were_not_asked_for_are_wrong() -> None:
    asked = challenge()
    extra = answer(asked, other=[])
    assert problems(asked, extra) == [{"other": "was not asked for"}]


def test_an_empty_answer_covers_nothing() -> None:
    asked = challenge()
    findings = asked.check([WorkerProof({}, {}, "file")])
    assert set(findings.uncovered) == WEIGHTS.keys() - {"empty"}


@pytest.mark.parametrize("nonce", ["", "00", "g" * 64, None, 7])
def test_what_is_no_nonce_is_refused(nonce: object) -> None:
    with pytest.raises(ValueError, match="nonce: .* is not 64 hex digits"):
        parse_nonce(nonce)


def test_the_digest_of_the_answers_depends_on_each_of_them() -> None:
    asked = challenge()
    one = answers_digest([answer(asked)])
    assert one == answers_digest([answer(asked)])
    assert (
        len({one, answers_digest([answer(asked)] * 2), answers_digest([answer(challenge())])}) == 3
    )


# ---- the artefact on this host -------------------------------------------------------------------


def test_a_written_artifact_is_read_back_and_hashed_as_it_is_written(tmp_path: Path) -> None:
    weights = WEIGHTS | {"large": torch.randn(FEWEST_BYTES // 4)}
    nonce = bytes(range(32))
    hasher = KeyedHasher(nonce)
    written = write_artifact(weights.items(), tmp_path / "v", "v", 2**14, keyed=hasher)
    hasher.close()
    reader = ArtifactReader(tmp_path / "v", written.chunks)
    assert shapes_of(written.chunks) == shapes(weights)
    assert hasher.digests == {n: slice_digest(w, nonce) for n, w in weights.items()}
    for name, weight in weights.items():
        assert torch.equal(reader.read(name), weight) and reader.read(name).dtype == weight.dtype
        reader.verify(name)
    asked = Challenge(shapes(weights), reader)
    assert asked.check([whole(weights, asked.nonce)]).wrong == [{}]
    asked.learn({})


def test_a_file_that_was_changed_or_is_gone_is_damaged(tmp_path: Path) -> None:
    written = write_artifact(WEIGHTS.items(), tmp_path / "v", "v", 2**20)
    reader = ArtifactReader(tmp_path / "v", written.chunks)
    file = tmp_path / "v" / written.chunks[0].file
    content = bytearray(file.read_bytes())
    content[HEADER_BYTES] ^= 1
    file.write_bytes(content)
    asked = Challenge(ASKED, reader)
    with pytest.raises(DamagedArtifact, match="tensor 'embed' was changed"):
        asked.check([whole(WEIGHTS, asked.nonce)])
    file.unlink()
    with pytest.raises(DamagedArtifact, match="cannot be read"):
        reader.read("embed")
