"""Hugging Face causal language models on packed rows: policy, old policy and reference.

One call on a micro-batch returns the three models' log-probabilities of its trained tokens; only
the policy's carry gradient. Models are loaded from disk, with adapters if asked for.
"""
