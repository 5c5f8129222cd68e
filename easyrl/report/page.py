"""The report's HTML file: template, data and Plotly's own script in one, nothing from a network.

What a model, a data file or a configuration says is never taken for HTML: texts are escaped, and
the data are JSON without a ``<``. The page's policy allows no connection at all, and no script but
its own two, which carry a number drawn for each file. A watched page may look at one image more,
its mark.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from easyrl.report.collect import Collected
from easyrl.report.written_mark import Watched

FILE = "report.html"  # in the run's folder
TEMPLATE = "page.html.j2"
INSTALL = "plotly is not installed; pip install 'easyrl[report]'"


def render(collected: Collected, watched: Watched | None = None) -> str:
    """The page; ``watched``: it loads itself again when it was written again.

    Raises ``ValueError`` without Plotly.
    """
    data = asdict(collected) | {"watched": None if watched is None else watched._asdict()}
    # orjson writes NaN as null; what closes a script element cannot be in its text
    safe = orjson.dumps(data).decode().replace("<", "\\u003c")
    return str(
        _template().render(
            report=collected,
            data=safe,
            plotly=_plotly_script(),
            watched=watched is not None,
            nonce=secrets.token_urlsafe(16),
            written=time.strftime("written %Y-%m-%d %H:%M:%S"),
        )
    )


@cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE)


@cache
def _plotly_script() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError(INSTALL) from None
    script: str = get_plotlyjs()
    return script.replace("</script", "<\\/script")
