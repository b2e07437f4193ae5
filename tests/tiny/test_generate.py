"""The generate step without a model: prompts, batches, and what is kept of a teacher's words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from minivllm.tiny import generate
from minivllm.tiny.__main__ import build_parser


def test_requests_cover_the_plots_and_repeat_with_the_seed():
    stories = generate.draw_requests(150, seed=4)
    assert stories == generate.draw_requests(150, seed=4)
    assert len({story.plot for story in stories[:100]}) == 100


def test_the_teacher_sees_an_example_the_notes_and_the_opening():
    story = generate.draw_requests(1, seed=1)[0]
    messages = generate.teacher_messages(story)
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert all(note in messages[2]["content"] for note in story.notes)
    assert messages[-1]["content"] == story.opening


def test_what_the_engine_writes_is_judged_and_recorded():
    stories = generate.draw_requests(2, seed=1)
    calls = []

    class FakeLLM:
        def chat(self, conversations, params, **options):
            calls.append((conversations, params, options))
            texts = [stories[0].told.removeprefix(stories[0].opening), " No. No. No."]
            return [
                SimpleNamespace(outputs=[SimpleNamespace(text=t, finish_reason="stop")])
                for t in texts
            ]

    results = list(generate.write_batch(FakeLLM(), stories, ["p", "q"]))
    assert calls[0][2]["continue_final_message"] and not calls[0][2]["add_generation_prompt"]
    assert calls[0][1] == ["p", "q"]
    assert results[1] == ("length", None)
    verdict, record = results[0]
    if record is not None:
        assert record["complete"] == (verdict == "complete")
        assert record["text"].startswith(stories[0].opening)


def test_batches_cut_and_refuse_zero():
    stories = generate.draw_requests(5, seed=1)
    assert [len(part) for part in generate.batches(stories, 2)] == [2, 2, 1]
    with pytest.raises(ValueError, match="batch is 0"):
        list(generate.batches(stories, 0))


@pytest.mark.parametrize("step", ["generate", "tokenizer", "train", "evaluate", "export"])
def test_every_step_has_help(step, capsys):
    with pytest.raises(SystemExit) as exit_:
        build_parser().parse_args([step, "--help"])
    assert exit_.value.code == 0
    assert "usage" in capsys.readouterr().out
