"""One stage cache in each of its forms."""

import functools
import logging

import pytest
from scripted import make_stage

from vllm_neuron_cache.stage_cache import manager

FORMS = ("host", "host with threads", "device")


@functools.cache
def eager_lane():
    """One for all stores: it traces a graph once."""
    from vllm_neuron_cache.graphs.lanes import EagerLane

    return EagerLane()


def store_of(form):
    """What makes the row store of a form; None for the manager's own."""
    if form != "device":
        return None
    from vllm_neuron_cache.stage_cache import DeviceRowStore

    return lambda config: DeviceRowStore(config, device="cpu", lane=eager_lane(), max_read_rows=16)


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


@pytest.fixture
def make(form):
    """Makes stages whose caches are in the form of the test; they are checked and shut down after it."""
    stages = []

    def make_in_form(make_store=None, **options):
        stage = make_stage(make_store or store_of(form), inline="threads" not in form, **options)
        stages.append(stage)
        return stage

    yield make_in_form
    for stage in stages:
        stage.close()


@pytest.fixture
def logged(monkeypatch):
    """Messages of the stage cache. vLLM's logger hands them to nobody above it, and drops most of them here."""
    messages = []
    logger = manager.logger
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()
    yield messages
    logger.removeHandler(handler)
    monkeypatch.undo()
    logger.manager._clear_cache()
