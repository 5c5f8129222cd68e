"""Every metric of a run: name, unit, meaning, equation, and the names that TRL and verl give it.

A peer's name stands here where its number means the same, as read in the sources of TRL 1.16 and
verl 0.9.1; ``remark`` says what still differs, or why a name that looks alike is none. ``<…>`` in
a name stands for what a run puts there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

Names = Literal["easyrl", "trl", "verl"]


@dataclass(frozen=True)
class Metric:
    """A metric, or a family of them."""

    name: str
    unit: str
    meaning: str
    equation: str = ""
    trl: str = ""
    verl: str = ""
    remark: str = ""

    @property
    def is_family(self) -> bool:
        return "<" in self.name


@dataclass(frozen=True)
class Section:
    """Metrics that are shown together."""

    title: str
    metrics: tuple[Metric, ...]


SECTIONS = (
    Section(
        "Rewards",
        (
            Metric(
                "reward/mean",
                "reward",
                "mean of the weighted sums over all responses of the batch",
                "1/N Σ rᵢ",
                trl="reward",
                verl="critic/score/mean",
                remark="verl's `critic/rewards/*` is less a KL in the reward, which is not in ours",
            ),
            Metric(
                "reward/std",
                "reward",
                "standard deviation over all responses of the batch",
                "√(Σ (rᵢ − r̄)² / (N − 1))",
                trl="reward_std",
            ),
            Metric(
                "reward/min",
                "reward",
                "the lowest of a response",
                "min rᵢ",
                verl="critic/score/min",
            ),
            Metric(
                "reward/max",
                "reward",
                "the highest of a response",
                "max rᵢ",
                verl="critic/score/max",
            ),
            Metric(
                "reward/group_std",
                "reward",
                "standard deviation inside a group, mean over the groups",
                "1/P Σₚ √(1/G Σ (rₚᵢ − r̄ₚ)²)",
                remark="TRL's `reward_std` is over all responses: `reward/std`",
            ),
            Metric(
                "reward/flat_groups",
                "share",
                "groups whose rewards are all equal",
                trl="frac_reward_zero_std",
                remark="TRL's is of the whole batch with `scale_rewards: batch`",
            ),
            Metric(
                "reward/failures", "count", "responses whose reward, or whose rollout, has failed"
            ),
            Metric(
                "reward/masked",
                "count",
                "of them, those that are left out of their groups and not trained "
                "(`environments[].on_failure: mask`); no reward above counts them",
            ),
            Metric(
                "reward/<reward>/mean",
                "reward",
                "of one reward, or a part of it, unweighted, over responses it has an opinion on",
                trl="rewards/<reward>/mean",
            ),
            Metric(
                "reward/<reward>/std",
                "reward",
                "its standard deviation over the same responses",
                "√(1/N Σ (rᵢ − r̄)²)",
                trl="rewards/<reward>/std",
                remark="TRL divides by N − 1",
            ),
        ),
    ),
    Section(
        "Responses",
        (
            Metric(
                "response/mean_tokens",
                "tokens",
                "mean length",
                trl="completions/mean_length",
                verl="response_length/mean",
            ),
            Metric(
                "response/min_tokens",
                "tokens",
                "the shortest",
                trl="completions/min_length",
                verl="response_length/min",
            ),
            Metric(
                "response/max_tokens",
                "tokens",
                "the longest",
                trl="completions/max_length",
                verl="response_length/max",
            ),
            Metric(
                "response/truncated",
                "share",
                "responses that were cut off at `rollout.max_tokens`, and episodes that "
                "`max_turns` refused a turn",
                trl="completions/clipped_ratio",
                verl="response_length/clip_ratio",
                remark="TRL also counts one that a stop text ended, verl one whose end is "
                "exactly its last token",
            ),
            Metric("response/repetition", "share", "n-grams of a response that it has had before"),
        ),
    ),
    Section(
        "Policy",
        (
            Metric(
                "loss",
                "",
                "the recipe's loss: its sum over the trained tokens by the denominator",
                "Σ lossₜ / D",
                trl="loss",
                remark="verl's `actor/pg_loss` is without KL and entropy",
            ),
            Metric(
                "grad_norm",
                "",
                "norm of the gradient before the clip",
                "‖g‖₂",
                trl="grad_norm",
                verl="actor/grad_norm",
            ),
            Metric("learning_rate", "", "of the step", trl="learning_rate", verl="actor/lr"),
            Metric("step_skipped", "count", "steps without a finite gradient or anything to train"),
            Metric(
                "policy/entropy",
                "nats",
                "of the policy's distribution, mean over the trained tokens",
                "−Σᵥ π(v) log π(v)",
                trl="entropy",
                verl="actor/entropy",
                remark="verl's is averaged as `loss_agg_mode` says: the same with `token-mean`",
            ),
            Metric(
                "policy/kl",
                "nats",
                "to the reference, mean over the trained tokens",
                "k3: e⁻ᵈ − 1 + d, d = log π − log π_ref",
                trl="kl",
                verl="actor/kl_loss",
                remark="verl's by `kl_loss_type` and `loss_agg_mode`: the same with `low_var_kl` "
                "and `token-mean`; TRL's is times the ratio with `use_bias_correction_kl`",
            ),
            Metric("policy/ratio", "", "mean ratio to the old policy", "ρ = π / π_old"),
            Metric("policy/ratio_max", "", "the largest ratio of a token"),
            Metric(
                "policy/clip_low",
                "share",
                "tokens at which the lower bound acts",
                "ρ < 1 − ε_low, A < 0",
                trl="clip_ratio/low_mean",
                remark="of `cispo` whatever the advantage",
            ),
            Metric(
                "policy/clip_high",
                "share",
                "tokens at which the upper bound acts",
                "ρ > 1 + ε_high, A > 0",
                trl="clip_ratio/high_mean",
                remark="of `cispo` whatever the advantage",
            ),
            Metric(
                "policy/clipped",
                "share",
                "tokens at which either bound acts",
                trl="clip_ratio/region_mean",
                verl="actor/pg_clipfrac",
            ),
            Metric(
                "policy/clip_delta",
                "share",
                "tokens at which `recipe.delta` acts (two_sided)",
                "ρ > δ, A < 0",
            ),
            Metric(
                "policy/clip_dual",
                "share",
                "tokens at which `recipe.clip_ratio_c` acts (dual_clip)",
                "ρ > c, A < 0",
                verl="actor/pg_clipfrac_lower",
            ),
            Metric(
                "policy/entropy_coef",
                "",
                "coefficient of the entropy bonus, where it is controlled",
                trl="entropy_coef",
                remark="TRL's is the one of the step after it",
            ),
            Metric(
                "policy/importance_ratio",
                "",
                "trainer's by inference engine's probability, mean over tokens",
                "π_old / π_inference",
                remark="TRL's `sampling/importance_sampling_ratio/*` are behind its bounds",
            ),
            Metric("policy/importance_capped", "share", "tokens whose importance ratio was cut"),
            Metric(
                "policy/importance_masked", "share", "tokens dropped for their importance ratio"
            ),
            Metric(
                "policy/logprob_diff",
                "nats",
                "between trainer and inference engine, mean over the first update's tokens",
                "|log π_old − log π_inference|",
                trl="sampling/sampling_logp_difference/mean",
                remark="verl's `training/rollout_probs_diff_mean` is of probabilities",
            ),
            Metric(
                "policy/logprob_diff_max",
                "nats",
                "the largest of a token",
                trl="sampling/sampling_logp_difference/max",
            ),
            Metric(
                "policy/inference_kl",
                "nats",
                "from the inference engine to the trainer, mean over the first update's tokens",
                "eᵈ − 1 − d, d = log π_old − log π_inference",
                verl="rollout_corr/k3_kl",
            ),
            Metric("policy/teacher_kl", "nats", "to the teacher (distillation)"),
            Metric("policy/accuracy", "share", "pairs whose chosen response has the larger margin"),
            Metric("policy/margin", "", "chosen less rejected implicit reward, mean over pairs"),
            Metric("policy/chosen_reward", "", "implicit reward of the chosen response"),
            Metric("policy/rejected_reward", "", "implicit reward of the rejected response"),
            Metric("policy/wanted_margin", "", "the margin that the rewards ask for (rpo)"),
            Metric("policy/<metric>", "", "what a recipe of your own counts"),
            Metric("update<update>/<metric>", "", "one update's own, of a batch with several"),
        ),
    ),
    Section(
        "Critic",
        (
            Metric(
                "critic/loss",
                "",
                "of the values",
                "Σ lossₜ / D",
                verl="critic/vf_loss",
                remark="verl's has a factor 0.5, here `recipe.value_coef`",
            ),
            Metric(
                "critic/explained_variance",
                "",
                "how much of the returns' variance the values explain",
                "1 − Var(R − V) / Var(R)",
                verl="critic/vf_explained_var",
                remark="verl adds 1e-5 to Var(R)",
            ),
            Metric("critic/value_mean", "reward", "mean value", verl="critic/values/mean"),
            Metric("critic/return_mean", "reward", "mean return", verl="critic/returns/mean"),
            Metric(
                "critic/clip_fraction",
                "share",
                "tokens whose value is beyond `recipe.value_clip`",
                verl="critic/vf_clipfrac",
            ),
            Metric("critic/grad_norm", "", "before the clip", verl="critic/grad_norm"),
            Metric("critic/learning_rate", "", "of the step", verl="critic/lr"),
            Metric("critic/<metric>", "", "what a recipe of your own counts"),
        ),
    ),
    Section(
        "Batch",
        (
            Metric(
                "epoch",
                "epochs",
                "passes through the prompts that are drawn, the refused ones too",
                "position / prompts",
                trl="epoch",
                remark="verl's `training/epoch` is a whole number",
            ),
            Metric("batch/groups", "count", "groups that were trained"),
            Metric("batch/groups_drawn", "count", "prompts that were drawn for it"),
            Metric("batch/groups_rejected", "count", "groups that the recipe did not accept"),
            Metric("batch/groups_excluded", "count", "prompts that could not be answered"),
            Metric("batch/groups_excluded_refused", "count", "of these, refused by endpoints"),
            Metric("batch/groups_excluded_too_long", "count", "of these, longer than the context"),
            Metric("batch/groups_without_signal", "count", "groups with zero advantages, left out"),
            Metric(
                "batch/groups_recovered", "count", "groups from the journal of an earlier attempt"
            ),
            Metric("batch/micro_batches", "count", "packed rows"),
            Metric("batch/look_ahead_tokens", "tokens", "that frozen models saw before their row"),
            Metric("batch/denominator", "", "what the loss's sum is divided by"),
            Metric("balance/groups_moved", "count", "groups that another rank trained"),
            Metric("balance/bytes_moved", "bytes", "of these groups"),
            Metric("tokens/prompt", "tokens", "of prompts, each once for its group"),
            Metric("tokens/response", "tokens", "of responses"),
            Metric(
                "tokens/sequences",
                "tokens",
                "of the trained sequences: all responses, and a prompt for each of them",
                "Σ over groups (G · |prompt| + Σᵢ |responseᵢ|)",
                verl="perf/total_num_tokens",
                remark="TRL's `num_tokens` is the sum since the start",
            ),
            Metric("tokens/compared", "tokens", "trained; `policy/*` are means over them"),
            Metric(
                "tokens/packed",
                "tokens",
                "that went through the trainer, prompts once for a group",
                remark="TRL's `num_tokens` and verl's `perf/total_num_tokens` count a prompt for "
                "each response: `tokens/sequences`",
            ),
        ),
    ),
    Section(
        "Throughput and memory",
        (
            Metric(
                "throughput/tokens_per_s",
                "tokens/s",
                "through the trainer",
                "tokens/packed / time/step_s",
            ),
            Metric(
                "throughput/tokens_per_s_per_device",
                "tokens/s",
                "the same by the number of devices",
                "throughput/tokens_per_s / throughput/devices",
                remark="verl's `perf/throughput` counts a prompt for each response: "
                "`throughput/tpspd`",
            ),
            Metric(
                "throughput/tpspd",
                "tokens/s",
                "tokens trained per second and device, as the paper of periodic asynchrony has it "
                "(§6): of the sequences, unshared, generated and trained within the step",
                "tokens/sequences / (time/step_s · throughput/devices)",
                verl="perf/throughput",
                remark="with what a resumed run has generated before, too",
            ),
            Metric(
                "throughput/devices",
                "count",
                "of training and inference together: ranks, and those of each endpoint "
                "(`inference.devices_per_endpoint`)",
            ),
            Metric(
                "throughput/generated_tokens_per_s",
                "tokens/s",
                "response tokens from the first request until the last group was scored",
            ),
            Metric(
                "memory/device_peak_gib",
                "GiB",
                "the most that tensors took on a device since the start, of the rank with most",
                verl="perf/max_memory_allocated_gb",
                remark="with a split model the first rank of each copy is looked at",
            ),
            Metric(
                "memory/host_peak_gib",
                "GiB",
                "the most that a process had resident since the start, of the rank with most",
                remark="verl's `perf/cpu_memory_used_gb` is the machine's",
            ),
            Metric(
                "memory/<phase>/device_peak_gib",
                "GiB",
                "the most that tensors took on a device while the trainer's thread was in a phase "
                "(`time/phase_<phase>_s`) of the batch, of the rank with most",
                remark="what is counted and what it costs: [memory](memory.md#peaks-by-phase)",
            ),
            Metric(
                "memory/<phase>/host_peak_gib",
                "GiB",
                "the most that the trainer's process had resident then, of the rank with most",
            ),
            Metric(
                "memory/<phase>/shm_peak_gib",
                "GiB",
                "the most that all files in `/dev/shm` took then, also those of others (`df`)",
            ),
        ),
    ),
    Section(
        "Times",
        (
            Metric(
                "time/step_s",
                "s",
                "the whole batch, to the end of its sync",
                trl="step_time",
                verl="timing_s/step",
                remark="TRL's is without the optimizer; all of ours: "
                "[what they measure](architecture.md#what-time-metrics-measure)",
            ),
            Metric("time/batch_s", "s", "from the first request to the last optimizer step"),
            Metric("time/wait_s", "s", "waiting for groups with an idle device"),
            Metric("time/first_group_wait_s", "s", "of these, for the first one"),
            Metric("time/first_group_s", "s", "until a first group was complete"),
            Metric("time/median_group_s", "s", "until half of them were"),
            Metric("time/last_group_s", "s", "until all were"),
            Metric("time/look_ahead_s", "s", "frozen models, while no group was ready"),
            Metric("time/train_s", "s", "forward and backward"),
            Metric("time/optimizer_s", "s", "clip and optimizer step"),
            Metric("time/evaluation_wait_s", "s", "waiting for the evaluation beside the batch"),
            Metric("time/evaluation_s", "s", "from its first request to its last scored response"),
            Metric(
                "time/reward_s",
                "s",
                "a reward call of training groups ran or waited for a worker; side by side once",
            ),
            Metric("time/inference_idle_s", "s", "endpoints without a request"),
            Metric("time/sync_s", "s", "weights to all endpoints, with proof"),
            Metric("time/probe_s", "s", "of it, asking for changed weights to show"),
            Metric("time/proof_s", "s", "of it, proof of the served bits"),
            Metric("time/canary_s", "s", "sampled log-probabilities against the trainer's"),
            Metric("time/journal_s", "s", "the journal, written and read back"),
            Metric("time/certificate_s", "s", "the certificate's line, and its check"),
            Metric("time/samples_s", "s", "choosing and writing samples"),
            Metric(
                "time/timeline_s", "s", "processor time of writing the timeline, beside the run"
            ),
            Metric("time/phase_<phase>_s", "s", "the first rank's trainer thread, by phase"),
        ),
    ),
    Section(
        "Environments ([episodes](environments.md))",
        (
            Metric(
                "environment/<environment>/episodes",
                "count",
                "to be trained that ended since the report before, as are all of these",
            ),
            Metric("environment/<environment>/failures", "count", "of them, those that failed"),
            Metric(
                "environment/<environment>/truncated",
                "count",
                "of them, those that were refused a turn by max_turns, or whose last was cut off",
            ),
            Metric("environment/<environment>/turns", "count", "of an episode, mean"),
            Metric("environment/<environment>/branches", "count", "of an episode, mean"),
            Metric("environment/<environment>/tokens", "tokens", "sampled for an episode, mean"),
            Metric("environment/<environment>/episode_s", "s", "of an episode, mean"),
            Metric(
                "environment/<environment>/environment_s",
                "s",
                "of these, in which nothing was asked of the model: the environment, its tools",
            ),
            Metric("environment/<environment>/tool_calls", "count", "of an episode, mean"),
            Metric(
                "environment/<environment>/tool_failures",
                "count",
                "calls that the model was told an error of",
            ),
            Metric("environment/<environment>/tool_s", "s", "of a call, mean"),
            Metric(
                "environment/<environment>/hung_threads",
                "count",
                "threads of its hosts, now, whose calls did not end in their time; none is not "
                "reported",
            ),
            Metric(
                "environment/<environment>/held_out/<metric>",
                "",
                "the same of episodes of held-out prompts, beside their evaluation's figures",
            ),
        ),
    ),
    Section(
        "Where a batch's time went ([timeline](timeline.md))",
        (
            Metric(
                "time/accounted_batch",
                "batch",
                "of which these are: the newest one whose spans were all written",
            ),
            Metric("time/trainer_training_share", "share", "ranks train or look ahead, mean"),
            Metric("time/trainer_waiting_share", "share", "ranks wait for groups, mean"),
            Metric("time/unexplained_share", "share", "ranks are outside of all phases, mean"),
            Metric(
                "time/inference_generating_share",
                "share",
                "endpoints generate, and more requests of the batch are to come or all its places "
                "are taken, mean",
            ),
            Metric(
                "time/inference_tail_share",
                "share",
                "endpoints generate the last ones, and places stay empty, mean",
            ),
            Metric(
                "time/inference_failed_share",
                "share",
                "endpoints fail, or are set aside for it, and nothing else runs, mean",
            ),
            Metric(
                "time/inference_idle_share",
                "share",
                "endpoints have nothing to do, for a reason that is seen, mean",
            ),
            Metric(
                "time/inference_others_tail_share",
                "share",
                "of these: the endpoint is done, and others still generate, mean",
            ),
            Metric(
                "time/inference_unexplained_share",
                "share",
                "endpoints have nothing to do, and no reason is seen, mean",
            ),
            Metric(
                "time/spans_left_out",
                "count",
                "requests, rewards and groups beyond the timeline's bound",
            ),
            Metric(
                "time/startup_sync_s",
                "s",
                "until training begins in a synchronous run, by the times of the prompts",
                "T_sync = Σₖ maxᵢ t(k, i), equation (12) of the paper; k: inference batches",
            ),
            Metric(
                "time/startup_async_s",
                "s",
                "the same in an asynchronous run",
                "T_async = minᵢ t(1, i), equation (13)",
            ),
        ),
    ),
    Section(
        "Weights, evaluation, alarms",
        (
            Metric("sync/endpoints", "count", "endpoints that have the weights, proved"),
            Metric("sync/broadcast", "count", "of them, those that a broadcast reached"),
            Metric("sync/bytes", "bytes", "of the weights"),
            Metric("sync/canary_mean", "nats", "|Δ log-prob| of the worst endpoint's canary"),
            Metric("sync/canary_max", "nats", "the largest of a token"),
            Metric(
                "eval/accuracy",
                "share",
                "samples whose first reward, episodes whose reward reaches the threshold",
            ),
            Metric("eval/avg@<samples>", "share", "the same, by the number of samples"),
            Metric(
                "eval/pass@<k>",
                "share",
                "prompts with a correct one among k samples",
                "1 − C(n − c, k) / C(n, k)",
            ),
            Metric("eval/excluded", "count", "held-out prompts that could not be answered"),
            Metric("eval/<set>/accuracy", "share", "`eval/accuracy` of a set with a name"),
            Metric("eval/<set>/avg@<samples>", "share", "the same, by the number of samples"),
            Metric("eval/<set>/pass@<k>", "share", "its prompts with a correct one among k"),
            Metric("eval/<set>/excluded", "count", "of them, those that could not be answered"),
            Metric("eval/loss", "", "on held-out records"),
            Metric("eval/<metric>", "", "of held-out records, as `policy/<metric>`"),
            Metric("alarm/<alarm>", "0 or 1", "whether the [alarm](alarms.md) is raised"),
        ),
    ),
)
METRICS = tuple(metric for section in SECTIONS for metric in section.metrics)
_EXACT = {metric.name: metric for metric in METRICS if not metric.is_family}


@cache
def declared(name: str) -> Metric | None:
    """The metric of that name, or the first family that it fits."""
    if name in _EXACT:
        return _EXACT[name]
    families = (metric for metric in METRICS if metric.is_family)
    return next((metric for metric in families if _pattern(metric).fullmatch(name)), None)


def accuracies(metrics: Iterable[Mapping[str, float]]) -> list[str]:
    """Names of the held-out accuracy of each set that ``metrics`` have figures of."""
    of_sets = re.compile(r"eval/([^/]+/)?accuracy")
    return sorted({name for row in metrics for name in row if of_sets.fullmatch(name)})


def accuracy_label(name: str) -> str:
    """What a chart calls a held-out accuracy: by its set, if that has a name."""
    _, *of_set, _ = name.split("/")
    return " ".join([*of_set, "held-out accuracy"])


@cache
def name_for(name: str, names: Names) -> str:
    """What a peer calls a metric; ours where it has none that means the same."""
    metric = declared(name)
    if names == "easyrl" or metric is None:
        return name
    theirs = metric.trl if names == "trl" else metric.verl
    if theirs and metric.is_family:
        found = _pattern(metric).fullmatch(name)
        assert found is not None
        for placeholder, value in found.groupdict().items():
            theirs = theirs.replace(f"<{placeholder}>", value)
    return theirs or name


def renamed(metrics: Mapping[str, float], names: Names) -> dict[str, float]:
    """``metrics`` by the names of a peer."""
    return {name_for(name, names): value for name, value in metrics.items()}


@cache
def _pattern(metric: Metric) -> re.Pattern[str]:
    parts = re.split(r"<(\w+)>", metric.name)
    named = (f"(?P<{part}>.+)" if i % 2 else re.escape(part) for i, part in enumerate(parts))
    return re.compile("".join(named))
