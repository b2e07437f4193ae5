"""Our own engine with SmolLM2 writes stories from the plot grammar, filtered.

Owns the prompts of the teacher model and the file format of generated stories. What is kept is
decided by filters.py. A 135M model needs help: it is shown one example, gets the plot as notes and
continues a given opening. Plain requests ("write a story about ...") do not end or loop.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from minivllm.tiny import filters, grammar

MAX_TOKENS = 165
TOP_P = 0.95
ASK = "Tell this story in easy words."
# The example's name is in no list of the grammar, so that a story that copies it is seen by a
# reader; the filter on strangers looks for the grammar's own names.
EXAMPLE_NOTES = (
    "Ottilie found a box in the attic.",
    "The box was locked.",
    "She asked Uncle Bert for a key.",
    "The key was too big.",
    "She saw that the box was not locked at all.",
    "In the box was a warm blanket.",
)
EXAMPLE_STORY = (
    "Once upon a time, there was a girl named Ottilie. One day she found a box in the attic. She "
    "pulled and pulled, but it did not open. She asked Uncle Bert for a key. He had a very big "
    "one, and it did not fit.\n\nThen Ottilie looked again. The box was not locked at all! She "
    "lifted the lid. In the box was a warm blanket. That night Ottilie slept under it."
)


def teacher_messages(story: grammar.Story) -> list[dict[str, str]]:
    """The conversation the teacher continues: an example, the notes, the answer's beginning."""
    return [
        {"role": "user", "content": f"{ASK}\n" + "\n".join(EXAMPLE_NOTES)},
        {"role": "assistant", "content": EXAMPLE_STORY},
        {"role": "user", "content": f"{ASK}\n" + "\n".join(story.notes)},
        {"role": "assistant", "content": story.opening},
    ]


def draw_requests(count: int, seed: int) -> list[grammar.Story]:
    """`count` stories to be written: all plots in turn, in an order drawn from the seed."""
    rng = random.Random(seed)
    plots = grammar.read_plots()
    order = [plot for _ in range(-(-count // len(plots))) for plot in rng.sample(plots, len(plots))]
    return [grammar.draw_story(plot, rng) for plot in order[:count]]


def keep(story: grammar.Story, continuation: str, ended: bool) -> tuple[str, dict[str, Any] | None]:
    """(verdict, record): the record to write where the verdict is complete or incomplete."""
    text = story.opening + continuation
    verdict, kept = filters.judge(text, story.notes, story.names, ended)
    if verdict not in ("complete", "incomplete"):
        return verdict, None
    record = {
        "kind": "story",
        "prompt": story.request,
        "text": kept,
        "complete": verdict == "complete",
        "plot": story.plot,
    }
    return verdict, record


def batches(stories: Sequence[grammar.Story], size: int) -> Iterator[Sequence[grammar.Story]]:
    """Slices of at most `size`."""
    if size < 1:
        raise ValueError(f"batch is {size}, must be at least 1")
    for start in range(0, len(stories), size):
        yield stories[start : start + size]


def write_batch(
    llm: Any, stories: Sequence[grammar.Story], params: Sequence[Any]
) -> Iterable[tuple[str, dict[str, Any] | None]]:
    """Let the engine write one batch; yields what `keep` says of each story."""
    outputs = llm.chat(
        [teacher_messages(story) for story in stories],
        list(params),
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    for story, output in zip(stories, outputs, strict=True):
        first = output.outputs[0]
        yield keep(story, first.text, first.finish_reason == "stop")


def generate_stories(
    out: str | Path, count: int, model: str, seed: int, batch: int, temperature: float
) -> dict[str, int]:
    """Append the kept stories to `out`; returns how many requests met which verdict.

    Every request has its own seed (seed * 1,000,000 + its number), so a run can be repeated.
    """
    from tqdm import tqdm

    from minivllm import LLM, SamplingParams

    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    llm = LLM(model, max_model_len=1024)
    stories = draw_requests(count, seed)
    with path.open("a", encoding="utf-8") as file, tqdm(total=count, desc="stories") as bar:
        for part in batches(stories, batch):
            params = [
                SamplingParams(
                    temperature=temperature,
                    top_p=TOP_P,
                    max_tokens=MAX_TOKENS,
                    seed=seed * 1_000_000 + bar.n + i,
                )
                for i in range(len(part))
            ]
            for verdict, record in write_batch(llm, part, params):
                counts[verdict] += 1
                if record is not None:
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
            # Batches are written at once: an interrupted night of generation keeps its work.
            file.flush()
            bar.update(len(part))
    return dict(counts.most_common())
