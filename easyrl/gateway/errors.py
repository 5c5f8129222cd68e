"""What a client is answered that gets no turn: OpenAI's error objects."""

from __future__ import annotations

from typing import Any

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    410: "session_closed",
    429: "rate_limit_error",
}


class GatewayError(Exception):
    """A request that is refused; ``status`` is HTTP's, ``param`` the key that is to blame."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def as_json(self) -> dict[str, Any]:
        """OpenAI's object, under ``error``."""
        kind = _TYPES.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        said = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": said}


class BadRequest(GatewayError):
    """400: ``param`` is wrong; the message names it and what would be right."""

    def __init__(self, param: str, problem: str, *, code: str | None = None) -> None:
        super().__init__(400, f"{param}: {problem}", param=param, code=code)
