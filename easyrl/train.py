"""Runs the trainer: ``deepspeed --module easyrl.train CONFIG [key=value …]``.

Only light imports at module level: worker processes import the main module again, and a signal has
its sentence and its status from ``main`` on.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from easyrl.arguments.train import TrainArguments
    from easyrl.config import Config
    from easyrl.engines.base import TrainEngine
    from easyrl.runtime.signals import RunSignals
    from easyrl.schema import Progress


ABOUT = "Train in this process; on several devices use deepspeed --module easyrl.train CONFIG."


def main(
    argv: Sequence[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    *,
    fixed: Sequence[str] = (),
    prog: str = "easyrl train",
    about: str = ABOUT,
) -> int:
    """The command; returns the exit status.

    ``defaults``: a tree of keys for where the configuration has none; ``fixed``: overrides that
    come last; ``prog``, ``about``: name and purpose of the command, for ``--help``.
    """
    from easyrl.runtime.startup_signals import end_at_signals

    end_at_signals()
    from easyrl.runtime.streams import tolerant_streams

    with tolerant_streams():
        from easyrl.arguments.parsing import parsed
        from easyrl.arguments.train import train_arguments

        return _main(parsed(train_arguments, argv, prog, about), defaults, fixed)


def _main(
    arguments: TrainArguments, defaults: Mapping[str, Any] | None, fixed: Sequence[str]
) -> int:
    from easyrl.config import ConfigError
    from easyrl.config.file import dump_config, load_config
    from easyrl.config.machine import check_paths
    from easyrl.hub.models import with_local_models
    from easyrl.runtime.signals import RunSignals, end_with_launcher
    from easyrl.runtime.stopping import StopRequest
    from easyrl.schema import InterruptedRun, LedgerError

    try:
        overrides = [*arguments.overrides, *fixed]
        config = load_config(arguments.config, overrides, defaults=defaults)
        if arguments.print_config:
            print(dump_config(_checked(config)), end="")
            return 0
        config = with_local_models(config, resume=arguments.resume)
        check_paths(config)
        signals = RunSignals(StopRequest(config.trainer.grace_s))
        signals.install()
        end_with_launcher(signals.terminate)
        try:
            run(config, resume=arguments.resume, signals=signals, seal=arguments.seal)
        finally:
            signals.finish()
    except (ConfigError, LedgerError) as error:  # the user's to mend; a traceback would hide it
        print(f"easyrl: {error}", file=sys.stderr)
        return 2
    except InterruptedRun as error:
        print(f"easyrl: {error}", file=sys.stderr)
        status = error.status
    else:
        status = 0
    import torch.distributed as dist

    # All ranks have come to the end of the run. Left to the interpreter's end, a thread of gloo now
    # and then aborts the process (status -6). Not after an error, which others may not have met.
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.destroy_process_group()
    return status


def run(
    config: Config,
    *,
    resume: bool = False,
    signals: RunSignals | None = None,
    on_folder: Callable[[], object] = lambda: None,
    seal: Path | None = None,
) -> None:
    """Trains one model from ``config``; every rank calls this.

    ``seal``: a key file, on rank 0. Prints the certificate's hash last, also when the run is
    interrupted.

    ``on_folder`` is called once the run's folder is this process's, before the data is read. A
    finished run that is resumed with nothing left to do is left as it is, and said so. Raises
    ``ConfigError`` for what cannot be used, ``InterruptedRun`` in an outage, where a file of the
    run cannot be written, and when a stop was asked for by ``signals``.
    """
    import os
    from contextlib import ExitStack

    config = _checked(config)
    from easyrl.build.ledger import load_seal_key, print_chain
    from easyrl.build.parts import build_parts
    from easyrl.build.ranks import is_follower
    from easyrl.runtime.garbage import collect_rarely
    from easyrl.runtime.signals import RunSignals
    from easyrl.runtime.stopping import StopRequest
    from easyrl.schema import RunComplete

    if is_follower(config):
        _follow(config, signals)
        return
    seal_key = load_seal_key(seal, config.run.output_dir, resume=resume)
    progress: Progress | None = None
    folders = [config.run.output_dir, config.weight_sync.directory]
    with (
        _lost_processes_told(),
        _disk_faults_told(folders, lambda: progress is not None and progress.closed_batches > 0),
        ExitStack() as at_end,
        ExitStack() as open_parts,
    ):
        if signals is None:
            signals = RunSignals(StopRequest(config.trainer.grace_s))
            open_parts.callback(signals.stop.close)  # of a command it lasts as long as the process
        try:
            trainer, engine = build_parts(
                config,
                open_parts,
                resume=resume,
                signals=signals,
                on_folder=on_folder,
                seal_key=seal_key,
            )
        except RunComplete as complete:
            # a success: who starts the run again until it has one must come to an end
            if int(os.environ.get("RANK", "0")) == 0:
                print(f"easyrl: {complete}", file=sys.stderr)
            return
        progress = trainer.progress
        if engine.ranks.rank == 0:
            at_end.callback(print_chain, config.run.output_dir)
        collect_rarely()
        signals.begin_training()
        trainer.fit()
        _finish(config, engine)


def _follow(config: Config, signals: RunSignals | None) -> None:
    """Without a trainer: this process has a part of the model of another's."""
    from easyrl.build.follower import follow
    from easyrl.runtime.signals import RunSignals
    from easyrl.runtime.stopping import StopRequest

    with _lost_processes_told():
        follow(config, signals or RunSignals(StopRequest(config.trainer.grace_s)))


@contextmanager
def _lost_processes_told() -> Iterator[None]:
    """Raises ``InterruptedRun`` where another process of the run is gone."""
    from easyrl.runtime.lost_process import lost_process
    from easyrl.schema import TEMPORARY_FAILURE, InterruptedRun

    try:
        yield
    except Exception as error:
        problem = lost_process(error)
        if problem is None or isinstance(error, InterruptedRun):
            raise
        raise InterruptedRun(
            f"another process of the run has ended ({problem}); go on with --resume",
            status=TEMPORARY_FAILURE,
        ) from error


@contextmanager
def _disk_faults_told(folders: Sequence[Path], has_trained: Callable[[], bool]) -> Iterator[None]:
    """Raises ``InterruptedRun`` for a file in ``folders`` that cannot be written, with the remedy.

    Temporary once the run ``has_trained``; before, something has to be put right first.
    """
    from easyrl.config import ConfigError
    from easyrl.runtime.disk_faults import disk_fault
    from easyrl.schema import NEEDS_CHANGE, TEMPORARY_FAILURE, InterruptedRun

    try:
        yield
    except (ConfigError, InterruptedRun):
        raise
    except Exception as error:
        fault = disk_fault(error, folders)
        if fault is None:
            raise
        status = TEMPORARY_FAILURE if fault.is_temporary and has_trained() else NEEDS_CHANGE
        raise InterruptedRun(fault.text, status=status) from error


def _checked(config: Config) -> Config:
    """With all keys of its recipe, which is looked at before anything heavy is loaded but torch."""
    from easyrl.recipes.loading import with_whole_recipe

    return with_whole_recipe(config)


def _finish(config: Config, engine: TrainEngine) -> None:
    """Exports the trained model, and the adapter if there is one; draws reward or loss."""
    from easyrl.ledger.checkpoints.export import export_adapter, export_model
    from easyrl.metrics.plot import plot_loss_curve, plot_reward_curve
    from easyrl.metrics.trackers import read_metrics
    from easyrl.recipes.loading import load_recipe
    from easyrl.runtime.run_folder import METRICS_FILE

    output, lora = config.run.output_dir, config.model.lora
    has_critic = load_recipe(config).needs.critic
    if engine.ranks.rank != 0:
        if config.checkpoint.export_at_end:  # collectives: rank 0 writes
            for _ in engine.named_weights():
                pass
            for _ in engine.named_weights("adapter") if lora else ():
                pass
            for _ in engine.named_weights("critic") if has_critic else ():
                pass
        return
    if config.checkpoint.export_at_end:
        weights = engine.named_weights()
        dtype = {"bf16": "bfloat16", "fp32": "float32"}[config.model.dtype]
        source, tokenizer = config.model.path, config.model.tokenizer_path
        export_model(weights, source, tokenizer, output / "model", dtype)
        print(f"easyrl: the trained model is in {output / 'model'}", file=sys.stderr)
        if lora is not None:
            adapter = engine.named_weights("adapter")
            export_adapter(adapter, lora, source, output / "adapter")
        if has_critic:
            source = config.critic.path or source
            export_model(
                engine.named_weights("critic"), source, tokenizer, output / "critic", dtype
            )
    name, plot = "reward", plot_reward_curve
    if config.source == "records":
        name, plot = "loss", plot_loss_curve
    try:
        plot(read_metrics(output / METRICS_FILE), output / f"{name}.png")
    except OSError as error:  # nothing needs it
        print(f"easyrl: the {name} curve cannot be drawn: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
