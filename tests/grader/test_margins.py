"""Group 4: tolerances sit well between rounding and the nearest mistake."""

import math

import pytest

from grader_tools import COURSE
from minivllm.course.compare import error_ratio
from minivllm.course.diagnosis import FALLBACK, observe
from minivllm.course.kill_table import grade_here
from minivllm.course.mistakes import load_mistakes

pytestmark = pytest.mark.slow
SEEDS = range(20)
CHAPTERS = pytest.mark.parametrize("chapter", COURSE.chapters, ids=lambda chapter: chapter.id)


def worst(grading, task):
    """Largest error over allowed error in a task's tests."""
    return max((step.ratio for step in grading.trails[task].steps), default=0.0)


@CHAPTERS
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_solution_stays_under_a_fifth_of_the_tolerance(chapter, threads):
    # All seeds on one thread; more threads only change the order of sums, which few seeds show.
    for seed in SEEDS if threads == 1 else SEEDS[:6]:
        options = [f"--course-seed={seed}", f"--course-threads={threads}"]
        grading, output = grade_here(COURSE, chapter, "reference", options)
        for result in grading.results():
            assert result.state in ("pass", "unavailable"), f"seed {seed}\n{output}"
            if result.state == "pass":
                ratio = worst(grading, result.id)
                assert ratio <= 0.2, f"{result.id}, seed {seed}: {ratio:.2f} of the tolerance"


@CHAPTERS
def test_every_mistake_is_off_by_five_tolerances(chapter):
    """Asked what the tests ask, a mistake's answers lie far from the reference's somewhere."""
    for seed in SEEDS:
        grading, _ = grade_here(COURSE, chapter, "reference", [f"--course-seed={seed}"])
        for mistake in load_mistakes(chapter.id):
            if COURSE.task(mistake.task).device == "cpu":
                steps = grading.trails[mistake.task].steps
                ratio = max(distance(mistake, step) for step in steps)
                assert ratio >= 5, f"{mistake.task} {mistake.name}, seed {seed}: only {ratio:.2f}"


def distance(mistake, step):
    """Largest error over allowed error; infinity for another kind of answer."""
    tolerance = COURSE.task(mistake.task).tolerance
    outcome = observe(step.probe, mistake.unit)
    if outcome.error is not None or step.outcome.error is not None:
        return 0.0 if type(outcome.error) is type(step.outcome.error) else math.inf
    return error_ratio(outcome.value, step.outcome.value, {**FALLBACK, **tolerance})
