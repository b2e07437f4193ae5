"""The training loop on a CPU: it learns, and a resumed run ends with the same weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from minivllm.tiny import data, packing

pytestmark = pytest.mark.slow  # transformers' model classes take seconds to import


@pytest.fixture()
def streams(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    documents = [(np.arange(60) % 7 + rng.integers(4, 40)).astype(np.uint16) for _ in range(200)]
    path = tmp_path / "streams.npz"
    data.save_streams({"told_raw": documents, "held_told_raw": documents[:20]}, path)
    monkeypatch.setitem(packing.PLANS, "test", (packing.Phase(2.0, {"told_raw": 1.0}),))
    return path


def test_a_resumed_training_equals_an_unbroken_one(streams, tmp_path):
    from safetensors.torch import load_file

    from minivllm.tiny.train import Shape, Training, train

    shape = Shape(64, 32, 1, 32, 2, 1, 16)
    training = Training(plan="test", tokens_per_step=1024, warmup=2, eval_every=4, max_steps=10)
    whole = train(streams, tmp_path / "whole", shape, training)
    train(streams, tmp_path / "parts", shape, training, stop_at=5)
    resumed = train(streams, tmp_path / "parts", shape, training)
    assert whole["steps"] == resumed["steps"] == 10
    assert whole["final"] == resumed["final"]
    a, b = (load_file(tmp_path / n / "model" / "model.safetensors") for n in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert (tmp_path / "whole" / "curve.png").exists()
    curve = json.loads((tmp_path / "whole" / "curve.json").read_text())
    assert curve[-1]["told_raw"] < curve[0]["told_raw"]


def test_the_learning_rate_rises_and_falls():
    from minivllm.tiny.train import Training, learning_rate

    training = Training(warmup=10, lr=1.0)
    rates = [learning_rate(step, 100, training) for step in range(100)]
    assert rates[0] == 0.1 and max(rates) == 1.0 and rates.index(1.0) in (9, 10)
    assert rates[-1] == pytest.approx(0.03, abs=0.01)
