"""``easyrl eval CONFIG``: pass@k and avg@k of whatever the endpoints serve, without a trainer."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from easyrl.arguments.shared import ConfigFile, Overrides
from easyrl.config import Config, ConfigError, EvaluationConfig
from easyrl.config.file import load_config
from easyrl.config.machine import check_paths
from easyrl.hub.models import with_local_models
from easyrl.samples.texts import TextsNotWritten
from easyrl.schema import RewardError, TooManyExcluded


def eval_command(
    config: ConfigFile,
    overrides: Overrides = None,
    keep_texts: Annotated[
        Path | None,
        typer.Option(
            help="write prompts, responses and rewards there, as lines of JSON; gzip if it ends "
            "in .gz",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Evaluate what the endpoints serve now on the held-out prompts; prints one JSON object."""
    try:
        checked = with_local_models(load_config(config, overrides or []))
        check_paths(checked)
        if checked.source == "records":
            raise ConfigError(
                f"{config}: source: records has no endpoints to evaluate; the run itself reports "
                "eval/loss"
            )
        if checked.evaluation is None:
            raise ConfigError(f"{config}: evaluation: is required for easyrl eval; add it")
        from easyrl.recipes.loading import load_recipe

        load_recipe(checked)
        if keep_texts is not None and not keep_texts.resolve().parent.is_dir():
            raise ConfigError(f"--keep-texts: {keep_texts.parent} is no folder; make it first")
        _evaluate(checked, checked.evaluation, keep_texts)
    except (ConfigError, RewardError, TextsNotWritten, TooManyExcluded) as error:
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def _evaluate(config: Config, evaluation: EvaluationConfig, keep_texts: Path | None) -> None:
    from easyrl.build.data import load_held_out
    from easyrl.build.endpoints import warn_of_short_contexts
    from easyrl.build.inference import open_inference, open_scoring
    from easyrl.build.servers import start_servers
    from easyrl.build.tokenizer import load_tokenizer, token_decoder
    from easyrl.build.vocabulary import policy_vocabulary
    from easyrl.runtime.collectives import Collectives
    from easyrl.runtime.ranks import Ranks
    from easyrl.runtime.stopping import StopRequest
    from easyrl.samples.texts import TextFile

    tokenizer = load_tokenizer(config)
    held_out = load_held_out(config, tokenizer)
    with ExitStack() as opened:
        # not into run.output_dir, which may be a run's
        log_dir = Path(opened.enter_context(TemporaryDirectory(prefix="easyrl-eval-")))
        servers = start_servers(config, opened, log_dir)
        inference = open_inference(
            config,
            opened,
            open_scoring(config, opened),
            vocabulary=policy_vocabulary(config, tokenizer),
            servers=servers,
        )
        warn_of_short_contexts(config, inference, rollout=False)
        nobody_stops = StopRequest(config.trainer.grace_s)
        opened.callback(nobody_stops.close)
        alone = Collectives(Ranks.data_parallel(0, 1))
        evaluator = inference.evaluator(evaluation, held_out, alone, nobody_stops)
        texts = None
        if keep_texts is not None:
            texts = TextFile(keep_texts, token_decoder(tokenizer))
            opened.callback(texts.close)
            evaluator = replace(evaluator, on_group=texts.add)
        metrics = evaluator.evaluate(version=None)
        if texts is not None:
            texts.finish()
    counts = {name: len(prompts) for name, prompts in held_out.items()}
    print(json.dumps({"num_prompts": counts.get("", counts), **metrics}))
