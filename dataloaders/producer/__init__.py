"""The temporary data generator: a batch of prompts becomes a queue of finished groups.

Consumes: a batch of prompts and the version that its responses must be made by. Waits for: a
group's turn, its G responses, and their scores. Is unblocked by: answers of endpoints and scorers,
on the producer's own thread. Produces: every group of the batch once, in order of completion or of
the prompts, and finished responses of groups that are still open.

It is given *generate* and *score*, and knows neither HTTP, rewards nor files.
"""
