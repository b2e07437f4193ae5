"""The story filters: which stories are kept, and for which reason others are not."""

from __future__ import annotations

import random

from minivllm.tiny import filters, grammar

NOTES = ("Mia had a red ball.", "One day the ball was gone.", "Ben found it under the bed.")
STORY = (
    "Once upon a time, there was a girl named Mia. Mia had a red ball. She played with it every "
    "day. One day the ball was gone. Mia looked in the garden and in the kitchen. Then her friend "
    "Ben came to help. He found it under the bed. They laughed and played until the evening."
)
NAMES = {"Mia", "Ben"}


def test_a_good_story_is_complete():
    assert filters.judge(STORY, NOTES, NAMES, ended=True) == ("complete", STORY)


def test_a_story_that_told_its_last_note_is_complete_though_it_did_not_end():
    verdict, kept = filters.judge(STORY + " And then", NOTES, NAMES, ended=False)
    assert (verdict, kept) == ("complete", STORY)


def test_a_story_without_its_end_is_a_beginning():
    beginning = STORY.split(" Then her")[0] + " She asked all the people of the village."
    assert filters.judge(beginning, NOTES, NAMES, ended=False)[0] == "incomplete"


def test_a_loop_is_cut_before_it_repeats():
    loop = STORY + " She loved her mom and dad." * 3
    assert filters.cut_at_repeat(loop) == STORY + " She loved her mom and dad."


def test_reasons():
    judge = filters.judge
    assert judge("Mia <b>", NOTES, NAMES, True)[0] == "characters"
    assert judge("Mia had a ball.", NOTES, NAMES, True)[0] == "length"
    assert judge(STORY.replace("laughed", "drank beer"), NOTES, NAMES, True)[0] == "word list"
    assert judge(STORY + ' "Yes.', NOTES, NAMES, True)[0] == "quotes"
    assert judge(STORY + " Oscar came.", NOTES, NAMES, True)[0] == "stranger"
    other = ("Tom built a boat.", "The wind blew hard.", "A whale pulled him home.")
    assert judge(STORY, other, NAMES, True)[0] == "plot"
    flat = STORY.replace(".", " and")[:-4] + "."
    assert judge(flat, NOTES, NAMES, True)[0] == "long sentence"
    again = STORY + " Mia had a red ball there. Mia had a red hat there. Mia had a red cup there."
    assert judge(again, NOTES, NAMES, True)[0] in {"repetition", "complete"}


def test_coverage_counts_content_words_only():
    assert filters.coverage("the ball was red", ["A red ball."]) == 1.0
    assert filters.coverage("the and of", ["A red ball."]) == 0.0
    assert filters.coverage("anything", []) == 1.0


def test_distinct_ngrams():
    assert filters.distinct_ngrams("a b c d", 2) == 1.0
    assert filters.distinct_ngrams("a b a b a", 2) == 0.5
    assert filters.distinct_ngrams("a", 4) == 1.0


def test_holds_together_refuses_the_usual_slips():
    request = "Tell me a story about a girl named Mia who loses a red ball."
    good = STORY.replace("was gone", "was gone, and she lost it").replace("lost it", "loses it")
    assert filters.holds_together(good, request)
    assert not filters.holds_together(good, request.replace("red ball", "wooden spaceship"))
    assert not filters.holds_together(good.replace("Mia", "Sue"), request)
    assert not filters.holds_together(good + " Mia gave the ball to Mia.", request)
    only_girl = good.replace("Ben", "Anna").replace("He found", "She found")
    assert filters.holds_together(only_girl, request)
    assert not filters.holds_together(only_girl.replace("She played", "He played"), request)


def test_most_stories_of_the_grammar_are_not_repetitive():
    rng = random.Random(7)
    stories = [grammar.draw_story(plot, rng).told for plot in grammar.read_plots()]
    fine = [s for s in stories if filters.distinct_ngrams(s, 4) >= 0.93]
    assert len(fine) >= 0.95 * len(stories)
