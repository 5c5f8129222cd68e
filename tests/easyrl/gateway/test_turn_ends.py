"""Turns that end otherwise than their template writes: nothing of them is lost, nor said twice."""

import pytest

from tests.easyrl.gateway.gateway_parts import (
    ADD,
    ALTERNATING,
    END,
    OTHER_END,
    PLAIN,
    START,
    call_text,
    chat_tokenizer,
    served,
    tool,
    user,
)

QUESTION, NEXT = user("is the answer in the inner thing?"), user("and then?")
NEW = f"\n{START}user\nand then?{END}\n{START}assistant\n"
# roles are said by tokens of their own, which a model ends its turns with
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def ids_of(*tokens):
    return chat_tokenizer().convert_tokens_to_ids(list(tokens))


@pytest.mark.parametrize("end", [END, OTHER_END])
async def test_another_of_the_models_ends_stands_in_the_place_of_the_templates(tmp_path, end):
    async with served(tmp_path, end_ids=ids_of(END, OTHER_END)) as gateway:
        trainer = gateway.trainer
        trainer.says = [trainer.ids("yes" + end)]
        answer = await gateway.chat(QUESTION)
        assert answer["content"] == "yes"
        await gateway.chat(QUESTION, answer, NEXT)
        assert trainer.prompt(1) == trainer.prompt(0) + trainer.answered[0] + trainer.ids(NEW)


@pytest.mark.parametrize("template", [PLAIN, ALTERNATING])
@pytest.mark.parametrize("end", [END, OTHER_END])
async def test_calls_behind_another_end_are_told_and_continued(tmp_path, template, end):
    async with served(tmp_path, template, end_ids=ids_of(END, OTHER_END)) as gateway:
        trainer = gateway.trainer
        trainer.says = [trainer.ids(call_text(a=1) + end)]
        answer = await gateway.chat(QUESTION, tools=[ADD])
        (call,) = answer["tool_calls"]
        assert not answer["content"] and call["function"]["arguments"] == '{"a": 1}'
        await gateway.chat(QUESTION, answer, tool(call, "2"), tools=[ADD])
        begun = trainer.prompt(0) + trainer.answered[0]
        assert trainer.prompt(1)[: len(begun)] == begun
        behind = trainer.prompt_text(1)[len(trainer.tokenizer.decode(begun)) :]
        assert behind.lstrip().startswith(START if template is PLAIN else "[RESULT] 2")


@pytest.mark.parametrize("history", ["keep", "as_template"])
@pytest.mark.parametrize("stop", [{"stop": ["</tool_call>"]}, {"stop_token_ids": [">"]}])
async def test_a_stop_that_ends_a_call_does_not_lose_it(tmp_path, stop, history):
    async with served(tmp_path, history=history) as gateway:
        trainer = gateway.trainer
        stop = {key: [trainer.ids(s)[0] if s == ">" else s for s in stop[key]] for key in stop}
        trainer.says = [trainer.ids(call_text(a=1))]
        answer = await gateway.chat(QUESTION, tools=[ADD], **stop)
        (call,) = answer["tool_calls"]
        assert call["function"]["arguments"] == '{"a": 1}' and not answer["content"]
        await gateway.chat(QUESTION, answer, NEXT, tools=[ADD])
        new = trainer.ids(END + NEW)
        assert trainer.prompt(1) == trainer.prompt(0) + trainer.answered[0] + new


async def test_a_stop_behind_a_call_is_not_told(tmp_path):
    async with served(tmp_path) as gateway:
        trainer = gateway.trainer
        trainer.says = [trainer.ids(call_text(a=1) + "###")]
        answer = await gateway.chat(QUESTION, tools=[ADD], stop=["###"])
        assert len(answer["tool_calls"]) == 1 and not answer["content"]


async def test_an_end_that_a_server_leaves_out_takes_nothing_else_with_it(tmp_path):
    async with served(tmp_path) as gateway:
        trainer = gateway.trainer
        trainer.says = [trainer.ids("the answer"), trainer.ids(call_text(a=1))]
        answer = await gateway.chat(QUESTION)
        assert answer["content"] == "the answer"
        await gateway.chat(QUESTION, answer, NEXT)
        begun = trainer.prompt(0) + trainer.answered[0]
        assert trainer.prompt(1) == begun + trainer.ids(END + NEW)


@pytest.mark.parametrize("end, behind", [(START, ""), (END, START), (OTHER_END, START)])
async def test_where_the_next_role_ends_a_turn_it_is_said_once(tmp_path, end, behind):
    async with served(tmp_path, MARKED, end_ids=ids_of(START, END, OTHER_END)) as gateway:
        trainer = gateway.trainer
        trainer.says = [trainer.ids("yes" + end)]
        answer = await gateway.chat(QUESTION)
        await gateway.chat(QUESTION, answer, NEXT)
        new = f"{behind}user\nand then?{START}assistant\n"
        assert trainer.prompt(1) == trainer.prompt(0) + trainer.answered[0] + trainer.ids(new)


async def test_calls_in_special_tokens_are_read_though_no_client_is_told_those(tmp_path):
    async with served(tmp_path, tool_parser="mistral") as gateway:
        trainer = gateway.trainer
        assert trainer.ready.result().tool_parser == "mistral"
        trainer.says = ['So.[TOOL_CALLS]add[ARGS]{"a": 1}', f"{START}no call"]
        answer = await gateway.chat(QUESTION, tools=[ADD])
        assert answer["content"] == "So." and len(answer["tool_calls"]) == 1
        assert (await gateway.chat(NEXT, tools=[ADD]))["content"] == "no call"


async def test_tools_whose_calls_nobody_reads_are_refused(tmp_path):
    own_way = "{% for t in tools or [] %}{{ t }}{% endfor %}" + MARKED
    async with served(tmp_path, own_way) as gateway:
        assert gateway.trainer.ready.result().tool_parser is None
        status, said = await gateway.post({"messages": [QUESTION], "tools": [ADD]})
        assert status == 400 and said["error"]["param"] == "tools"
        assert "set data.tool_parser to the one" in said["error"]["message"]
        assert "hermes, llama3_json, mistral" in said["error"]["message"]
        plain = {"messages": [QUESTION], "tools": [ADD], "tool_choice": "none"}
        assert (await gateway.post(plain))[0] == 200
