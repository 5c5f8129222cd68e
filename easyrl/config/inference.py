"""Section ``inference``: the endpoints, and the servers that a run starts itself."""

from __future__ import annotations

import re
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_serializer,
    model_validator,
)

from easyrl.config.base import FilePath, Section


class LaunchConfig(Section):
    """Inference servers that the run starts, watches and restarts itself, on its own machine."""

    engine: Literal["vllm", "embedded"] = "vllm"  # vllm, or the embedded server on the CPU
    count: PositiveInt = 1  # servers
    tensor_parallel: PositiveInt = 1  # devices per server (vllm)
    devices: list[list[int]] | None = None  # per server; default: consecutive ones from 0; [] on
    # CPU
    python: FilePath | None = None  # interpreter of vLLM's environment; embedded: this one
    options: list[str] = []  # more of the server's command line, e.g. --max-model-len=4096
    env: dict[str, str] = {}  # further environment variables of the servers
    restart: bool = True  # start a server again that has ended

    @model_validator(mode="after")
    def _fits_engine(self) -> Self:
        if self.engine == "embedded" and self.tensor_parallel > 1:
            raise ValueError("tensor_parallel: the embedded engine runs on one device; use vllm")
        if self.engine == "vllm" and self.python is None:
            raise ValueError(
                "python: is required for engine vllm, the interpreter of the environment that vLLM "
                "is installed in; give it, for instance .venv-vllm/bin/python"
            )
        if self.devices is not None and len(self.devices) != self.count:
            raise ValueError(
                f"devices: {len(self.devices)} lists for count={self.count} servers; give as many"
            )
        wanted = self.tensor_parallel
        for given in self.devices or []:
            if given and len(given) != wanted:
                raise ValueError(
                    f"devices: {given} are not tensor_parallel={wanted} devices; give as many"
                )
        if any(re.match(r"--api[-_]key\b", option) for option in self.options):
            raise ValueError(
                "options: --api-key is made by the run, for each of its servers another one; "
                "remove it"
            )
        return self


class EndpointConfig(Section):
    """A server that somebody else runs; written as its URL alone where it has no key of its own."""

    url: str  # base URL
    api_key_env: str | None = None  # variable that holds its bearer token; default: the section's

    @field_validator("api_key_env")
    @classmethod
    def _names_a_variable(cls, value: str | None) -> str | None:
        return variable_name(value)

    @model_serializer
    def _as_written(self) -> str | dict[str, str]:
        if self.api_key_env is None:
            return self.url
        return {"url": self.url, "api_key_env": self.api_key_env}


class InferenceConfig(Section):
    """The inference endpoints (``vllm serve`` or ``easyrl serve``)."""

    endpoints: list[EndpointConfig] = []  # servers that somebody else runs: base URLs, or
    # {url: …, api_key_env: …} where one has a key of its own
    launch: LaunchConfig | None = None  # servers of our own, beside or instead of them
    api_key_env: str | None = None  # name of the environment variable that holds the bearer token
    # of all endpoints that name none of their own
    devices_per_endpoint: PositiveInt | None = None  # that throughput counts; default: what each
    # server says (a tensor-parallel one of four: 4), else 1
    max_inflight: PositiveInt | Literal["auto"] = "auto"  # requests at a time per endpoint; auto:
    # what finishes batches soonest, as measured, 256 at most
    dispatch: Literal["shortest_first", "prompt_order"] = "shortest_first"  # which groups go first
    num_fetchers: PositiveInt = 1  # processes that talk to the endpoints and decode responses
    max_retries: NonNegativeInt = 10  # per request, each on another endpoint where there is one
    progress_timeout_s: PositiveFloat = 600.0  # an endpoint silent for so long is set aside
    health_interval_s: PositiveFloat = 5.0  # between two health probes of an endpoint
    startup_timeout_s: PositiveFloat = 300.0  # until a first endpoint is up
    max_outage_s: PositiveFloat = 1800.0  # without any endpoint; then checkpoint and stop

    @field_validator("endpoints", mode="before")
    @classmethod
    def _url_alone(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [{"url": entry} if isinstance(entry, str) else entry for entry in value]

    @field_validator("endpoints")
    @classmethod
    def _urls(cls, value: list[EndpointConfig]) -> list[EndpointConfig]:
        cleaned = [e.model_copy(update={"url": endpoint_url(e.url)}) for e in value]
        if len({endpoint.url for endpoint in cleaned}) != len(cleaned):
            raise ValueError("names an endpoint twice; remove one of the two")
        return cleaned

    @field_validator("api_key_env")
    @classmethod
    def _names_a_variable(cls, value: str | None) -> str | None:
        return variable_name(value)

    @property
    def urls(self) -> list[str]:
        """Of the endpoints that somebody else runs."""
        return [endpoint.url for endpoint in self.endpoints]

    @model_validator(mode="after")
    def _some_endpoint(self) -> Self:
        if not self.endpoints and self.launch is None:
            raise ValueError(
                "endpoints: is empty; name the base URL of at least one server, or let the run "
                "start its own with inference.launch"
            )
        return self


def endpoint_url(url: str) -> str:
    """``url`` without a trailing slash. Raises ``ValueError`` if it is none, or names no server."""
    # first, since no message may show what stands at these places
    if "@" in url:
        raise ValueError(
            "a URL with a user name; name the key's variable in inference.api_key_env, and write "
            "it without what is before the @"
        )
    if len(bare := re.split("[?#]", url)[0]) < len(url):
        raise ValueError(
            f"{bare!r} with a query or fragment names no server; write it as http://host:8000, and "
            "a key's variable in inference.api_key_env"
        )
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not an http:// or https:// URL; write it as http://host:8000")
    url = url.rstrip("/")
    if url.endswith("/v1"):
        raise ValueError(f"{url!r}: leave off /v1, other routes of the server are used too")
    try:
        parts = urlsplit(url)
        has_server = parts.hostname and parts.port != 0
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}; write it as http://host:8000") from None
    if not has_server:
        raise ValueError(f"{url!r} names no server; write it as http://host:8000")
    return url


def variable_name(name: str | None) -> str | None:
    """``name`` if it can be an environment variable's. Raises ``ValueError`` without showing it."""
    if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(
            "is the name of an environment variable, not the key itself; export the key and write "
            "the variable's name"
        )
    return name
