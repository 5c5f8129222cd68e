"""Prompt files become tokenised prompts, in batches with a cursor that survives a restart.

Consumes: records of .jsonl, .json and .parquet files, the tokenizer and its chat template. Waits
for: nothing but the disk; all prompts are tokenised before the first batch. Produces: batches in an
order that seed and epoch alone decide, the same on every rank.
"""
