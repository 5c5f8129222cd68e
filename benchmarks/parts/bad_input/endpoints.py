"""Mistakes in endpoints: their URL, key and server, and servers that a run is to start itself."""

from __future__ import annotations

from benchmarks.parts.bad_input.scene import Mistake

KEY = "inference.endpoints"


def _url(title: str, url: str, location: str = KEY) -> Mistake:
    return Mistake(title, location, (f"inference.endpoints=['{url}']",))


def _server(title: str, name: str, *overrides: str, **environment: str) -> Mistake:
    """A server of ``servers`` at a good URL."""
    url = f"{{url:{name}}}"
    overrides = (f"inference.endpoints=['{url}']", *overrides)
    return Mistake(title, (KEY, url), overrides, environment=environment)


def _launch(title: str, launch: str, location: str) -> Mistake:
    overrides = ("inference.endpoints=[]", f"inference.launch={{{launch}}}")
    return Mistake(title, location, overrides)


WITH_KEY = "inference.api_key_env=EASYRL_TEST_KEY"
MISTAKES = [
    Mistake("no endpoint", KEY, ("inference.endpoints=[]",)),
    _url("no scheme", "localhost:8000"),
    _url("a scheme that is none", "htp://localhost:8000"),
    _url("gRPC", "grpc://localhost:8000"),
    _url("the path of OpenAI's routes", "http://localhost:8000/v1"),
    _url("the path of a route", "{url:good}/health", "{url:good}/health"),
    _url("a key in the URL", "http://user:key@localhost:8000"),
    _url("a port out of range", "http://localhost:80000"),
    _url("a port as a word", "http://localhost:http"),
    _url("a query", "http://localhost:8000/?model=qwen"),
    _url("no host", "http://:8000"),
    _url("a host that is not known", "http://no-such-host.invalid:8000"),
    Mistake("an endpoint twice", KEY, ("inference.endpoints=['{url:good}', '{url:good}/']",)),
    _server("a port where nobody listens", "closed"),
    _server("https for http", "tls-of-good"),
    _server("a server that speaks no HTTP", "no-http"),
    _server("another web server", "nothing"),
    _server("a web page", "web-page"),
    _server("another service", "other-json"),
    _server("a login page", "redirecting"),
    _server("a proxy that forbids", "forbidden"),
    _server("a server that loads for ever", "loading"),
    _server("a server that is silent", "silent"),
    _server("no model", "no-model"),
    _server("a context of one token", "short-context"),
    _server("no routes for weights", "no-weight-routes"),
    _server("a key that is needed", "with-key"),
    _server("a wrong key", "with-key", WITH_KEY, EASYRL_TEST_KEY="wrong-key"),
    _server("another model", "other-model"),
    Mistake(
        "a key's variable that is not set",
        "inference.api_key_env",
        ("inference.api_key_env=EASYRL_NOT_SET",),
    ),
    Mistake(
        "a key's variable that is empty",
        "inference.api_key_env",
        (WITH_KEY,),
        environment={"EASYRL_TEST_KEY": ""},
    ),
    Mistake("the key itself", "inference.api_key_env", ("inference.api_key_env=sk-123",)),
    Mistake("no requests at a time", "inference.max_inflight", ("inference.max_inflight=0",)),
    Mistake(
        "an address with a port",
        "weight_sync.advertise_host",
        ("weight_sync.advertise_host=host:8000",),
    ),
    _launch("vLLM without its interpreter", "engine: vllm", "inference.launch.python"),
    _launch("an interpreter that is missing", "python: {folder}/python", "{folder}/python"),
    _launch("an interpreter without vLLM", "python: /usr/bin/python3", "/usr/bin/python3"),
    _launch("an engine that is none", "engine: sglang", "inference.launch.engine"),
    _launch(
        "a tensor-parallel embedded server",
        "engine: embedded, tensor_parallel: 2",
        "inference.launch.tensor_parallel",
    ),
    _launch(
        "too few lists of devices",
        "engine: embedded, count: 2, devices: [[0]]",
        "inference.launch.devices",
    ),
    _launch(
        "no servers",
        "engine: embedded, count: 0",
        "inference.launch.count",
    ),
    Mistake(
        "endpoints add without a scheme",
        "localhost:8000",
        command=("endpoints", "add", "{folder}", "localhost:8000"),
    ),
    Mistake(
        "serve on a port out of range", "--port", command=("serve", "{model}", "--port", "99999")
    ),
    Mistake(
        "serve with an unknown option",
        "--max-tokens",
        command=("serve", "{model}", "--max-tokens", "5"),
    ),
    Mistake(
        "serve with a dtype that is none", "dtype", command=("serve", "{model}", "--dtype", "fp8")
    ),
]
