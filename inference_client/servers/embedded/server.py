"""``easyrl serve MODEL``: the embedded server in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from aiohttp import web

from easyrl.hub.models import local_model
from easyrl.inference_client.servers.embedded.classifier import Classifier, is_classifier
from easyrl.inference_client.servers.embedded.classifier_routes import ClassifierServer
from easyrl.inference_client.servers.embedded.engine import DTYPES, EmbeddedEngine
from easyrl.inference_client.servers.embedded.requests import UnavailableError
from easyrl.inference_client.servers.embedded.routes import EmbeddedServer
from easyrl.inference_client.servers.embedded.sampling import LogprobsMode
from easyrl.inference_client.vllm_plugin.easyrl_vllm.access import API_KEY_VARIABLE
from easyrl.runtime.garbage import collect_rarely
from easyrl.runtime.machine import url_host
from easyrl.runtime.shared_cores import SharedCores


async def start_site(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, str]:
    """Listens, at the URL that is given back; port 0: a free one. ``runner.cleanup()`` stops."""
    # a client that hangs up cancels its handler, and with it its request
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=5)
    await runner.setup()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    await web.SockSite(runner, listener).start()
    return runner, f"http://{url_host(host)}:{listener.getsockname()[1]}"


def serve(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="directory or Hub id of a causal LM, or of a sequence classifier",
        ),
    ],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0: a free one, see the ready line")
    ] = 8000,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "auto",
    device: Annotated[str, typer.Option(help="as torch names it, such as cuda:0")] = "cpu",
    max_num_seqs: Annotated[int, typer.Option(help="sequences in the batch")] = 256,
    max_model_len: Annotated[
        int | None, typer.Option(help="prompt and response; default: model's")
    ] = None,
    max_queue: Annotated[int, typer.Option(help="waiting samples before 503")] = 4096,
    logprobs_mode: Annotated[
        LogprobsMode,
        typer.Option(help="of the distribution that is sampled, or before temperature"),
    ] = "processed_logprobs",
    api_key: Annotated[
        str | None, typer.Option(help="bearer token; shown by ps, --api-key-env is better")
    ] = None,
    api_key_env: Annotated[
        str, typer.Option(help="environment variable with the bearer token, if it is set")
    ] = API_KEY_VARIABLE,
    served_model_name: Annotated[str | None, typer.Option(help="default: the path")] = None,
    num_threads: Annotated[
        int | None, typer.Option(help="of torch; default: torch's, 1 with --batch-invariant")
    ] = None,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="decode each response by itself, so that no other request can change a bit of it",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="for requests without one")] = 0,
) -> None:
    """Serve MODEL with vLLM's rollout and weight-update routes until SIGINT or SIGTERM.

    A sequence classifier, such as a reward model, is served with vLLM's route /classify instead.
    Prints one line with the URL when it is ready. Flags are vLLM's where vLLM has them.
    """
    if api_key is None:
        api_key = os.environ.get(api_key_env)
        if api_key is None and api_key_env != API_KEY_VARIABLE:
            raise ValueError(f"--api-key-env: {api_key_env} is not set; export it")
    if api_key == "":
        raise ValueError("the key of --api-key or --api-key-env is empty; every request would pass")
    if batch_invariant:
        torch.use_deterministic_algorithms(True)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        num_threads = num_threads or 1  # their number decides the order of sums
    cores = SharedCores()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    elif device == "cpu":
        cores = SharedCores.of_environment()
    name, model = served_model_name or str(model), local_model(model, "MODEL")
    if is_classifier(model):
        classifier = ClassifierServer(
            Classifier(model, dtype=dtype, device=device, max_model_len=max_model_len), name
        )
        try:
            asyncio.run(_serve_until_signal(classifier.app(api_key), model, host, port))
        finally:
            classifier.close()
        return
    engine = EmbeddedEngine(
        model,
        dtype=dtype,
        device=device,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_queue=max_queue,
        logprobs_mode=logprobs_mode,
        seed=seed,
        batch_invariant=batch_invariant,
        cores=cores,
    )

    async def abort() -> None:
        with contextlib.suppress(UnavailableError):  # then there is nothing to abort
            await asyncio.wrap_future(engine.pause("abort"))

    try:
        app = EmbeddedServer(engine, name).app(api_key)
        asyncio.run(_serve_until_signal(app, model, host, port, abort))
    finally:
        engine.close()


async def _serve_until_signal(
    app: web.Application,
    model: Path,
    host: str,
    port: int,
    before_closing: Callable[[], Awaitable[None]] | None = None,
) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    runner, url = await start_site(app, host, port)
    collect_rarely()
    print(f"easyrl serve: {model} ready at {url}", flush=True)
    await stopped.wait()
    if before_closing is not None:
        await before_closing()
    await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(serve)
    try:
        app(argv, prog_name="easyrl serve")
    except SystemExit as end:
        return int(end.code or 0)
    except (ValueError, OSError) as error:  # a model or setting that cannot be served, a taken port
        print(f"easyrl serve: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
