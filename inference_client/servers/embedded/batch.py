"""The running batch: sequences that join and leave independently, one token each per step.

Shape legend: B running sequences, S record slots, T recorded tokens, V vocabulary, K stop tokens.

All per-sequence state lies in tensors with a row per running sequence; a finished one's row is
taken by the last, so that finished sequences cost nothing. What was generated lies in records that
do not move. Keys and values of a prompt are held once for all that have it where that pays; a slot
then holds what comes behind them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from easyrl.inference_client.servers.embedded.attention import SharedPrompts
from easyrl.inference_client.servers.embedded.cache import Prefilled, SlotCache
from easyrl.inference_client.servers.embedded.decode_forward import DecodeForward
from easyrl.inference_client.servers.embedded.decode_masks import DecodeMasks
from easyrl.inference_client.servers.embedded.prefill import Prefill
from easyrl.inference_client.servers.embedded.prompts import PromptStore
from easyrl.inference_client.servers.embedded.requests import EngineStats, Sequence, TopLogprobs
from easyrl.inference_client.servers.embedded.rows import Records, RowTable, TokenCounts
from easyrl.inference_client.servers.embedded.sampling import (
    Feature,
    apply_min_p,
    apply_top_k_top_p,
    forbid_early_stop,
    inverse_cdf,
    penalize,
)
from easyrl.inference_client.servers.embedded.sharing_probe import takes_shared_prompts

PREFILL_TOKENS = 8192  # prompts prefilled in one forward hold at most so many, padding included
PREFILL_TOKENS_BESIDE_DECODING = 1024  # running sequences wait no longer for one forward


class RunningBatch:
    """Up to ``max_num_seqs`` sequences in the middle of their generation.

    ``decode`` computes decode steps in the place of the model's modules.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_num_seqs: int,
        max_model_len: int,
        raw_logprobs: bool,
        masks: DecodeMasks | None = None,
        decode: DecodeForward | None = None,
    ) -> None:
        self.sequences: list[Sequence] = []  # by row
        self.stats = EngineStats()
        self._model = model
        self._decode = decode
        self._device, config = model.device, model.config.get_text_config()
        self._zero = torch.zeros((), dtype=model.dtype, device=model.device)
        self._max_num_seqs = max_num_seqs
        self._raw_logprobs = raw_logprobs
        self._cache = SlotCache(config.num_hidden_layers, max_num_seqs, max_model_len, self._device)
        self._rows = RowTable(max_num_seqs, self._device)
        self._records = Records(max_num_seqs, self._device)
        self._penalized = TokenCounts(max_num_seqs, int(config.vocab_size), self._device)
        self._feature_counts: Counter[Feature] = Counter()
        self._masks = masks or DecodeMasks()
        # one sequence alone has nothing to share: its prompt stays in its slot; a prompt
        # that is read for all of its samples at once has no place for a window of each
        self._shares_prompts = (
            max_num_seqs > 1
            and self._masks.window is None
            and takes_shared_prompts(model, max_model_len)
        )
        self._prefill = Prefill(model)
        self._prompts = PromptStore(self._cache, self._shares_prompts)
        self._shared_prompts = SharedPrompts.of([], self._device)  # of the current rows
        self._longest = 0  # no running sequence holds more positions in its slot
        self._most_generated = 0  # and none has generated more tokens

    @property
    def num_admitted(self) -> int:
        """Sequences that run or whose prompts are being computed."""
        return len(self.sequences) + len(self._prefill)

    @property
    def num_free(self) -> int:
        return self._max_num_seqs - self.num_admitted

    def forget_prefixes(self) -> None:
        """What was computed of prompts until now is not used for new sequences."""
        self._prompts.forget()
        self._prefill.restart()

    def stamp(self, version: str) -> None:
        """The admitted sequences' next tokens are made by ``version``."""
        generated = self._rows.num_generated[: len(self.sequences)].tolist()
        for sequence, start in zip(self.sequences, generated, strict=True):
            sequence.stamp(version, start)
        for sequence in self._prefill.sequences:
            sequence.stamp(version, 0)

    def add(self, sequences: list[Sequence], version: str) -> None:
        """Admits them: they run once their prompts are computed; the caller checks ``num_free``.

        Each distinct prompt is computed once, unless it is held already.
        """
        known: dict[bytes, list[Sequence]] = {}
        for sequence in sequences:
            sequence.stamp(version, 0)
            if len(sequence.prompt) == 1 or sequence.prompt_key in self._prompts:
                known.setdefault(sequence.prompt_key, []).append(sequence)
            else:
                self._prefill.add(sequence)
        if known:
            self._start([(group, None) for group in known.values()])

    def _start(self, groups: list[tuple[list[Sequence], Prefilled | None]]) -> None:
        """Lets sequences run, a group for each prompt; with its states unless they are held."""
        started: list[Sequence] = []
        held: list[int] = []  # positions of each slot
        filled: dict[int, list[tuple[int, Prefilled]]] = {}  # slots and what of, by layers' id
        samples = [group for group, _ in groups]
        num_rows = len(self.sequences) + sum(map(len, samples))
        longest = self._prompts.longest_in_slots(samples, self._longest, num_rows)
        for group, prefilled in groups:
            has_states = len(group[0].prompt) > 1
            in_slots = self._prompts.start(group, prefilled, longest) if has_states else None
            for sequence in group:
                sequence.row = len(self.sequences) + len(started)
                started.append(sequence)
                held.append(0 if in_slots is None else in_slots.length)
                if in_slots is not None:
                    filled.setdefault(id(in_slots.layers), []).append((sequence.row, in_slots))
        first = len(self.sequences)
        self.sequences += started
        self._records.open(started)
        for sequence in started:
            if Feature.PENALTIES in sequence.features:
                self._penalized.open(sequence)
            self._feature_counts.update(sequence.features)
        self._rows.set(started, first, held)
        self._longest = max(self._longest, *held)
        self._cache.ensure(len(self.sequences), self._longest + 1)
        for together in filled.values():
            rows = self._index([row for row, _ in together])
            source = self._index([states.index for _, states in together])
            length = max(states.length for _, states in together)
            self._cache.fill(rows, source, together[0][1].layers, length)
        self._find_shared_prompts()

    def step(self) -> list[Sequence]:
        """One forward of prefill, one token for all that run; returns those that are finished."""
        if self._prefill:
            self._run_prefill()
        if not self.sequences:
            return []
        num_rows = len(self.sequences)
        rows = self._rows
        self._longest += 1
        self._cache.ensure(num_rows, self._longest)
        self._most_generated += 1
        self._records.ensure(self._most_generated, self.sequences)
        logits = self._forward(num_rows)
        tokens, logprobs = self._sample(logits, num_rows)
        self._records.write(rows, num_rows, tokens, logprobs)
        if self._feature_counts[Feature.PENALTIES]:
            self._penalized.count(rows.record[:num_rows], tokens)
        is_done = rows.advance(num_rows, tokens)
        self.stats.decode_steps += 1
        self.stats.generated_tokens += num_rows
        return self._collect(is_done, tokens)

    def _run_prefill(self) -> None:
        """Whatever decodes waits for a bounded number of tokens only."""
        limit = PREFILL_TOKENS_BESIDE_DECODING if self.sequences else PREFILL_TOKENS
        done = self._prefill.run(limit)
        self.stats.prefilled_tokens = self._prefill.num_tokens
        if done:
            self._start([*done])

    def _forward(self, num_rows: int) -> Tensor:
        """Logits of every running sequence's next token, float32 [B, V]."""
        positions = self._rows.slot_position[:num_rows]
        self._cache.begin_step(positions, self._longest)
        # additive and of the model's dtype: made once here instead of from a bool in every layer
        mask: Any = self._masks.of_step(self._zero, self._cache.unwritten(positions), positions)
        newest, position = self._rows.newest[:num_rows], self._rows.position[:num_rows]
        if self._decode is not None:
            shared = self._shared_prompts
            return self._decode(newest, position, mask, self._cache, shared).float()
        output = self._model(
            input_ids=newest[:, None],
            position_ids=position[:, None],
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            **({"shared_prompts": self._shared_prompts} if self._shares_prompts else {}),
        )
        return output.logits[:, 0].float()

    def _sample(self, logits: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Next tokens int64 [B] and their log-probabilities float32 [B]."""
        rows, asked = self._rows, self._feature_counts
        reported = logits.log_softmax(-1) if self._raw_logprobs else None
        if asked[Feature.PENALTIES]:
            counts, in_prompt = self._penalized.of(rows.record[:num_rows])
            logits = penalize(logits, counts, in_prompt, rows.penalties[:num_rows])
        if asked[Feature.MIN_TOKENS]:
            too_early = rows.num_generated[:num_rows] < rows.min_tokens[:num_rows]
            logits = forbid_early_stop(logits, rows.early_ids[:num_rows], too_early)
        greedy = logits.argmax(-1) if asked[Feature.GREEDY] else None
        if asked[Feature.TEMPERATURE]:
            logits = logits / rows.temperature[:num_rows, None]
        if asked[Feature.MIN_P]:
            logits = apply_min_p(logits, rows.min_p[:num_rows])
        if asked[Feature.TOP_K_TOP_P]:
            logits = apply_top_k_top_p(logits, rows.top_k[:num_rows], rows.top_p[:num_rows])
        processed = logits.log_softmax(-1)
        tokens = inverse_cdf(processed.exp(), self._records.uniform(rows, num_rows))
        if greedy is not None:
            tokens = torch.where(rows.is_greedy[:num_rows] > 0, greedy, tokens)
        reported = processed if reported is None else reported
        logprobs = reported.gather(1, tokens[:, None]).squeeze(1)
        if asked[Feature.TOP_LOGPROBS]:
            self._keep_alternatives(reported, tokens, logprobs)
        return tokens, logprobs

    def _keep_alternatives(self, reported: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        for sequence in self.sequences:
            if Feature.TOP_LOGPROBS not in sequence.features:
                continue
            row = reported[sequence.row]
            count = sequence.params.logprobs or 0
            best = row.topk(len(row) if count < 0 else min(count, len(row)))
            rank = int((row > logprobs[sequence.row]).sum()) + 1
            alternatives = TopLogprobs(best.indices.tolist(), best.values.tolist(), rank)
            sequence.top_logprobs.append(alternatives)

    def _collect(self, is_done: Tensor, tokens: Tensor) -> list[Sequence]:
        """Notes why each finished sequence is, and closes them."""
        finished: list[Sequence] = []
        for row in is_done.nonzero().squeeze(1).tolist():
            sequence = self.sequences[row]
            token = int(tokens[row])
            is_stop = token in sequence.stop_token_ids
            sequence.finish_reason = "stop" if is_stop else "length"
            if is_stop and token != sequence.eos_token_id:
                sequence.stop_reason = token
            finished.append(sequence)
        if self._feature_counts[Feature.STOP_STRINGS]:
            finished += self._collect_stop_strings(tokens.tolist())
        if finished:
            self.remove(finished)
        return finished

    def _collect_stop_strings(self, tokens: list[int]) -> list[Sequence]:
        finished = []
        for sequence, token in zip(self.sequences, tokens, strict=True):
            if sequence.stop_strings is None or token in sequence.stop_token_ids:
                continue
            if (found := sequence.stop_strings.append(token)) is not None:
                if sequence.finish_reason is None:
                    finished.append(sequence)
                sequence.finish_reason, sequence.stop_reason = "stop", found
        return finished

    def remove(self, finished: list[Sequence]) -> None:
        """Ends admitted sequences now, with the tokens that they have."""
        self._prefill.remove({sequence for sequence in finished if sequence.row < 0})
        finished = [sequence for sequence in finished if sequence.row >= 0]
        generated = self._rows.num_generated[: len(self.sequences)].tolist()
        self._records.close(finished, [generated[sequence.row] for sequence in finished])
        self._prompts.end(finished)
        for sequence in finished:
            self._feature_counts.subtract(sequence.features)
        num_left = len(self.sequences) - len(finished)
        freed = {sequence.row for sequence in finished}
        targets = [row for row in freed if row < num_left]  # the last rows move into these
        sources = [row for row in range(num_left, len(self.sequences)) if row not in freed]
        if targets:
            target, source = self._index(targets), self._index(sources)
            self._cache.copy(target, source, self._longest)
            self._rows.copy(target, source)
            for new, old in zip(targets, sources, strict=True):
                self.sequences[new] = self.sequences[old]
                self.sequences[new].row = new
        del self.sequences[num_left:]
        for sequence in finished:
            sequence.row = -1
        rows = self._rows
        self._longest = int(rows.slot_position[:num_left].max()) if num_left else 0
        self._most_generated = int(rows.num_generated[:num_left].max()) if num_left else 0
        self._find_shared_prompts()

    def _find_shared_prompts(self) -> None:
        apart = [self._prompts.read_apart(sequence) for sequence in self.sequences]
        self._shared_prompts = SharedPrompts.of(apart, self._device)

    def _index(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=self._device)
