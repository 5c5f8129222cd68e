"""What the model is shown of a conversation: sampled ids stay, what is new is rendered."""

import itertools
import json
from random import Random

import pytest

from tests.easyrl.gateway.gateway_parts import (
    ADD,
    ALTERNATING,
    END,
    KEY,
    PLAIN,
    START,
    STRIPPING,
    call_text,
    served,
    tool,
    user,
)

QUESTION, NEXT = user("is the answer in the inner thing?"), user("and then?")
NEW = f"\n{START}user\nand then?{END}\n{START}assistant\n"
REASONED = "<think>\nlong\n</think>\n\nyes"


def odd_ids(trainer, text):
    """Of ``text`` and the end of a turn, byte by byte: not as a tokenizer would have them."""
    ids = [trainer.ids(character)[0] for character in text] + trainer.ids(END)
    assert ids != trainer.ids(text + END)
    assert trainer.tokenizer.decode(ids) == text + END
    return ids


async def test_a_first_prompt_is_the_template_with_its_generation_prompt(tmp_path):
    async with served(tmp_path) as gateway:
        await gateway.chat({"role": "system", "content": "Be kind."}, QUESTION)
        trainer = gateway.trainer
        expected = trainer.tokenizer.apply_chat_template(
            [{"role": "system", "content": "Be kind."}, QUESTION],
            add_generation_prompt=True,
            return_dict=False,
        )
        assert trainer.prompt(0) == expected


async def test_a_turn_that_retokenises_otherwise_keeps_its_sampled_ids(tmp_path):
    async with served(tmp_path) as gateway:
        trainer = gateway.trainer
        sampled = odd_ids(trainer, "then the answer is in there")
        trainer.says = [sampled]
        answer = await gateway.chat(QUESTION)
        assert answer["content"] == "then the answer is in there"
        await gateway.chat(QUESTION, answer, NEXT)
        assert trainer.prompt(1) == trainer.prompt(0) + sampled + trainer.ids(NEW)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_later_answer_tells_all_that_the_model_was_shown(tmp_path, stream):
    async with served(tmp_path) as gateway:
        trainer = gateway.trainer
        answer = await gateway.chat(QUESTION)
        body = {"messages": [QUESTION, answer, NEXT], "return_token_ids": True, "stream": stream}
        headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "one"}
        url = gateway.url + "/v1/chat/completions"
        for _ in range(2):  # once more: as it was kept
            async with gateway.http.post(url, json=body, headers=headers) as response:
                text = await response.text()
            whole = json.loads(text.split("\n\n")[0].removeprefix("data: "))
            assert whole["prompt_token_ids"] == trainer.prompt(1)
        assert len(trainer.asked) == 2


async def test_ten_turns_each_extend_the_one_before(tmp_path):
    async with served(tmp_path) as gateway:
        trainer, messages = gateway.trainer, [QUESTION]
        for number in range(10):
            trainer.says = [odd_ids(trainer, f"the winner is there {number}")]
            messages += [await gateway.chat(*messages), user(f"more {number}")]
        for number in range(1, 10):
            before = trainer.prompt(number - 1) + trainer.answered[number - 1]
            assert trainer.prompt(number)[: len(before)] == before


async def test_a_turn_that_was_cut_off_is_ended_by_the_template(tmp_path):
    async with served(tmp_path) as gateway:
        trainer = gateway.trainer
        trainer.says, trainer.finish_reason = [trainer.ids("the ans")], "length"
        answer = await gateway.chat(QUESTION)
        await gateway.chat(QUESTION, answer, NEXT)
        assert trainer.prompt(1) == trainer.prompt(0) + trainer.ids("the ans") + trainer.ids(
            END + NEW
        )


async def test_a_turn_that_a_stop_string_ended_is_told_before_it_and_kept_whole(tmp_path):
    async with served(tmp_path) as gateway:
        trainer = gateway.trainer
        trainer.says = [trainer.ids("one###")]
        answer = await gateway.chat(QUESTION, stop=["###"])
        assert answer["content"] == "one" and trainer.asked[0].stop == ("###",)
        await gateway.chat(QUESTION, answer, NEXT)
        assert trainer.prompt(1) == trainer.prompt(0) + trainer.ids("one###") + trainer.ids(
            END + NEW
        )


@pytest.mark.parametrize(
    "changed",
    [
        {"content": "another answer"},
        {"content": "the answer "},
        {"tool_calls": [{"id": "x", "function": {"name": "add", "arguments": "{}"}}]},
        {"reasoning_content": "made up"},
    ],
)
async def test_an_answer_that_was_not_given_is_rendered_afresh(tmp_path, changed):
    async with served(tmp_path) as gateway:
        trainer = gateway.trainer
        sampled = odd_ids(trainer, "the answer")
        trainer.says = [sampled]
        answer = await gateway.chat(QUESTION)
        await gateway.chat(QUESTION, {**answer, **changed}, NEXT)
        text = trainer.prompt_text(1)
        assert trainer.prompt(1) == trainer.ids(text)  # the tokenizer's own ids
        assert trainer.prompt(1)[: len(trainer.prompt(0)) + len(sampled)] != (
            trainer.prompt(0) + sampled
        )


async def test_what_clients_add_to_a_message_changes_nothing(tmp_path):
    async with served(tmp_path) as gateway:
        trainer = gateway.trainer
        sampled = odd_ids(trainer, "the answer")
        trainer.says = [sampled]
        await gateway.chat(QUESTION)
        parts = [{"type": "text", "text": "the answer"}]
        back = {
            "role": "assistant",
            "content": parts,
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": None,
        }
        question = {"role": "user", "content": [{"type": "text", "text": QUESTION["content"]}]}
        await gateway.chat(question, back, NEXT)
        assert trainer.prompt(1) == trainer.prompt(0) + sampled + trainer.ids(NEW)


async def test_a_history_compacted_in_the_middle_is_rendered_afresh(tmp_path):
    async with served(tmp_path) as gateway:
        trainer = gateway.trainer
        trainer.says = [odd_ids(trainer, "the first"), odd_ids(trainer, "the other")]
        first = await gateway.chat(QUESTION)
        second = await gateway.chat(QUESTION, first, NEXT)
        await gateway.chat(QUESTION, {"role": "assistant", "content": "(left out)"}, NEXT, second)
        text = trainer.prompt_text(2)
        assert "(left out)" in text and "the other" in text and "the first" not in text
        assert trainer.prompt(2) == trainer.ids(text)


async def test_of_two_branches_each_is_continued_by_itself(tmp_path):
    async with served(tmp_path) as gateway:
        trainer = gateway.trainer
        trainer.says = [odd_ids(trainer, "the one"), odd_ids(trainer, "the other")]
        one = await gateway.chat(QUESTION)
        other = await gateway.chat(QUESTION)
        for number, answer in ((0, one), (1, other)):
            await gateway.chat(QUESTION, answer, NEXT)
            begun = trainer.prompt(number) + trainer.answered[number]
            assert trainer.prompt(2 + number) == begun + trainer.ids(NEW)


async def test_other_tools_are_another_conversation(tmp_path):
    async with served(tmp_path) as gateway:
        trainer = gateway.trainer
        answer = await gateway.chat(QUESTION)
        await gateway.chat(QUESTION, answer, NEXT, tools=[ADD])
        assert trainer.prompt_text(1).startswith(f"{START}system\n<tools>")


async def test_parallel_calls_are_told_and_answered_behind_their_sampled_ids(tmp_path):
    async with served(tmp_path) as gateway:
        trainer = gateway.trainer
        said = f"Both.\n{call_text(a=1)}\n{call_text(a=2.50)}"
        sampled = odd_ids(trainer, said)
        trainer.says = [sampled]
        answer = await gateway.chat(QUESTION, tools=[ADD])
        first, second = answer["tool_calls"]
        assert answer["content"] == "Both." and first["id"] != second["id"]
        assert [c["function"]["arguments"] for c in (first, second)] == ['{"a": 1}', '{"a": 2.5}']
        second["function"]["arguments"] = '{ "a":2.5 }'  # a client's own way to write it
        await gateway.chat(QUESTION, answer, tool(first, "2"), tool(second, "5"), tools=[ADD])
        results = "".join(
            f"\n{START}user\n<tool_response>\n{n}\n</tool_response>{END}" for n in (2, 5)
        )
        new = f"{results}\n{START}assistant\n"
        assert trainer.prompt(1) == trainer.prompt(0) + sampled + trainer.ids(new)


async def test_calls_are_kept_where_a_template_needs_to_see_them(tmp_path):
    async with served(tmp_path, ALTERNATING) as gateway:
        trainer = gateway.trainer
        sampled = odd_ids(trainer, f"then{call_text(a=1)}")
        trainer.says = [sampled, odd_ids(trainer, "then")]
        answer = await gateway.chat(QUESTION, tools=[ADD])
        called = [QUESTION, answer, tool(answer["tool_calls"][0], "2")]
        final = await gateway.chat(*called, tools=[ADD])
        new = trainer.ids("[RESULT] 2[/RESULT]")
        assert trainer.prompt(1) == trainer.prompt(0) + sampled + new
        await gateway.chat(*called, final, NEXT, tools=[ADD])
        begun = trainer.prompt(1) + trainer.answered[1]
        assert trainer.prompt(2) == begun + trainer.ids("[INST] and then?[/INST]")


async def test_reasoning_that_the_template_strips_stays_where_history_is_kept(tmp_path):
    async with served(tmp_path, STRIPPING) as gateway:
        trainer = gateway.trainer
        problem = trainer.ready.result().template_problem
        assert problem == "it leaves out the reasoning of earlier turns"
        trainer.says = [REASONED]
        answer = await gateway.chat(QUESTION)
        assert answer["content"] == REASONED
        await gateway.chat(QUESTION, answer, NEXT)
        sampled = trainer.ids(REASONED + END)
        assert trainer.prompt(1) == trainer.prompt(0) + sampled + trainer.ids(NEW)


async def test_as_the_template_reasoning_is_stripped_and_a_new_branch_begins(tmp_path):
    async with served(tmp_path, STRIPPING, history="as_template") as gateway:
        trainer = gateway.trainer
        trainer.says = [REASONED, odd_ids(trainer, "the end")]
        answer = await gateway.chat(QUESTION)
        second = await gateway.chat(QUESTION, answer, NEXT)
        text = trainer.prompt_text(1)
        assert "long" not in text and "yes" in text and trainer.prompt(1) == trainer.ids(text)
        # nothing of the second answer is stripped: it keeps its ids, behind the new branch
        await gateway.chat(QUESTION, answer, NEXT, second, NEXT)
        begun = trainer.prompt(1) + trainer.answered[1]
        assert trainer.prompt(2) == begun + trainer.ids(NEW)


async def test_as_the_template_what_it_renders_as_sampled_keeps_its_ids(tmp_path):
    async with served(tmp_path, PLAIN, history="as_template") as gateway:
        trainer = gateway.trainer
        assert trainer.ready.result().template_problem is None
        sampled = odd_ids(trainer, f"the{call_text(a=1)}")  # rendered with other spaces
        trainer.says = [sampled]
        answer = await gateway.chat(QUESTION, tools=[ADD])
        await gateway.chat(QUESTION, answer, NEXT, tools=[ADD])
        assert trainer.prompt(1) == trainer.prompt(0) + sampled + trainer.ids(NEW)


async def test_kept_turns_of_a_session_are_not_another_ones(tmp_path):
    from easyrl.config import SamplingConfig
    from easyrl.gateway.messages import Open

    async with served(tmp_path) as gateway:
        trainer = gateway.trainer
        trainer.says = [odd_ids(trainer, "the answer")]
        answer = await gateway.chat(QUESTION)
        told = SamplingConfig().model_dump_json().encode()
        trainer.send(Open("s2", "secret", told))
        gateway.url = gateway.root + "/sessions/s2"
        for _ in itertools.repeat(None, 100):
            status, _ = await gateway.post({"messages": [QUESTION, answer, NEXT]})
            if status == 200:
                break
        assert trainer.prompt(1) == trainer.ids(trainer.prompt_text(1))


async def test_a_sub_agent_between_two_turns_is_a_conversation_of_its_own(tmp_path):
    async with served(tmp_path) as gateway:
        trainer = gateway.trainer
        trainer.says = [odd_ids(trainer, "ask the other"), odd_ids(trainer, "the inner one")]
        answer = await gateway.chat(QUESTION)
        agent = {"role": "system", "content": "You look things up."}
        inner = await gateway.chat(agent, QUESTION)
        await gateway.chat(QUESTION, answer, NEXT)
        await gateway.chat(agent, QUESTION, inner, NEXT)
        for number in (0, 1):
            begun = trainer.prompt(number) + trainer.answered[number]
            assert trainer.prompt(2 + number) == begun + trainer.ids(NEW)
        assert trainer.prompt(1) == trainer.ids(trainer.prompt_text(1))


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_is_sampled_a_conversation_goes_on_behind_it(tmp_path, seed):
    """Half characters, cut off or ended; also where branches are interleaved."""
    random = Random(seed)
    async with served(tmp_path) as gateway:
        trainer = gateway.trainer
        end = trainer.ids(END)[0]
        branches = [([QUESTION], [])]  # messages, and ids up to their last answer
        for number in range(40):
            messages, begun = random.choice(branches)
            sampled = [random.randrange(end) for _ in range(random.randrange(1, 9))]
            is_cut = random.random() < 0.3
            if not is_cut:
                sampled.append(end)
            trainer.says, trainer.finish_reason = [sampled], "length" if is_cut else "stop"
            answer = await gateway.chat(*messages)
            prompt = trainer.prompt(number)
            assert prompt[: len(begun)] == begun
            if begun:
                new = NEW if begun[-1] == end else END + NEW
                assert prompt[len(begun) :] == trainer.ids(new)
            branches.append(([*messages, answer, NEXT], prompt + sampled))
