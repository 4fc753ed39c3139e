"""The acceptance run on a Trainium, one test for each of its claims, in every lane for the hardware, by either kernel.

Elsewhere every test skips and says what is missing. The run itself is tested in tests/test_acceptance.py.
"""

from pathlib import Path

import pytest
import torch

from vllm_neuron_cache.acceptance.device_checks import check_device
from vllm_neuron_cache.acceptance.machine import chip_of, instance_type, missing_here
from vllm_neuron_cache.acceptance.report import CHECKS
from vllm_neuron_cache.acceptance.run import run_acceptance
from vllm_neuron_cache.config import HARDWARE_LANES, KERNELS, NeuronCacheConfig
from vllm_neuron_cache.graphs.deployment import plan_deployment
from vllm_neuron_cache.graphs.lanes import make_lane
from vllm_neuron_cache.planner.model import load_model_shape

pytestmark = pytest.mark.neuron

DEVICE = "neuron"


@pytest.fixture(scope="module", params=KERNELS)
def kernel(request):
    return request.param


@pytest.fixture(scope="module", params=HARDWARE_LANES)
def lane(request, kernel):
    missing = missing_here(request.param, DEVICE, instance_type(), kernel)
    if missing:
        pytest.skip("; ".join(missing))
    return request.param


def deployment_of(lane, kernel, shape):
    config = NeuronCacheConfig.from_additional_config(
        {"vllm_neuron_cache": {"encoder_cache_block_size": 16, "lane": lane, "kernel": kernel}}
    )
    shape = load_model_shape(shape)
    return plan_deployment(shape, config, max_num_batched_tokens=8192, max_model_len=8192, device=DEVICE)


@pytest.fixture(scope="module")
def report(lane, kernel, checkpoint):
    """Of the small checkpoint, whose graphs compile soonest."""
    return run_acceptance(
        deployment_of(lane, kernel, checkpoint),
        checkpoint,
        lane_name=lane,
        device=torch.device(DEVICE),
        config="none",
        model=str(checkpoint),
        hardware=instance_type(),
    )


@pytest.mark.vllm
@pytest.mark.parametrize("name", CHECKS)
def test_a_claim_holds(report, name):
    (check,) = (check for check in report.checks if check.name == name)
    assert check.passed, check.text


@pytest.mark.slow
def test_the_published_workload_at_its_published_width(lane, kernel, tmp_path, monkeypatch):
    """30 images of 512 x 512 pixels for Qwen3-VL 32B, of which only the shapes are taken."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "planner")
    from published_configs import write_checkpoint

    shape = write_checkpoint(tmp_path / "model", "Qwen3-VL-32B")
    checks = check_device(deployment_of(lane, kernel, shape), make_lane(lane, kernel), torch.device(DEVICE))
    assert [check.text for check in checks if not check.passed] == []


@pytest.mark.vllm
def test_the_report_says_what_it_is_of(report):
    values = report.as_json()
    assert values["hardware_result"] and chip_of(values["hardware"]) in ("trn2", "trn3")
