"""Log-probabilities and entropy of trained tokens from hidden states, without whole logits.

The projection to the vocabulary goes through positions in chunks, forward and backward; the
gradient is formed with the values, or from logits that are computed again.
"""
