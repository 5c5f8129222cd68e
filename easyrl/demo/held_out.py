"""What a model of the demo gets right, measured with plain ``transformers``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from easyrl.demo.task import END_THINK

ACCURACY_BATCH_SIZE = 250


@torch.no_grad()
def held_out_accuracy(model_dir: Path, heldout: Path, seed: int, max_tokens: int) -> float:
    """Share of ``heldout``'s problems answered right by one response sampled at temperature 1.

    With plain ``transformers`` and nothing of EasyRL's own. Sampled, not greedy: the reward is an
    expectation under sampling, and greedy decoding would show a policy that merely got sharper as
    one that got better.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True)
    model.eval()
    records = [json.loads(line) for line in heldout.read_text().splitlines()]
    torch.manual_seed(seed)
    correct = 0
    for start in range(0, len(records), ACCURACY_BATCH_SIZE):
        batch = records[start : start + ACCURACY_BATCH_SIZE]
        inputs: Any = tokenizer.apply_chat_template(
            [[{"role": "user", "content": record["prompt"]}] for record in batch],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_tokens,
        )
        responses = output[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        correct += sum(
            text.rpartition(END_THINK)[2].strip() == record["answer"]
            for text, record in zip(texts, batch, strict=True)
        )
    return correct / len(records)
