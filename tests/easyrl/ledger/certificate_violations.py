"""What no batch may be certified with: asked of the trainer's certificate and of ``verify``."""

import dataclasses

import msgspec

from easyrl.schema import APART, Confirmation, EndpointAgreement
from tests.easyrl.ledger.certified_run import RUN, URLS, confirmation

replace = msgspec.structs.replace


def first_group(record, **changes):
    return replace(record, groups=[replace(record.groups[0], **changes), *record.groups[1:]])


def last_group(record, **changes):
    return replace(record, groups=[*record.groups[:-1], replace(record.groups[-1], **changes)])


def instead_of_first(record, key):
    """``record`` with another prompt in its first one's place."""
    return first_group(record, epoch=key[0], index=key[1])


def without_last(record):
    return replace(record, groups=record.groups[:-1], num_drawn=record.num_drawn - 1)


def with_another(record, key=(1, 5)):
    """One prompt more than make up the batch; ``key`` belongs to the next."""
    last = record.groups[-1]
    more = replace(last, epoch=key[0], index=key[1], position=last.position + 1)
    return replace(record, groups=[*record.groups, more], num_drawn=record.num_drawn + 1)


def with_proof(record, proof):
    """``record`` with another proof of its first endpoint."""
    first, *others = record.confirmations
    return replace(record, confirmations=[dataclasses.replace(first, proof=proof), *others])


# What a trainer might want to certify as batch 1, what is wrong with it, and where it is: "key" is
# the first group's prompt, "last" the last one's.
VIOLATIONS = {
    "a group of an old version": (
        lambda r: first_group(r, stamped=[f"{RUN}:0:0"]),
        f"has tokens of version {RUN}:0:0; trained is {RUN}:0:1",
        ("key",),
    ),
    "weights pushed during the batch": (
        lambda r: first_group(r, stamped=[f"{RUN}:0:1", f"{RUN}:0:2"]),
        f"has tokens of version {RUN}:0:2",
        ("key",),
    ),
    "a version of nobody": (
        lambda r: first_group(r, stamped=["default"]),
        "has tokens of version default",
        ("key",),
    ),
    "no version": (lambda r: first_group(r, stamped=[]), "bear no version", ("key",)),
    "accepts an old version": (
        lambda r: replace(r, accepted_versions=[f"{RUN}:0:0", *r.accepted_versions]),
        f"accepts version {RUN}:0:0, which is not of this batch",
        (),
    ),
    "another run's version": (
        lambda r: replace(r, version="other:0:1", accepted_versions=["other:0:1"]),
        f"has version other:0:1, not {RUN}:0:1",
        (),
    ),
    "a prompt without a group": (
        lambda r: replace(r, groups=r.groups[1:], num_drawn=r.num_drawn - 1),
        "is at position 1, 0 has no group",
        ("key",),
    ),
    "more prompts drawn than groups": (
        lambda r: replace(r, groups=r.groups[1:]),
        "has 3 groups and 4 drawn prompts",
        (),
    ),
    "a group without a prompt": (
        lambda r: replace(r, num_drawn=3),
        "has 4 groups and 3 drawn prompts",
        (),
    ),
    "a group twice": (
        lambda r: replace(r, groups=[*r.groups, r.groups[0]]),
        "has a group twice",
        ("key",),
    ),
    "a position drawn twice": (
        lambda r: last_group(r, position=2),
        "is at position 2, behind position 2",
        ("last",),
    ),
    "a prompt too many": (
        with_another,
        "was drawn at position 4, but the 4 prompts before it already make up the batch",
        ("last",),
    ),
    "a prompt too few": (
        without_last,
        "has 3 accepted groups of 3 prompts: prompts are missing, it may draw 4",
        (),
    ),
    "a prompt too few, said to be the order's end": (
        lambda r: replace(without_last(r), ended_by="data"),
        "prompts are missing, it may draw 4",
        (),
    ),
    "ended by what did not end it": (
        lambda r: replace(r, ended_by="data"),
        "was ended by data, not accepted",
        (),
    ),
    "a rejection that draws no other prompt": (
        lambda r: first_group(r, outcome="rejected", reason="flat"),
        "has 3 accepted groups of 4 prompts: prompts are missing, it may draw 5",
        (),
    ),
    "rejected without a reason": (
        lambda r: with_another(first_group(r, outcome="rejected")),
        "is rejected without a reason",
        ("key",),
    ),
    "excluded without a reason": (
        lambda r: with_another(first_group(r, outcome="excluded", stamped=[])),
        "is excluded without a reason",
        ("key",),
    ),
    "a rejected group without a version": (
        lambda r: with_another(first_group(r, outcome="rejected", reason="flat", stamped=[])),
        "bear no version",
        ("key",),
    ),
    "a rejected group of an old version": (
        lambda r: with_another(
            first_group(r, outcome="rejected", reason="flat", stamped=[f"{RUN}:0:0"])
        ),
        f"has tokens of version {RUN}:0:0",
        ("key",),
    ),
    "a group of an update that there was not": (
        lambda r: first_group(r, update=1),
        "is of update 1, there are 1",
        ("key",),
    ),
    "a group drawn by a rank that there was not": (
        lambda r: first_group(r, drawn_by=1),
        "was drawn by rank 1 of 1",
        ("key",),
    ),
    "a group drawn by less than no rank": (
        lambda r: first_group(r, drawn_by=-1),
        "was drawn by rank -1 of 1",
        ("key",),
    ),
    "a group handed over to the rank that drew it": (
        lambda r: first_group(r, drawn_by=0),
        "was drawn by rank 0 for itself",
        ("key",),
    ),
    "no update": (
        lambda r: replace(r, num_updates=0),
        "has 0 updates, the run takes 1 per batch",
        (),
    ),
    "a prompt that the run has not": (
        lambda r: instead_of_first(r, (2, 0)),
        "prompt 0 of epoch 2: no such prompt",
        (),
    ),
    "an update too many": (
        lambda r: replace(r, num_updates=2),
        "has 2 updates, the run takes 1 per batch",
        (),
    ),
    "an endpoint that has confirmed nothing": (
        lambda r: replace(r, confirmations=r.confirmations[1:]),
        f"made tokens and had not confirmed {RUN}:0:1",
        ("key", "endpoint"),
    ),
    "an endpoint that has confirmed another version": (
        lambda r: replace(
            r, confirmations=[Confirmation(URLS[0], f"{RUN}:0:0", True, None), r.confirmations[1]]
        ),
        f"confirmed version {RUN}:0:0, not {RUN}:0:1",
        ("endpoint",),
    ),
    "a proof without an answer": (
        lambda r: with_proof(r, None),
        "proved its bits, but no answer is recorded",
        ("endpoint",),
    ),
    "a proof that was not asked for": (
        lambda r: replace(
            r,
            confirmations=[dataclasses.replace(c, bits_proved=False) for c in r.confirmations],
        ),
        "has an answer recorded, but did not prove its bits",
        ("endpoint",),
    ),
    "an answer to no nonce": (
        lambda r: with_proof(r, dataclasses.replace(r.confirmations[0].proof, nonce="0" * 63)),
        "has no nonce of 64 hex digits",
        ("endpoint",),
    ),
    "an answer about the model below an adapter to no nonce": (
        lambda r: replace(
            r,
            weights=APART + r.weights,
            confirmations=[
                dataclasses.replace(c, base=dataclasses.replace(c.proof, nonce="0" * 63))
                for c in r.confirmations
            ],
        ),
        "has no nonce of 64 hex digits",
        ("endpoint",),
    ),
    "another answer to the same question": (
        lambda r: with_proof(r, dataclasses.replace(r.confirmations[0].proof, answers="0" * 64)),
        "answered otherwise than another endpoint with the same nonce",
        (),
    ),
    "an answer of nobody": (
        lambda r: with_proof(r, dataclasses.replace(r.confirmations[0].proof, num_workers=0)),
        "proved 24 tensors in 0 workers",
        ("endpoint",),
    ),
    "an answer to the question before": (
        lambda r: with_proof(r, confirmation(URLS[0], f"{RUN}:0:0").proof),
        f"was asked with the nonce of version {RUN}:0:0",
        ("endpoint",),
    ),
    "trained and skipped": (
        lambda r: replace(r, skipped_updates=[0]),
        "counts as trained, its update as skipped",
        ("key",),
    ),
    "a gap": (
        lambda r: replace(r, batch=3, version=f"{RUN}:0:3", accepted_versions=[f"{RUN}:0:3"]),
        "batch 1 to 2 is missing before it",
        (),
    ),
    "a batch again": (
        lambda r: replace(r, batch=0, version=f"{RUN}:0:0", accepted_versions=[f"{RUN}:0:0"]),
        "batch 0: is certified already, in line 3",
        (),
    ),
    "no step": (lambda r: replace(r, step=1), "step 1 is not behind step 1", ()),
    "a step too many": (
        lambda r: replace(r, step=3),
        "step 3 is not behind step 1 of the batch before by the number of its updates, 1",
        (),
    ),
    "recovered without a digest": (
        lambda r: first_group(r, recovered=True, digest=None),
        "its record's digest is not given",
        ("key",),
    ),
    "log-probabilities of another model": (
        lambda r: replace(
            r, agreement=[EndpointAgreement(URLS[0], 1000, 4.2, 9.0), r.agreement[1]]
        ),
        f"endpoint {URLS[0]}: log-probabilities differ from the trainer's by 4.2 nats in the mean "
        "of 1000 trained tokens (maximum 9, limit 0.2)",
        ("endpoint",),
    ),
    "log-probabilities that are not finite": (
        lambda r: replace(r, agreement=[EndpointAgreement(URLS[0], 3, None, None)]),
        "3 trained tokens are not finite",
        ("endpoint",),
    ),
    "discarded, and trained all the same": (
        lambda r: replace(first_group(r, recovered=True), discarded=[r.groups[0].key]),
        "its journalled group was discarded, yet it was trained",
        ("key",),
    ),
}  # fmt: skip
