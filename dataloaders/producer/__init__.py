"""The temporary data generator: positions of the prompt order become a queue of accepted groups.

Consumes: the positions that a batch may draw, and the version that its responses must be made by.
Waits for: a group's turn, its G responses, and their scores. Is unblocked by: answers of endpoints
and scorers, on the producer's own thread. Produces: every accepted group of the batch once, in
order of completion or of the prompts, the outcomes of refused ones, and finished responses of open
groups.

It is given ``begin_group``, a scorer and ``accept``, and knows neither HTTP, rewards nor files.
"""
