"""Thinker to talker in processes of their own, with the thinker's stage cache on."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from omni_pipeline import NUM_TIMES, build_checkpoint

HERE = Path(__file__).parent

if importlib.util.find_spec("vllm_omni") is None and Path(sys.prefix) != HERE.parents[1] / ".cache/envs/omni":
    pytest.skip("needs vLLM-Omni; scripts/omni_env runs these", allow_module_level=True)

pytestmark = [pytest.mark.omni, pytest.mark.slow]


@pytest.fixture(scope="module")
def answers(omni_checkpoint):
    """What the stages answered to one prompt, sent again and again."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = build_checkpoint(omni_checkpoint, Path(directory) / "checkpoint")
        result = Path(directory) / "answers.json"
        process = subprocess.run(
            [sys.executable, "-W", "ignore", HERE / "omni_pipeline.py", checkpoint, result],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE / "omni_cpu")])},
            capture_output=True,
            text=True,
            timeout=1500,
        )
        assert process.returncode == 0, process.stderr[-4000:]
        answers = json.loads(result.read_text())
    assert len(answers) == NUM_TIMES
    return answers


def test_the_talker_says_the_same_after_a_hit_of_the_thinker(answers):
    first, hit = answers[:2]
    assert len(first["0"]) == 6 and len(set(first["1"])) > 6
    assert hit == first


def test_zeros_in_the_place_of_the_hidden_states_change_what_the_talker_says(answers):
    first, _, zeroed = answers[:3]
    assert zeroed["0"] == first["0"]
    assert zeroed["1"] != first["1"]


def test_a_request_whose_rows_cannot_be_had_ends_with_the_reason(answers):
    assert "memory is gone" in answers[3]["error"]


def test_the_next_one_is_served(answers):
    assert answers[4] == answers[0]
