"""Filters for generated stories: what a small teacher writes is kept only where it stands up.

Pure functions over text, no model and no randomness. `judge` gives the reason a story is
dropped, or whether it is complete; `holds_together` is the stricter test that chooses the
stories of the last training phase. Repetition and lost plots are a 135M model's usual faults.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from minivllm.tiny.grammar import BOYS, GIRLS

ALLOWED = re.compile(r"[A-Za-z \n.,!?'\"-]+")
SENTENCE = re.compile(r"[^.!?]+[.!?]+[\"']?")
# Words that tell nothing about a plot; the coverage of notes is counted without them.
STOP_WORDS = frozenset(
    "a an the and or but so to of in on at it is was were be been he she him her his they them "
    "their i you we my your me us that this there then for with from up down out not no had has "
    "have did do does said one day very will would could can all by as what who when "
    "where".split()
)
FEMALE = frozenset(GIRLS) | {"Mom", "Grandma", "girl", "mother", "sister", "woman", "queen"}
MALE = frozenset(BOYS) | {"Dad", "Grandpa", "boy", "father", "brother", "man", "king"}
BANNED = frozenset(
    "kill killed blood gun knife dead die died beer wine drunk hate stupid assistant recipe".split()
)
MIN_WORDS, MAX_WORDS, MAX_SENTENCE_WORDS = 35, 160, 30
MIN_COVERAGE = 0.55


def sentences(text: str) -> list[str]:
    """The sentences of `text`, each with its end mark and closing quote; a cut tail is left out."""
    return [match.strip() for match in SENTENCE.findall(text)]


def words(text: str) -> list[str]:
    """Lower-case words, punctuation stripped."""
    return re.findall(r"[a-z']+", text.lower())


def content_words(text: str) -> set[str]:
    """The words that carry a plot, roughly stemmed ("climbed" and "climbs" meet)."""
    return {re.sub(r"(ing|ed|es|s)$", "", w) for w in words(text) if w not in STOP_WORDS}


def coverage(text: str, notes: Sequence[str]) -> float:
    """Share of the notes' content words that the text uses, from 0 to 1."""
    wanted = set().union(*(content_words(note) for note in notes)) if notes else set()
    return len(wanted & content_words(text)) / len(wanted) if wanted else 1.0


def distinct_ngrams(text: str, n: int) -> float:
    """Distinct n-grams of words over all n-grams; 1.0 where there are none."""
    tokens = words(text)
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def cut_at_repeat(text: str, threshold: float = 0.75) -> str:
    """The text before the first sentence that nearly repeats an earlier one (Jaccard of words)."""
    seen: list[set[str]] = []
    for match in SENTENCE.finditer(text):
        here = set(words(match[0]))
        for before in seen:
            # Very short sentences ("Thank you!") may come twice.
            if len(here) > 2 and len(here & before) >= threshold * len(here | before):
                return text[: match.start()].rstrip()
        seen.append(here)
    return text


def strangers(text: str, names: Collection[str]) -> set[str]:
    """Known first names in the text that belong to nobody of the story."""
    known = set(GIRLS) | set(BOYS)
    return {w for w in re.findall(r"[A-Z][a-z]+", text) if w in known} - set(names)


def judge(text: str, notes: Sequence[str], names: Collection[str], ended: bool) -> tuple[str, str]:
    """(verdict, story): 'complete', 'incomplete' or the reason it is dropped.

    `ended` says that the model itself stopped. A story that loops is cut before the repeat; one
    that told its last note is complete, other cut stories are only good as beginnings.
    """
    if not ALLOWED.fullmatch(text):
        return "characters", ""
    kept = cut_at_repeat(text.strip())
    cut = kept != text.strip()
    kept = "".join(SENTENCE.findall(kept)).strip()
    count = len(words(kept))
    if not MIN_WORDS <= count <= MAX_WORDS:
        return "length", kept
    if any(len(words(s)) > MAX_SENTENCE_WORDS for s in sentences(kept)):
        return "long sentence", kept
    if distinct_ngrams(kept, 4) < 0.93 or distinct_ngrams(kept, 2) < 0.78:
        return "repetition", kept
    if BANNED & set(words(kept)):
        return "word list", kept
    if kept.count('"') % 2:
        return "quotes", kept
    if strangers(kept, names):
        return "stranger", kept
    told = coverage(kept, notes)
    last_told = bool(notes) and coverage(kept, notes[-1:]) >= 0.6
    if (ended and not cut and told >= MIN_COVERAGE) or (told >= 0.65 and last_told):
        return "complete", kept
    return ("incomplete", kept) if told >= 0.3 and len(sentences(kept)) >= 5 else ("plot", kept)


def holds_together(text: str, request: str) -> bool:
    """A strict test of a complete story: who acts stays clear, and it is neither short nor odd.

    It looks for the teacher's commonest slips: pronouns of nobody in the story, a hero who acts
    on himself or talks to himself, and requests whose plot words never come up.
    """
    if len(sentences(text)) < 5 or len(words(text)) < 40 or text.count('"') % 2:
        return False
    hero = re.search(r"named ([A-Z][a-z]+)", request)
    if hero and hero[1] not in sentences(text)[0] + sentences(text)[1]:
        return False
    plot = re.search(r" (?:who|whose) (.+?)[.?]?$", request)
    if plot and coverage(text, [plot[1]]) < 0.75:
        return False
    return _pronouns_fit(text) and not _talks_to_itself(text)


def _pronouns_fit(text: str) -> bool:
    present = set(re.findall(r"[A-Za-z]+", text))
    lower = {w.lower() for w in present}
    if lower & {"he", "his", "him"} and lower & {"she", "her"}:
        # Both sexes are spoken of: then both need somebody they can mean.
        return bool(present & MALE) and bool(present & FEMALE)
    return True


def _talks_to_itself(text: str) -> bool:
    for sentence in sentences(text):
        names = re.findall(r"\b(?!The|She|His|Her|One|They|But|And)[A-Z][a-z]{2,}\b", sentence)
        if len(names) >= 2 and names[0] == names[-1]:
            return True
    return bool(re.search(r'"[^"]*\b([A-Z][a-z]+)\b[^"]*" said \1\b', text))
