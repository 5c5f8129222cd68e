"""The report's HTML file: template, data and Plotly's own script in one, nothing from a network.

What a model, a data file or a configuration says is never taken for HTML: texts are escaped, and
the data are JSON without a ``<``. The page's policy allows no connection at all, and no script but
its own two, which carry a number drawn for each file.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict
from pathlib import Path

import orjson

from easyrl.report.collect import Collected

FILE = "report.html"  # in the run's folder
TEMPLATE = "page.html.j2"
INSTALL = "plotly is not installed; pip install 'easyrl[report]'"


def render(collected: Collected, *, reload_s: float = 0.0) -> str:
    """The page; with ``reload_s`` it loads itself again after so many seconds.

    Raises ``ValueError`` without Plotly.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    data = asdict(collected) | {"reload_s": reload_s}
    # orjson writes NaN as null; what closes a script element cannot be in its text
    safe = orjson.dumps(data).decode().replace("<", "\\u003c")
    return environment.get_template(TEMPLATE).render(
        report=collected,
        data=safe,
        plotly=_plotly_script(),
        reload_s=reload_s,
        nonce=secrets.token_urlsafe(16),
        written=time.strftime("written %Y-%m-%d %H:%M:%S"),
    )


def _plotly_script() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError(INSTALL) from None
    script: str = get_plotlyjs()
    return script.replace("</script", "<\\/script")
