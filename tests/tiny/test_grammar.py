"""The plot grammar: every plot reads, fills and draws the same story from the same seed."""

from __future__ import annotations

import random

import pytest

from minivllm.tiny import filters, grammar

PLOTS = grammar.read_plots()


def test_there_are_a_hundred_plots_with_different_names():
    assert len(PLOTS) >= 100
    assert len({plot.name for plot in PLOTS}) == len(PLOTS)


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
def test_every_plot_draws_clean_stories(plot):
    rng = random.Random(plot.name)
    for _ in range(20):
        story = grammar.draw_story(plot, rng)
        for text in (story.told, story.request, *story.notes):
            assert "{" not in text and "}" not in text and "  " not in text
            assert text[-1] in '.!?"', text
            assert text.count('"') % 2 == 0
        assert story.hero in story.told
        assert 4 <= len(filters.sentences(story.told)) <= 25
        assert filters.ALLOWED.fullmatch(story.told.replace(":", ""))


def test_the_same_seed_gives_the_same_story():
    first, again = (grammar.draw_story(PLOTS[3], random.Random(5)) for _ in range(2))
    assert first == again
    assert first != grammar.draw_story(PLOTS[3], random.Random(6))


def test_every_wording_of_a_plot_is_reached():
    rng = random.Random(0)
    told = " ".join(grammar.draw_story(PLOTS[0], rng).told for _ in range(200))
    for beat in PLOTS[0].beats:
        for wording in beat.wordings:
            piece = max(grammar.SLOT.split(wording)[::3], key=len).strip()
            assert piece in told, piece


def test_linked_beats_keep_the_column():
    block = "[x] who tries\n" + "\n".join(
        ["- a1. | b1. | c1."] + [f"= a{i}. | b{i}. | c{i}." for i in range(2, 6)]
    )
    plot = grammar._parse(block)
    for seed in range(30):
        told = grammar.draw_story(plot, random.Random(seed)).told
        letters = {w[0].lower() for w in told.replace("\n", " ").split() if w[1:2].isdigit()}
        assert len(letters) == 1


def test_articles_and_capitals():
    values = {"toy": "old doll", "he": "she", "food": "eggs"}
    assert grammar.fill("it was {a:toy}. {he} saw it.", values) == "It was an old doll. She saw it."
    assert grammar.fill('"Stop!" called Tom. "{food}!"', values) == '"Stop!" called Tom. "Eggs!"'


def test_renaming_changes_request_and_story():
    story = grammar.draw_story(PLOTS[0], random.Random(1))
    renamed = grammar.rename_hero(story, "Zubo")
    assert story.hero not in renamed.told.split() and "Zubo" in renamed.told
    assert renamed.hero == "Zubo" and "Zubo" in renamed.names


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("no head", "begins with"),
        ("[x] who runs\n- a", "1 beats"),
        ("[x] who runs\n" + "- {nobody} runs.\n" * 5, "unknown slot 'nobody'"),
        ("[x] who runs\n" + "- a.\n" * 5 + "* b", "cannot read"),
        ("[x] who runs\n- a. | b.\n= a.\n" + "- a.\n" * 4, "different numbers"),
    ],
)
def test_a_broken_plot_is_refused(block, message):
    with pytest.raises(ValueError, match=message):
        grammar._parse(block)


def test_a_double_plot_is_refused(tmp_path):
    block = "[x] who runs\n" + "- a.\n" * 5
    (tmp_path / "plots.txt").write_text(block + "\n" + block)
    with pytest.raises(ValueError, match="'x' appears 2 times"):
        grammar.read_plots(tmp_path / "plots.txt")
