"""A small run folder as attempts and kills leave it, with certificate and journal, no model."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.ledger.certificate.chain import ChainReader, encode_line
from easyrl.ledger.certificate.records import AttemptRecord, BatchRecord, Record, RunRecord
from easyrl.ledger.certificate.seal import SealKey
from easyrl.ledger.certificate.writer import Certificate
from easyrl.ledger.checkpoints.folder import CheckpointFolder
from easyrl.ledger.journal.batch import Journal
from easyrl.ledger.journal.codec import GroupRecord, decode_record
from easyrl.ledger.journal.reading import batch_folder, journal_files
from easyrl.ledger.journal.record_file import RecordWriter, read_records
from easyrl.schema import (
    APART,
    Completion,
    Confirmation,
    EndedBy,
    EndpointAgreement,
    Exclusion,
    GroupOutcome,
    Key,
    Outcome,
    PolicyVersion,
    Prompt,
    RolloutGroup,
    Score,
    ServedWeights,
    VersionSpan,
    WeightProof,
)

RUN = "small-1234abcd"
URLS = ("http://one:8000", "http://two:8000")
G, NUM_TOKENS = 2, 5
REJECTED, EXCLUDED = "all rewards are equal", "the prompt is too long"
FRAME = struct.Struct("<II16s")  # of a journal record
replace = msgspec.structs.replace


def with_refused(
    folder: Path, places: Mapping[tuple[int, int], Outcome], **options: Any
) -> CertifiedRun:
    """A run whose prompts at (batch, position) are refused so."""
    run = CertifiedRun(folder, **options)
    for (v, position), outcome in sorted(places.items()):
        refused = run.refused | {run.batches[v][position].key: outcome}
        run = CertifiedRun(folder, refused=refused, **options)
    return run


def confirmation(url: str, version: str) -> Confirmation:
    """Of an endpoint that has answered the question asked of all about this version."""
    nonce, answers = (blake3(f"{version} {what}".encode()).hexdigest() for what in ("nonce", ""))
    return Confirmation(url, version, True, 1e-4, WeightProof(nonce, 24, 1, answers, whole=True))


class CertifiedRun:
    """Trains batches in attempts. ``weights`` of a batch depend on the ranks that came to them.

    Args:
        refused: prompts whose groups are not trained, and how they come out.
        num_batches: of a run whose prompts do not end (``epochs=None``).
        adapters: served above a model, in place of whole models.

    Attributes:
        batches: the prompts of each, in the order in which they are drawn.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_prompts: int = 6,
        batch_size: int = 4,
        epochs: int | None = 2,
        updates_per_batch: int = 1,
        journalled: bool = True,
        refused: Mapping[Key, Outcome] | None = None,
        max_draws: int | None = None,
        num_batches: int | None = None,
        recipe: str | None = None,
        agreement_limit: float | None = 0.2,
        key: SealKey | None = None,
        adapters: bool = False,
    ) -> None:
        self.folder = folder
        self.adapters = adapters
        self.key = key
        self.certificate_path = folder / "certificate.jsonl"
        self.journal_path = folder / "journal"
        self.prompts = [
            Prompt(i, np.arange(3, 3 + i + 1, dtype=np.int32), f"q{i}", "a")
            for i in range(num_prompts)
        ]
        self.run = RunRecord(RUN, 1, True, num_prompts, batch_size, data="da7a")
        self.updates_per_batch = updates_per_batch
        self.max_draws = max_draws
        self.recipe = recipe
        self.agreement_limit = agreement_limit
        self.refused = dict(refused or {})
        self.journalled = journalled
        self.batches: list[list[Prompt]] = []
        self.steps: list[int] = []  # optimizer steps behind each batch
        self.epochs: int | None = 0
        self.attempt = -1
        self.next_batch = 0
        self.give_epochs(epochs, num_batches)

    def give_epochs(self, epochs: int | None, num_batches: int | None = None) -> None:
        """The prompts go on behind those of all batches until now, in the next attempt."""
        self.epochs = epochs
        order = PromptOrder(self.prompts, seed=1, epochs=epochs)
        position = sum(map(len, self.batches))
        while order.num_left(position) != 0 and len(self.batches) != num_batches:
            self.batches.append(self._draw(order, position))
            position += len(self.batches[-1])

    def _draw(self, order: PromptOrder, position: int) -> list[Prompt]:
        """The shortest prefix that holds B accepted groups, unless something ends it before."""
        drawn: list[Prompt] = []
        num_accepted = 0
        while num_accepted < self.run.batch_size and len(drawn) != self.max_draws:
            if order.num_left(position + len(drawn)) == 0:
                break
            drawn.append(order.prompt(position + len(drawn)))
            num_accepted += drawn[-1].key not in self.refused
        return drawn

    def accepted(self, v: int) -> list[Prompt]:
        """Of batch ``v``, those that are trained."""
        return [prompt for prompt in self.batches[v] if prompt.key not in self.refused]

    def begin(self, first_batch: int = 0, num_ranks: int = 1) -> Certificate:
        """A new attempt; whoever ends it closes what is returned."""
        self.attempt += 1
        self.next_batch = first_batch
        self.num_ranks = num_ranks
        self.certificate = Certificate(
            self.certificate_path,
            self.run,
            AttemptRecord(
                attempt=self.attempt,
                num_ranks=num_ranks,
                first_batch=first_batch,
                reason="checkpoint" if first_batch else "start",
                epochs=self.epochs,
                updates_per_batch=self.updates_per_batch,
                max_draws=self.max_draws,
                recipe=self.recipe,
                agreement_limit=self.agreement_limit,
            ),
            self.key,
        )
        return self.certificate

    def served(self) -> ServedWeights:
        """What the open batch is made by: one rank and two come to other bits after batch 0."""
        ranks = self.num_ranks if self.next_batch else 0
        digest = blake3(f"{self.next_batch} {ranks}".encode()).hexdigest()
        digest = APART + digest if self.adapters else digest
        return ServedWeights(PolicyVersion(RUN, self.attempt, self.next_batch), digest)

    def generate(self, num_groups: int | None = None) -> BatchRecord:
        """The open batch's groups, or the first so many, into the journal; what is to be checked.

        Those that an earlier attempt has finished for these weights are taken from there.
        """
        served = self.served()
        groups: list[GroupOutcome] = []
        accepted, discarded = {str(served.version)}, set[Key]()
        for rank in range(self.num_ranks):
            share = list(enumerate(self.batches[self.next_batch]))[rank :: self.num_ranks]
            share = share[:num_groups]
            if not self.journalled:
                made = [GroupOutcome.of(self.finish(position, served)) for position, _ in share]
                groups += [replace(group, rank=rank) for group in made]
                continue
            journal = Journal(self.journal_path, self.attempt, rank, "never")
            with closing(journal.open_batch(served)) as store:
                accepted |= store.accepted_versions
                discarded |= store.discarded & {prompt.key for _, prompt in share}
                for position, prompt in share:
                    found = store.find(prompt)
                    if found is not None:
                        group = found.load()
                    else:
                        group, _ = store.add(self.finish(position, served))
                    outcome = GroupOutcome.of(group, recovered=found is not None)
                    groups.append(replace(outcome, rank=rank))
        return self.record(served, groups, accepted, discarded)

    def finish(self, position: int, served: ServedWeights) -> RolloutGroup:
        """The open batch's group at ``position``, as its prompt comes out."""
        prompt = self.batches[self.next_batch][position]
        group = dataclasses.replace(finished_group(prompt, served), position=position)
        match self.refused.get(prompt.key):
            case "rejected":
                return dataclasses.replace(group, rejected=REJECTED)
            case "excluded":
                return dataclasses.replace(
                    group, completions=(), scores=(), excluded=Exclusion("refused", EXCLUDED)
                )
        return group

    def record(
        self,
        served: ServedWeights,
        groups: list[GroupOutcome],
        accepted_versions: set[str],
        discarded: set[Key],
    ) -> BatchRecord:
        by_position = []
        num_accepted = 0
        for group in sorted(groups, key=lambda group: group.position):
            if group.accepted:
                update = num_accepted * self.updates_per_batch // self.run.batch_size
                group = replace(group, update=update)
                num_accepted += 1
            by_position.append(group)
        num_updates = 1 + max((group.update for group in by_position), default=0)
        before = self.steps[self.next_batch - 1] if self.next_batch else 0
        self.steps[self.next_batch :] = [before + num_updates]
        ended_by: EndedBy = "accepted"
        if num_accepted < self.run.batch_size:
            is_last = self.epochs is not None and self.next_batch == len(self.batches) - 1
            ended_by = "data" if is_last else "max_draws"
        return BatchRecord(
            batch=self.next_batch,
            step=before + num_updates,
            version=str(served.version),
            weights=served.digest,
            num_updates=num_updates,
            num_drawn=len(groups),
            ended_by=ended_by,
            groups=by_position,
            confirmations=[confirmation(url, str(served.version)) for url in URLS],
            accepted_versions=sorted(accepted_versions),
            discarded=sorted(discarded),
            skipped_updates=[],
            logprob_max=2e-3,
            logprob_mean=1e-4,
            agreement=[EndpointAgreement(url, 1000, 1e-4, 2e-3) for url in URLS],
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
        step = self.steps[closed_batches - 1] if closed_batches else 0
        folder = CheckpointFolder(self.folder / "checkpoints")
        folder.begin(step)
        progress = {"step": step, "closed_batches": closed_batches, "position": 0}
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
            lines.append(encode_line(record, previous, self.key))
            previous = blake3(lines[-1][:-1]).hexdigest(length=16)
        self.write_lines(lines)

    def forge_batch(self, v: int, edit: Callable[[BatchRecord], BatchRecord]) -> None:
        """Edits the line of batch ``v`` and seals the file anew."""

        def edit_all(records: list[Record]) -> None:
            for i, record in enumerate(records):
                if isinstance(record, BatchRecord) and record.batch == v:
                    records[i] = edit(record)
                    return

        self.forge(edit_all)

    def forge_journal(self, v: int, edit: Callable[[GroupRecord], GroupRecord]) -> dict[Key, str]:
        """Edits the groups of batch ``v`` and their checksums. Returns their digests by key."""
        digests: dict[Key, str] = {}
        for file in journal_files(batch_folder(self.journal_path, v)):
            header, *payloads = [payload for _, payload in read_records(file.path)]
            file.path.unlink()
            writer = RecordWriter(file.path, durable=False)
            writer.append(header)
            for payload in payloads:
                group = edit(decode_record(payload))
                digests[group.key] = writer.append(msgspec.msgpack.encode(group)).digest.hex()
            writer.close()
        return digests


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
    changed = dataclasses.replace(first, version_spans=spans)
    return dataclasses.replace(group, completions=(changed, *group.completions[1:]))


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


def append_to_journal(path: Path, payload: bytes) -> None:
    """One more record behind those of a journal file."""
    digest = blake3(payload).digest(length=16)
    with path.open("ab") as file:
        file.write(FRAME.pack(len(payload), len(payload) ^ 0xFFFFFFFF, digest) + payload)


def other_token(payload: bytes) -> bytes:
    """Another first token of the first response; ids are below 99, stored as 4 bytes each."""
    at = payload.index(bytes([0xC4, 4 * NUM_TOKENS])) + 2  # msgpack: bin of so many bytes
    return payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
