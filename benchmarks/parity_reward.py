"""A reward that varies inside every group, so that no group's gradient is zero."""


def reward_func(prompt, texts, token_ids):
    return [float(len(ids) % 2) for ids in token_ids]
