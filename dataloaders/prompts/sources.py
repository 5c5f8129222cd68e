"""Where records come from: files, or a dataset of the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

from easyrl.config import DatasetConfig
from easyrl.dataloaders.prompts.records import Record, read_records

_ANSWER_S = 10.0  # that the Hub may take to say what it has


def source_records(config: DatasetConfig) -> Iterator[Record]:
    """The first ``max_records`` records of the files, or of the dataset's split.

    Raises ``ValueError`` for a file or dataset that cannot be read.
    """
    records: Iterator[Record]
    if config.dataset is None:
        records = chain.from_iterable(read_records(path) for path in config.files)
    else:
        records = _dataset_records(config, config.dataset)
    return islice(records, config.max_records)


@contextmanager
def _asked_once(name: str) -> Iterator[None]:
    """Inside, a Hub that does not answer now is not asked again: ``datasets`` would for 24 s.

    What is in its cache, and folders, are loaded all the same.
    """
    import datasets
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if not Path(name).exists() and not any(before):
        try:
            HfApi().dataset_info(name, timeout=_ANSWER_S)
        except HfHubHTTPError:  # it has answered
            pass
        except Exception:  # of the HTTP library, whichever it is
            datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _dataset_records(config: DatasetConfig, name: str) -> Iterator[Record]:
    """Their locations are ``NAME:SPLIT row NUMBER``, counted from 1."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            "dataset: the package datasets is not installed; pip install 'easyrl[hub]', or save "
            "the records in a .jsonl or .parquet file and name that in files"
        ) from None
    try:
        with _asked_once(name):
            rows = load_dataset(name, config.subset, split=config.split, streaming=config.streaming)
    except Exception as error:  # of the Hub, the network, arrow, or the dataset's own form
        told = " ".join(str(error).split())
        raise ValueError(
            f"dataset: {name}, split {config.split!r}, cannot be loaded ({told:.300}); correct "
            "dataset, subset or split, or where there is no network fetch it elsewhere (hf "
            f"download {name} --repo-type dataset --local-dir data/{name.rpartition('/')[2]}) and "
            f"name that folder in dataset{', with its subset' if config.subset else ''}"
        ) from None
    for number, values in enumerate(rows, start=1):
        yield Record(f"{name}:{config.split} row {number}", values)
