"""Supervised records: prompts with given completions, for fine-tuning and preference pairs.

Consumes: records of .jsonl, .json and .parquet files, the tokenizer and its chat template. Waits
for: nothing but the disk; all records are tokenised before the first batch. Produces: the groups of
each batch, at the positions of the order that prompts have too.
"""
