"""``easyrl doctor CONFIG [key=value …]``: what would go wrong, before a run is started."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from easyrl.arguments.shared import AsJson, ConfigFile, Overrides, WorldSize
from easyrl.config import ConfigError
from easyrl.config.file import load_config
from easyrl.config.machine import check_paths
from easyrl.hub.models import with_local_models
from easyrl.runtime.terminal import print_plain

if TYPE_CHECKING:
    from easyrl.doctor.finding import Finding

SIGNS = {"ok": "✓", "failed": "✗", "not checked": "–"}


def doctor_command(
    config: ConfigFile,
    overrides: Overrides = None,
    world_size: WorldSize = None,
    as_json: AsJson = False,
) -> None:
    """Check machine, data, rewards and endpoints before a run; changes none of them.

    Exits with 1 if a check has failed, with 2 if the configuration is wrong.
    """
    given = overrides or []
    try:
        checked = with_local_models(load_config(config, given))
        check_paths(checked)
        from easyrl.build.doctor import Diagnosis
        from easyrl.recipes.loading import with_whole_recipe

        checked = with_whole_recipe(checked)
        diagnosis = Diagnosis(
            checked,
            lambda more: with_local_models(load_config(config, [*given, *more])),
            world_size,
        )
    except ConfigError as error:
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    found = []
    with _no_warnings():
        for finding in diagnosis.findings():
            found.append(finding)
            if not as_json:
                print_plain(_line(finding))
    verdicts = Counter(finding.verdict for finding in found)
    if as_json:
        findings = [asdict(finding) for finding in found]
        print(json.dumps({"ok": verdicts["failed"] == 0, "findings": findings}))
    else:
        counts = f"{verdicts['ok']} ok, {verdicts['failed']} failed"
        print_plain(f"{counts}, {verdicts['not checked']} not checked")
    raise typer.Exit(1 if verdicts["failed"] else 0)


@contextmanager
def _no_warnings() -> Iterator[None]:
    """What a run would warn of is a finding here."""
    logger = logging.getLogger("easyrl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _line(finding: Finding) -> str:
    line = f"{SIGNS[finding.verdict]} {finding.name}: {finding.seen}"
    return f"{line}\n    → {finding.remedy}" if finding.remedy else line
