"""How weights travel from the trainer to endpoints: files, an HTTP stream of them, or a broadcast.

Consumes: named tensors, one after another. Produces: chunks of safetensors with a hash per tensor,
which an endpoint can read while the next ones are being written, and a manifest when all are; or a
broadcast between devices beside them.
"""
