"""``data.max_excluded``: more refused prompts than that, counted over the order, stop the run."""

import random

import pytest

from easyrl.dataloaders.producer.group_stream import ProducerError
from easyrl.ledger.exclusions import ExclusionLimit, recent_exclusions
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.printable import printable
from easyrl.runtime.ranks import Ranks
from easyrl.schema import ExcludedPrompt, Exclusion, GroupOutcome, TooManyExcluded
from tests.dataloaders.rollout_parts import completion, generator, prompt
from tests.easyrl.ledger.journal_groups import read, rollouts_of, served
from tests.easyrl.ledger.test_journalled_rollouts import OneOfRanks, RankedRun, together


class Refused(Exception):
    pass


class TooLong(Refused):
    pass


KINDS = {TooLong: "too_long", Refused: "refused"}


def at(position: int, reason: str = "no") -> ExcludedPrompt:
    return ExcludedPrompt(position, 0, position, reason)


def refusing(refused, too_long=(), asked=None):
    """A ``generate`` that answers all prompts but these."""

    async def generate(prompt, sample, version):
        if asked is not None:
            asked.append(prompt.index)
        if prompt.index in too_long:
            raise TooLong(f"{prompt.index} has too many tokens")
        if prompt.index in refused:
            raise Refused(f"http://a: \x1b[31m400\x1b[0m\nbad\x00 content {prompt.index % 2}")
        return completion(version)

    return generate


# -- the rule ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "positions, share, batch_size, too_many",
    [
        (range(5), 0.05, 8, False),  # 5 of 100
        (range(6), 0.05, 8, True),
        (range(0, 600, 20), 0.05, 8, False),  # any 100 positions hold 5
        (range(0, 600, 19), 0.05, 8, True),
        ([0, 1, 2, 3, 4, 99], 0.05, 8, True),
        ([0, 1, 2, 3, 4, 100], 0.05, 8, False),
        (range(50), 0.05, 1000, False),  # 50 of 1000
        (range(51), 0.05, 1000, True),
        (range(29), 0.29, 8, False),  # 0.29 x 100 is 28.999999999999996
        ([7], 0.0, 8, True),
        ([], 0.0, 8, False),
        (range(500), 1.0, 8, False),
    ],
)
def test_more_than_the_share_of_a_window_is_too_many(positions, share, batch_size, too_many):
    told = [at(position) for position in positions]
    random.Random(0).shuffle(told)  # in whatever order
    limit = ExclusionLimit(share, batch_size)
    for each in told + told:
        limit.add(each)
    assert (limit.problem() is not None) == too_many


def test_the_reasons_come_most_frequent_first_with_a_prompt_and_the_remedy():
    limit = ExclusionLimit(0.02, 8, location=lambda e: f"prompts.jsonl:{e.prompt_index + 1}")
    for position, reason in enumerate(["too odd", "400: no", "400: no", "400: no"]):
        limit.add(at(10 + position, reason))
    told = limit.problem()
    assert told.startswith("data.max_excluded: 4 prompts among 100") and "0.02 x 100" in told
    assert told.index("3 times, for instance prompts.jsonl:12: 400: no") < told.index(
        "1 times, for instance prompts.jsonl:11: too odd"
    )
    assert "--resume" in told and "new run" in told


def test_many_different_reasons_are_cut():
    limit = ExclusionLimit(0.0, 8, [at(n, f"reason {n}") for n in range(9)])
    assert limit.problem().count("times, for instance") == 5
    assert "and 4 other reasons" in limit.problem()


def test_what_a_closed_batch_leaves_still_counts_as_long_as_a_window_reaches_it():
    outcomes = [
        GroupOutcome(epoch=0, index=n, position=n, outcome="excluded", digest=None, stamped=[],
                     endpoints=[], reason="no", exclusion=kind)
        for n, kind in enumerate(["refused", "too_long", "refused"])
    ]  # fmt: skip
    kept = recent_exclusions([at(3), at(4)], outcomes, 101, 8)
    assert [each.position for each in kept] == [101, 103]  # the next window begins at 5
    assert kept == recent_exclusions([], outcomes, 101, 8)
    assert [e.position for e in recent_exclusions([at(4), at(5)], outcomes, 101, 8)][0] == 5


def test_printable_text_is_one_bounded_line():
    assert printable("\x1b[31mred\x1b[0m\r\n\ttext\x00") == "[31mred [0m text"
    assert printable("x" * 10**6, 20) == "x" * 16 + " ..." and len(printable("é" * 600)) == 500
    assert printable("\u202eevil") == "evil"


# -- in the open batch ---------------------------------------------------------------------------


def journalled(directory) -> dict[int, Exclusion | None]:
    return {each.group.prompt.index: each.group.excluded for each in read(directory)}


def drain(batch) -> set[int]:
    taken = iter(lambda: batch.updates[0].drain_ready(10**6), [])
    return {group.prompt.index for ready in taken for group in ready}


def begin(thread, directory, number, generate, excluded=(), num_prompts=40, **rules):
    rules = {"batch_size": 12, "max_excluded": 0.02} | rules
    made = generator(thread, generate, excluded_by=KINDS)
    rollouts = rollouts_of(directory, number, made, list(map(prompt, range(num_prompts))), **rules)
    return rollouts.begin(served(number), 0, excluded)


def test_the_open_batch_stops_with_the_reasons(tmp_path):
    with LoopThread() as thread:
        batch = begin(thread, tmp_path, 0, refusing({1, 2, 3, 5}))
        with pytest.raises(TooManyExcluded, match=r"(?s)data.max_excluded: \d prompts .* bad cont"):
            drain(batch)
        batch.close()
    kept = [excluded for excluded in journalled(tmp_path).values() if excluded is not None]
    assert kept[0] == ("refused", f"http://a: [31m400 [0m bad content {kept[0].reason[-1]}")


def test_a_resume_counts_the_same_and_stops_again_without_asking(tmp_path):
    asked: list[int] = []
    with LoopThread() as thread:
        batch = begin(thread, tmp_path, 0, refusing({1, 2, 3}))
        with pytest.raises(TooManyExcluded) as first:
            drain(batch)
        batch.close()
    with LoopThread() as thread:
        with pytest.raises(TooManyExcluded) as again:
            begin(thread, tmp_path, 1, refusing((), asked=asked))
        assert str(again.value) == str(first.value) and asked == []
        batch = begin(thread, tmp_path, 2, refusing(()), max_excluded=0.05)
        assert drain(batch) == set(range(15)) - {1, 2, 3}


def test_closed_batches_count_too(tmp_path):
    with LoopThread() as thread:
        batch = begin(thread, tmp_path, 0, refusing({4}), excluded=[at(-3)])
        assert drain(batch) == set(range(13)) - {4}
        batch = begin(thread, tmp_path / "other", 0, refusing({4}), excluded=[at(-3), at(-9)])
        with pytest.raises(TooManyExcluded):
            drain(batch)
        batch.close()


def test_prompts_that_are_too_long_do_not_count(tmp_path):
    with LoopThread() as thread:
        batch = begin(thread, tmp_path, 0, refusing({4}, too_long=range(5, 20)))
        assert drain(batch) == {0, 1, 2, 3, *range(20, 28)}
    kinds = [g.exclusion for g in sorted(batch.refused, key=lambda g: g.position)]
    assert kinds == ["refused"] + ["too_long"] * 15


def test_an_error_of_the_run_is_no_exclusion(tmp_path):
    async def fails(prompt, sample, version):
        raise RuntimeError("a bug")

    with LoopThread() as thread:
        with pytest.raises(ProducerError, match="a bug"):
            drain(begin(thread, tmp_path, 0, fails))


def test_the_ranks_exclusions_are_counted_together(tmp_path):
    """Two of each: neither has too many by itself."""
    run = RankedRun(2)
    with LoopThread() as thread:
        ranks = [Ranks.data_parallel(rank, 2) for rank in range(2)]
        made = [
            rollouts_of(
                tmp_path, 0, generator(thread, refusing({0, 1, 2, 3}), excluded_by=KINDS),
                list(map(prompt, range(40))), ranks=rank,
                coordination=OneOfRanks(run, rank.rank),
                batch_size=12, max_excluded=0.03, in_prompt_order=True,
            )
            for rank in ranks
        ]  # fmt: skip
        batches = together([lambda one=one: one.begin(served(0), 0) for one in made])
        outcomes = together([lambda one=one: _ending(one) for one in batches])
        for batch in batches:
            batch.close()
    assert [type(outcome) for outcome in outcomes] == [TooManyExcluded] * 2
    assert str(outcomes[0]) == str(outcomes[1])


def _ending(batch) -> BaseException | None:
    try:
        drain(batch)
    except Exception as error:
        return error
    return None


def test_an_exclusion_is_what_it_was_after_the_journal(tmp_path):
    with LoopThread() as thread:
        drain(begin(thread, tmp_path, 0, refusing({4}, too_long={5})))
    found = {index: told for index, told in journalled(tmp_path).items() if told is not None}
    assert {index: told.kind for index, told in found.items()} == {4: "refused", 5: "too_long"}
    assert all(isinstance(told, Exclusion) for told in found.values())
