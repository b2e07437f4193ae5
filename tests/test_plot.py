"""Figures show what they were given: values, labels, and nothing drawn twice."""

import math

import pytest

pytest.importorskip("matplotlib")

from minivllm import plot


def test_heatmap_keeps_rows_and_centres_both_signs_at_white():
    figure = plot.heatmap([[1.0, -3.0], [0.0, 2.0]], "x", "y", "t", label="v", diverging=True)
    ax, bar = figure.axes
    image = ax.images[0]
    assert image.get_array().tolist() == [[1.0, -3.0], [0.0, 2.0]]
    assert image.get_clim() == (-3.0, 3.0)
    assert (ax.get_xlabel(), ax.get_ylabel(), bar.get_ylabel()) == ("x", "y", "v")


def test_heatmap_of_zeros_has_a_scale():
    low, high = plot.heatmap([[0.0]], "x", "y", diverging=True).axes[0].images[0].get_clim()
    assert low < high


def test_ladder_says_which_panel_is_recorded():
    here, there = plot.ladder({"s1_naive": 1.0}, {"s1_naive": 2.0}, "a GPU").axes
    titles = [ax.get_title(loc="left") for ax in (here, there)]
    assert titles == ["this machine", "a GPU (recorded)"]
    assert len(plot.ladder({"s1_naive": 1.0}).axes) == 1


def test_mask_has_a_tick_at_each_position_with_the_first_query_on_top():
    ax = plot.mask([[True, True, False], [True, True, True]], q_start=1).axes[0]
    assert list(ax.get_xticks()) == [0, 1, 2]
    assert list(ax.get_yticks()) == [1, 2]
    bottom, top = ax.get_ylim()
    assert bottom > top


def test_hands_number_only_those_with_room():
    wide = plot.hands([0.0, math.pi / 2, math.pi]).axes[0]
    narrow = plot.hands([0.0, 0.01, 0.02, 1.0]).axes[0]
    assert [text.get_text() for text in wide.texts] == ["0", "1", "2"]
    assert [text.get_text() for text in narrow.texts] == ["0", "3"]
    assert len(narrow.lines) == 4
