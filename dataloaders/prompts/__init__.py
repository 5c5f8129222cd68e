"""Prompt files become tokenised prompts, and the order in which a run draws them.

Consumes: records of .jsonl, .json and .parquet files, the tokenizer and its chat template. Waits
for: nothing but the disk; all prompts are tokenised before the first batch. Produces: the prompt at
each position of an order that seed and epoch alone decide, the same on every rank.
"""
