"""Whether an endpoint's tokenizer and chat template are the policy's, where it shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from easyrl.config import Config
from easyrl.doctor.endpoints import Reached
from easyrl.doctor.finding import Finding, failed, not_checked, ok
from easyrl.inference_client.errors import EndpointError
from easyrl.schema import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MESSAGES = [{"role": "user", "content": "1 + 2 = 3"}]


async def tokenizer_finding(
    config: Config, tokenizer: PreTrainedTokenizerBase, reached: Reached, prompt: Prompt
) -> Finding:
    """Ids of a prompt's text.

    The run itself sends ids, and decodes what comes: of the server's tokenizer it uses the ids that
    end a response, and the text in which ``stop`` is looked for.
    """
    name = f"tokenizer of {reached.url}"
    own = tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    asked = {"prompt": prompt.text, "add_special_tokens": False}
    return await _compare(
        name,
        reached,
        asked,
        list(own),
        f"start the server with the tokenizer of {config.model.tokenizer_path} (vllm serve "
        "--tokenizer), or correct model.tokenizer",
    )


async def template_finding(
    config: Config, tokenizer: PreTrainedTokenizerBase, reached: Reached
) -> Finding:
    """Ids of a message as a chat; only told of where the configuration applies the template."""
    name = f"chat template of {reached.url}"
    if not config.data.apply_chat_template:
        return not_checked(name, "data.apply_chat_template=false: no template is used")
    template = None
    if config.data.chat_template is not None:
        template = config.data.chat_template.read_text()
    keywords: dict[str, Any] = config.data.chat_template_kwargs
    text = tokenizer.apply_chat_template(
        MESSAGES, chat_template=template, add_generation_prompt=True, tokenize=False, **keywords
    )
    # the template writes its own beginning-of-text token
    own = tokenizer(str(text), add_special_tokens=False)["input_ids"]
    asked = {
        "messages": MESSAGES,
        "add_generation_prompt": True,
        "chat_template_kwargs": keywords,
    }
    return await _compare(
        name,
        reached,
        asked,
        list(own),
        "start the server with the run's template (vllm serve --chat-template) if others use its "
        "chat route; training sends token ids and is not touched",
    )


async def _compare(
    name: str, reached: Reached, asked: dict[str, Any], own: list[int], remedy: str
) -> Finding:
    try:
        theirs = await reached.client.tokenize(asked)
    except EndpointError as error:
        return not_checked(name, f"it does not say ({error.reason:.200})")
    if theirs is None:
        return not_checked(name, "it has no route /tokenize")
    if theirs == own:
        return ok(name, f"gives the same {len(own)} ids")
    pairs = zip(own, theirs, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), len(theirs)))
    return failed(
        name,
        f"gives {len(theirs)} ids for a text where the policy's gives {len(own)}; they differ from "
        f"position {first}",
        remedy,
    )
