"""The plot grammar: reads plots.txt and draws stories, notes and requests from it (lesson 14).

Owns the words that fill the slots (names, animals, helpers, places) and the rules that join
them. Knows nothing of models or tokenizers: `draw_story` is a pure function of a plot and a
seeded `random.Random`. The teacher model is given the first wording of each beat as notes;
`told` is the same plot told directly from the grammar, which the last training phase uses
because these stories hold together by construction.
"""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

PLOTS_FILE = Path(__file__).parent / "plots.txt"

GIRLS = (
    "Mia Lily Anna Emma Zoe Ella Lucy Molly Rosie Ruby Sara Nina Bella Kate Lola Jane Sue Ivy Amy "
    "Daisy Mila Nora Clara Alice Eva Hannah Grace Maya Leah Julia Olivia Sophie Chloe Elsa Tina "
    "Wendy Penny Holly Fiona Rita"
).split()
BOYS = (
    "Tom Ben Max Sam Leo Tim Jack Finn Noah Toby Billy Peter Luke Hugo Eli Adam Oscar Danny Joe "
    "Ned Henry George Charlie James Oliver Jacob Felix Simon Paul Mark David Daniel Robin Rory "
    "Kevin Harry Alex Theo Jonas Victor"
).split()
PETS = (
    "Coco Biscuit Spot Pepper Sunny Dot Ziggy Honey Rex Luna Fluffy Bubbles Teddy Rusty Snowy "
    "Nibbles Hop Bobo Milo Oreo Buddy"
).split()
ANIMALS = "cat dog rabbit mouse fox bear duck frog pig horse hedgehog squirrel goat kitten".split()
# Heroes may also be these; the list above is for animals that come along or are met.
HERO_ANIMALS = [*ANIMALS, *"cow bird owl lion turtle elephant puppy bunny".split()]
ADJECTIVES = "small kind shy funny happy brave quiet gentle young clever".split()
COLORS = "red blue green yellow orange pink purple white".split()
PLACES = ["lake", "river", "park", "meadow", "old mill", "village square", "school", "farm"]
HELPERS = "Mom Dad Grandma Grandpa".split()

OPENINGS = (
    "Once upon a time, there was {a:adj_kind} named {hero}.",
    "Once upon a time, {a:adj_kind} named {hero} lived in {a:home}.",
    "Once upon a time there lived {a:adj_kind}. {His} name was {hero}.",
    "There was once {a:adj_kind} named {hero}.",
    "{hero} was {a:adj_kind}.",
    "In {a:home} there lived {a:adj_kind} named {hero}.",
)
# The first opening is by far the commonest: the course's example prompt is its first four words.
OPENING_WEIGHTS = (12, 3, 2, 1, 1, 1)
HOMES = [
    "small house",
    "little village",
    "house by the lake",
    "house near the forest",
    "big old house",
]
REQUESTS = (
    "Tell me a story about {a:kind} named {hero} {about}.",
    "Write a short story about {a:kind} named {hero} {about}.",
    "Tell me a story about {a:adj_kind} {about}.",
    "I want a story about {a:adj_kind} {about}.",
    "Please tell me a bedtime story about {a:kind} named {hero}.",
    "Tell me a story about {a:kind} named {hero}.",
    "Tell me a story about {a:kind}.",
    "Tell me a story.",
    "Please tell me a bedtime story.",
    "Can you tell me a story about {a:kind} named {hero}?",
)
CLOSINGS = (
    "It was a good day.",
    "That night {hero} slept well.",
    "{hero} never forgot that day.",
    "And so they were all happy.",
)
SLOT = re.compile(r"\{(a:)?(\w+)\}")
COMMON_SLOTS = {
    "hero",
    "he",
    "him",
    "his",
    "He",
    "His",
    "friend",
    "helper",
    "animal",
    "color",
    "place",
}


@dataclass(frozen=True)
class Beat:
    """One step of a plot: its wordings, and whether it keeps the column of the beat before."""

    wordings: tuple[str, ...]
    linked: bool


@dataclass(frozen=True)
class Plot:
    """A plot: `about` completes a request, `slots` maps a slot name to its choices."""

    name: str
    about: str
    slots: dict[str, tuple[str, ...]]
    beats: tuple[Beat, ...]


@dataclass(frozen=True)
class Story:
    """A drawn story: the user's request, the teacher's notes, an opening, the direct telling."""

    plot: str
    request: str
    notes: tuple[str, ...]
    opening: str
    told: str
    hero: str
    names: frozenset[str]


def read_plots(path: str | Path = PLOTS_FILE) -> list[Plot]:
    """Parse a plot file. ValueError names the plot: duplicate id, unknown slot, too few beats."""
    text = "\n".join(
        line for line in Path(path).read_text("utf-8").splitlines() if not line.startswith("#")
    )
    plots = [_parse(block) for block in re.split(r"\n\s*\n", text.strip()) if block.strip()]
    names = [plot.name for plot in plots]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"plot {name!r} appears {names.count(name)} times")
    return plots


def _parse(block: str) -> Plot:
    head, *lines = block.strip().splitlines()
    match = re.fullmatch(r"\[([\w-]+)\] (.+)", head)
    if match is None:
        raise ValueError(f"a plot begins with '[id] about', not {head!r}")
    name, about = match.groups()
    slots: dict[str, tuple[str, ...]] = {}
    beats: list[Beat] = []
    for line in lines:
        if line.startswith("@"):
            slot, choices = line[1:].split(":", 1)
            slots[slot] = tuple(choice.strip() for choice in choices.split("|"))
        elif line[:2] in ("- ", "= "):
            wordings = tuple(part.strip() for part in line[2:].split(" | "))
            beats.append(Beat(wordings, line[0] == "="))
        else:
            raise ValueError(f"plot {name!r}: cannot read the line {line!r}")
    _check(name, about, slots, beats)
    return Plot(name, about, slots, tuple(beats))


def _check(name: str, about: str, slots: dict[str, tuple[str, ...]], beats: list[Beat]) -> None:
    if not 5 <= len(beats) <= 8:
        raise ValueError(f"plot {name!r} has {len(beats)} beats, not 5 to 8")
    for text in [about, *(w for beat in beats for w in beat.wordings)]:
        for _, slot in SLOT.findall(text):
            if slot not in COMMON_SLOTS and slot not in slots:
                raise ValueError(f"plot {name!r} uses the unknown slot {slot!r} in {text!r}")
    for before, beat in itertools.pairwise(beats):
        # A linked beat is told with the column of the one before, so both need the same columns.
        if beat.linked and len(beat.wordings) != len(before.wordings):
            raise ValueError(f"plot {name!r}: linked beats have different numbers of wordings")


def with_article(words: str) -> str:
    """'apple' -> 'an apple', 'red ball' -> 'a red ball'."""
    return ("an " if words[:1].lower() in "aeiou" else "a ") + words


def fill(template: str, values: dict[str, str]) -> str:
    """Fill the slots, twice (a slot's value may hold a slot), and capitalise sentence starts."""
    text = template
    for _ in range(2):
        text = SLOT.sub(
            lambda m: with_article(values[m[2]]) if m[1] else values[m[2]],
            text,
        )
    # '. ' without a closing quote starts a sentence; after '!" ' the sentence may go on ("called").
    return re.sub(r'(^"?|[.!?] "?)([a-z])', lambda m: m[1] + m[2].upper(), text)


def draw_values(plot: Plot, rng: random.Random) -> dict[str, str]:
    """Choose hero, friend, helper and the plot's own slots; the words differ from each other."""
    girl = rng.random() < 0.5
    if rng.random() < 0.7:
        kind, hero = ("girl", rng.choice(GIRLS)) if girl else ("boy", rng.choice(BOYS))
    else:
        # Animals get children's names too: a model that saw "dog" only with "Spot" would not use
        # the name it is asked for.
        names = PETS if rng.random() < 0.5 else (GIRLS if girl else BOYS)
        kind, hero = rng.choice(HERO_ANIMALS), rng.choice(names)
    animal = rng.choice([a for a in ANIMALS if a != kind])
    values = {
        "hero": hero,
        "kind": kind,
        "friend": rng.choice([n for n in GIRLS + BOYS if n != hero]),
        "helper": rng.choice(HELPERS),
        "animal": animal,
        "color": rng.choice(COLORS),
        "place": rng.choice(PLACES),
        "home": rng.choice(HOMES),
        "about": plot.about,
    }
    he, him, his = ("she", "her", "her") if girl else ("he", "him", "his")
    values |= {"he": he, "him": him, "his": his, "He": he.capitalize(), "His": his.capitalize()}
    adjective = rng.choice(ADJECTIVES)
    values["adj_kind"] = f"{adjective} {kind}" if rng.random() < 0.6 else kind
    values |= {slot: rng.choice(choices) for slot, choices in plot.slots.items()}
    return values


def draw_story(plot: Plot, rng: random.Random) -> Story:
    """Draw one story of `plot`; the same rng state gives the same story."""
    values = draw_values(plot, rng)
    opening = fill(rng.choices(OPENINGS, OPENING_WEIGHTS)[0], values)
    sentences, column = [opening], rng.randrange(3)
    for beat in plot.beats:
        # Neighbouring wordings of one column fit each other best, so the column is mostly kept;
        # changing it now and then is what makes a plot more than three stories.
        if not beat.linked and rng.random() < 0.25:
            column = rng.randrange(len(beat.wordings))
        sentences.append(fill(beat.wordings[min(column, len(beat.wordings) - 1)], values))
    if rng.random() < 0.25:
        sentences.append(fill(rng.choice(CLOSINGS), values))
    return Story(
        plot=plot.name,
        request=fill(rng.choice(REQUESTS), values),
        notes=tuple(fill(beat.wordings[0], values) for beat in plot.beats),
        opening=opening,
        told=_paragraphs(sentences, rng),
        hero=values["hero"],
        names=frozenset({values["hero"], values["friend"], values["helper"]}),
    )


def invented_name(rng: random.Random) -> str:
    """A name of two or three syllables that nobody has: "Belo", "Tariwen"."""
    syllables = rng.choice((2, 2, 3))
    name = "".join(rng.choice("bdfgklmnprstvwz") + rng.choice("aeiou") for _ in range(syllables))
    return (name + rng.choice(("", "", "n", "s", "l", "r"))).capitalize()


def rename_hero(story: Story, name: str) -> Story:
    """The same story with another hero; teaches to copy the asked name, letter by letter."""
    old = re.compile(rf"\b{story.hero}\b")
    request, told = old.sub(name, story.request), old.sub(name, story.told)
    names = story.names - {story.hero} | {name}
    return replace(story, request=request, told=told, hero=name, names=names)


def _paragraphs(sentences: list[str], rng: random.Random) -> str:
    """Join beats with spaces, with one or two blank lines as the teacher's stories have."""
    if rng.random() < 0.4:
        return " ".join(sentences)
    cuts = {rng.randrange(1, 3), rng.randrange(3, len(sentences))}
    pieces = [("\n\n" if i in cuts else " ") + s for i, s in enumerate(sentences)]
    return "".join(pieces).strip()
