"""The catalogue of hostile behaviours, and their distribution over runs."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.parts.hostile.alone import runs_alone
from benchmarks.parts.hostile.behaviour import EndpointBehaviour, FileBehaviour, SocketBehaviour
from benchmarks.parts.hostile.catalogue import BEHAVIOURS
from benchmarks.parts.hostile.mixtures import plan_mixtures
from benchmarks.parts.hostile.plan import plan_ranks, plan_runs

ALL = list(BEHAVIOURS.values())


def test_the_catalogue_is_large_and_says_what_each_does():
    kinds = Counter(type(behaviour) for behaviour in ALL)
    assert kinds[EndpointBehaviour] >= 60 and kinds[SocketBehaviour] >= 10
    assert kinds[FileBehaviour] >= 20
    assert len({behaviour.says for behaviour in ALL}) == len(ALL)
    for behaviour in ALL:
        assert behaviour.says.endswith("."), behaviour.name


@pytest.mark.parametrize("num_runs", [1, 5, 14])
def test_every_behaviour_is_in_one_run_and_the_kinds_are_mixed(num_runs):
    plans = plan_runs(ALL, num_runs, num_batches=7, seed=3)
    names = Counter(behaviour.name for plan in plans for behaviour in plan.behaviours)
    assert names == Counter(dict.fromkeys(BEHAVIOURS, 1))
    sizes = [len(plan.behaviours) for plan in plans]
    assert max(sizes) - min(sizes) <= 1
    for kind in ("body", "protocol", "weights", "file"):
        shares = [sum(b.kind == kind for b in plan.behaviours) for plan in plans]
        assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_endpoints_that_refuse_prompts_only_never_meet(seed):
    """A prompt that two of them refuse is given up, as it has to be."""
    for plan in plan_runs(ALL, 14, num_batches=7, seed=seed):
        assert sum(behaviour.refuses for behaviour in plan.endpoints) <= 1


def test_what_happens_beside_a_run_falls_between_its_second_and_last_batch():
    for plan in plan_runs(ALL, 5, num_batches=7, seed=0):
        assert all(2 <= due.batch < 6 for due in plan.due)
        assert {due.behaviour.name for due in (*plan.kills, *plan.beside)} == {
            due.behaviour.name for due in plan.due
        }
        assert all(due.behaviour.needs_killed_run for due in plan.kills)


def test_mixtures_are_runs_of_their_own_without_the_healthy_endpoints():
    drawn = plan_runs(ALL, 14, num_batches=7, seed=0)
    assert all(plan.beside_healthy for plan in drawn)
    mixtures = plan_mixtures(seed=0)
    assert ("refuse-prompts-of-the-dataset", "restarts-for-seconds") in [
        tuple(behaviour.name for behaviour in plan.endpoints) for plan in mixtures
    ]
    assert not any(plan.beside_healthy for plan in mixtures)
    assert {p.number for p in mixtures}.isdisjoint(range(2 * len(drawn) + len(ALL)))


def test_strangers_come_to_several_ranks_one_after_the_other():
    strangers = [behaviour for behaviour in ALL if isinstance(behaviour, SocketBehaviour)]
    plan = plan_ranks(strangers, 0, num_ranks=2, num_batches=22, seed=3)
    assert plan.num_ranks == 2 and not plan.kills
    assert {due.behaviour.name for due in plan.beside} == {each.name for each in strangers}
    batches = [due.batch for due in plan.due]
    assert batches == sorted(batches) and batches[0] == 2 and batches[-1] < 22 - 7
    assert max(Counter(batches).values()) <= 2


def test_a_seed_fixes_all():
    first, again, other = (plan_runs(ALL, 4, num_batches=7, seed=seed) for seed in (1, 1, 2))
    assert first == again and first != other


# ---- nobody healthy ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "status, said, is_right",
    [
        (2, "noise\neasyrl: no endpoint is up\n", True),
        (2, "easyrl: model 2.9 s\neasyrl: no endpoint is up after 20 s\n", True),
        (75, "easyrl: no endpoint is up\n", False),
        (2, "Traceback (most recent call last):\neasyrl: no endpoint is up\n", False),
        (2, "easyrl: no endpoint is up: 500: Traceback (most recent\n", True),  # its word
        (2, "no sentence\n", False),
        (2, "easyrl: data 0.8 s\n", False),
        (2, "easyrl: no endpoint is up\neasyrl: two\n", False),
        (2, "easyrl: no endpoint is up\neasyrl: no endpoint is up\n", False),
    ],
)
def test_without_endpoints_one_sentence_and_the_right_status_are_wanted(status, said, is_right):
    before, after = runs_alone(4)
    assert before.status == 2 and after.status == 75 and len(before.behaviours) == 4
    assert (before.problem(status, said) is None) == is_right


@pytest.mark.parametrize(
    "status, said, is_right",
    [
        (75, "easyrl: data 0.8 s\neasyrl: no usable endpoint:\n  one: down\n", True),
        (2, "easyrl: no usable endpoint:\n", False),
        (75, "easyrl: no endpoint is up\n", False),
    ],
)
def test_behind_a_batch_it_is_the_outage_s_sentence(status, said, is_right):
    _, after = runs_alone(4)
    assert (after.problem(status, said) is None) == is_right
