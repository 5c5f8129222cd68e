"""Each cause of disagreement is really produced by the embedded engine, and named; noise is not.

A tiny model learns a small language (a first letter that the prompt decides, then a Markov chain),
so that prompts and low-entropy positions matter as they do in real models.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from easyrl.config import Config
from easyrl.config.file import validate_config
from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.engines.base import LogprobComparison, MetricSums, TriLogprobs
from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine, GenerationRequest
from easyrl.inference_client.servers.embedded.sampling import SamplingParams
from easyrl.metrics.logprob_mismatch import LogprobMismatch, pattern
from easyrl.models.loading import load_policy_model
from easyrl.models.policy_model import run_micro_batch
from easyrl.recipes.losses import comparison_sums, policy_loss
from easyrl.schema import Completion, FrozenLogprobs, Prompt, RolloutGroup, Score
from tests.recipes import pack_groups, token_grpo
from tests.tiny_models import tiny_config
from tests.tiny_tokenizer import tiny_tokenizer

NUM_PROMPTS, NUM_GENERATIONS, MAX_TOKENS = 16, 4, 32
TRANSITIONS = np.random.default_rng(0).dirichlet(np.full(26, 0.15), size=26)
CHAT = [{"role": "user", "content": ""}]
ONE, TWO = "http://one", "http://two"


def letters(numbers: Sequence[int]) -> str:
    return "".join(chr(97 + number) for number in numbers)


def question_and_answer(rng: np.random.Generator) -> tuple[str, str]:
    question = rng.integers(26, size=5)
    answer = [int(question[0])]
    while len(answer) < MAX_TOKENS:
        answer.append(int(rng.choice(26, p=TRANSITIONS[answer[-1]])))
    return letters(question), letters(answer)


def prompt_ids(
    tokenizer: PreTrainedTokenizerFast, question: str, *, generation_prompt: bool = True
) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=generation_prompt,
        tokenize=False,
    )
    return tokenizer(text)["input_ids"]


@dataclass
class Taught:
    """A model that has learnt the language, and prompts for it."""

    folder: Path
    tokenizer: PreTrainedTokenizerFast
    questions: list[str] = field(default_factory=list)

    @property
    def prompts(self) -> list[list[int]]:
        return [prompt_ids(self.tokenizer, question) for question in self.questions]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    folder = tmp_path_factory.mktemp("taught")
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "vocab_size": len(tokenizer)}
    model = Qwen3ForCausalLM(tiny_config("qwen3", tied=True, **sizes))
    rng, num_steps, rate = np.random.default_rng(1), 200, 6e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(num_steps):
        pairs = [question_and_answer(rng) for _ in range(16)]
        rows = [prompt_ids(tokenizer, q) + tokenizer(a)["input_ids"] for q, a in pairs]
        row = torch.tensor(rows)
        loss = model(input_ids=row, labels=row).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate * (1 - step / num_steps)
    assert loss.item() < 1.6, "the model did not learn, the prompt will not matter"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rng = np.random.default_rng(5)
    questions = [question_and_answer(rng)[0] for _ in range(NUM_PROMPTS)]
    return Taught(folder, tokenizer, questions)


def generate(
    taught: Taught,
    *,
    dtype: str = "float32",
    mode: str = "processed_logprobs",
    prompts: Sequence[Sequence[int]] | None = None,
    folder: Path | None = None,
    **sampling: Any,
) -> list[list[tuple[list[int], list[float]]]]:
    """Tokens and log-probabilities of the inference side, by prompt and sample."""
    engine = EmbeddedEngine(folder or taught.folder, dtype=dtype, logprobs_mode=mode)  # type: ignore[arg-type]
    try:
        futures = [
            engine.submit(
                GenerationRequest(
                    np.array(ids, dtype=np.int64),
                    SamplingParams(
                        n=NUM_GENERATIONS,
                        max_tokens=MAX_TOKENS,
                        seed=number,
                        ignore_eos=True,
                        **sampling,
                    ),
                )
            )
            for number, ids in enumerate(prompts or taught.prompts)
        ]
        return [
            [(sample.token_ids, sample.logprobs) for sample in future.result(120)]
            for future in futures
        ]
    finally:
        engine.close()


def batch_sums(
    taught: Taught,
    responses: list[list[tuple[list[int], list[float]]]],
    *,
    temperature: float = 1.0,
    dtype: str = "fp32",
    prompts: Sequence[Sequence[int]] | None = None,
    endpoints: Sequence[str] = (ONE,),
) -> MetricSums:
    """What the trainer's objective gathers over the batch's micro-batches.

    ``endpoints`` take turns with the prompts.
    """
    config = config_of(taught, temperature=temperature, dtype=dtype)
    model = load_policy_model(config.model)
    groups = [
        RolloutGroup(
            prompt=Prompt(number, np.array(ids, dtype=np.int32), "", None),
            completions=tuple(
                Completion(
                    token_ids=np.array(tokens, dtype=np.int32),
                    logprobs=np.array(logprobs, dtype=np.float32),
                    finish_reason="length",
                    version_spans=(),
                    endpoint=endpoints[number % len(endpoints)],
                    loss_mask=np.ones(len(tokens), dtype=bool),
                )
                for tokens, logprobs in samples
            ),
            scores=tuple(Score(float(i), {}) for i in range(len(samples))),
            policy_version="",
            dispatched_s=0.0,
            completed_s=0.0,
        )
        for number, (ids, samples) in enumerate(
            zip(prompts or taught.prompts, responses, strict=True)
        )
    ]
    rows = pack_groups(
        groups,
        [np.linspace(-1, 1, NUM_GENERATIONS, dtype=np.float32)] * len(groups),
        aggregation="token",
        max_tokens=MAX_TOKENS,
        mask_truncated=False,
        max_tokens_per_micro_batch=512,
    )
    assert len(rows) > 1
    total = MetricSums()
    for row in rows:
        with torch.no_grad():
            logprobs, entropy = run_micro_batch(model, row, temperature)
        tri = TriLogprobs(logprobs, entropy, FrozenLogprobs(None, None))
        total.add(policy_loss(tri, row, token_grpo())[1])
    return total


def config_of(
    taught: Taught, *, temperature: float = 1.0, dtype: str = "fp32", **rollout: Any
) -> Config:
    return validate_config(
        {
            "model": {"path": str(taught.folder), "dtype": dtype},
            "data": {"files": [str(taught.folder / "config.json")]},
            "rollout": {"temperature": temperature, **rollout},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
        }
    )


def verdict(
    taught: Taught,
    sums: MetricSums,
    caplog: pytest.LogCaptureFixture,
    *,
    temperature: float = 1.0,
    dtype: str = "fp32",
) -> tuple[str | None, str]:
    """The cause, and what was logged."""
    caplog.clear()
    watch = LogprobMismatch(config_of(taught, temperature=temperature, dtype=dtype))
    with caplog.at_level(logging.WARNING):
        cause = watch.look(sums.compared)
    return cause, caplog.text


def measured_temperature(said: str) -> float:
    return float(said.partition("taken at temperature ")[2].partition(",")[0])


# ---- no cause ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "server", "trainer"),
    [(1.0, "float32", "fp32"), (0.7, "float32", "fp32"), (1.0, "bfloat16", "bf16")],
)
def test_agreement_is_not_warned_of(
    taught: Taught,
    caplog: pytest.LogCaptureFixture,
    temperature: float,
    server: str,
    trainer: str,
) -> None:
    responses = generate(taught, dtype=server, temperature=temperature)
    sums = batch_sums(taught, responses, temperature=temperature, dtype=trainer)
    assert sums.sums["num_loss_tokens"] == NUM_PROMPTS * NUM_GENERATIONS * MAX_TOKENS
    assert verdict(taught, sums, caplog, temperature=temperature, dtype=trainer) == (None, "")
    seen = pattern(sums.compared[ONE])
    assert 0 < seen.mean_abs < (1e-5 if trainer == "fp32" else 3e-2)


def test_too_few_tokens_to_judge_and_none_at_all(
    taught: Taught, caplog: pytest.LogCaptureFixture
) -> None:
    y = torch.full((40,), -1.0)
    sums = compared(y, y.abs(), y - 3, torch.arange(40))
    assert verdict(taught, MetricSums(compared=sums), caplog) == (None, "")
    assert verdict(taught, MetricSums(), caplog) == (
        None,
        "",
    )  # every token of the batch was masked


# ---- each cause ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 0.7, 0.95, 1.3])
def test_raw_logprobs_are_named_as_a_temperature(
    taught: Taught, caplog: pytest.LogCaptureFixture, temperature: float
) -> None:
    responses = generate(taught, temperature=temperature, mode="raw_logprobs")
    sums = batch_sums(taught, responses, temperature=temperature)
    cause, said = verdict(taught, sums, caplog, temperature=temperature)
    assert cause == "temperature"
    assert measured_temperature(said) == pytest.approx(1.0, abs=0.03)
    assert "--logprobs-mode processed_logprobs" in said
    assert f"rollout.temperature is {temperature:g}" in said


@pytest.mark.parametrize(("served", "dtype"), [(0.6, "fp32"), (1.4, "fp32"), (0.8, "bf16")])
def test_another_temperature_is_measured(
    taught: Taught, caplog: pytest.LogCaptureFixture, served: float, dtype: str
) -> None:
    server = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    responses = generate(taught, temperature=served, dtype=server)
    cause, said = verdict(taught, batch_sums(taught, responses, dtype=dtype), caplog, dtype=dtype)
    assert cause == "temperature"
    assert measured_temperature(said) == pytest.approx(served, abs=0.03)


@pytest.mark.parametrize(
    "sampling",
    [{"top_p": 0.5}, {"top_p": 0.9}, {"top_p": 0.98}, {"top_k": 5}, {"min_p": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_truncated_sampling_is_named(
    taught: Taught, caplog: pytest.LogCaptureFixture, sampling: dict[str, float], dtype: str
) -> None:
    server = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    responses = generate(taught, dtype=server, **sampling)
    cause, said = verdict(taught, batch_sums(taught, responses, dtype=dtype), caplog, dtype=dtype)
    assert cause == "truncation" and "rollout.top_p=1" in said


def test_truncated_sampling_behind_raw_logprobs_is_named(
    taught: Taught, caplog: pytest.LogCaptureFixture
) -> None:
    """The two sides agree to 1e-6, and still the samples are not the policy's."""
    sums = batch_sums(taught, generate(taught, top_p=0.9, mode="raw_logprobs"))
    assert pattern(sums.compared[ONE]).mean_abs < 1e-5
    cause, said = verdict(taught, sums, caplog)
    assert cause == "sampling" and "--generation-config vllm" in said


def test_half_precision_server_is_named(taught: Taught, caplog: pytest.LogCaptureFixture) -> None:
    cause, said = verdict(taught, batch_sums(taught, generate(taught, dtype="bfloat16")), caplog)
    assert cause == "dtype" and "--dtype float32" in said


@pytest.mark.parametrize("other", ["no generation prompt", "last token missing"])
def test_another_prompt_is_named(
    taught: Taught, caplog: pytest.LogCaptureFixture, other: str
) -> None:
    if other == "last token missing":
        prompts = [ids[:-1] for ids in taught.prompts]
    else:
        prompts = [
            prompt_ids(taught.tokenizer, question, generation_prompt=False)
            for question in taught.questions
        ]
    sums = batch_sums(taught, generate(taught), prompts=prompts)
    cause, said = verdict(taught, sums, caplog)
    assert cause == "prompt" and "data.chat_template" in said


@pytest.mark.parametrize("scale", [0.2, None], ids=["drifted", "another model"])
def test_other_weights_are_named(
    taught: Taught, caplog: pytest.LogCaptureFixture, tmp_path: Path, scale: float | None
) -> None:
    model = Qwen3ForCausalLM.from_pretrained(taught.folder, dtype=torch.float32)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if scale is None:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.mul_(1 + scale * noise)
    model.save_pretrained(tmp_path)
    taught.tokenizer.save_pretrained(tmp_path)
    cause, said = verdict(taught, batch_sums(taught, generate(taught, folder=tmp_path)), caplog)
    assert cause == "weights" and "model.path" in said


# ---- once, and only what is news -----------------------------------------------------------------


def test_each_cause_is_said_once_per_run(taught: Taught, caplog: pytest.LogCaptureFixture) -> None:
    top_p = batch_sums(taught, generate(taught, top_p=0.8))
    half = batch_sums(taught, generate(taught, dtype="bfloat16"))
    watch = LogprobMismatch(config_of(taught))
    with caplog.at_level(logging.WARNING):
        causes = [watch.look(sums.compared) for sums in (top_p, half, top_p, half)]
    assert causes == ["truncation", "dtype"] * 2  # seen each time
    assert len(caplog.records) == 2


def test_truncation_that_was_asked_for_is_no_news(
    taught: Taught, caplog: pytest.LogCaptureFixture
) -> None:
    sums = batch_sums(taught, generate(taught, top_p=0.8))
    config = config_of(taught, top_p=0.8, allow_off_policy_sampling=True)
    with caplog.at_level(logging.WARNING):
        assert LogprobMismatch(config).look(sums.compared) == "truncation"
    assert not caplog.records


# ---- the sums ------------------------------------------------------------------------------------


def test_pattern_equals_an_independent_computation_whatever_the_partition() -> None:
    rng = np.random.default_rng(4)
    sequence_index = np.repeat(np.arange(30), rng.integers(1, 40, 30))
    n = len(sequence_index)
    y, h = -rng.exponential(1.0, n), rng.exponential(1.0, n)
    x = 0.9 * y + 0.2 * h + 0.05 * rng.normal(size=n)
    x[:7] = 0.0
    d = y - x
    design = np.stack([y, h, np.ones(n)], axis=1)
    solution, residual, *_ = np.linalg.lstsq(design, d, rcond=None)
    position = np.concatenate([np.arange(c) for c in np.bincount(sequence_index)])
    cut = int(np.searchsorted(sequence_index, 11))  # between two sequences, as rows are cut
    total = MetricSums()
    for part in (slice(0, cut), slice(cut, n)):
        columns = [torch.from_numpy(v[part]) for v in (y, h, x, sequence_index)]
        total.add(MetricSums(compared=compared(*columns)))
    assert pattern(total.compared[ONE]) == pytest.approx(
        (
            n,
            np.abs(d).mean(),
            solution[0],
            1 - residual[0] / n / min(d.var(), x.var()),
            (d[d > 0] ** 2).sum() / (d**2).sum(),
            ((x == 0) & (y < -1e-3)).mean(),
            np.abs(d[position < 4]).mean(),
            np.abs(d[position >= 4]).mean(),
            (y + h).mean() / math.sqrt(((y + h) ** 2).mean()),
        ),
        rel=1e-9,
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5])
def test_sums_of_very_few_tokens(num_tokens: int) -> None:
    y = torch.linspace(-2, -1, num_tokens)
    sums = compared(y, y.abs(), y - 0.5, torch.zeros(num_tokens, dtype=torch.int64))[ONE]
    assert (sums.num, sums.first) == (num_tokens, min(num_tokens, 4))
    assert sums.abs == pytest.approx(0.5 * num_tokens)
    assert sums.maximum == pytest.approx(0.5 if num_tokens else 0.0)


def test_sums_are_kept_by_endpoint_also_where_one_sent_what_is_not_finite() -> None:
    """Rows mix endpoints; equal to sums over the tokens of each."""
    rng = np.random.default_rng(5)
    sequence_index = torch.arange(6).repeat_interleave(torch.tensor([3, 1, 7, 2, 5, 4]))
    y, h = (torch.from_numpy(-rng.exponential(1.0, len(sequence_index))) for _ in range(2))
    x = y + torch.from_numpy(rng.normal(size=len(y)))
    endpoints = [ONE, TWO, ONE, "http://three", TWO, ONE]
    x[sequence_index == 3] = math.nan
    sums = compared(y, h, x, sequence_index, endpoints)
    assert list(sums) == sorted({*endpoints})
    for url in (ONE, TWO):
        of_url = [q for q, endpoint in enumerate(endpoints) if endpoint == url]
        mine = torch.isin(sequence_index, torch.tensor(of_url))
        expected = compared(y[mine], h[mine], x[mine], sequence_index[mine])[ONE]
        assert asdict(sums[url]) == pytest.approx(asdict(expected), rel=1e-12)
        assert sums[url].maximum == pytest.approx(float((y - x)[mine].abs().max()))
    assert math.isnan(sums["http://three"].abs) and sums["http://three"].num == 2


def test_the_endpoint_that_shows_a_cause_is_named(
    taught: Taught, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three, one samples at another temperature: over all tokens the pattern is blurred."""
    sound, hot = generate(taught), generate(taught, temperature=1.3)
    urls = [ONE, TWO, "http://three"]
    responses = [(hot if n % 3 == 1 else sound)[n] for n in range(NUM_PROMPTS)]
    cause, said = verdict(taught, batch_sums(taught, responses, endpoints=urls), caplog)
    assert cause == "temperature"
    assert f"({TWO}, mean difference" in said and ONE not in said
    assert measured_temperature(said) == pytest.approx(1.3, abs=0.05)


def compared(
    y: torch.Tensor,
    h: torch.Tensor,
    x: torch.Tensor,
    sequence_index: torch.Tensor,
    endpoints: Sequence[str] | None = None,
) -> dict[str, LogprobComparison]:
    """Each endpoint's sums over the tokens of a micro-batch."""
    urls = endpoints or [ONE] * (int(sequence_index.max()) + 1 if len(sequence_index) else 1)
    row = replace(dummy_micro_batch(), sequence_index=sequence_index, endpoints=tuple(urls))
    names, values = comparison_sums(y, h, x, row)
    rows = (LogprobComparison(*numbers) for numbers in values.tolist())
    return dict(zip(names, rows, strict=True))
