"""A chat with which several samples begin is tokenised once, whatever becomes of it behind."""

import numpy as np
import pytest

from easyrl.gateway.errors import BadRequest
from easyrl.gateway.prompts import chat_prompt
from easyrl.gateway.rendering import KEPT_BYTES, KEPT_CHATS, Renderer
from tests.easyrl.gateway.gateway_parts import chat_tokenizer, user


@pytest.fixture
def renderer(monkeypatch) -> tuple[Renderer, list[str]]:
    """And the texts that it has tokenised."""
    made, texts = Renderer(chat_tokenizer()), []
    encode = made._codec.encode
    monkeypatch.setattr(made._codec, "encode", lambda text: (texts.append(text), encode(text))[1])
    return made, texts


def test_the_chat_of_a_group_is_tokenised_once(renderer):
    made, texts = renderer
    chats = [[user("the number is 4")], [user("the number is 5")]]
    prompts = [chat_prompt(made, chat, None, "keep") for chat in chats * 3]
    assert len(texts) == 2
    for chat, prompt in zip(chats * 3, prompts, strict=True):
        assert prompt.ids.tolist() == made.ids(made.text(chat)).tolist()
        assert prompt.parent is None and prompt.new_text == made.text(chat)


def test_tools_make_another_chat(renderer):
    made, texts = renderer
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    chat_prompt(made, [user("a")], None, "keep")
    chat_prompt(made, [user("a")], None, "keep", tools)
    assert len(texts) == len(set(texts)) == 2


def test_so_do_settings_of_the_template():
    named = Renderer(chat_tokenizer("{{ name }}: {{ messages[0].content }}"))
    ada, eve, again = (
        chat_prompt(named, [user("a")], None, "keep", None, {"name": name})
        for name in ("Ada", "Eve", "Ada")
    )
    assert [named.decode(prompt.ids.tolist()) for prompt in (ada, eve)] == ["Ada: a", "Eve: a"]
    assert again.ids is ada.ids


def test_nobody_writes_to_what_is_kept(renderer):
    made, _ = renderer
    ids = chat_prompt(made, [user("a")], None, "keep").ids
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1
    assert ids.dtype == np.int32


def test_what_is_kept_is_bounded(renderer):
    made, texts = renderer
    for number in range(KEPT_CHATS + 1):
        made.ids_of_chat(f"{number}")
    made.ids_of_chat("0")  # the one that was used last long before the others
    assert texts.count("0") == 2
    made.ids_of_chat(f"{KEPT_CHATS}")
    assert texts.count(f"{KEPT_CHATS}") == 1
    for long in ("a" * (KEPT_BYTES + 1), "é" * (KEPT_BYTES // 2 + 1)):
        assert made.ids_of_chat(long).tolist() == made.ids_of_chat(long).tolist()
        assert texts.count(long) == 2
    wide = "𝄞" + "a" * (KEPT_BYTES - 4)  # one letter makes all of them wide
    for widest in (wide, *(x * (KEPT_BYTES // len(x.encode())) for x in "aé€𝄞")):
        num_bytes = widest.__sizeof__() + made.ids_of_chat(widest).nbytes  # an id for each byte
        assert KEPT_CHATS * num_bytes < 67.5e6
    assert KEPT_CHATS * (wide.__sizeof__() + made.ids_of_chat(wide).nbytes) > 67e6


def test_a_text_that_is_refused_is_refused_again(renderer):
    made, _ = renderer
    for _ in range(2):
        with pytest.raises(BadRequest, match="no text that can be tokenised"):
            made.ids_of_chat("\ud800")
