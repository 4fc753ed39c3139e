"""What a worker collects for the scheduler during a step."""

from vllm_neuron_cache.encoder_cache.report import ReportBuilder, RequestFailure, WorkerEpochs


def failure(request_id: str, text: str = "EncoderOutputError: item a") -> RequestFailure:
    return RequestFailure(request_id, text, first_position=3, recompute=False)


def test_a_step_without_anything_to_tell_has_no_report():
    builder = ReportBuilder()
    builder.start_step(WorkerEpochs())
    assert builder.take() is None


def test_what_happened_is_told_once():
    builder = ReportBuilder()
    builder.fail_item("a")
    builder.fail_request(failure("r"))
    report = builder.take()
    assert report.failed_items == ("a",) and report.failed_requests == (failure("r"),)
    assert builder.take() is None


def test_the_first_failure_of_a_request_is_the_one_told_and_each_item_is_told_once():
    builder = ReportBuilder()
    for key in ("a", "b", "a"):
        builder.fail_item(key)
        builder.fail_request(failure("r", f"EncoderOutputError: item {key}"))
    report = builder.take()
    assert report.failed_items == ("a", "b")
    assert report.failed_requests == (failure("r", "EncoderOutputError: item a"),)


def test_lost_rows_are_told_until_the_scheduler_knows():
    builder = ReportBuilder()
    builder.note_rows_lost()
    builder.start_step(WorkerEpochs())
    assert builder.scheduler_is_behind
    assert builder.take().epochs == builder.take().epochs == WorkerEpochs(cache=1, weights=0)
    # Known is what another rank has told, which may be ahead of this one.
    for known in (WorkerEpochs(cache=1), WorkerEpochs(cache=2)):
        builder.start_step(known)
        assert not builder.scheduler_is_behind
    assert builder.take() is None


def test_new_weights_are_new_rows_as_well():
    builder = ReportBuilder()
    builder.note_rows_lost()
    builder.note_weights_changed()
    assert builder.epochs == WorkerEpochs(cache=2, weights=1)
