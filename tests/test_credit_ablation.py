"""The arithmetic of the comparison, on curves made by hand."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "credit_ablation.py"


@pytest.fixture(scope="module")
def ablation():
    spec = importlib.util.spec_from_file_location("credit_ablation", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["credit_ablation"] = module
    spec.loader.exec_module(module)
    return module


def curve(ablation, success, seconds_per_update=1.0):
    updates = np.arange(len(success)) * 4.0
    turns = np.full(len(success), 3.0)
    return ablation.Curve(updates, updates * seconds_per_update, np.array(success), turns, 0.5)


def test_a_threshold_is_reached_between_two_evaluations(ablation):
    found = curve(ablation, [0.0, 0.2, 0.6])
    assert ablation.reached(found, found.updates, 0.3) == pytest.approx(5.0)
    assert ablation.reached(found, found.updates, 0.0) == 0.0
    assert ablation.reached(found, found.updates, 0.7) == float("inf")


def test_differences_are_paired_by_seed(ablation):
    """Each seed gains exactly 0.1, whatever its level: the interval has no width."""
    levels = [0.2, 0.5, 0.8]
    found = ablation.compare(
        {
            "grpo": [curve(ablation, [0.0, level]) for level in levels],
            "trace": [curve(ablation, [0.0, level + 0.1]) for level in levels],
        }
    )
    assert found["trace"]["success_minus_grpo"] == [0.1, 0.1, 0.1]
    low, mean = found["grpo"]["success"][1], found["grpo"]["success"][0]
    assert low < mean == 0.5


def test_the_area_is_compared_with_the_control_where_there_is_one(ablation):
    runs = {
        "grpo": [curve(ablation, [0.0, 0.4])],
        "trace": [curve(ablation, [0.0, 0.8])],
        "shuffled": [curve(ablation, [0.0, 0.6])],
    }
    found = ablation.compare(runs)
    assert found["trace"]["area_minus_grpo"] == [0.2, 0.2, 0.2]
    assert found["trace"]["area_minus_shuffled"] == [0.1, 0.1, 0.1]
    assert "10.0 [10.0, 10.0]" in ablation.table(found)
    del runs["shuffled"]
    found = ablation.compare(runs)
    assert found["trace"]["area_minus_shuffled"] is None
    assert "| - |" in ablation.table(found)


def test_equal_seconds_are_those_of_the_fastest_variant(ablation):
    found = ablation.compare(
        {
            "grpo": [curve(ablation, [0.0, 0.4])],
            "trace": [curve(ablation, [0.0, 0.8], seconds_per_update=2.0)],
        }
    )
    assert found["trace"]["success"][0] == 0.8
    assert found["trace"]["success_at_equal_seconds"][0] == 0.4
    assert found["grpo"]["success_at_equal_seconds"][0] == 0.4
    assert found["trace"]["median_updates_to_grpo"] == 2.0
    assert found["trace"]["median_seconds_to_grpo"] == 4.0


def test_the_table_has_a_row_for_each_variant_and_the_figures_are_plain_json(ablation):
    found = ablation.compare({"grpo": [curve(ablation, [0.0, 0.4])]})
    assert json.loads(json.dumps(found)) == found
    head, _, row = ablation.table(found).splitlines()
    assert row.startswith("| grpo | 40.0 [40.0, 40.0] |")
    assert head.count("|") == row.count("|")
