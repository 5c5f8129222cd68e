"""How fast an endpoint decodes, fitted to its responses: seconds of a step and of a sequence in it.

Each sequence gets a token per step of the server. So the time of a response of n tokens is that of
n steps and of all K tokens that the endpoint made meanwhile:  n · step_s + K · sequence_s.  What
belongs to a prompt is part of these two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SPREAD = 2.0  # of the sequences beside a response: a fit tells step and sequence apart


class TimedResponse(NamedTuple):
    """When a response was asked for and came, and how long it is."""

    began_s: float
    ended_s: float
    num_tokens: int


class DecodeSpeed(NamedTuple):
    """Seconds of a decoding step: a constant, and so much for each sequence in it."""

    step_s: float
    sequence_s: float

    def tokens_per_s(self, num_sequences: int) -> float:
        """Of all of them together."""
        return num_sequences / (self.step_s + num_sequences * self.sequence_s)


def decode_terms(batch: Sequence[TimedResponse]) -> np.ndarray:
    """What is known of the N responses of a batch: float64 [N, 2], steps and tokens per second.

    Steps are a response's tokens, tokens are all that were made in its time.
    """
    began, ended, tokens = np.array(batch, dtype=np.float64).T
    took = np.maximum(ended - began, 1e-9)
    meanwhile = _tokens_by(ended, began, took, tokens) - _tokens_by(began, began, took, tokens)
    return np.stack([tokens, meanwhile], axis=1) / took[:, None]


def fit_decode_speed(batches: Sequence[np.ndarray]) -> DecodeSpeed:
    """Least squares of relative errors: the terms of every batch have the same weight.

    Step and sequence can be told apart where the number of sequences differs, within batches or
    among them.
    """
    terms = np.concatenate([terms * len(terms) ** -0.5 for terms in batches])
    ones = np.concatenate([np.full(len(terms), len(terms) ** -0.5) for terms in batches])
    (step_s, sequence_s), *_ = np.linalg.lstsq(terms, ones, rcond=None)
    if step_s <= 0:  # the best fit that has no negative part
        step_s, sequence_s = 0.0, _only(terms[:, 1], ones)
    elif sequence_s <= 0:
        step_s, sequence_s = _only(terms[:, 0], ones), 0.0
    return DecodeSpeed(float(step_s), float(sequence_s))


def tells_step_from_sequence(batches: Sequence[np.ndarray]) -> bool:
    """Whether the number of sequences differs enough for a fit to tell the two apart."""
    terms = np.concatenate(batches)
    few, many = np.quantile(terms[:, 1] / terms[:, 0], [0.1, 0.9])
    return bool(many > SPREAD * few)


def speed_of_sequences(batches: Sequence[np.ndarray]) -> DecodeSpeed:
    """As if all seconds were the sequences' and none the step's: no speed loses less with few."""
    terms = np.concatenate(batches)
    return DecodeSpeed(0.0, _only(terms[:, 1], np.ones(len(terms))))


def _tokens_by(
    times: np.ndarray, began: np.ndarray, took: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """Tokens that all responses together had at ``times``, each growing evenly."""
    rates = tokens / took
    corners = np.concatenate([began, began + took])
    order = np.argsort(corners)
    corners = corners[order]
    rate = np.cumsum(np.concatenate([rates, -rates])[order])
    made = np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(corners))])
    return np.interp(times, corners, made)


def _only(term: np.ndarray, ones: np.ndarray) -> float:
    return float(term @ ones / (term @ term))
