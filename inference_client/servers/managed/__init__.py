"""Server processes of a run's own: started, watched, restarted on their ports, and ended with it.

Consumes: ``inference.launch``. Waits for: a server that ends, hangs or does not come up, each
watched by a thread of its own. Is unblocked by: its exit, or a time-out of its health route.
Produces: URLs for the pool, and a new server at the old URL until it has died too often in a row. A
restarted server serves the weights that it was started with; the weight sync brings the present
ones.
"""
