"""The records of a run on records, read; no model is loaded for it."""

from __future__ import annotations

import sys
from pathlib import Path

from easyrl.build.tokenizer import load_tokenizer
from easyrl.build.vocabulary import policy_vocabulary, require_known_tokens
from easyrl.config import ConfigError
from easyrl.config.file import load_config
from easyrl.config.records import RecordDatasetConfig, RecordsConfig
from easyrl.dataloaders.supervised.dataset import RecordDataset, load_records, record_digest
from easyrl.recipes.loading import load_recipe
from easyrl.runtime.run_files import CONFIG_FILE


def load_dataset(config: RecordsConfig, section: RecordDatasetConfig, key: str) -> RecordDataset:
    """The records of one section, which the recipe can train.

    Raises ``ConfigError`` naming file, line and remedy.
    """
    tokenizer = load_tokenizer(config)
    vocabulary = policy_vocabulary(config, tokenizer)
    try:
        data = load_records(section, tokenizer, vocabulary.end_ids or (), source_key=key)
    except ValueError as error:
        said = str(error)
        raise ConfigError(said if said.startswith(key) else f"{key}: {said}") from error
    recipe, is_pairs = load_recipe(config), data.format == "preference"
    if recipe.pairs and not is_pairs:
        raise ConfigError(
            f"{key}.files: recipe {config.recipe.name} trains preference pairs, the records are of "
            f"format {data.format}; give records with chosen and rejected, or use recipe sft"
        )
    if is_pairs and not recipe.pairs:
        raise ConfigError(
            f"{key}.files: the records are preference pairs, of which recipe "
            f"{config.recipe.name} trains none; use recipe dpo, or set {key}.format=completion and "
            f"{key}.fields.completion={section.fields.chosen}"
        )
    for record in data.records:
        parts = [record.prompt.token_ids, *(each.token_ids for each in record.completions)]
        require_known_tokens(config, parts, vocabulary.size)
    return data


def record_digests(run_dir: Path) -> list[str] | None:
    """Of a run's records as its files give them now, by index.

    None, which is said, where they cannot be read.
    """
    try:
        config = load_config(run_dir / CONFIG_FILE, to_look_back=True)
        assert isinstance(config, RecordsConfig)
        data = load_dataset(config, config.data, "data")
    except (ConfigError, OSError) as error:
        print(f"easyrl: the records are not compared: {error}", file=sys.stderr)
        return None
    return [record_digest(record) for record in data.records]
