"""A packed row of tokens and the same sequences unpacked, made with torch alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Group = tuple[Tensor, list[Tensor]]  # ids of a prompt and of its responses


class Row(NamedTuple):
    input_ids: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T]
    segments: list[tuple[int, int, int]]
    predictor_index: Tensor  # int64 [N]
    label_ids: Tensor  # int64 [N], response by response


def random_groups(shapes: list[tuple[int, list[int]]], vocab: int) -> list[Group]:
    """Prompts and responses of these lengths."""
    generator = torch.Generator().manual_seed(4)

    def draw(length: int) -> Tensor:
        return torch.randint(vocab, (length,), generator=generator)

    return [(draw(prompt), [draw(length) for length in lengths]) for prompt, lengths in shapes]


def packed(groups: list[Group]) -> Row:
    """Each prompt once, its responses behind it; all response tokens are trained."""
    ids: list[Tensor] = []
    positions, predictors, labels = [], [], []
    segments: list[tuple[int, int, int]] = []
    end = 0
    for prompt, responses in groups:
        parent, last_of_prompt = len(segments), end + len(prompt) - 1
        segments.append((end, len(prompt), -1))
        ids.append(prompt)
        positions.append(torch.arange(len(prompt)))
        end += len(prompt)
        for response in responses:
            segments.append((end, len(response), parent))
            ids.append(response)
            positions.append(torch.arange(len(response)) + len(prompt))
            own = torch.arange(end, end + len(response) - 1)
            predictors.append(torch.cat([torch.tensor([last_of_prompt]), own]))
            labels.append(response)
            end += len(response)
    return Row(
        torch.cat(ids), torch.cat(positions), segments, torch.cat(predictors), torch.cat(labels)
    )
