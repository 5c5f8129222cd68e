"""Verifiable instructions: does a response follow one? A small function for each, in a table.

Ids and arguments are those of IFEval (Zhou et al., arXiv 2311.07911, and its published data).
Where this differs from its published checker: keywords are literal text, no regular expressions;
sentences and words are found without a tokenizer to download, so that abbreviations outside a short
list end a sentence; upper and lower case do not also ask for English. ``startend:start_checker``
is not in its data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

Check = Callable[..., bool]  # (response, **arguments)
Relation = Literal["less than", "at least"]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]

_ABBREVIATIONS = re.compile(
    r"\b(Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Inc|Ltd|Co|vs|etc|e\.g|i\.e|approx|No|Fig|U\.S|a\.m|p\.m)\."
)
# Every pattern here takes time that grows with the text, not with its square: a response may be a
# hundred thousand characters of whatever a model falls into. Hence the look behind.
_SENTENCE_END = re.compile(r"(?:(?<![.!?…])[.!?…]++[\"'”’)\]*_]*+(?=\s|$))|[。！？]+")
_POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}  # with or without spaces
_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _holds(count: int, relation: Relation, bound: int) -> bool:
    return count < bound if relation == "less than" else count >= bound


def sentences_of(text: str) -> list[str]:
    """The sentences of ``text``, in order; a decimal point ends none."""
    # a full stop of an abbreviation becomes a character that ends nothing, of the same length
    masked = _ABBREVIATIONS.sub(lambda match: match[0].replace(".", "\0"), text)
    starts, ends = [0], []
    for match in _SENTENCE_END.finditer(masked):
        ends.append(match.end())
        starts.append(match.end())
    pieces = [text[start:end].strip() for start, end in zip(starts, [*ends, None], strict=True)]
    return [piece for piece in pieces if re.search(r"\w", piece)]


def _blocks(text: str, divider: str) -> list[str] | None:
    """What ``divider`` separates; None if a block between two dividers is empty."""
    blocks = re.split(divider, text)
    if any(not block.strip() for block in blocks[1:-1]):
        return None
    return [block for block in blocks if block.strip()]


# ---- keywords ----


def _contains(response: str, *, keywords: Texts) -> bool:
    return all(word.casefold() in response.casefold() for word in keywords)


def _keyword_frequency(
    response: str, *, keyword: Text, frequency: NonNegativeInt, relation: Relation
) -> bool:
    return _holds(response.casefold().count(keyword.strip().casefold()), relation, frequency)


def _lacks(response: str, *, forbidden_words: Texts) -> bool:
    return not any(
        re.search(rf"(?<!\w){re.escape(word)}(?!\w)", response, re.IGNORECASE)
        for word in forbidden_words
    )


def _letter_frequency(
    response: str,
    *,
    letter: Annotated[str, Field(min_length=1, max_length=1)],
    let_frequency: NonNegativeInt,
    let_relation: Relation,
) -> bool:
    return _holds(response.lower().count(letter.lower()), let_relation, let_frequency)


# ---- length ----


def _number_of_words(response: str, *, num_words: NonNegativeInt, relation: Relation) -> bool:
    return _holds(len(re.findall(r"\w+", response)), relation, num_words)


def _number_of_sentences(
    response: str, *, num_sentences: NonNegativeInt, relation: Relation
) -> bool:
    return _holds(len(sentences_of(response)), relation, num_sentences)


def _number_of_paragraphs(response: str, *, num_paragraphs: PositiveInt) -> bool:
    blocks = _blocks(response, r"\s?\*\*\*\s?")
    return blocks is not None and len(blocks) == num_paragraphs


def _first_word_of_paragraph(
    response: str, *, num_paragraphs: PositiveInt, nth_paragraph: PositiveInt, first_word: Text
) -> bool:
    paragraphs = [part for part in response.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'\"")
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


# ---- content and format ----


def _placeholders(response: str, *, num_placeholders: NonNegativeInt) -> bool:
    return len(re.findall(r"\[[^\[\]\n]*\]", response)) >= num_placeholders


def _postscript(response: str, *, postscript_marker: Text) -> bool:
    marker = postscript_marker.strip()
    pattern = _POSTSCRIPTS.get(marker, re.escape(marker.lower()))
    return re.search(pattern, response.lower()) is not None


def _bullets(response: str, *, num_bullets: NonNegativeInt) -> bool:
    return len(re.findall(r"^[^\S\n]*(?:\*[^*\n]|-)", response, re.MULTILINE)) == num_bullets


def _constrained(response: str) -> bool:
    return any(option in response for option in _OPTIONS)


def _highlights(response: str, *, num_highlights: NonNegativeInt) -> bool:
    found = re.findall(r"\*[^\n*]*\*", response) + re.findall(r"\*\*[^\n*]*\*\*", response)
    return sum(bool(each.strip("*").strip()) for each in found) >= num_highlights


def _sections(response: str, *, section_spliter: Text, num_sections: NonNegativeInt) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", response)) >= num_sections


def _is_json(response: str) -> bool:
    text = re.sub(r"^```(?:json)?", "", response.strip(), flags=re.IGNORECASE).removesuffix("```")
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(response: str) -> bool:
    for line in response.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and line[start:end].strip("<> "):
            return True
    return False


def _two_responses(response: str) -> bool:
    blocks = _blocks(response, r"\*{6}")
    return blocks is not None and len(blocks) == 2 and blocks[0].strip() != blocks[1].strip()


def _repeats_prompt(response: str, *, prompt_to_repeat: Text) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


# ---- start and end, case, punctuation ----


def _starts_with(response: str, *, starter: Text) -> bool:
    return response.lstrip().startswith(starter.strip())


def _ends_with(response: str, *, end_phrase: Text) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _is_quoted(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_words(
    response: str, *, capital_frequency: NonNegativeInt, capital_relation: Relation
) -> bool:
    words = re.findall(r"\w+(?:['’-]\w+)*", response)
    return _holds(sum(word.isupper() for word in words), capital_relation, capital_frequency)


def _is_upper(response: str) -> bool:
    return response.isupper()


def _is_lower(response: str) -> bool:
    return response.islower()


def _no_comma(response: str) -> bool:
    return "," not in response


CHECKS: dict[str, Check] = {
    "keywords:existence": _contains,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _lacks,
    "keywords:letter_frequency": _letter_frequency,
    "length_constraints:number_words": _number_of_words,
    "length_constraints:number_sentences": _number_of_sentences,
    "length_constraints:number_paragraphs": _number_of_paragraphs,
    "length_constraints:nth_paragraph_first_word": _first_word_of_paragraph,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _has_title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeats_prompt,
    "startend:start_checker": _starts_with,
    "startend:end_checker": _ends_with,
    "startend:quotation": _is_quoted,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": _is_upper,
    "change_case:english_lowercase": _is_lower,
    "punctuation:no_comma": _no_comma,
}


def follows(instruction: str, response: str, arguments: dict[str, Any]) -> bool:
    """Whether ``response`` follows the instruction; an empty one follows none."""
    return bool(response.strip()) and CHECKS[instruction](response, **arguments)
