"""The one key turns the cache on, its absence changes nothing, and mistakes are errors at start-up."""

import json
import logging
import operator
import os
import re
import subprocess
import sys
import types

import pytest
from engines import small_media, start

pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.processing import ProcessorInputs
from vllm.renderers.base import BaseRenderer
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_neuron_cache.demo.requests import MediaRequest, engine_prompt
from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.integrations.vllm import activation, geometry, plugin
from vllm_neuron_cache.integrations.vllm.activation import MANAGER_CLS, SCHEDULER_CLS, WORKER_CLS
from vllm_neuron_cache.integrations.vllm.geometry import resolve_geometry
from vllm_neuron_cache.integrations.vllm.manager import BlockEncoderCacheManager
from vllm_neuron_cache.integrations.vllm.scheduler import (
    BlockSchedulerMixin,
    acknowledges_steps,
    block_scheduler,
    compose,
)

pytestmark = pytest.mark.vllm

ARGUMENTS = {"max_model_len": 4096, "max_num_batched_tokens": 4096, "enforce_eager": True, "dtype": "float32"}
ON = {"vllm_neuron_cache": {}}
CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def engine_config(checkpoint, additional_config=None, **arguments):
    extra = {} if additional_config is None else {"additional_config": additional_config}
    return EngineArgs(model=str(checkpoint), **(ARGUMENTS | arguments), **extra).create_engine_config()


class LoudScheduler(Scheduler):
    """Stands for a third party's scheduler."""


class OtherManager(EncoderCacheManager):
    """Stands for a third party's manager."""


class OtherWorker(CPUWorker):
    """Stands for a third party's worker."""


def test_without_the_key_vllm_is_untouched(checkpoint):
    config = engine_config(checkpoint)
    assert config.ec_manager_config.encoder_cache_manager_cls is None
    assert config.scheduler_config.scheduler_cls is None
    assert config.parallel_config.worker_cls == CPU_WORKER


def test_without_the_key_an_engine_has_vllms_own_classes(checkpoint):
    engine = start(checkpoint, None)
    assert type(engine.manager) is EncoderCacheManager
    assert type(engine.scheduler) is Scheduler
    assert type(engine.worker) is CPUWorker
    assert not hasattr(engine.runner, "encoder_runtime")
    engine.close()


def test_the_key_fills_in_manager_scheduler_and_worker(checkpoint):
    config = engine_config(checkpoint, ON)
    assert config.ec_manager_config.encoder_cache_manager_cls == MANAGER_CLS
    assert config.scheduler_config.scheduler_cls == SCHEDULER_CLS
    assert config.parallel_config.worker_cls == WORKER_CLS[CPU_WORKER]
    assert config.ec_manager_config.manager_config["num_blocks"] > 1


@pytest.mark.parametrize(
    "flags",
    [
        {"ec_manager_config": {"encoder_cache_manager_cls": MANAGER_CLS}},
        {"scheduler_cls": SCHEDULER_CLS},
        {"worker_cls": WORKER_CLS[CPU_WORKER]},
    ],
    ids=["manager", "scheduler", "worker"],
)
def test_one_explicit_flag_brings_the_others(checkpoint, flags):
    config = engine_config(checkpoint, **flags)
    assert config.ec_manager_config.encoder_cache_manager_cls == MANAGER_CLS
    assert config.scheduler_config.scheduler_cls == SCHEDULER_CLS
    assert config.parallel_config.worker_cls == WORKER_CLS[CPU_WORKER]
    with pytest.raises(ConfigurationError, match="prompt embeddings"):
        engine_config(checkpoint, enable_prompt_embeds=True, **flags)


def test_an_engine_by_explicit_flags_serves_an_image(checkpoint):
    engine = start(
        checkpoint,
        None,
        ec_manager_config={"encoder_cache_manager_cls": MANAGER_CLS},
        scheduler_cls=SCHEDULER_CLS,
        worker_cls=WORKER_CLS[CPU_WORKER],
    )
    engine.generate([engine_prompt(MediaRequest(images=("chelsea",)), small_media())], max_tokens=2)
    assert isinstance(engine.scheduler, BlockSchedulerMixin)
    assert engine.runner.encoder_runtime.stats().items_written == engine.encoder_runs == 1
    engine.close()


def test_a_manager_without_its_scheduler_says_so():
    """What happens where the plugin is not loaded, and only the manager's flag was given."""
    config = types.SimpleNamespace(scheduler_config=types.SimpleNamespace(get_scheduler_cls=lambda: Scheduler))
    with pytest.raises(ConfigurationError, match="--scheduler-cls"):
        BlockEncoderCacheManager.create_manager(cache_size=1, vllm_config=config)


def test_a_third_partys_scheduler_is_composed_over(checkpoint):
    config = engine_config(checkpoint, ON, scheduler_cls=LoudScheduler)
    assert config.scheduler_config.scheduler_cls == SCHEDULER_CLS
    assert config.ec_manager_config.manager_config["scheduler_cls"].endswith("LoudScheduler")


@pytest.mark.parametrize("base", [Scheduler, AsyncScheduler, LoudScheduler])
def test_composing_keeps_the_base_and_happens_once(base):
    composed = compose(base)
    assert issubclass(composed, base) and issubclass(composed, BlockSchedulerMixin)
    assert compose(base) is composed
    assert compose(composed) is composed
    assert acknowledges_steps(composed) and acknowledges_steps(block_scheduler) and not acknowledges_steps(base)


@pytest.mark.parametrize(
    ("additional_config", "message"),
    [
        ({"vllm_neuron_cache": {"evicton": "lru"}}, "evicton is not a configuration key"),
        ({"vllm_neuron_cache": {"encoder_cache_block_sise": 64}}, "Did you mean 'encoder_cache_block_size'"),
        ({"vllm_neuron_cache": {"encoder_cache_block_size": 100}}, "100 and does not divide.*512"),
        ({"vllm_neuron_cache": {"encoder_cache_block_size": -64}}, "at least 1"),
        ({"vllm_neuron_cache": {"encoder_cache_num_blocks_exact": 1}}, "at least 2"),
        ({"vllm_neuron_cache": {}, "encoder_neuron_config": {"encoder_attention_block_size": 2047}}, "multiple of 4"),
        ({"vllm_neuron_cache": {}, "encoder_neuron_config": {"encoder_cache_num_blocks": -1}}, "at least 2"),
        ({"vllm_neuron_cache": True}, "give an object"),
        ({"vllm_neuron_cache": {"stage_cache": {"size": 1}}}, "stage_cache.size is not a configuration key"),
        ({"vllm_neuron_cache": {"stage_cache": {}}}, "stage_cache is for the stages of vLLM-Omni"),
    ],
)
def test_a_bad_configuration_is_refused_before_anything_starts(checkpoint, additional_config, message):
    with pytest.raises(ValueError, match=message):
        engine_config(checkpoint, additional_config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2.*Set pipeline_parallel_size to 1"),
        ({"runner": "pooling"}, "pooling models.*Set runner to"),
        ({"enable_prompt_embeds": True}, "prompt embeddings.*Set enable_prompt_embeds to false"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative decoding.*Remove speculative_config",
        ),
        ({"ec_manager_config": {"encoder_cache_manager_cls": f"{__name__}.OtherManager"}}, "a manager of its own"),
        ({"worker_cls": f"{__name__}.OtherWorker"}, "not known to work"),
    ],
    ids=["pipeline", "pooling", "prompt embeddings", "speculative", "manager", "worker"],
)
def test_combinations_that_are_not_served_are_refused(checkpoint, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        engine_config(checkpoint, ON, **arguments)


@pytest.mark.parametrize(
    ("part", "setting", "value", "message"),
    [
        ("parallel_config", "decode_context_parallel_size", 2, "Set decode_context_parallel_size to 1"),
        ("parallel_config", "prefill_context_parallel_size", 2, "Set prefill_context_parallel_size to 1"),
        (None, "ec_transfer_config", object(), "encoder disaggregation.*Remove ec_transfer_config"),
        ("model_config.multimodal_config", "video_pruning_rate", 0.5, "video pruning.*Remove video_pruning_rate"),
    ],
)
def test_combinations_that_vllm_itself_refuses_for_this_model_are_refused(checkpoint, part, setting, value, message):
    """Set in the finished configuration, as an engine of a model or platform would have it that allows them."""
    config = engine_config(checkpoint)
    owner = operator.attrgetter(part)(config) if part else config
    object.__setattr__(owner, setting, value)
    with pytest.raises(ConfigurationError, match=message):
        activation.activate(config)


def test_the_v2_model_runner_is_refused_with_the_setting_that_selects_v1(checkpoint, monkeypatch):
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda self: False))
    config = engine_config(checkpoint)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda self: True))
    with pytest.raises(ConfigurationError, match=r"V2 model runner.*VLLM_USE_V2_MODEL_RUNNER=0"):
        activation.activate(config)


def test_adapters_on_the_encoder_are_served(checkpoint):
    config = engine_config(checkpoint, ON, enable_lora=True, enable_tower_connector_lora=True)
    assert activation.uses_block_cache(config)


@pytest.fixture
def warnings():
    """What the package warns of, as it comes. A handler of our own: whether vLLM's loggers propagate is up to vLLM."""
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("vllm.neuron_cache")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    yield messages
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_an_encoder_decoder_model_keeps_vllms_manager_with_a_warning(checkpoint, warnings, monkeypatch):
    config = engine_config(checkpoint)
    monkeypatch.setitem(config.model_config.__dict__, "is_encoder_decoder", True)  # vLLM caches it there
    activation.activate(config)
    assert not activation.uses_block_cache(config)
    (warning,) = warnings
    assert "is an encoder-decoder model; vLLM's own cache stays" in warning


def test_fewer_blocks_than_the_largest_item_needs_is_one_warning_with_both_numbers(checkpoint, warnings):
    config = engine_config(
        checkpoint, {"vllm_neuron_cache": {"encoder_cache_block_size": 64, "encoder_cache_num_blocks_exact": 12}}
    )
    resolve_geometry(config)
    (warning,) = warnings
    assert "encoder_cache_num_blocks_exact is 12" in warning and "65 would hold" in warning
    assert "more than 11 blocks (704 token rows) will be refused" in warning
    assert config.ec_manager_config.manager_config["num_blocks"] == 12


def test_enough_blocks_are_no_warning(checkpoint, warnings):
    engine_config(
        checkpoint, {"vllm_neuron_cache": {"encoder_cache_block_size": 64, "encoder_cache_num_blocks_exact": 65}}
    )
    assert not warnings


def test_two_engines_have_geometries_of_their_own(checkpoint):
    small = engine_config(checkpoint, ON)
    large = engine_config(checkpoint, {**ON, "encoder_neuron_config": {"encoder_cache_num_blocks": 100}})
    fine = engine_config(checkpoint, {"vllm_neuron_cache": {"encoder_cache_block_size": 64}})
    blocks = [config.ec_manager_config.manager_config["num_blocks"] for config in (small, large, fine)]
    assert blocks == [257, 101, 65]  # 101: the next rung of the ladder


def block_size(config):
    return config.ec_manager_config.manager_config["block_size"]


@pytest.mark.parametrize(
    "smallest_pixels, expected", [(None, 16), (256 * 256, 16), (512 * 512, 64), (1024 * 1024, 256)]
)
def test_the_block_is_chosen_by_the_smallest_image_of_the_processor(checkpoint, smallest_pixels, expected):
    """At 32 pixels a side a row: 1, 64, 256 and 1024 rows."""
    size = {"shortest_edge": smallest_pixels, "longest_edge": 1024 * 1024}
    options = {} if smallest_pixels is None else {"mm_processor_kwargs": {"size": size}}
    assert block_size(engine_config(checkpoint, ON, **options)) == expected


def test_the_vendors_plugin_keeps_the_encoders_block(checkpoint, monkeypatch):
    monkeypatch.setattr(geometry, "current_platform", types.SimpleNamespace(device_type="neuron"))
    assert block_size(engine_config(checkpoint, ON)) == 512


def test_a_number_of_blocks_is_one_of_the_encoders_blocks(checkpoint):
    floor = engine_config(checkpoint, {**ON, "encoder_neuron_config": {"encoder_cache_num_blocks": 100}})
    exact = engine_config(checkpoint, {"vllm_neuron_cache": {"encoder_cache_num_blocks_exact": 9}})
    assert block_size(floor) == block_size(exact) == 512


def test_registering_again_changes_nothing():
    def wrapped():
        return (
            EngineArgs.create_engine_config,
            BaseRenderer._process_tokens,
            BaseRenderer._process_tokens_async,
            BaseRenderer._process_multimodal,
            ProcessorInputs.get_mm_hashes,
            InputProcessor.process_inputs,
            AsyncLLM.generate,
        )

    plugin.register()
    before = wrapped()
    assert all(method._neuron_cache for method in before)
    plugin.register()
    assert wrapped() == before


def in_a_new_process(code: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "WARNING"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)


def test_without_vllm_the_plugin_warns_and_does_not_crash():
    result = in_a_new_process(
        "import sys, logging; logging.basicConfig(); sys.modules['vllm'] = None\n"
        "from vllm_neuron_cache.integrations.vllm.plugin import register\n"
        "register(); print('alive')"
    )
    assert result.returncode == 0, result.stderr
    assert "alive" in result.stdout
    assert "the encoder cache is off" in result.stderr


# One thing after the other that makes a vLLM unfit, each undone before the next. All in one process, for to import vLLM
# takes seconds.
UNFIT = """
import json, logging, sys
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.renderers.base import BaseRenderer
from vllm_neuron_cache.integrations.vllm.plugin import register

messages = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: messages.append(record.getMessage())
logger = logging.getLogger("vllm.neuron_cache")
logger.addHandler(handler)
logger.setLevel(logging.WARNING)

def registered():
    messages.clear()
    before = EngineArgs.create_engine_config
    register()
    return {"untouched": EngineArgs.create_engine_config is before, "messages": list(messages)}

results = {}
version, vllm.__version__ = vllm.__version__, "0.99.0"
results["unsupported version"] = registered()
vllm.__version__ = version

name = "vllm.multimodal.encoder_budget"
module, sys.modules[name] = sys.modules.get(name), None
results["module missing"] = registered()
if module is None:
    del sys.modules[name]
else:
    sys.modules[name] = module

method = BaseRenderer._process_multimodal
del BaseRenderer._process_multimodal
results["method missing"] = registered()
BaseRenderer._process_multimodal = method

results["nothing"] = registered()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def unfit():
    result = in_a_new_process(UNFIT)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("damage", "warning"),
    [
        ("unsupported version", "outside the supported"),
        ("module missing", "lacks a hook .*encoder_budget"),
        ("method missing", "lacks a hook .*_process_multimodal"),
    ],
)
def test_a_vllm_that_cannot_be_served_is_a_warning_and_stays_untouched(unfit, damage, warning):
    assert unfit[damage]["untouched"]
    (message,) = unfit[damage]["messages"]
    assert re.search(warning, message)


def test_control_undamaged_the_same_vllm_is_served(unfit):
    assert unfit["nothing"] == {"untouched": False, "messages": []}
