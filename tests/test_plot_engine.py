"""Figures draw what they are given, and leave a panel out where there is no record."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from minivllm import plot_engine

RECORD = {
    "environment": {"gpu": "NVIDIA H200"},
    "latency": {"model": "a shape", "lengths": [64, 4096], "seconds": {"s2_kv": [0.01, 0.012]}},
}


def test_latency_in_milliseconds():
    figure = plot_engine.latency([10, 20], {"s1_naive": [0.1, 0.2], "s2_kv": [0.05, 0.05]})
    (ax,) = figure.axes
    assert [list(line.get_ydata()) for line in ax.lines] == [[100, 200], [50, 50]]
    assert ax.get_ylim()[0] == 0 and "ms" in ax.get_ylabel()


def test_latency_beside_a_record():
    figure = plot_engine.latency([10], {"s1_naive": [0.1]}, record=RECORD)
    assert figure.axes[1].get_title(loc="left") == "NVIDIA H200 (recorded)\na shape"
    assert list(figure.axes[1].lines[0].get_xdata()) == [64, 4096]


def test_roofline_has_its_corner_at_the_ridge():
    figure = plot_engine.roofline(
        {"cpu": (2e9, 8e9), "gpu": (1e12, 1e14)}, {"cpu": {"1 token": (0.5, 1e9)}}
    )
    roof, point = figure.axes[0].lines
    assert roof.get_xdata()[1] == 4 and list(roof.get_ydata())[1:] == [8, 8]
    assert roof.get_xdata()[0] < 0.5
    assert list(point.get_xdata()) == [0.5] and list(point.get_ydata()) == [1]
    assert len(figure.axes) == 2


def test_roofline_puts_limits_on_the_roof():
    limits = {"gpu": {"1 token": 1.0, "300 tokens": 300.0}}
    figure = plot_engine.roofline({"gpu": (1e12, 1e14)}, {}, limits)
    _, below, beyond = figure.axes[0].lines
    assert list(below.get_ydata()) == [1e3] and list(beyond.get_ydata()) == [1e5]
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["1 token: at most", "300 tokens: at most"]


def test_computed_tokens_are_counted():
    prompt, new = 6, 8
    figure = plot_engine.computed_tokens(prompt, new)
    naive, cached = (ax.get_title(loc="left") for ax in figure.axes)
    assert f"{sum(prompt + step for step in range(new))} tokens" in naive
    assert f"{prompt + new - 1} tokens" in cached


def test_layer_wiring_shows_the_shapes():
    figure = plot_engine.layer_wiring({"qkv_proj": "[T, 512]"})
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert "[T, 512]" in texts and "attend" in texts


@pytest.mark.parametrize("qk_norm", [True, False])
def test_layer_wiring_leads_v_past_rope(qk_norm):
    shapes = {"RoPE": "q [T, 8, 32]\nk [T, 4, 32]", "v": "v [T, 4, 32]"}
    figure = plot_engine.layer_wiring(shapes, qk_norm=qk_norm)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert all(shape in texts for shape in shapes.values())
    assert ("RMSNorm\nper head" in texts) == qk_norm


def test_model_chain_names_its_boxes_in_order():
    figure = plot_engine.model_chain({"embedding": "[T, 256]", "head": "[T, 2048]"})
    texts = [text.get_text() for text in figure.axes[0].texts if text.get_text()]
    assert texts == ["ids", "embedding", "[T, 256]", "head", "[T, 2048]", "logits"]
