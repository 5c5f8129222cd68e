"""Episodes: samples of several turns, with exactly the tokens that were sampled.

Consumes a group's samples as the producer asks for them; an environment plays each one, in a
process of its own, against the recording gateway. Waits for the environment's end. Unblocked by
turns, which the pool of endpoints samples. Produces one completion per sample, a tree of turns,
made of the session's own records.
"""
