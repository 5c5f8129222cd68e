"""The gateway's HTTP routes: environments' requests in, turns that the trainer recorded out."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from aiohttp import ClientSession, web
from aiohttp.typedefs import Handler

from easyrl.gateway.chat import ChatTurn, chat_turn, chunks, completion
from easyrl.gateway.errors import BadRequest, GatewayError
from easyrl.gateway.generate import generate_response
from easyrl.gateway.history import AnsweredTurn, chain_of
from easyrl.gateway.long_requests import LongRequests, too_many
from easyrl.gateway.messages import (
    Answer,
    Close,
    Closed,
    Drop,
    Lend,
    Open,
    Order,
    Recorded,
    Refused,
    Request,
    Settings,
    Working,
)
from easyrl.gateway.prompts import ChatPrompt, chat_prompt
from easyrl.gateway.questions import Questions, SampledTurn
from easyrl.gateway.rendering import Renderer, renderable
from easyrl.gateway.requests import (
    ChatRequest,
    GenerateRequest,
    Limits,
    chat_request,
    generate_request,
)
from easyrl.gateway.sampled_text import Stops, sampled_text
from easyrl.gateway.sessions import Session, Sessions, checked_request_id, closed_error
from easyrl.gateway.streaming import stream
from easyrl.gateway.tool_parsers import chosen_parser, unread_calls

log = logging.getLogger(__name__)

GENERATE, CHAT, MODELS = "/inference/v1/generate", "/v1/chat/completions", "/v1/models"
TURN_HEADER = "X-Turn-Id"  # of an answer that is no stream
BELOW = "/sessions/{session}"  # the routes once more; without it a header names the session
MAX_BODIES_BYTES = 2**30  # that are being read at once
LONG_BODY_BYTES = 2**18  # such a chat is rendered in a thread: the others go on meanwhile


class Gateway:
    """Sessions and their routes. Every method belongs to one loop.

    Args:
        send: tells the trainer's process what is to be sampled.
        renderer: None: there is no chat template, and chats are refused.
        http: asks endpoints at which a session was lent a place.
    """

    def __init__(
        self,
        settings: Settings,
        renderer: Renderer | None,
        send: Callable[[Request], object],
        http: ClientSession,
    ) -> None:
        self._settings, self._renderer = settings, renderer
        template = "" if renderer is None else renderer.chat_template
        self._parser = chosen_parser(settings.tool_parser, template)
        self._sessions = Sessions(settings)
        self._questions = Questions(http, settings.vocabulary, send)
        self._send = send
        self._num_body_bytes = 0
        self._long = LongRequests(settings.max_body_bytes, settings.max_long_bytes)

    @property
    def tool_parser(self) -> str | None:
        """The name of the parser of tool calls; None: none reads the template's."""
        return None if self._parser is None else self._parser.name

    def obey(self, order: Order) -> None:
        """Does what the trainer's process says."""
        if isinstance(order, Open):
            self._sessions.open(order)
        elif isinstance(order, Close):
            self._close(order.session)
            self._send(Closed(order.session))
        elif isinstance(order, Lend):
            self._sessions.lend(order.session, order.lease)
        elif isinstance(order, Drop):
            self._questions.leased.drop(order.number)
        else:
            assert isinstance(order, Answer | Recorded | Refused)
            self._questions.answered(order)

    def close_idle(self) -> None:
        for session in self._sessions.idle():
            log.warning("session %s: no request for too long, it is given up", session)
            self._close(session)

    def app(self) -> web.Application:
        middlewares: list[Any] = [_errors]
        limit = self._settings.max_body_bytes
        app = web.Application(middlewares=middlewares, client_max_size=limit)
        app.router.add_get("/health", _health)
        for below in ("", BELOW):
            app.router.add_post(below + GENERATE, self._in_session(self._generate))
            app.router.add_post(below + CHAT, self._in_session(self._chat))
            app.router.add_get(below + MODELS, self._in_session(self._models))
        return app

    def _close(self, session: str) -> None:
        self._sessions.close(session)
        self._questions.end_of(session, closed_error())

    def _in_session(self, handler: Callable[[web.Request, Session], Any]) -> Handler:
        @functools.wraps(handler)
        async def handle(http: web.Request) -> web.StreamResponse:
            name = http.match_info.get("session") or http.headers.get("X-Session-Id")
            session = self._sessions.found(name, http.headers.get("Authorization", ""))
            with session.request():
                return await handler(http, session)

        return handle

    async def _models(self, http: web.Request, session: Session) -> web.Response:
        card = {"id": self._settings.model, "object": "model", "created": 0, "owned_by": "easyrl"}
        return json_response({"object": "list", "data": [card]})

    async def _generate(self, http: web.Request, session: Session) -> web.Response:
        body = await self._body(http, session)
        async with self._worked_on(session, len(body)):
            request = generate_request(body, session.sampling)
        if request.wants_text:
            self._require_renderer()
        sampled = await session.turn(
            _request_id(http), body, lambda: self._sampled(session, request)
        )
        text = None
        if request.wants_text:
            stops = _stops(session, request.limits)
            text = sampled_text(self._require_renderer(), sampled, stops).told
        told = generate_response(sampled, request, self._settings.model, text)
        return _turn_response(told, sampled)

    async def _sampled(self, session: Session, request: GenerateRequest) -> SampledTurn:
        return await self._questions.ask(session, request.token_ids, request.limits)

    async def _chat(self, http: web.Request, session: Session) -> web.StreamResponse:
        body = await self._body(http, session)
        async with self._worked_on(session, len(body)):
            request = chat_request(body, session.sampling)
        renderer = self._require_renderer()
        if request.parses_calls and self._parser is None:
            raise BadRequest("tools", unread_calls())
        waiting = session.turn(
            _request_id(http),
            body,
            lambda: self._chat_turn(session, request, renderer, len(body)),
        )
        model = self._settings.model
        if not request.stream:
            turn = await waiting
            return _turn_response(completion(turn, request, renderer, model), turn.sampled)
        return await stream(
            http,
            asyncio.ensure_future(waiting),
            lambda turn: chunks(turn, request, renderer, model),
            self._settings.keep_alive_s,
        )

    async def _chat_turn(
        self, session: Session, request: ChatRequest, renderer: Renderer, num_bytes: int
    ) -> ChatTurn:
        """A turn of a chat: asked for, parsed and put into the session's history."""
        async with self._worked_on(session, num_bytes):
            messages = [renderable(message) for message in request.messages]
            chain = chain_of([request.tools, request.template_kwargs], messages)
            previous = session.history.longest(chain)
            render = functools.partial(
                chat_prompt,
                renderer,
                messages,
                previous,
                session.mode,
                request.tools,
                request.template_kwargs,
            )
            is_long = num_bytes > LONG_BODY_BYTES
            prompt: ChatPrompt = await asyncio.to_thread(render) if is_long else render()
        sampled = await self._questions.ask(session, prompt.ids, request.limits)
        sampled = replace(sampled, new_ids=prompt.new_ids, parent=prompt.parent)
        token_ids, new_text = sampled.token_ids, prompt.new_text
        turn = chat_turn(renderer, self._parser, request, sampled, _stops(session, request.limits))
        answered = AnsweredTurn(
            num_messages=len(messages) + 1,
            previous=prompt.previous,
            parent=prompt.parent,
            own_ids=np.concatenate([prompt.new_ids, token_ids]),
            own_text=functools.cache(lambda: new_text + renderer.decode(token_ids.tolist())),
            said=turn.said,
        )
        session.history.record(chain, renderable(turn.message), answered)
        return turn

    @asynccontextmanager
    async def _worked_on(self, session: Session, num_bytes: int) -> AsyncIterator[None]:
        """Inside, a request is parsed or rendered: a long one where there is room for it. Raises
        ``GatewayError`` where too many wait."""
        if num_bytes <= LONG_BODY_BYTES:
            yield
            return
        async with self._long.place(num_bytes):
            with self._may_die_of(session, num_bytes):
                await asyncio.sleep(0)  # it is on its way before anything can happen
                yield

    @contextmanager
    def _may_die_of(self, session: Session, num_bytes: int) -> Iterator[None]:
        """Tells the trainer's process of a long request, and that it is over."""
        if num_bytes > LONG_BODY_BYTES:
            self._send(Working(session.id, True))
        try:
            yield
        finally:
            if num_bytes > LONG_BODY_BYTES:
                self._send(Working(session.id, False))

    def _require_renderer(self) -> Renderer:
        if self._renderer is None:
            raise GatewayError(400, f"the model has no chat template; send token ids to {GENERATE}")
        return self._renderer

    async def _body(self, http: web.Request, session: Session) -> bytes:
        """Raises ``GatewayError`` at one that is too long, too slow or packed."""
        limit = self._settings.max_body_bytes
        num_bytes = limit if http.content_length is None else http.content_length
        if num_bytes > limit:
            raise _too_large(limit)
        if http.headers.get("Content-Encoding", "identity") != "identity":
            raise GatewayError(415, "Content-Encoding: send the body as it is")
        if self._num_body_bytes + num_bytes > max(MAX_BODIES_BYTES, limit):
            raise too_many()
        self._num_body_bytes += num_bytes
        try:
            with self._may_die_of(session, num_bytes):
                async with asyncio.timeout(self._settings.body_timeout_s):
                    return await http.read()
        except web.HTTPRequestEntityTooLarge:
            raise _too_large(limit) from None
        except TimeoutError:
            limit_s = self._settings.body_timeout_s
            raise GatewayError(408, f"the body did not arrive within {limit_s:g} s") from None
        finally:
            self._num_body_bytes -= num_bytes


def _stops(session: Session, limits: Limits) -> Stops:
    own = session.sampling
    return Stops(
        (*own.stop, *limits.stop), frozenset((*own.stop_token_ids, *limits.stop_token_ids))
    )


def json_response(content: Any, status: int = 200) -> web.Response:
    body = orjson.dumps(content)
    return web.Response(body=body, status=status, content_type="application/json")


def _turn_response(content: Any, sampled: SampledTurn) -> web.Response:
    response = json_response(content)
    response.headers[TURN_HEADER] = sampled.id
    return response


def _request_id(http: web.Request) -> str | None:
    headers = http.headers
    return checked_request_id(headers.get("X-Request-Id") or headers.get("Idempotency-Key"))


def _too_large(limit: int) -> GatewayError:
    return GatewayError(413, f"the body has more than {limit} bytes")


async def _health(http: web.Request) -> web.Response:
    return json_response({})


@web.middleware
async def _errors(http: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as OpenAI's clients expect them."""
    try:
        return await handler(http)
    except GatewayError as error:
        problem = error
    except web.HTTPException as error:
        problem = GatewayError(error.status, error.reason)
    except RecursionError:  # of what reads or writes JSON
        problem = GatewayError(400, "the body is nested too deeply")
    except ConnectionError:
        raise  # the client is gone
    except Exception:
        log.exception("a request failed")
        problem = GatewayError(500, "the gateway failed; its log says more")
    response = json_response(problem.as_json(), problem.status)
    if problem.status == 429:
        response.headers["Retry-After"] = "1"
    return response
