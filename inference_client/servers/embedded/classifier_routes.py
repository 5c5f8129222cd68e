"""vLLM's route ``/classify`` over the embedded classifier (vLLM 0.32's JSON)."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import jinja2
from aiohttp import web
from pydantic import BaseModel, model_validator

from easyrl.inference_client.servers.embedded.classifier import Classifier
from easyrl.inference_client.servers.embedded.http_parts import (
    guarded_application,
    json_response,
    parse,
)
from easyrl.inference_client.servers.embedded.protocol import TokenId
from easyrl.inference_client.servers.embedded.requests import BadRequestError


class Message(BaseModel):
    role: str
    content: str


class ClassifyBody(BaseModel):
    """``POST /classify``: sequences as ids or text, or one conversation."""

    model: str | None = None
    input: str | list[TokenId] | list[str] | list[list[TokenId]] | None = None
    messages: list[Message] | None = None
    use_activation: bool | None = None  # None: as true
    add_special_tokens: bool | None = None  # None: for text, not for messages

    @model_validator(mode="after")
    def _has_one_of_both(self) -> Self:
        if (not self.input) == (not self.messages):
            raise ValueError("give either input or messages")
        return self


class ClassifierServer:
    """The routes of one classifier, which reads in a thread of its own."""

    def __init__(self, classifier: Classifier, served_model_name: str) -> None:
        self._classifier, self._model = classifier, served_model_name
        self._started = int(time.time())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embedded-classifier")

    def app(self, api_key: str | None = None) -> web.Application:
        """The application; with ``api_key`` every route but the open ones asks for it."""
        app = guarded_application(api_key)
        app.add_routes(
            [
                web.post("/classify", self._classify),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/version", self._version),
            ]
        )
        return app

    def close(self) -> None:
        """Ends the thread; what waits for it is dropped."""
        self._thread.shutdown(cancel_futures=True)

    async def _classify(self, http: web.Request) -> web.Response:
        body = await parse(http, ClassifyBody)
        if body.model not in (None, "", self._model):
            message = f"The model `{body.model}` does not exist, this server has `{self._model}`."
            raise web.HTTPNotFound(text=message)
        sequences = self._sequences(body)
        for token_ids in sequences:
            self._classifier.check(token_ids)
        loop, logits = asyncio.get_running_loop(), self._classifier.logits
        data = []
        for index, token_ids in enumerate(sequences):  # another request may come between two
            values = await loop.run_in_executor(self._thread, logits, token_ids)
            if body.use_activation is not False:
                values = activated(values)
            label = self._classifier.labels.get(values.index(max(values)))
            data.append(
                {"index": index, "label": label, "probs": values, "num_classes": len(values)}
            )
        num_tokens = sum(map(len, sequences))
        return json_response(
            {
                "id": f"classify-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": self._model,
                "data": data,
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            }
        )

    def _sequences(self, body: ClassifyBody) -> list[list[int]]:
        given: Any = body.input
        if body.messages:
            given = [self._rendered(body.messages)]
        elif isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        if not isinstance(given[0], str):
            return [list(token_ids) for token_ids in given]
        if self._classifier.tokenizer is None:
            raise BadRequestError("input", "text needs a tokenizer, the model has none; send ids")
        special = body.add_special_tokens
        if special is None:
            special = not body.messages  # a chat template writes its own
        encoded = self._classifier.tokenizer(given, add_special_tokens=special)["input_ids"]
        return [list(token_ids) for token_ids in encoded]

    def _rendered(self, messages: Sequence[Message]) -> str:
        tokenizer = self._classifier.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise BadRequestError("messages", "need a chat template, the model has none")
        chat = [message.model_dump() for message in messages]
        try:
            return str(tokenizer.apply_chat_template(chat, tokenize=False))
        except jinja2.TemplateError as error:
            problem = f"the chat template refuses them ({error})"
            raise BadRequestError("messages", problem) from None

    async def _models(self, http: web.Request) -> web.Response:
        card = {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "easyrl",
            "root": self._model,
            "parent": None,
            "max_model_len": self._classifier.max_model_len,
        }
        return json_response({"object": "list", "data": [card]})

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=200)

    async def _version(self, http: web.Request) -> web.Response:
        return json_response({"version": "easyrl"})


def activated(logits: Sequence[float]) -> list[float]:
    """Probabilities as vLLM gives them: the sigmoid of one label, the softmax of several."""
    if len(logits) == 1:
        return [0.5 * (1.0 + math.tanh(0.5 * logits[0]))]
    highest = max(logits)
    weights = [math.exp(value - highest) for value in logits]
    return [weight / sum(weights) for weight in weights]
