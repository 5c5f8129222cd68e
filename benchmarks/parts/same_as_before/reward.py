"""A reward that nearly always differs within a group: a hash of the response's tokens in [0, 1]."""

import zlib


def reward_func(prompt, texts, token_ids):
    return [zlib.crc32(repr([int(i) for i in ids]).encode()) / 0xFFFFFFFF for ids in token_ids]
