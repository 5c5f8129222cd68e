"""``easyrl serve MODEL``: the embedded inference server in this process."""

from __future__ import annotations

import typer


def serve_command(context: typer.Context) -> None:
    """Serve MODEL with the embedded inference server (vLLM's routes over transformers)."""
    from easyrl.inference_client.servers.embedded.server import main

    raise typer.Exit(main(context.args))
