"""``from easyrl import train_policy`` in a script of a few lines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.parts.random_model import write_random_model
from easyrl import train_policy
from easyrl.metrics.trackers import read_metrics

ROOT = Path(__file__).resolve().parents[2]
PATHS = [path for path in [os.environ.get("PYTHONPATH")] if path]
SCRIPT = """
from easyrl import train_policy

def short_is_good(prompt, texts, token_ids):
    return [1.0 - len(ids) / 24 for ids in token_ids]

if __name__ == "__main__":
    prompts = [f"{a}+{b}" for a in range(3) for b in range(2)]
    settings = {"rollout.max_tokens": 24, "data.max_prompt_tokens": 32, "data.epochs": 2}
    settings["checkpoint.every_steps"] = 1
    print(train_policy("model", prompts, short_is_good, output_dir="out", settings=settings))
"""
# Of several forms, without a guard around its call; what a process does that runs it is counted.
UNGUARDED = """
from easyrl import train_policy

with open("runs.txt", "a") as runs:
    runs.write("x")

def make(longest):
    return lambda prompts, completion_ids, **columns: [
        {"score": 1.0 - len(ids) / longest, "end": ids[-1]} for ids in completion_ids
    ]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return None if extra_info["a"] else 0.25 * (ground_truth in "01") * (data_source == "")

records = [{"prompt": f"{a}+{b}", "answer": str(a + b), "a": a} for a in range(2) for b in range(2)]
settings = {"rollout.max_tokens": 24, "data.max_prompt_tokens": 32, "rewards[2].weight": 0.5}
rewards = [make(24), compute_score, "format"]
print(train_policy("model", records, rewards, output_dir="several", settings=settings))
"""
FAILING = """
from easyrl import train_policy

def no_judge(completions, **columns):
    raise OSError("no judge")

settings = {"rollout.max_tokens": 9, "data.max_prompt_tokens": 32} | SETTINGS
prompts = [f"{a}+{b}" for a in range(3) for b in range(2)]
train_policy("model", prompts, no_judge, output_dir="failing", settings=settings)
"""


AGAIN = """
import json
from pathlib import Path
from easyrl import train_policy
from script import short_is_good
from tests.end_to_end.refused_runs import changed, digests

def again(prompts, **further):
    before = digests(Path("out"))
    settings = {"rollout.max_tokens": 24, "data.max_prompt_tokens": 32, "data.epochs": 2}
    settings |= {"checkpoint.every_steps": 1} | further.pop("settings", {})
    try:
        said = str(train_policy(
            "model", prompts, short_is_good, output_dir="out", settings=settings, **further
        ))
    except ValueError as error:
        said = str(error)
    return [said, changed(before, digests(Path("out")))]

if __name__ == "__main__":
    same = [f"{a}+{b}" for a in range(3) for b in range(2)]
    other = [*same[:-1], "1+1"]
    print(json.dumps([
        again(same), again(other), again(other, resume=True),
        again(same, settings={"rollout.max_token": 9}), again(same, resume=True),
        again(same, resume=True, settings={"data.epochs": 3}),
    ]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a script that has trained; holds ``model`` and ``out``."""
    folder = tmp_path_factory.mktemp("api")
    write_random_model(folder / "model", hidden_size=32, num_layers=1)
    run_script(folder, "script.py", SCRIPT)
    return folder


def run_script(folder, name, text) -> str:
    """The last line that it prints."""
    result = ended_script(folder, name, text)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()[-1]


def ended_script(folder, name, text) -> subprocess.CompletedProcess:
    (folder / name).write_text(text)
    return subprocess.run(
        [sys.executable, name],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *PATHS]),
        },
        capture_output=True,
        text=True,
    )


def test_a_script_trains(folder):
    metrics = read_metrics(folder / "out" / "metrics.jsonl")
    assert [m["batch/groups"] for m in metrics[1:]] == [6.0, 6.0]
    trained = AutoModelForCausalLM.from_pretrained(folder / "out" / "model")
    start = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert any(
        (a != b).any() for a, b in zip(trained.parameters(), start.parameters(), strict=True)
    )


@pytest.mark.runs
def test_a_used_folder_is_refused_unchanged_and_goes_on_with_resume(folder):
    results = json.loads(run_script(folder, "again.py", AGAIN))
    used, used_other, other_prompts, mistyped, finished, extended = results
    for said, files in (used, used_other):
        assert "out holds an earlier run" in said and files == []
    assert "prompts: are not those" in other_prompts[0] and other_prompts[1] == []
    assert "rollout.max_token" in mistyped[0] and mistyped[1] == []
    assert finished == ["out/model", []]
    assert extended[0] == "out/model" and "certificate.jsonl" in extended[1]
    assert len(read_metrics(folder / "out" / "metrics.jsonl")) == 4


@pytest.mark.runs
def test_rewards_of_several_forms_train_and_the_script_is_not_run_again(folder):
    assert run_script(folder, "unguarded.py", UNGUARDED) == "several/model"
    assert (folder / "runs.txt").read_text() == "x"
    (metrics,) = read_metrics(folder / "several" / "metrics.jsonl")[1:]
    assert 0.0 <= metrics["reward/lambda/mean"] < 1.0 and metrics["reward/lambda/end/mean"] >= 0.0
    assert metrics["reward/failures"] == 0.0
    assert metrics["reward/compute_score/mean"] == 0.25  # of the half that it has an opinion on
    assert metrics["reward/format/mean"] == 0.0
    lambdas, others = metrics["reward/lambda/mean"], 0.25 / 2
    assert metrics["reward/mean"] == pytest.approx(lambdas + others, abs=1e-6)


def sentence(ended) -> str:
    """The last one, without a stack; the line behind it names the script's own."""
    *said, where = ended.stderr.splitlines()
    assert where.startswith("  (called in ") and f"/{ended.args[-1]}:" in where
    assert "[rank0]" not in ended.stderr
    return next(line for line in reversed(said) if line.startswith("easyrl: "))


def test_a_reward_that_raises_is_one_sentence_and_no_server_is_started(folder):
    ended = ended_script(folder, "failing.py", FAILING.replace("SETTINGS", "{}"))
    assert ended.returncode == 1 and not (folder / "failing" / "servers").exists()
    line = 1 + FAILING.splitlines().index('    raise OSError("no judge")')
    said = sentence(ended)
    assert said.startswith(
        f"easyrl: rewards[0]: {folder / 'failing.py'}:{line}: no_judge "
        "raised OSError: no judge, in a trial call on "
    )
    assert said.endswith("(or set scoring.on_reward_error=zero)")


@pytest.mark.runs
def test_a_batch_without_a_reward_ends_the_run_and_the_first_failure_is_in_the_log(folder):
    settings = '{"scoring.on_reward_error": "zero"}'
    ended = ended_script(folder, "failing.py", FAILING.replace("SETTINGS", settings))
    assert ended.returncode == 1
    assert sentence(ended).startswith(
        "easyrl: rewards[0]: all 6 calls of no_judge in a row failed, as "
        "many as a batch has, which scoring.on_reward_error=zero is not for; the last: reward "
    )
    assert "; go on with resume=True" in ended.stderr and "--resume" not in ended.stderr
    assert ended.stderr.count("more like it are only counted") == 1
    before = ended.stderr.partition("Traceback (most recent")[0]
    assert before.count('raise OSError("no judge")') == 1


@pytest.mark.parametrize(
    ("prompts", "reward", "message"),
    [
        (["a"], len, r"rewards\[0\]\.function: len takes \(obj, /\) but is called with"),
        ([], test_a_script_trains, "prompts: the list is empty"),
        ("prompts.jsonl", test_a_script_trains, "prompts: 'prompts.jsonl' is one text; give a"),
    ],
)
def test_what_cannot_be_trained_is_refused(prompts, reward, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train_policy("model", prompts, reward, output_dir=tmp_path, endpoints=["http://x"])
