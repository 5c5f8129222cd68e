"""``easyrl samples``: each filter, what it says where there is nothing, and a run that goes on."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from easyrl.__main__ import command_line
from easyrl.samples.folder import SampleFolder
from easyrl.samples.records import SampledGroup, SampledResponse
from easyrl.samples.show import print_group, readable, response_heading
from tests.easyrl.samples.sample_groups import sampled

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory) -> Path:
    """Of words: token n is ``wn``, 100 is a special token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = {f"w{i}": i for i in range(100)} | {"<user>": 100}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<user>")
    fast.save_pretrained(folder)
    return folder


def cut_off(step: int, index: int) -> SampledGroup:
    responses = [SampledResponse([index, 0, 7], "length", reward=0.5, advantage=0.0)]
    return sampled(step, index, [], responses=responses, has_signal=False)


@pytest.fixture
def run_dir(tmp_path: Path, tokenizer_dir: Path) -> Path:
    """A run with three steps; of the newest, no group is without signal or cut off."""
    (tmp_path / "config.yaml").write_text(
        f"model: {{path: {tokenizer_dir}}}\ndata: {{files: [a.jsonl]}}\n"
        "inference: {endpoints: [http://h:1]}\nrewards: [{name: exact}]\n"
    )
    folder = SampleFolder(tmp_path)
    folder.write(1, 0, 1, [sampled(1, 11, [0.0, 1.0]), cut_off(1, 12)])
    folder.write(2, 0, 1, [cut_off(2, 21), sampled(2, 22, [1.0, 0.0]), cut_off(2, 23)])
    folder.write(3, 0, 1, [sampled(3, i, [r, r]) for i, r in ((11, 0.5), (32, 0.25), (33, 1.0))])
    return tmp_path


def shown(run_dir: Path, *options: str) -> list[tuple[int, int]]:
    """Step and prompt of each group that the command prints."""
    result = CliRunner().invoke(command_line(), ["samples", str(run_dir), *options])
    assert result.exit_code == 0, result.output
    heads = [line for line in result.output.splitlines() if line.startswith("==== ")]
    return [(int(h.split()[2]), int(h.split()[5])) for h in heads]


@pytest.mark.parametrize(
    "options, expected",
    [
        ("", [(3, 11), (3, 32), (3, 33)]),
        ("--step 1", [(1, 11), (1, 12)]),
        ("--prompt 11", [(1, 11), (3, 11)]),
        ("--prompt 11 --step 1", [(1, 11)]),
        ("--worst", [(3, 32)]),
        ("--best", [(3, 33)]),
        ("--worst --best", [(3, 32), (3, 33)]),
        ("--no-signal", [(2, 21), (2, 23)]),
        ("--no-signal --step 1", [(1, 12)]),
        ("--truncated", [(2, 21), (2, 23)]),
        ("--truncated --step 1 --best", [(1, 12)]),
        ("--no-signal --prompt 23", [(2, 23)]),
    ],
)
def test_each_option_shows_its_groups(run_dir, options, expected):
    assert shown(run_dir, *options.split()) == expected


@pytest.mark.parametrize(
    "options, message",
    [
        ("--step 9", "--step: of step 9 nothing is kept;.* 3 steps from 1 to 3"),
        ("--step 3 --no-signal", "of step 3 no such group is kept"),
        ("--prompt 99", "of steps 1 to 3 no such group is kept.*samples.per_step"),
        ("--follow --step 1", "leave --step off"),
        ("--tokenizer DIR/nowhere", "--tokenizer: .*nowhere has no tokenizer; give a folder"),
    ],
)
def test_where_there_is_nothing_it_says_what_there_is(run_dir, options, message):
    given = options.replace("DIR", str(run_dir)).split()
    result = CliRunner().invoke(command_line(), ["samples", str(run_dir), *given])
    assert result.exit_code == 2 and not result.stdout
    assert_says(result.stderr, message)


def assert_says(text: str, message: str) -> None:
    assert re.search(message, text), text


def test_a_folder_without_a_run_and_a_run_without_samples(tmp_path, run_dir):
    result = CliRunner().invoke(command_line(), ["samples", str(run_dir / "samples")])
    assert result.exit_code == 2
    assert_says(result.stderr, "samples: has no config.yaml; name the run.output_dir of a run")
    SampleFolder(run_dir).remove_after(0)
    result = CliRunner().invoke(command_line(), ["samples", str(run_dir)])
    assert result.exit_code == 2
    assert_says(result.stderr, "has no samples yet;.*samples.per_step is 0")


def test_a_model_that_is_gone_is_named_with_the_remedy(run_dir, tokenizer_dir):
    file = run_dir / "config.yaml"
    file.write_text(file.read_text().replace(str(tokenizer_dir), "models/gone"))
    result = CliRunner().invoke(command_line(), ["samples", str(run_dir)])
    assert result.exit_code == 2
    assert_says(result.stderr, "model.tokenizer: models/gone has no tokenizer.*--tokenizer DIR")
    assert shown(run_dir, "--tokenizer", str(tokenizer_dir), "--worst") == [(3, 32)]


def test_it_prints_the_text_and_what_was_made_of_it(run_dir):
    group = sampled(
        4,
        7,
        [],
        responses=[
            SampledResponse(
                [7, 1, 100],
                "length",
                reward=0.75,
                components={"exact": 1.0, "format": 0.5},
                advantage=-0.5,
                advantages=(-1.0, 0.25),
                logprob_diff=0.001,
            ),
            SampledResponse([7, 2], "stop", reward=0.0, reward_failed=True),
        ],
        answer="42",
        location="a.jsonl:8",
    )
    SampleFolder(run_dir).write(4, 0, 1, [group])
    result = CliRunner().invoke(command_line(), ["samples", str(run_dir)])
    assert result.output.splitlines() == [
        "==== step 4 | prompt 7 of epoch 0 | a.jsonl:8 | mean reward 0.375 | kept as drawn | "
        "answer 42 | weights run:0:0",
        "<user> w7",
        "---- response 0 | reward 0.750 (exact 1.000, format 0.500) | "
        "advantage -0.500 (-1.000 to +0.250 by token) | Δ log-prob +1.0e-03 | 3 tokens | truncated",
        "w7 w1 <user>",
        "---- response 1 | reward 0.000 | a reward function failed | not trained | "
        "Δ log-prob not compared | 2 tokens",
        "w7 w2",
    ]


def test_a_response_without_reward_says_so():
    assert "no reward | not trained" in response_heading(3, SampledResponse([], "stop"))


def on_terminal(group: SampledGroup, width: int) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    print_group(group, lambda ids: " ".join(f"t{i}" for i in ids), console)
    return console.file.getvalue()


def test_responses_are_side_by_side_where_the_terminal_is_wide():
    group = sampled(1, 5, [0.25, 0.75, 0.5])

    def rows(width: int) -> list[int]:
        """How many responses each line of text shows."""
        lines = on_terminal(group, width).splitlines()
        assert max(map(len, lines)) <= width
        return [count for line in lines if (count := line.count("t7"))]

    assert rows(160) == [3]
    assert rows(100) == [2, 1]
    assert rows(60) == [1, 1, 1]


def test_what_the_model_writes_does_not_steer_the_terminal():
    assert readable("a\x1b[2J\tb\r\nc\u202e") == "a\\x1b[2J\tb\\r\nc\\u202e"
    group = sampled(1, 5, [0.5], answer="4\x1b]0;x\x07")
    console = Console(file=io.StringIO(), force_terminal=True, width=90, color_system=None)
    print_group(group, lambda ids: "[red]\x1b[31m[/nothing]", console)
    assert "\x1b[31m" not in console.file.getvalue()
    assert "[red]\\x1b[31m[/nothing]" in console.file.getvalue()  # no markup of rich's


def test_a_reader_that_goes_away_is_no_fault(run_dir):
    long = [SampledResponse([7] * 100_000, "stop", reward=0.5) for _ in range(4)]
    SampleFolder(run_dir).write(4, 0, 1, [sampled(4, 7, [], responses=long)])
    command = [sys.executable, "-m", "easyrl", "samples", str(run_dir)]
    pipe, text = subprocess.PIPE, True
    process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=text)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith("==== step 4")
    process.stdout.close()
    assert process.wait(60) == 0 and "easyrl:" not in (said := process.stderr.read()), said
    assert "Traceback" not in said and "Exception" not in said
    process.stderr.close()


def test_follow_shows_each_step_once_it_is_whole(run_dir):
    command = [sys.executable, "-m", "easyrl", "samples", str(run_dir), "--follow", "--best"]
    following = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert following.stdout is not None
    try:
        heads = (line for line in following.stdout if line.startswith("===="))
        assert next(heads).startswith("==== step 3 | prompt 33")
        folder = SampleFolder(run_dir)
        folder.write(4, 0, 2, [sampled(4, 41, [0.5])])
        folder.write(4, 1, 2, [sampled(4, 42, [1.0])])
        assert next(heads).startswith("==== step 4 | prompt 42")
        folder.remove_after(3)  # the run is killed, and resumes from step 3
        folder.write(4, 0, 1, [sampled(4, 43, [1.0])])
        folder.write(5, 0, 1, [sampled(5, 51, [1.0])])
        heads_left = [next(heads)]
        while "step 5" not in heads_left[-1]:
            heads_left.append(next(heads))
    finally:
        following.kill()
        following.wait()
