"""The ledger that judges the runs under faults must itself see every kind of wrong entry."""

import copy
from typing import Any

import pytest

from benchmarks.parts.ledger import dataset_order, keep_ledger, read_ledger
from easyrl.metrics.event_log import EventLog

NUM_PROMPTS, EPOCHS, BATCH = 3, 2, 2
EXPECTED = dataset_order(NUM_PROMPTS, EPOCHS)


def sound_run() -> list[dict[str, Any]]:
    """Three batches of two over two epochs of three prompts."""
    keys = sorted(EXPECTED)
    events: list[dict[str, Any]] = []
    for batch in range(len(keys) // BATCH):
        version = f"run:0:{batch}"
        events.append({"event": "batch_dispatched", "version": version})
        events.append({"event": "micro_batch_end"})
        step = {"event": "step", "step": batch + 1, "version": version, "skipped": False}
        events.append(step | {"accepted": [version]})
        for position in reversed(range(BATCH)):
            epoch, index = keys[batch * BATCH + position]
            closed = {"event": "group_closed", "version": version, "position": position}
            closed |= {"epoch": epoch, "index": index, "outcome": "trained"}
            events.append(closed | {"stamped": [version]})
    return events


def group(events: list[dict[str, Any]], epoch: int, index: int) -> dict[str, Any]:
    return next(e for e in events if e.get("epoch") == epoch and e.get("index") == index)


def test_a_sound_run_is_clean() -> None:
    ledger = keep_ledger([sound_run()], EXPECTED)
    assert ledger.is_clean
    assert (ledger.batches, ledger.groups_trained, ledger.cursor) == (3, 6, 6)


def test_ranks_are_added_up() -> None:
    events = sound_run()
    theirs = [e for e in events if e.get("index") != 1]
    ours = [e for e in events if e.get("index", 1) == 1]
    assert not keep_ledger([ours], EXPECTED).is_clean
    ledger = keep_ledger([ours, theirs], EXPECTED)
    assert ledger.is_clean and ledger.batches == 3


def test_a_lost_prompt_is_seen() -> None:
    events = sound_run()
    events.remove(group(events, 1, 0))
    ledger = keep_ledger([events], EXPECTED)
    assert ledger.prompts_lost == 1
    assert ledger.problems == ("prompt 0 of epoch 1 was never drawn",)


def test_a_recovered_group_has_an_earlier_attempts_version_of_the_same_weights() -> None:
    events = sound_run()
    next(e for e in events if e.get("step") == 1)["accepted"].append("run:earlier:0")
    group(events, 0, 0)["stamped"] = ["run:earlier:0"]
    assert keep_ledger([events], EXPECTED).is_clean


def second_attempt(events: list[dict[str, Any]], from_batch: int) -> list[dict[str, Any]]:
    """The same run, resumed from a checkpoint of ``from_batch`` closed batches."""
    start = [i for i, e in enumerate(events) if e["event"] == "batch_dispatched"][from_batch]
    later = copy.deepcopy(events[start:])
    for event in later:
        if "version" in event:
            event["version"] = event["version"].replace("run:0:", "run:1:")
        if event["event"] == "step":
            event["accepted"].append(event["version"])
    return later


def test_what_a_resumed_run_trains_again_counts_once() -> None:
    events = sound_run()
    cut = next(i for i, e in enumerate(events) if e["event"] == "group_closed" and i > 5)
    ledger = keep_ledger([events[:cut] + second_attempt(events, from_batch=1)], EXPECTED)
    assert ledger.is_clean, ledger.problems
    assert (ledger.batches, ledger.groups_trained) == (3, 6)


def test_a_prompt_that_two_attempts_train_in_different_batches_is_seen() -> None:
    events = sound_run()
    later = second_attempt(events, from_batch=1)
    group(later, *sorted(EXPECTED)[2])["index"] = sorted(EXPECTED)[0][1]
    ledger = keep_ledger([events + later], EXPECTED)
    assert (
        ledger.prompts_lost == 1 and ledger.prompts_trained_twice + ledger.prompts_unexpected == 1
    )


def test_a_skipped_step_trains_nothing() -> None:
    events = sound_run()
    step = next(e for e in events if e.get("step") == 2)
    step["skipped"] = True
    for key in sorted(EXPECTED)[BATCH : 2 * BATCH]:
        group(events, *key)["outcome"] = "skipped"
    ledger = keep_ledger([events], EXPECTED)
    assert (ledger.batches, ledger.prompts_skipped, ledger.groups_trained) == (2, 2, 4)
    assert ledger.prompts_lost == 0 and not ledger.is_clean


def test_a_prompt_trained_twice_is_seen() -> None:
    events = sound_run()
    again = copy.deepcopy(group(events, 0, 1))
    events += [again, copy.deepcopy(again)]
    for number, event in enumerate(events[-2:]):  # of the batch that it is trained in
        event |= {"stamped": ["run:0:2"], "version": "run:0:2", "position": BATCH + number}
    ledger = keep_ledger([events], EXPECTED)
    assert (ledger.prompts_trained_twice, ledger.wrong_version_trained) == (2, 0)
    assert ledger.problems == ("prompt 1 of epoch 0 was trained 3 times",)


@pytest.mark.parametrize(
    "stamped", [["run:0:0"], ["run:0:0", "run:0:1"], ["default"], ["run:1:1"], []], ids=str
)
def test_a_sample_of_another_version_is_seen(stamped: list[str]) -> None:
    events = sound_run()
    group(events, 1, 0)["stamped"] = stamped  # in the batch of run:0:1
    ledger = keep_ledger([events], EXPECTED)
    assert ledger.wrong_version_trained == 1
    assert "prompt 0 of epoch 1: samples of" in ledger.problems[0]


def test_a_step_of_another_version_than_dispatched_is_seen() -> None:
    events = sound_run()
    next(e for e in events if e.get("step") == 2)["version"] = "run:0:2"
    assert keep_ledger([events], EXPECTED).wrong_version_trained == 1


def test_an_excluded_prompt_is_counted_and_not_lost() -> None:
    events = sound_run()
    group(events, 0, 2).update(outcome="excluded", stamped=[])
    ledger = keep_ledger([events], EXPECTED)
    assert ledger.is_clean, ledger.problems
    assert (ledger.prompts_excluded, ledger.groups_trained, ledger.cursor) == (1, 5, 6)


def test_a_rejected_prompt_is_counted_and_not_lost() -> None:
    events = sound_run()
    group(events, 0, 2)["outcome"] = "rejected"
    ledger = keep_ledger([events], EXPECTED)
    assert ledger.is_clean, ledger.problems
    assert (ledger.prompts_rejected, ledger.groups_trained, ledger.cursor) == (1, 5, 6)


def test_a_batch_may_have_drawn_more_prompts_than_it_trains() -> None:
    """The cursor is behind all of them; the next batch has fewer left."""
    events = sound_run()
    moved = group(events, 1, 1)  # of the third batch
    moved |= {"version": "run:0:1", "stamped": ["run:0:1"], "position": 2}
    events.remove(moved)
    group(events, 0, 2)["outcome"] = "rejected"
    third = [i for i, e in enumerate(events) if e["event"] == "batch_dispatched"][2]
    events.insert(third, moved)
    group(events, 1, 2)["position"] = 0
    ledger = keep_ledger([events], EXPECTED)
    assert ledger.is_clean, ledger.problems
    assert (ledger.batches, ledger.cursor) == (3, 6)


def test_a_position_that_no_rank_has_closed_is_seen() -> None:
    """Though every prompt that is expected was drawn."""
    events = sound_run()
    group(events, 1, 0)["position"] = 2
    ledger = keep_ledger([events], EXPECTED)
    assert ledger.problems == ("batch 1 has groups at the positions [0, 2]",)


def test_a_prompt_that_is_rejected_and_trained_is_seen() -> None:
    events = sound_run()
    again = copy.deepcopy(group(events, 0, 1)) | {"outcome": "rejected", "position": BATCH}
    again |= {"stamped": ["run:0:2"], "version": "run:0:2"}
    ledger = keep_ledger([[*events, again]], EXPECTED)
    assert ledger.prompts_trained_twice == 1
    assert ledger.problems == ("prompt 1 of epoch 0 was trained and rejected",)


def test_a_prompt_from_elsewhere_is_seen() -> None:
    events = sound_run()
    events.append(group(events, 1, 2) | {"index": 99})
    assert keep_ledger([events], EXPECTED).prompts_unexpected == 1


def test_logs_are_read_from_the_run_folder(tmp_path) -> None:
    log = EventLog(tmp_path / "events-rank0.jsonl")
    for event in sound_run():
        log.record(**event)
    log.close()
    assert read_ledger(tmp_path, EXPECTED).is_clean
    assert read_ledger(tmp_path, EXPECTED | {(7, 7)}).prompts_lost == 1


def test_a_run_that_ends_early_is_held_against_its_part_of_the_order() -> None:
    assert dataset_order(3, 2, num_groups=4) == {(0, 0), (0, 1), (0, 2), (1, 0)}
