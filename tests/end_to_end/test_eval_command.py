"""``easyrl eval`` against a server that nobody trains."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.parts.random_model import write_prompts
from tests.end_to_end.conftest import MAX_MODEL_LEN

ROOT = Path(__file__).resolve().parents[2]
REWARD = """
def reward_func(prompt, texts, token_ids):
    # the second and the fourth sample of every prompt are right
    return [float(i % 2 == 1) for i in range(len(texts))]
"""


def test_figures_are_those_of_the_rewards_and_samples_that_do_not_fit_are_cut(served, tmp_path):
    """A prompt takes 12 tokens: the server cannot hold all, is told apart from a dead one, and
    the key to change is named."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 6, 12)
    (tmp_path / "reward.py").write_text(REWARD)
    command = [
        *(sys.executable, "-m", "easyrl", "eval", "benchmarks/overlap.yaml"),
        *(f"model.path={served.model}", f"data.files=[{prompts}]"),
        *(f"inference.endpoints=[{served.url}]", f"rewards=[{{file: {tmp_path / 'reward.py'}}}]"),
        *(f"evaluation.data.files=[{prompts}]", "evaluation.num_samples=4"),
        *("evaluation.data.max_prompt_tokens=16", "evaluation.pass_at=[1,4]"),
        f"evaluation.sampling.max_tokens={MAX_MODEL_LEN}",
        *("--keep-texts", str(tmp_path / "texts.jsonl.gz")),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    key = "evaluation.data.max_prompt_tokens + evaluation.sampling.max_tokens"
    assert f"{key} is {16 + MAX_MODEL_LEN}" in result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures.pop("time/evaluation_s") > 0
    assert figures == {
        "num_prompts": 6,
        "eval/accuracy": 0.5,
        "eval/avg@4": 0.5,
        "eval/excluded": 0.0,
        "eval/pass@1": 0.5,
        "eval/pass@4": 1.0,
    }
    with gzip.open(tmp_path / "texts.jsonl.gz") as file:
        kept = [json.loads(line) for line in file]
    assert sorted(each["index"] for each in kept) == list(range(6))
    for each in kept:
        assert each["prompt"] and each["excluded"] is None
        assert [response["reward"] for response in each["responses"]] == [0.0, 1.0, 0.0, 1.0]
        assert all(r["truncated"] or r["text"] for r in each["responses"])
    assert sorted(path.name for path in tmp_path.glob("texts*")) == ["texts.jsonl.gz"]


def test_named_sets_have_figures_of_their_own(served, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    files = [write_prompts(tmp_path / f"{n}.jsonl", n, 12, seed=n) for n in (3, 2)]
    sets = [
        f"evaluation.{name}.data={{files: [{file}], max_prompt_tokens: 16}}"
        for name, file in zip(("one", "two"), files, strict=True)
    ]
    command = [
        *(sys.executable, "-m", "easyrl", "eval", "benchmarks/overlap.yaml"),
        *(f"model.path={served.model}", f"data.files=[{files[0]}]", *sets),
        *(f"inference.endpoints=[{served.url}]", f"rewards=[{{file: {tmp_path / 'reward.py'}}}]"),
        *("evaluation.num_samples=2", "evaluation.sampling.max_tokens=4"),
        *("evaluation.two.num_samples=1", "--keep-texts", str(tmp_path / "texts.jsonl")),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures.pop("time/evaluation_s") > 0
    assert figures == {
        "num_prompts": {"one": 3, "two": 2},
        "eval/one/accuracy": 0.5,
        "eval/one/avg@2": 0.5,
        "eval/one/excluded": 0.0,
        "eval/one/pass@1": 0.5,
        "eval/two/accuracy": 0.0,
        "eval/two/avg@1": 0.0,
        "eval/two/excluded": 0.0,
        "eval/two/pass@1": 0.0,
    }
    kept = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert sorted((each["set"], each["index"]) for each in kept) == [
        *(("one", 0), ("one", 1), ("one", 2), ("two", 0), ("two", 1)),
    ]
