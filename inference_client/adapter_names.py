"""The name under which each endpoint is asked for its adapter: the ``model`` of a request."""

from __future__ import annotations


class AdapterNames:
    """By URL; shared by all that send requests, whatever thread they are in."""

    def __init__(self) -> None:
        self._by_url: dict[str, str] = {}

    def of(self, url: str) -> str | None:
        """None: requests name none, and get the model as it is served."""
        return self._by_url.get(url)

    def learn(self, url: str, name: str | None) -> None:
        """From now on requests to ``url`` give ``name``."""
        if name is None:
            self._by_url.pop(url, None)
        else:
            self._by_url[url] = name
