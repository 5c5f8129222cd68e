"""A sequence classifier from disk, such as a scalar reward model, and its logits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from easyrl.inference_client.servers.embedded.engine import DTYPES, load_tokenizer
from easyrl.inference_client.servers.embedded.requests import BadRequestError
from easyrl.runtime.numerics import own_memory

SUFFIX = "ForSequenceClassification"  # of an architecture


def is_classifier(model: Path) -> bool:
    """Whether the folder's ``config.json`` names a sequence classifier."""
    try:
        names = json.loads((model / "config.json").read_text()).get("architectures") or [""]
    except (OSError, ValueError, AttributeError):
        return False
    return str(names[0]).endswith(SUFFIX)


class Classifier:
    """A ``transformers`` sequence classifier that reads one sequence at a time.

    Each sequence is run by itself, without padding, so that no other one can change a bit of its
    logits, and a causal model is read at its last token, whatever token that is, as vLLM does.

    Raises ``ValueError`` if ``model`` is not a directory with such a model, or weights are missing.
    """

    def __init__(
        self,
        model: Path,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        max_model_len: int | None = None,
    ) -> None:
        self._model = _load(model, dtype).to(torch.device(device))  # type: ignore[arg-type]
        self.tokenizer = load_tokenizer(model)
        config = self._model.config.get_text_config()
        # without one transformers reads the last token, with one the last that is another
        config.pad_token_id = None
        self.vocab_size = int(config.vocab_size)
        limit = int(config.max_position_embeddings)
        if max_model_len is not None and not 0 < max_model_len <= limit:
            raise ValueError(
                f"max_model_len: must be from 1 to the model's {limit}, is {max_model_len}"
            )
        self.max_model_len = max_model_len or limit
        self.labels: Mapping[int, str] = self._model.config.id2label

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> list[float]:
        """One number per label, fp32. ``token_ids`` has passed ``check``."""
        ids = torch.tensor([token_ids], device=self._model.device)
        # without a mask of ones some models build their own out of the padding token
        output = self._model(input_ids=ids, attention_mask=torch.ones_like(ids))
        values: list[float] = output.logits[0].float().tolist()
        return values

    def check(self, token_ids: Sequence[int]) -> None:
        """Raises ``BadRequestError`` if the model cannot read them."""
        if not token_ids:
            raise BadRequestError("input", "must not be empty")
        if len(token_ids) > self.max_model_len:
            raise BadRequestError(
                "input",
                f"{len(token_ids)} tokens exceed the maximum model length of {self.max_model_len}",
            )
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise BadRequestError(
                "input", f"token id out of vocabulary, ids are 0 to {self.vocab_size - 1}"
            )


def _load(path: Path, dtype: str) -> PreTrainedModel:
    if dtype not in DTYPES:
        raise ValueError(f"dtype: must be one of {', '.join(DTYPES)}, is {dtype!r}")
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=DTYPES[dtype], local_files_only=True, output_loading_info=True
        )
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path}: {error}; fetch the model again, with all of its files"
        ) from error
    if missing := sorted(found["missing_keys"]):  # transformers draws them at random
        raise ValueError(
            f"{path}: has no weights for {len(missing)} parameters, {missing[0]} first; give the "
            "folder of a model that was trained as a classifier"
        )
    own_memory(model)
    loaded: PreTrainedModel = model.requires_grad_(False).eval()
    return loaded
