"""What no batch may be certified with: asked of the trainer's certificate and of ``verify``."""

import msgspec

from easyrl.schema import Confirmation
from tests.easyrl.ledger.certified_run import RUN, URLS

replace = msgspec.structs.replace


def first_group(record, **changes):
    return replace(record, groups=[replace(record.groups[0], **changes), *record.groups[1:]])


def instead_of_first(record, key):
    """``record`` with another prompt in its first one's place."""
    old = record.groups[0].key
    updates = [[key if each == old else each for each in keys] for keys in record.updates]
    return replace(first_group(record, epoch=key[0], index=key[1]), updates=updates)


# What a trainer might want to certify as batch 1, what is wrong with it, and where it is.
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
        lambda r: replace(r, groups=r.groups[1:]),
        "was dispatched and has no group",
        ("key",),
    ),
    "a group without a prompt": (
        lambda r: replace(r, updates=[[k for k in r.updates[0] if k != r.groups[0].key]]),
        "was not dispatched",
        ("key",),
    ),
    "a group twice": (
        lambda r: replace(r, groups=[*r.groups, r.groups[0]]),
        "has a group twice",
        ("key",),
    ),
    "a prompt dispatched twice": (
        lambda r: replace(r, updates=[[*r.updates[0], r.groups[0].key]]),
        "is dispatched twice",
        ("key",),
    ),
    "a prompt that the run has not": (
        lambda r: instead_of_first(r, (2, 0)),
        "prompt 0 of epoch 2: no such prompt",
        (),
    ),
    "an update too many": (
        lambda r: replace(r, updates=[*r.updates, []]),
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
    "recovered without a digest": (
        lambda r: first_group(r, recovered=True, digest=None),
        "its record's digest is not given",
        ("key",),
    ),
    "discarded, and trained all the same": (
        lambda r: replace(first_group(r, recovered=True), discarded=[r.groups[0].key]),
        "its journalled group was discarded, yet it was trained",
        ("key",),
    ),
}  # fmt: skip
