"""Tensors with a row or slot per running sequence: what the decode step reads and writes.

Shape legend: B running sequences, K stop tokens, T recorded tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from easyrl.inference_client.servers.embedded.requests import Sequence
from easyrl.inference_client.servers.embedded.sampling import SamplingParams, uniform_numbers

PADDING = -1  # in the table of stop tokens


class RowTable:
    """Per running sequence, what the decode step reads and writes; a row per batch row."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._floats = torch.zeros(7, max_num_seqs, device=device)
        self._ints = torch.zeros(8, max_num_seqs, dtype=torch.int64, device=device)
        self.stop_ids = torch.full((max_num_seqs, 1), PADDING, device=device)
        self.early_ids = torch.full((max_num_seqs, 1), PADDING, device=device)
        self.temperature, self.top_p, self.min_p = self._floats[:3]
        self.penalties = self._floats[3:6].t()  # repetition, frequency, presence
        self.is_greedy = self._floats[6]
        self._counters = self._ints[:3]  # one more with every token
        self.position, self.slot_position, self.num_generated = self._counters
        self.newest, self.record, self.max_tokens, self.min_tokens, self.top_k = self._ints[3:]

    def set(self, sequences: list[Sequence], first: int, held: list[int]) -> None:
        """Sequences that start, in the rows from ``first`` on; ``held`` positions of each slot."""
        rows = slice(first, first + len(sequences))
        of_params = {id(params): _floats(params) for params in (s.params for s in sequences)}
        floats = [of_params[id(sequence.params)] for sequence in sequences]
        ints = [_ints(s, count) for s, count in zip(sequences, held, strict=True)]
        # by numpy: torch takes four times as long for lists of lists
        self._floats[:, rows] = torch.from_numpy(np.array(floats, dtype=np.float32).T)
        self._ints[:, rows] = torch.from_numpy(np.array(ints, dtype=np.int64).T)
        self.stop_ids = _with_rows(self.stop_ids, rows, [s.stop_token_ids for s in sequences])
        self.early_ids = _with_rows(self.early_ids, rows, [s.forbidden_early for s in sequences])

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._floats[:, target] = self._floats[:, source]
        self._ints[:, target] = self._ints[:, source]
        self.stop_ids[target] = self.stop_ids[source]
        self.early_ids[target] = self.early_ids[source]

    def advance(self, num_rows: int, tokens: Tensor) -> Tensor:
        """Takes the new tokens; bool [B], which sequences are finished by token or length."""
        self.newest[:num_rows] = tokens
        self._counters[:, :num_rows] += 1
        stopped = (tokens[:, None] == self.stop_ids[:num_rows]).any(1)
        return stopped | (self.num_generated[:num_rows] >= self.max_tokens[:num_rows])


class Records:
    """What was generated, and the uniform numbers for what will be; a slot per running sequence."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._free = list(range(max_num_seqs))
        self._tokens = torch.zeros(max_num_seqs, 64, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(max_num_seqs, 64, device=device)
        self._uniforms = torch.zeros(max_num_seqs, 64, device=device)

    @property
    def _length(self) -> int:
        return self._tokens.shape[1]

    def open(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.record = self._free.pop()
        self._draw(sequences, 0)

    def close(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Gives each what it has generated, so many tokens."""
        records, most = [sequence.record for sequence in sequences], max(counts, default=0)
        tokens, logprobs = (
            table[records, :most].tolist() for table in (self._tokens, self._logprobs)
        )
        for sequence, count, ids, values in zip(sequences, counts, tokens, logprobs, strict=True):
            sequence.token_ids, sequence.logprobs = ids[:count], values[:count]
        self._free += records

    def ensure(self, count: int, running: list[Sequence]) -> None:
        """Room for ``count`` tokens of each running sequence."""
        if count <= self._length:
            return
        more = self._length  # doubles
        self._tokens, self._logprobs, self._uniforms = (
            pad(table, (0, more)) for table in (self._tokens, self._logprobs, self._uniforms)
        )
        self._draw(running, more)

    def _draw(self, sequences: list[Sequence], start: int) -> None:
        """The uniform numbers from position ``start`` on."""
        drawn = uniform_numbers([s.uniforms for s in sequences], self._length - start)
        records = torch.tensor([sequence.record for sequence in sequences])
        self._uniforms[records, start:] = torch.from_numpy(drawn).to(self._uniforms.device)

    def uniform(self, rows: RowTable, num_rows: int) -> Tensor:
        """float32 [B], the number for each running sequence's next token."""
        return self._uniforms[rows.record[:num_rows], rows.num_generated[:num_rows]]

    def write(self, rows: RowTable, num_rows: int, tokens: Tensor, logprobs: Tensor) -> None:
        index = (rows.record[:num_rows], rows.num_generated[:num_rows])
        self._tokens[index] = tokens
        self._logprobs[index] = logprobs


class TokenCounts:
    """Tokens of prompt and output, for sequences with penalties; allocated at the first of them."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._counts = torch.zeros(0, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(0, dtype=torch.bool, device=device)

    def open(self, sequence: Sequence) -> None:
        if len(self._counts) == 0:
            self._counts = self._counts.new_zeros(self._shape)
            self._in_prompt = self._in_prompt.new_zeros(self._shape)
        prompt = torch.from_numpy(sequence.prompt).to(self._counts.device)
        self._counts[sequence.record] = 0
        self._in_prompt[sequence.record] = False
        self._in_prompt[sequence.record, prompt] = True

    def count(self, records: Tensor, tokens: Tensor) -> None:
        self._counts[records, tokens] += 1

    def of(self, records: Tensor) -> tuple[Tensor, Tensor]:
        return self._counts[records], self._in_prompt[records]


def _floats(params: SamplingParams) -> list[float]:
    is_greedy = params.temperature == 0
    return [
        1.0 if is_greedy else params.temperature,
        1.0 if is_greedy else params.top_p,
        0.0 if is_greedy else params.min_p,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        float(is_greedy),
    ]


def _ints(sequence: Sequence, held: int) -> list[int]:
    params = sequence.params
    return [
        len(sequence.prompt) - 1,
        held,
        0,
        int(sequence.prompt[-1]),
        sequence.record,
        params.max_tokens,
        params.min_tokens,
        0 if params.temperature == 0 else max(params.top_k, 0),
    ]


def _with_rows(table: Tensor, rows: slice, values: list[tuple[int, ...]]) -> Tensor:
    """The table with ``values`` in ``rows``, made wider if they do not fit."""
    width = max(table.shape[1], *map(len, values))
    padded = [(*row, *[PADDING] * (width - len(row))) for row in values]
    table = pad(table, (0, width - table.shape[1]), value=PADDING)
    table[rows] = torch.from_numpy(np.array(padded, dtype=np.int64))
    return table
