"""The token ids that a policy knows, from its model's configuration alone."""

from __future__ import annotations

from easyrl.config import ModelConfig


def vocabulary_size(model: ModelConfig) -> int:
    """Rows of the embedding of the model at ``model.path``: it looks ids up from 0 to one less.

    May be more than the tokenizer has. Raises ``ValueError`` naming ``model.path``.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            model.path, local_files_only=True, trust_remote_code=False
        )
        return int(config.get_text_config().vocab_size)
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"model.path: {model.path} has no config.json that tells its vocab_size ({error}); "
            "give a folder with a Hugging Face model"
        ) from None
