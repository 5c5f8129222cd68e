"""Rewards: what the built-in ones give, users' files, and the scorer with real worker processes."""

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from easyrl.config import ConfigError, RewardConfig, ScoringConfig
from easyrl.rewards import worker
from easyrl.rewards.exact import exact
from easyrl.rewards.format import format as format_reward
from easyrl.rewards.functions import RewardFunctionError, check_rewards
from easyrl.rewards.math import math
from easyrl.rewards.scorer import SampleScores, Scorer
from easyrl.runtime.workers.worker_pool import WorkerDied, WorkerPool, WorkerTimeout
from easyrl.schema import Completion, Prompt, RewardError
from tests.tiny_tokenizer import tiny_tokenizer
from tests.waiting import started


def prompt(answer: str | None = "72", index: int = 5, epoch: int = 1) -> Prompt:
    return Prompt(index, np.array([1, 2], np.int32), "question", answer, epoch, {"level": 3})


def tokens(text: str) -> np.ndarray:
    """What ``tiny_tokenizer`` makes of ASCII text: letters are numbered in the alphabet's order."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return np.array([letters.index({" ": "Ġ", "\n": "Ċ"}.get(c, c)) for c in text], np.int32)


def completion(text: str, finish_reason: str = "stop") -> Completion:
    ids = tokens(text)
    ones = np.ones(len(ids))
    return Completion(
        ids, ones.astype(np.float32), finish_reason, (), "http://fake", ones.astype(bool)
    )


# ---- built-in rewards --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "text", "kwargs", "expected"),
    [
        ("72", " 72\n", {}, 1.0),
        ("72", "The answer is 72", {}, 0.0),
        ("72", "73", {}, 0.0),
        ("72", "<think>is it 71?</think>72", {}, 1.0),
        ("72", "<think>72", {}, 0.0),
        ("1,234,567", "1234567", {}, 1.0),
        ("1234", "1,234", {}, 1.0),
        ("1,2", "12", {}, 0.0),  # a pair, not thousands
        ("1,2345", "12345", {}, 0.0),
        ("to  be", "to\nbe", {}, 1.0),
        ("Yes", "yes", {}, 0.0),
        ("Yes", "yes", {"ignore_case": True}, 1.0),
        ("72", "#### 71\n#### 72", {"pattern": "#### (.+)"}, 1.0),
        ("72", "#### 72\n#### 71", {"pattern": "#### (.+)"}, 0.0),
        ("72", "72", {"pattern": "#### (.+)"}, 0.0),
        ("72", "<think>#### 72</think>so 72", {"pattern": "#### (.+)"}, 0.0),
    ],
)
def test_exact(answer, text, kwargs, expected):
    assert exact(prompt(answer), [text], [], **kwargs) == [expected]


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("72", "So the answer is \\boxed{72}.", 1.0),
        ("72", "So the answer is 72.", 1.0),
        ("72", "\\boxed{7}", 0.0),
        ("72", "no idea", 0.0),
        ("72", "", 0.0),
        ("72", "<think>\\boxed{7}</think> it is \\boxed{72}", 1.0),
        ("\\frac{1}{2}", "$0.5$", 1.0),
        ("\\frac{1}{2}", "\\boxed{\\dfrac{2}{4}}", 1.0),
        ("x^2+2x+1", "\\boxed{(x+1)^2}", 1.0),
        ("x^2+2x+1", "\\boxed{(x-1)^2}", 0.0),
        ("p - q", "\\boxed{-q+p}", 1.0),
        ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", 1.0),
        ("(3, \\pi/2)", "\\boxed{\\left(3, \\frac{\\pi}{2}\\right)}", 1.0),
        ("\\boxed{72}", "72", 1.0),
        ("$72$", "72", 1.0),
        ("\\$42409", "\\boxed{42409}", 1.0),
    ],
)
def test_math(answer, text, expected):
    assert math(prompt(answer), [text, "\\boxed{12345678}"], []) == [expected, 0.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>hm</think>72", 1.0),
        ("\n<think>a\nb</think>\n\n72\n", 1.0),
        ("<think></think>72", 1.0),
        ("72", 0.0),
        ("<think>hm</think>", 0.0),
        ("<think>hm</think> \n", 0.0),
        ("<think>hm 72", 0.0),
        ("so <think>hm</think>72", 0.0),
        ("<think>a</think>b<think>c</think>d", 0.0),
        ("<think><think>a</think>b", 0.0),
        ("</think>b<think>", 0.0),
    ],
)
def test_format(text, expected):
    assert format_reward(prompt(), [text], []) == [expected]


def test_format_with_the_tag_in_the_prompt():
    texts = ["hm</think>72", "<think>hm</think>72"]
    assert format_reward(prompt(), texts, [], think_in_prompt=True) == [1.0, 0.0]


@pytest.mark.parametrize("reward", [exact, math])
def test_no_answer_to_compare_with_is_an_error(reward):
    with pytest.raises(ValueError, match="prompt 5 has no answer; set data.fields.answer"):
        reward(prompt(None), ["72"], [])


# ---- start-up ----------------------------------------------------------------------------------

USER_FILE = """
import asyncio, os, sys, time
from helper import LEVEL

def good(prompt, texts, token_ids, **kwargs):
    assert prompt.metadata["level"] == LEVEL and prompt.epoch == 1
    return [len(text) + kwargs.get("bonus", 0) for text in texts]

async def slow_but_async(prompt, texts, token_ids):
    await asyncio.sleep(0.01)
    return [float(len(ids)) for ids in token_ids]

def raises(prompt, texts, token_ids):
    raise KeyError("oh no")

def hangs(prompt, texts, token_ids):
    time.sleep(60)

def dies(prompt, texts, token_ids):
    os._exit(3)

def quits(prompt, texts, token_ids):
    sys.exit("enough")

def too_few(prompt, texts, token_ids):
    return [1.0] * (len(texts) - 1)

def huge(prompt, texts, token_ids):
    return [1.0, 1e300]


def infinite(prompt, texts, token_ids):
    return [float("nan") for _ in texts]

def words(prompt, texts, token_ids):
    return ["good" for _ in texts]

def one_number(prompt, texts, token_ids):
    return 1.0

def two_arguments(prompt, texts):
    return [1.0 for _ in texts]

def of_some(prompt, texts, token_ids):
    return [3.0 if text == "72" else None for text in texts]

def of_none(prompt, texts, token_ids):
    return None

def with_parts(prompt, texts, token_ids):
    return [{"score": len(text), "short": len(text) < 2, "said": text} for text in texts]

def fails_on_some(prompt, texts, token_ids):
    if texts[0].isalpha():
        raise {"k": KeyError, "v": ValueError}[texts[0][0]](texts[0])
    return [1.0 for _ in texts]

def fails_twice(prompt, texts, token_ids):
    with open(prompt.metadata["log"], "a") as log:
        log.write("x")
    if os.path.getsize(prompt.metadata["log"]) < 3:
        raise RuntimeError("not yet")
    return [1.0 for _ in texts]

NOT_A_FUNCTION = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "reward.py").write_text(USER_FILE)
    (folder / "helper.py").write_text("LEVEL = 3\n")
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "raising.py").write_text("1 / 0\n")
    (folder / "script.py").write_text("import sys\nsys.exit(2)\n")
    (folder / "reward.txt").write_text("")
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    return folder


def user(folder: Path, function: str, **settings) -> RewardConfig:
    return RewardConfig(file=folder / "reward.py", function=function, **settings)


def test_start_up_accepts_what_works(folder):
    check_rewards(
        [
            RewardConfig(name="exact", kwargs={"pattern": "#### (.+)"}),
            RewardConfig(name="math"),
            RewardConfig(name="format", kwargs={"think_in_prompt": True}),
            user(folder, "good", kwargs={"bonus": 1}),
            user(folder, "slow_but_async"),
        ]
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"file": "broken.py"},
            r"rewards\[1\]\.file: .*broken\.py:1: .*broken\.py raises SyntaxError: ",
        ),
        ({"file": "raising.py"}, r"rewards\[1\]\.file: .*raising\.py raises ZeroDivisionError"),
        ({"file": "script.py"}, r"rewards\[1\]\.file: .*script\.py raises SystemExit: 2"),
        ({"file": "reward.txt"}, r"rewards\[1\]\.file: .*reward\.txt is not a Python file"),
        (
            {"function": "god"},
            r"rewards\[1\]\.function: .*reward\.py defines no 'god'; its functions: dies, fails_",
        ),
        (
            {"function": "NOT_A_FUNCTION"},
            r"rewards\[1\]\.function: 'NOT_A_FUNCTION' in .*reward\.py is of type int, not a ",
        ),
        (
            {"function": "two_arguments"},
            r"rewards\[1\]\.function: two_arguments takes \(prompt, texts\) but is called with "
            r"\(prompt, texts, token_ids\)",
        ),
        (
            {"function": "raises", "kwargs": {"bonus": 1}},
            r"rewards\[1\]\.kwargs: raises takes .* called with \(.*token_ids, bonus\)",
        ),
    ],
)
def test_start_up_refuses_a_users_file(folder, settings, message):
    reward = RewardConfig(**{**settings, "file": folder / settings.get("file", "reward.py")})
    with pytest.raises(ConfigError, match=message):
        check_rewards([RewardConfig(name="math"), reward])


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("exact", {"patern": "x"}, r"rewards\[0\]\.kwargs: exact takes .* called with .* patern\)"),
        ("exact", {"pattern": "("}, r"rewards\[0\]\.kwargs: exact does not take .*missing \)"),
        ("exact", {"pattern": "x"}, r"rewards\[0\]\.kwargs: .* needs one group"),
        ("exact", {"pattern": 3}, r"rewards\[0\]\.kwargs: exact does not take"),
        ("math", {"precision": 3}, r"rewards\[0\]\.kwargs: math takes"),
    ],
)
def test_start_up_refuses_wrong_kwargs(name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        check_rewards([RewardConfig(name=name, kwargs=kwargs)])


# ---- the worker's side -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "KeyError: 'oh no'\n(.|\n)*reward.py\", line [0-9]+, in raises"),
        ("quits", "SystemExit: enough"),
        ("too_few", "returned 1 rewards for 2 responses"),
        ("infinite", "returned nan for response 0; expected a finite number"),
        ("huge", r"returned 1e\+300 for response 1; expected a finite number"),
        ("words", "returned 'good' for response 0; expected a finite number"),
        ("one_number", r"returned 1\.0; expected a list of 2 numbers"),
    ],
)
def test_a_bad_result_says_what_it_is(folder, function, message):
    worker.initialize([user(folder, function)], folder / "tokenizer")
    with pytest.raises(RewardFunctionError, match=message):
        worker.score_reward(0, prompt(), [tokens("a"), tokens("b")])


def test_responses_are_decoded_without_special_tokens(folder):
    rewards = [RewardConfig(name="exact")]
    eos = tiny_tokenizer().eos_token_id
    ids = np.append(tokens("72"), eos).astype(np.int32)
    worker.initialize(rewards, folder / "tokenizer")
    assert worker.score_reward(0, prompt("72"), [ids]) == [1.0]
    worker.initialize(rewards, folder / "tokenizer", skip_special_tokens=False)
    assert worker.score_reward(0, prompt("72<eos>"), [ids]) == [1.0]


def test_the_worker_side_imports_neither_torch_nor_transformers(folder):
    code = f"""
        import sys
        from pathlib import Path
        import numpy as np
        from easyrl.config import RewardConfig
        from easyrl.rewards import worker
        from easyrl.schema import Prompt
        rewards = [RewardConfig(name=name) for name in ("exact", "math", "format")]
        worker.initialize(rewards, Path({str(folder / "tokenizer")!r}))
        prompt = Prompt(0, np.zeros(1, np.int32), "", "7")
        ids = np.array({tokens("7").tolist()}, np.int32)
        print([worker.score_reward(i, prompt, [ids]) for i in range(3)])
        assert not {{"torch", "transformers", "deepspeed"}} & set(sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[[1.0], [1.0], [0.0]]\n", done.stderr
    assert done.stderr == ""  # math-verify's warning about time limits is not printed


# ---- the scorer --------------------------------------------------------------------------------


class InProcessWorkers:
    """A pool of no processes: runs a call here, or raises the next fault of a script."""

    def __init__(self, rewards, folder, faults=()):
        worker.initialize(rewards, folder / "tokenizer")
        self.faults = list(faults)
        self.calls = []
        self.came_last = []

    async def call(self, function, *args, timeout_s, kind, last):
        self.came_last.append(last)
        self.calls.append((args[0], len(args[2]), timeout_s))
        if self.faults:
            raise self.faults.pop(0)
        # In a thread: an async reward starts a loop of its own, as in a worker process.
        return await asyncio.to_thread(function, *args)


def scorer(rewards, workers, on_reward_error="fail", **settings) -> Scorer:
    scoring = ScoringConfig(on_reward_error=on_reward_error, max_reward_retries=2)
    return Scorer(rewards, scoring, workers, **settings)


async def score(scorer: Scorer, prompt: Prompt, completions: list[Completion]):
    samples = [await scorer.score_sample(prompt, c) for c in completions]
    return await scorer.score_group(prompt, completions, samples)


async def test_weighted_sums_of_samples_and_groups(folder):
    rewards = [
        RewardConfig(name="exact", weight=2.0, timeout_s=7.0),
        RewardConfig(name="format", weight=0.5),
        user(folder, "good", weight=0.1, kwargs={"bonus": 10}, timeout_s=9.0),
        user(folder, "slow_but_async", weight=-1.0, scope="sample"),
    ]
    workers = InProcessWorkers(rewards, folder)
    texts = ["72", "<think>a</think>72", "no"]
    completions = [completion(text) for text in texts]
    scores = await score(scorer(rewards, workers), prompt(), completions)

    assert [dict(s.components) for s in scores] == [
        {"exact": 1.0, "format": 0.0, "good": 12.0, "slow_but_async": 2.0},
        {"exact": 1.0, "format": 1.0, "good": 28.0, "slow_but_async": 18.0},
        {"exact": 0.0, "format": 0.0, "good": 12.0, "slow_but_async": 2.0},
    ]
    # 2·exact + 0.5·format + 0.1·good − slow; exact to the last bits of a sum of four
    assert [s.reward for s in scores] == pytest.approx([1.2, -12.7, -0.8], rel=1e-12)
    assert not any(s.failed for s in scores)
    # Sample rewards see one response each, the group's reward all three; each its own time limit.
    assert workers.calls == [(0, 1, 7.0), (1, 1, 30.0), (3, 1, 30.0)] * 3 + [(2, 3, 9.0)]


@pytest.mark.parametrize(
    ("truncated_reward", "expected"), [(None, [1.0, 1.0]), (-0.5, [1.0, -0.5]), (0.0, [1.0, 0.0])]
)
async def test_truncated_responses(folder, truncated_reward, expected):
    rewards = [RewardConfig(name="exact")]
    it = scorer(rewards, InProcessWorkers(rewards, folder), truncated_reward=truncated_reward)
    scores = await score(it, prompt(), [completion("72"), completion("72", "length")])
    assert [s.reward for s in scores] == expected
    assert [s.components["exact"] for s in scores] == [1.0, 1.0]


async def test_fail_names_reward_prompt_and_cause(folder):
    rewards = [user(folder, "raises")]
    it = scorer(rewards, InProcessWorkers(rewards, folder))
    with pytest.raises(RewardError) as caught:
        await score(it, prompt(), [completion("a")])
    assert "reward raises in " in str(caught.value) and "reward.py failed on" in str(caught.value)
    assert "failed on prompt 5 of epoch 1: KeyError: 'oh no'" in str(caught.value)
    assert "scoring.on_reward_error=zero" in str(caught.value)
    assert it.num_failed == {"raises": 1}


async def test_zero_scores_that_reward_zero_and_says_so(folder):
    rewards = [RewardConfig(name="exact"), user(folder, "raises")]
    it = scorer(rewards, InProcessWorkers(rewards, folder), "zero")
    scores = await score(it, prompt(), [completion("72"), completion("1")])
    assert [s.reward for s in scores] == [1.0, 0.0]
    assert [s.components["raises"] for s in scores] == [0.0, 0.0]
    assert all(s.failed for s in scores)
    assert it.num_failed == {"raises": 1}


async def test_zero_marks_only_the_sample_whose_reward_failed(folder):
    rewards = [RewardConfig(name="exact")]
    it = scorer(rewards, InProcessWorkers(rewards, folder, [WorkerTimeout("late")]), "zero")
    scores = await score(it, prompt(), [completion("72"), completion("72")])
    assert [(s.reward, s.failed) for s in scores] == [(0.0, True), (1.0, False)]


async def test_retry_calls_again_and_then_fails(folder):
    rewards = [RewardConfig(name="exact")]
    faults = [WorkerDied("killed"), WorkerTimeout("late"), RewardFunctionError("x")]
    workers = InProcessWorkers(rewards, folder, faults[:2])
    it = scorer(rewards, workers, "retry")
    scores = await score(it, prompt(), [completion("72")])
    assert (scores[0].reward, scores[0].failed) == (1.0, False)
    assert it.num_failed == {"exact": 2}

    it = scorer(rewards, InProcessWorkers(rewards, folder, faults), "retry")
    with pytest.raises(RewardError, match=r"failed on prompt 5 of epoch 1 \(3 calls\): x"):
        await score(it, prompt(), [completion("72")])


@pytest.mark.parametrize("last", [False, True])
async def test_the_scores_of_an_evaluation_wait_behind_those_of_training(folder, last):
    rewards = [RewardConfig(name="exact")]
    workers = InProcessWorkers(rewards, folder)
    await scorer(rewards, workers, last=last).score_sample(prompt(), completion("72"))
    assert workers.came_last == [last]


async def test_it_is_busy_while_a_call_runs_whatever_becomes_of_it(folder):
    class Watched(InProcessWorkers):
        async def call(self, *args, **settings):
            seen.append(it.busy.num_running)
            return await super().call(*args, **settings)

    seen = []
    rewards = [RewardConfig(name="exact")]
    it = scorer(rewards, Watched(rewards, folder, [WorkerDied("x")]), "zero")
    completions = [completion(text) for text in ("72", "71", "70")]
    await asyncio.gather(*(it.score_sample(prompt(), each) for each in completions))
    # the first has failed before the next begins
    assert seen == [1, 1, 2] and it.busy.num_running == 0 and it.num_failed == {"exact": 1}
    assert 0.0 < it.busy.seconds() == it.busy.seconds()


async def test_other_errors_are_not_taken_for_a_rewards(folder):
    rewards = [RewardConfig(name="exact")]
    it = scorer(rewards, InProcessWorkers(rewards, folder, [RuntimeError("pool closed")]), "zero")
    with pytest.raises(RuntimeError, match="pool closed"):
        await it.score_sample(prompt(), completion("72"))


@pytest.mark.parametrize("how", ["", "async "])
@pytest.mark.parametrize(
    "error",
    [
        *("asyncio.CancelledError", "SystemExit", "KeyboardInterrupt", "GeneratorExit"),
        *("StopIteration", "StopAsyncIteration", "BaseException"),
    ],
)
def test_whatever_a_reward_raises_is_an_error_of_that_reward(folder, error, how):
    """None of them may cancel, end or interrupt what is ours."""
    file = folder / f"raises_{error}_{how.strip()}.py"
    file.write_text(
        f"import asyncio\n{how}def reward_func(prompt, texts, token_ids):\n    raise {error}('no')"
    )
    reward = RewardConfig(file=file)
    worker.initialize([reward], folder / "tokenizer")
    with pytest.raises(RewardFunctionError, match=error.rpartition(".")[2]):
        worker.score_reward(0, prompt(), [tokens("a")])


async def test_a_reward_that_cancels_itself_counts_by_on_reward_error(folder):
    (folder / "cancels.py").write_text(
        "import asyncio\nasync def reward_func(prompt, texts, token_ids):\n"
        "    raise asyncio.CancelledError()"
    )
    rewards = [RewardConfig(file=folder / "cancels.py")]
    async with started(
        WorkerPool(1, worker.initialize, (rewards, folder / "tokenizer"))
    ) as workers:
        lenient = Scorer(rewards, ScoringConfig(on_reward_error="zero"), workers)
        (score,) = await lenient.score_group(
            prompt(), [completion("a")], [await lenient.score_sample(prompt(), completion("a"))]
        )
        assert score.reward == 0.0 and score.failed
        strict = Scorer(rewards, ScoringConfig(on_reward_error="fail"), workers)
        with pytest.raises(RewardError, match="cancels.py.*CancelledError"):
            await strict.score_group(
                prompt(), [completion("a")], [await strict.score_sample(prompt(), completion("a"))]
            )


async def test_real_workers_survive_what_rewards_do(folder):
    """A hanging, a dying and a quitting reward, and a math expression that never ends."""
    rewards = [
        user(folder, "hangs", timeout_s=0.5, scope="sample"),
        user(folder, "dies"),
        user(folder, "quits"),
        RewardConfig(name="math", timeout_s=2.0),
        user(folder, "good"),
    ]
    async with started(
        WorkerPool(2, worker.initialize, (rewards, folder / "tokenizer"))
    ) as workers:
        it = scorer(rewards, workers, "zero")
        completions = [completion("\\boxed{9^{9^{9^{9}}}}"), completion("\\boxed{72}")]
        began = time.monotonic()
        scores = await score(it, prompt(), completions)
        assert time.monotonic() - began < 45  # nothing waits for the sleep of 60 s
        assert [s.components["good"] for s in scores] == [21.0, 10.0]
        assert [s.components["math"] for s in scores] == [0.0, 1.0]
        assert all(s.failed for s in scores)
        assert it.num_failed == {"hangs": 2, "dies": 1, "quits": 1, "math": 1}

        strict = scorer(rewards[:2], workers)
        with pytest.raises(RewardError, match=r"hangs in .*no result within timeout_s=0.5; its"):
            await strict.score_sample(prompt(), completions[0])
        with pytest.raises(RewardError, match="dies in .*its worker process died"):
            await strict.score_group(prompt(), completions, [])


async def test_real_workers_retry_and_score_many_at_once(folder, tmp_path):
    rewards = [RewardConfig(name="math"), user(folder, "fails_twice")]
    async with started(
        WorkerPool(2, worker.initialize, (rewards, folder / "tokenizer"))
    ) as workers:
        it = scorer(rewards, workers, "retry")
        asked = Prompt(0, np.zeros(1, np.int32), "", "72", 0, {"log": str(tmp_path / "log")})
        texts = ["\\boxed{72}", "\\boxed{71}", "72.0"]
        completions = [completion(text) for text in texts]
        samples = await asyncio.gather(*(it.score_sample(asked, c) for c in completions))
        scores = await it.score_group(asked, completions, samples)
        assert [s.reward for s in scores] == [2.0, 1.0, 2.0]
        assert os.path.getsize(tmp_path / "log") == 3
        assert it.num_failed == {"fails_twice": 2}


# ---- what a reward may leave unsaid, and say beside its score ------------------------------------


async def test_no_opinion_is_no_summand_and_no_component(folder):
    rewards = [
        RewardConfig(name="exact", weight=2.0),
        user(folder, "of_some", weight=0.5),
        user(folder, "of_none", weight=9.0),
    ]
    completions = [completion("72"), completion("no")]
    scores = await score(scorer(rewards, InProcessWorkers(rewards, folder)), prompt(), completions)
    assert [s.reward for s in scores] == [2.0 + 1.5, 0.0]
    assert [dict(s.components) for s in scores] == [{"exact": 1.0, "of_some": 3.0}, {"exact": 0.0}]
    assert not any(s.failed for s in scores)


async def test_the_score_among_parts_is_the_reward(folder):
    rewards = [user(folder, "with_parts", weight=0.1, log_as="judge")]
    completions = [completion("a"), completion("bbb")]
    scores = await score(scorer(rewards, InProcessWorkers(rewards, folder)), prompt(), completions)
    assert [s.reward for s in scores] == pytest.approx([0.1, 0.3])
    assert [dict(s.components) for s in scores] == [
        {"judge": 1.0, "judge/short": 1.0},
        {"judge": 3.0, "judge/short": 0.0},
    ]


# ---- failures are heard --------------------------------------------------------------------------


async def test_the_first_failure_of_each_kind_is_logged_with_its_traceback(folder, caplog):
    rewards = [user(folder, "fails_on_some"), user(folder, "raises")]
    it = scorer(rewards, InProcessWorkers(rewards, folder), "zero")
    for text in ("ka", "kb", "va", "7", "kc", "vb"):
        await it.score_group(prompt(), [completion(text)], [SampleScores({}, False)])
    told = [record.getMessage() for record in caplog.records]
    assert [said.splitlines()[0].partition(": ")[2].split(" (")[0] for said in told] == [
        "KeyError: 'ka'",
        "KeyError: 'oh no'",
        "ValueError: va",
    ]
    for said in told:
        first, *frames = said.splitlines()
        assert "more like it are only counted" in first and "on prompt 5 of epoch 1" in first
        assert any("reward.py" in line for line in frames) and "raise" in frames[-1]
    assert it.num_failed == {"fails_on_some": 5, "raises": 6}


async def test_a_timeout_and_a_death_are_kinds_of_their_own(folder, caplog):
    rewards = [RewardConfig(name="exact")]
    faults = [WorkerTimeout("late"), WorkerDied("killed"), WorkerTimeout("late"), WorkerDied("x")]
    it = scorer(rewards, InProcessWorkers(rewards, folder, faults), "zero")
    for _ in range(4):
        await it.score_sample(prompt(), completion("72"))
    assert [record.getMessage().partition(" of epoch 1: ")[2] for record in caplog.records] == [
        "no result within timeout_s=30.0; its worker was killed; more like it are only counted",
        "its worker process died (killed); more like it are only counted",
    ]


async def test_a_batch_of_failures_alone_ends_the_run(folder):
    """In a row, so that a call that succeeds begins the count again."""
    rewards = [RewardConfig(name="exact"), user(folder, "fails_on_some")]
    limits = {"groups_per_batch": 3, "num_generations": 2}
    it = scorer(rewards, InProcessWorkers(rewards, folder), "zero", **limits)

    async def group(text):
        exact = [SampleScores({"exact": 1.0}, False)]
        return await it.score_group(prompt(), [completion(text)], exact)

    for text in ("k", "v", "7", "k", "k"):
        await group(text)
    with pytest.raises(RewardError) as caught:
        await group("v")
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(
        "rewards[1]: all 3 calls of fails_on_some in a row failed, as many as a "
    )
    assert "scoring.on_reward_error=zero is not for; the last: reward fails_on_some in " in said
    assert "ValueError: v (" in said and "reward.py:" in said
    assert "correct it, or remove it from rewards" in said


async def test_a_batch_has_a_call_of_a_samples_reward_for_each_response(folder):
    rewards = [RewardConfig(name="exact")]
    limits = {"groups_per_batch": 2, "num_generations": 2}
    workers = InProcessWorkers(rewards, folder, [WorkerTimeout("late")] * 4)
    it = scorer(rewards, workers, "zero", **limits)
    for _ in range(3):
        await it.score_sample(prompt(), completion("72"))
    with pytest.raises(RewardError, match=r"rewards\[0\]: all 4 calls of exact in a row failed"):
        await it.score_sample(prompt(), completion("72"))


async def test_an_error_that_ends_the_run_is_one_sentence(folder, caplog):
    rewards = [user(folder, "raises")]
    with pytest.raises(RewardError) as caught:
        await score(scorer(rewards, InProcessWorkers(rewards, folder)), prompt(), [completion("a")])
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("rewards[0]: reward raises in ")
    line = 1 + USER_FILE.splitlines().index('    raise KeyError("oh no")')
    assert f"KeyError: 'oh no' ({folder / 'reward.py'}:{line}); correct it" in str(caught.value)
    (record,) = caplog.records  # where the traceback is
    assert 'raise KeyError("oh no")' in record.getMessage()
