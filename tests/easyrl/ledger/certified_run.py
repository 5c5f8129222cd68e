"""A small run folder as attempts and kills leave it, with certificate and journal, no model."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3

from easyrl.dataloaders.prompts.dataset import PromptBatches
from easyrl.ledger.certificate import (
    AttemptRecord,
    BatchRecord,
    Certificate,
    CertifiedGroup,
    RunRecord,
)
from easyrl.ledger.certificate.chain import ChainReader, seal
from easyrl.ledger.certificate.records import Record
from easyrl.ledger.checkpoints.folder import CheckpointFolder
from easyrl.ledger.journal import Journal
from easyrl.schema import (
    Completion,
    Confirmation,
    Key,
    PolicyVersion,
    Prompt,
    RolloutGroup,
    Score,
    ServedWeights,
    VersionSpan,
)

RUN = "small-1234abcd"
URLS = ("http://one:8000", "http://two:8000")
G, NUM_TOKENS = 2, 5
FRAME = struct.Struct("<II16s")  # of a journal record


class CertifiedRun:
    """Trains batches in attempts. ``weights`` of a batch depend on the ranks that came to them."""

    def __init__(
        self,
        folder: Path,
        *,
        num_prompts: int = 6,
        batch_size: int = 4,
        epochs: int = 2,
        updates_per_batch: int = 1,
        journalled: bool = True,
    ) -> None:
        self.folder = folder
        self.certificate_path = folder / "certificate.jsonl"
        self.journal_path = folder / "journal"
        self.prompts = [
            Prompt(i, np.arange(3, 3 + i + 1, dtype=np.int32), f"q{i}", "a")
            for i in range(num_prompts)
        ]
        self.batches = list(PromptBatches(self.prompts, batch_size, seed=1, epochs=epochs))
        self.run = RunRecord(
            RUN, 1, True, epochs, num_prompts, batch_size, updates_per_batch, data="da7a"
        )
        self.journalled = journalled
        self.attempt = -1
        self.next_batch = 0

    def begin(self, first_batch: int = 0, num_ranks: int = 1) -> Certificate:
        """A new attempt; whoever ends it closes what is returned."""
        self.attempt += 1
        self.next_batch = first_batch
        self.num_ranks = num_ranks
        self.certificate = Certificate.open(
            self.certificate_path, self.run, AttemptRecord(self.attempt, num_ranks, first_batch)
        )
        return self.certificate

    def give_epochs(self, epochs: int) -> None:
        """The prompts go on behind those of all batches until now, in the next attempt."""
        self.run = msgspec.structs.replace(self.run, epochs=epochs)
        more = PromptBatches(self.prompts, self.run.batch_size, seed=1, epochs=epochs)
        more.restore({**more.state(), "position": sum(map(len, self.batches))})
        self.batches += list(more)

    def served(self) -> ServedWeights:
        """What the open batch is made by: one rank and two come to other bits after batch 0."""
        ranks = self.num_ranks if self.next_batch else 0
        digest = blake3(f"{self.next_batch} {ranks}".encode()).hexdigest()
        return ServedWeights(PolicyVersion(RUN, self.attempt, self.next_batch), digest)

    def generate(self, num_groups: int | None = None) -> BatchRecord:
        """The open batch's groups, or the first so many, into the journal; what is to be checked.

        Those that an earlier attempt has finished for these weights are taken from there.
        """
        served, prompts = self.served(), self.batches[self.next_batch]
        groups: list[CertifiedGroup] = []
        accepted, discarded = {str(served.version)}, set[Key]()
        for rank in range(self.num_ranks):
            share = prompts[rank :: self.num_ranks][:num_groups]
            if not self.journalled:
                made = [CertifiedGroup.of(finished_group(p, served), "trained", recovered=False)
                        for p in share]  # fmt: skip
                groups += made
                continue
            journal = Journal(self.journal_path, self.attempt, rank, "never")
            with closing(journal.open_batch(served)) as store:
                accepted |= store.accepted_versions
                discarded |= store.discarded & {prompt.key for prompt in share}
                for prompt in share:
                    found = store.find(prompt)
                    if found is not None:
                        group = found.load()
                    else:
                        group, _ = store.add(finished_group(prompt, served))
                    groups.append(CertifiedGroup.of(group, "trained", recovered=found is not None))
        return self.record(served, prompts, groups, accepted, discarded)

    def record(
        self,
        served: ServedWeights,
        prompts: Sequence[Prompt],
        groups: list[CertifiedGroup],
        accepted: set[str],
        discarded: set[Key],
    ) -> BatchRecord:
        k = self.run.updates_per_batch
        keys = [prompt.key for prompt in prompts]
        return BatchRecord(
            batch=self.next_batch,
            step=(self.next_batch + 1) * k,
            version=str(served.version),
            weights=served.digest,
            updates=[[keys[i] for i in part] for part in np.array_split(np.arange(len(keys)), k)],
            groups=sorted(groups, key=lambda group: group.key),
            confirmations=[Confirmation(url, str(served.version), True, 1e-4) for url in URLS],
            accepted_versions=sorted(accepted),
            discarded=sorted(discarded),
            skipped_updates=[],
            logprob_max=2e-3,
            logprob_mean=1e-4,
            num_ranks=self.num_ranks,
        )

    def train(self, edit: Callable[[BatchRecord], BatchRecord] = lambda record: record) -> None:
        """One batch, certified."""
        self.certificate.close_batch(edit(self.generate()))
        self.next_batch += 1

    def train_all(self) -> None:
        """The rest of the batches and the end of the run."""
        while self.next_batch < len(self.batches):
            self.train()
        self.certificate.end(self.served().digest if self.next_batch else "")
        self.certificate.close()

    def save(self, closed_batches: int, keep: int = 1) -> None:
        """A checkpoint, without tensors, after so many batches."""
        step = closed_batches * self.run.updates_per_batch
        folder = CheckpointFolder(self.folder / "checkpoints")
        folder.begin(step)
        progress = {"step": step, "closed_batches": closed_batches, "cursor": {}}
        state = {"progress": progress, "reference": None, "journal": {"batch": closed_batches}}
        folder.finish(step, {"step": step, "state": state, "files": {}})
        folder.prune(step, keep)

    def prune(self, before: int) -> None:
        """The run goes on from there only, and lets its journal before it go."""
        self.save(before)
        Journal(self.journal_path, self.attempt, 0, "never").prune(before)

    # ---- what somebody else does to the folder ---------------------------------------------------

    def lines(self) -> list[bytes]:
        return self.certificate_path.read_bytes().splitlines(keepends=True)

    def write_lines(self, lines: Sequence[bytes]) -> None:
        self.certificate_path.write_bytes(b"".join(lines))

    def forge(self, edit: Callable[[list[Record]], None]) -> None:
        """Edits the records and seals all lines anew, as a trainer that checks nothing would."""
        records = [record for _, record in ChainReader(self.certificate_path)]
        edit(records)
        previous, lines = "0" * 32, []
        for record in records:
            lines.append(seal(record, previous))
            previous = blake3(lines[-1][:-1]).hexdigest(length=16)
        self.write_lines(lines)


def finished_group(prompt: Prompt, served: ServedWeights) -> RolloutGroup:
    """G responses of one endpoint; what is sampled differs from attempt to attempt."""
    version = str(served.version)
    rng = np.random.default_rng([served.version.attempt, *prompt.key])
    completions = tuple(
        Completion(
            token_ids=rng.integers(3, 99, NUM_TOKENS).astype(np.int32),
            logprobs=-rng.random(NUM_TOKENS, dtype=np.float32),
            finish_reason="stop",
            version_spans=(VersionSpan(version, 0, NUM_TOKENS),),
            endpoint=URLS[prompt.index % len(URLS)],
            loss_mask=np.ones(NUM_TOKENS, dtype=bool),
        )
        for _ in range(G)
    )
    scores = tuple(Score(float(i), {"exact": float(i)}) for i in range(G))
    return RolloutGroup(prompt, completions, scores, version, 0.0, 1.0)


def with_span(group: RolloutGroup, version: str, start: int, end: int) -> RolloutGroup:
    """The first response has tokens of another version in its middle: a push during the batch."""
    first = group.completions[0]
    own = first.version_spans[0].version
    spans = (
        VersionSpan(own, 0, start),
        VersionSpan(version, start, end),
        VersionSpan(own, end, NUM_TOKENS),
    )
    changed = replace(first, version_spans=spans)
    return replace(group, completions=(changed, *group.completions[1:]))


def change_journal(path: Path, change: Callable[[bytes], bytes], *, recompute: bool) -> None:
    """Changes the payload of a journal file's first group, and its checksum where asked to.

    The frame (length, its complement, blake3) is written out here once more: the format is part of
    what is promised.
    """
    data = path.read_bytes()
    at = data.index(b"\n") + 1
    at += FRAME.size + FRAME.unpack_from(data, at)[0]  # behind the header
    length, complement, digest = FRAME.unpack_from(data, at)
    payload = data[at + FRAME.size :][:length]
    changed = change(payload)
    assert changed != payload and len(changed) == length
    if recompute:
        digest = blake3(changed).digest(length=16)
    frame = FRAME.pack(length, complement, digest)
    path.write_bytes(data[:at] + frame + changed + data[at + FRAME.size + length :])


def other_token(payload: bytes) -> bytes:
    """Another first token of the first response; ids are below 99, stored as 4 bytes each."""
    at = payload.index(bytes([0xC4, 4 * NUM_TOKENS])) + 2  # msgpack: bin of so many bytes
    return payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
