"""The pool of inference endpoints: which are up, what each serves, where a group's requests go.

Consumes: requests for samples of a prompt, at a policy version. Waits for: room at an endpoint that
has confirmed this version since its last start. Is unblocked by: an answer, an endpoint that
returns or joins, a confirmation by the weight sync. Produces: responses; a failed request goes to
another endpoint with the same seed. Ends with an error after ``inference.max_outage_s`` without any
endpoint.
"""
